"""The peak table against the vendors' published values, and how a device is found in it."""

from __future__ import annotations

import pytest

from tb_chopper.backend import hardware
from tb_chopper.backend.errors import InvalidSelection

# Published dense TFLOP/s: (name, units, bf16, fp8, tf32, fp32, fp64)
PUBLISHED = [
    ("AMD Instinct MI210", 104, 181.0, None, None, 45.3, 45.3),
    ("AMD Instinct MI250X", 110, 191.5, None, None, 47.9, 47.9),
    ("AMD Instinct MI300A", 228, 980.6, 1961.2, 490.3, 122.6, 122.6),
    ("AMD Instinct MI300X VF", 304, 1307.4, 2614.9, 653.7, 163.4, 163.4),
    ("AMD Instinct MI325X", 304, 1307.4, 2614.9, 653.7, 163.4, 163.4),
    ("AMD Instinct MI350X", 256, 2306.9, 4613.7, None, 144.2, 72.1),
    ("AMD Instinct MI355X", 256, 2516.6, 5033.2, None, 157.3, 78.6),
    ("NVIDIA A100-SXM4-80GB", 108, 312.0, None, 156.0, 19.5, 19.5),
    ("NVIDIA H100 80GB HBM3", 132, 989.4, 1978.9, 494.7, 66.9, 66.9),
    ("NVIDIA H100 PCIe", 114, 756.5, 1513.0, 378.0, 51.2, 51.2),
    ("NVIDIA H100 NVL", 132, 835.0, None, None, None, None),
    ("NVIDIA H200", 132, 989.4, 1978.9, 494.7, 66.9, 66.9),
    ("NVIDIA H20", 78, 148.0, 296.0, 74.0, None, None),
    ("NVIDIA B200", 148, 2250.0, 4500.0, 1125.0, None, None),
    ("NVIDIA GB200", 152, 2500.0, 5000.0, 1250.0, None, None),
]


@pytest.mark.parametrize(("name", "units", "bf16", "fp8", "tf32", "fp32", "fp64"), PUBLISHED)
def test_peaks_are_the_published_ones(name, units, bf16, fp8, tf32, fp32, fp64):
    gpu = hardware.find(name, units=units)
    assert gpu is not None and gpu.source
    for dtype, published in (("bf16", bf16), ("fp16", bf16), ("fp8", fp8), ("tf32", tf32), ("fp32", fp32),
                             ("fp64", fp64)):
        peak = gpu.peak(dtype)
        if published is None:
            continue
        assert peak is not None and peak.flop_per_s / 1e12 == pytest.approx(published, rel=0.003)


def test_a_type_without_hardware_has_no_peak():
    for name in ("AMD Instinct MI210", "NVIDIA A100-SXM4-80GB"):
        gpu = hardware.find(name)
        assert gpu is not None and gpu.peak("fp8") is None
    mi355x = hardware.find("AMD Instinct MI355X")
    assert mi355x is not None and mi355x.peak("tf32") is None


@pytest.mark.parametrize(("name", "device_id", "units", "found"), [
    ("NVIDIA H100", None, 114, "H100 PCIe"),
    ("NVIDIA H100", None, 132, "H100 SXM"),
    ("AMD Radeon Graphics", 30115, 256, "MI355X"),  # the product name of a real MI355X agent
    ("", 29861, 304, "MI325X"),
    ("NVIDIA B200", None, None, "B200"),
    ("NVIDIA GB200", None, None, "GB200"),
    ("NVIDIA GH200 480GB", None, 132, None),
    ("NVIDIA GeForce RTX 4090", None, 128, None),
    ("AMD Radeon Graphics", None, 40, None),
    ("NVIDIA H200", None, 144, None),  # more units than the product has
])
def test_found_by_name_id_and_units(name, device_id, units, found):
    gpu = hardware.find(name, device_id, units)
    assert (gpu.name if gpu else None) == found


def test_a_nameless_device_is_known_only_where_one_peak_fits():
    either = hardware.find("", units=304)
    assert either is not None and either.name == "MI300X or MI325X" and either.memory_bytes_per_s is None
    assert hardware.find("", units=256) is None  # MI350X and MI355X differ in clock
    told = hardware.find("", units=256, max_clock_mhz=2400)
    assert told is not None and told.name == "MI355X"


def test_a_partition_has_its_share():
    whole, part = hardware.find("AMD Instinct MI300X", units=304), hardware.find("AMD Instinct MI300X", units=38)
    assert whole is not None and part is not None
    assert (whole.xcc, part.xcc) == (8, 1)
    assert part.peaks["bf16"].flop_per_s * 8 == pytest.approx(whole.peaks["bf16"].flop_per_s)
    assert part.peaks["bf16"].clock_mhz == 2100
    assert part.memory_bytes_per_s == pytest.approx(5325e9 / 8)
    mig = hardware.find("NVIDIA H100 80GB HBM3 MIG 3g.40gb", units=60)
    assert mig is not None and mig.peaks["bf16"].flop_per_s == pytest.approx(60 * 4096 * 1.83e9)
    assert mig.memory_bytes_per_s is None


def test_the_users_values_win_and_peak_and_clock_stay_one_pair():
    slower = hardware.find("AMD Instinct MI300X", override={"f_peak_mhz": 1050})
    assert slower is not None
    assert slower.peaks["bf16"].flop_per_s == pytest.approx(304 * 2048 * 1.05e9)
    assert slower.f_peak_mhz == 1050
    custom = hardware.find("Nobody 9000", units=10, override=hardware.parse_override(
        "peak_tflops=100, f_peak_mhz=1500,peak_tflops_fp8=200, hbm_gbs=500"))
    assert custom is not None
    assert custom.peaks["fp16"] == (100e12, 1500) and custom.peaks["fp8"] == (200e12, 1500)
    assert custom.memory_bytes_per_s == 500e9 and "user" in custom.source
    assert hardware.find("Nobody 9000", override={"hbm_gbs": 1.0}) is None


@pytest.mark.parametrize("text", ["peak=3", "peak_tflops=fast", "f_peak_mhz=-1", "peak_tflops=nan"])
def test_a_wrong_override_is_named(text):
    with pytest.raises(InvalidSelection, match=text.split("=")[0]):
        hardware.parse_override(text)


def test_an_unknown_gpu_says_what_to_pass():
    line = hardware.what_to_pass("Nobody 9000")
    assert "peak_tflops=" in line and "Nobody 9000" in line


def test_dies_of_a_device_and_of_its_partitions():
    assert [hardware.compute_dies(29857, units) for units in (304, 152, 76, 38)] == [8, 4, 2, 1]
    assert hardware.compute_dies(29858, 80) == 4  # MI308X, which rocprof-compute calls one die
    assert hardware.compute_dies(1, 80) is None and hardware.compute_dies(29857, 0) is None
