"""The sources against stand-ins for their libraries, with the real names, units, sentinels and errors."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from torch_ext.sources import Unavailable, amd, nvml, open_gpu_sources
from torch_ext.sources.amd import AmdSmi
from torch_ext.sources.cpu import Cpu, busy_percent, parse_stat, thread_state
from torch_ext.sources.nvml import Nvml
from torch_ext.sources.sysfs import Sysfs, levels

NA = "N/A"
MI300X = {  # the fields of amdsmi_get_gpu_metrics_info that matter, as amdsmi 7 fills them on a MI300X
    "temperature_edge": NA, "temperature_hotspot": 63, "temperature_mem": 51, "temperature_hbm": [NA] * 4,
    "average_gfx_activity": 98, "average_umc_activity": 41, "average_socket_power": NA, "current_socket_power": 747,
    "energy_accumulator": 10_000_000_000, "average_gfxclk_frequency": NA, "average_uclk_frequency": NA,
    "current_gfxclk": NA, "current_gfxclks": [1900, 1920, 1880, 1900, NA, NA, NA, NA], "current_uclk": 1300,
    "throttle_status": NA, "indep_throttle_status": NA, "accumulation_counter": 1000,
    "prochot_residency_acc": 0, "ppt_residency_acc": 300, "socket_thm_residency_acc": 7, "vr_thm_residency_acc": 0,
    "hbm_thm_residency_acc": 0,
}


class FakeAmdSmi(ModuleType):
    """`amdsmi` on a host with one GPU per given table; a table that is an exception is raised."""

    class AmdSmiException(Exception):
        pass

    class AmdSmiClkType:
        GFX = 0

    class AmdSmiMemoryType:
        VRAM = 0

    def __init__(self, *tables: object) -> None:
        super().__init__("amdsmi")
        self.tables = list(tables)

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.tables)))

    def amdsmi_get_gpu_metrics_info(self, handle: int) -> object:
        if isinstance(self.tables[handle], Exception):
            raise self.tables[handle]
        return self.tables[handle]

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, object]:
        return {"energy_accumulator": 1, "counter_resolution": 15.3, "timestamp": 0}

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, object]:
        return {"market_name": "AMD Instinct MI300X", "asic_serial": "0x1"}

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return f"0000:{handle + 5:02x}:00.0"

    def amdsmi_get_gpu_memory_usage(self, handle: int, kind: int) -> int:
        return 68_719_476_736

    def amdsmi_get_clock_info(self, handle: int, kind: int) -> dict[str, object]:
        return {"clk": 1900, "min_clk": 132, "max_clk": 2100, "clk_locked": False, "clk_deep_sleep": NA}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, object]:
        return {"power_cap": 750_000_000, "default_power_cap": 750_000_000}


@pytest.fixture
def amdsmi(monkeypatch):
    def install(*tables: object) -> AmdSmi:
        monkeypatch.setitem(sys.modules, "amdsmi", FakeAmdSmi(*tables))
        return AmdSmi()
    return install


def test_amd_sample(amdsmi):
    source = amdsmi(MI300X)
    assert source.gpus == [("AMD Instinct MI300X", "0000:05:00.0")]
    sample = source.read(0)
    assert sample == {
        "clock_mhz": 1900, "memory_clock_mhz": 1300, "power_w": 747, "energy_j": pytest.approx(10e9 * 15.3e-6),
        "temperature_c": 63, "memory_temperature_c": 51, "activity_pct": 98, "memory_activity_pct": 41,
        "memory_used_bytes": 68_719_476_736, "throttle": None}  # a share needs two tables
    assert source.limits(0) == {"clock_limit_mhz": 2100, "power_limit_w": 750}


def test_amd_throttle_is_the_share_of_the_time_between_two_samples(amdsmi):
    source = amdsmi(MI300X)
    source.read(0)
    later = {"accumulation_counter": 1200, "ppt_residency_acc": 380, "socket_thm_residency_acc": 9}
    source._smi.tables[0] = {**MI300X, **later}
    assert source.read(0)["throttle"] == "power:40 thermal:1"
    # The firmware has not refreshed its table: nothing is known about the time in between.
    assert source.read(0)["throttle"] is None


@pytest.mark.parametrize("fields, clock", [
    ({"current_gfxclk": 1700, "current_gfxclks": [65535] * 8}, 1700),
    ({"current_gfxclk": 65535, "current_gfxclks": [1700, 0, 65535]}, 1700),
    ({"current_gfxclk": NA, "current_gfxclks": NA, "average_gfxclk_frequency": 1650}, 1650),
    ({"current_gfxclk": 65535, "current_gfxclks": [NA] * 8}, None),
])
def test_amd_clock_of_whatever_is_valid(fields, clock):
    assert amd.values({**MI300X, **fields}, 1e-6)["clock_mhz"] == clock


def test_amd_old_and_secondary_dies():
    old = {**MI300X, "current_socket_power": NA, "average_socket_power": 480, "accumulation_counter": NA,
           "temperature_hotspot": 65535, "temperature_edge": 44, "temperature_mem": NA,
           "temperature_hbm": [40, 46, NA, 41], "indep_throttle_status": (1 << 36) | (1 << 0)}
    values = amd.values(old, 1e-6)
    assert (values["power_w"], values["temperature_c"], values["memory_temperature_c"]) == (480, 44, 46)
    assert amd.reasons(old, {}, amd.residencies(old)) == "power:100 thermal:100"
    secondary = {**MI300X, "current_socket_power": 0, "average_socket_power": NA, "energy_accumulator": 0}
    values = amd.values(secondary, 1e-6)
    assert values["power_w"] is None and values["energy_j"] is None


def test_amd_throttle_flag_without_a_reason():
    table = {**MI300X, "accumulation_counter": NA, "indep_throttle_status": True}
    assert amd.reasons(table, {}, amd.residencies(table)) == "other:100"
    assert amd.reasons({**table, "indep_throttle_status": NA}, {}, {}) is None


def test_amd_gpu_that_fails_does_not_stop_the_others(amdsmi):
    source = amdsmi(FakeAmdSmi.AmdSmiException("AMDSMI_STATUS_NO_DATA"), MI300X)
    with pytest.raises(FakeAmdSmi.AmdSmiException):
        source.read(0)
    assert source.read(1)["power_w"] == 747


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("Not Supported" if value == 3 else "GPU is lost")
        self.value = value


class FieldValue(ctypes.Structure):
    class Value(ctypes.Union):
        _fields_ = [("dVal", ctypes.c_double), ("uiVal", ctypes.c_uint), ("ulVal", ctypes.c_ulong),
                    ("ullVal", ctypes.c_ulonglong), ("sllVal", ctypes.c_longlong), ("siVal", ctypes.c_int),
                    ("usVal", ctypes.c_ushort)]

    _fields_ = [("fieldId", ctypes.c_uint32), ("valueType", ctypes.c_int), ("nvmlReturn", ctypes.c_int),
                ("value", Value)]


class FakeNvml(ModuleType):
    """`pynvml` with one H100; `unsupported` functions and fields answer Not Supported."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, unsupported: tuple[object, ...] = (), reasons: int = 0x4) -> None:
        super().__init__("pynvml")
        self.unsupported, self.reasons, self.calls, self.taken = unsupported, reasons, [], 0

    def _answer(self, name: str, value: object) -> object:
        self.calls.append(name)
        if name in self.unsupported:
            raise NVMLError(3)
        if "lost" in self.unsupported:
            raise NVMLError(15)
        return value

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return i

    def nvmlDeviceGetName(self, h: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetPciInfo(self, h: int) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:C1:00.0")

    def nvmlDeviceGetFieldValues(self, h: int, ids: list[int]) -> object:
        self._answer("fields", None)
        values = (FieldValue * len(ids))()
        for value, field in zip(values, ids, strict=True):
            value.fieldId, value.nvmlReturn = field, 3 if field in self.unsupported else 0
            value.valueType = 3 if field == 83 else 1  # energy is an unsigned long long, the others unsigned
            setattr(value.value, "ullVal" if field == 83 else "uiVal", {186: 650_250, 83: 5 * 10**12, 82: 71}[field])
        return values

    def nvmlDeviceGetPowerUsage(self, h: int) -> object:
        return self._answer("power", 640_000)

    def nvmlDeviceGetClockInfo(self, h: int, kind: int) -> object:
        return self._answer("clock", {1: 1755, 2: 2619}[kind])

    def nvmlDeviceGetTemperature(self, h: int, kind: int) -> object:
        return self._answer("temperature", 58)

    def nvmlDeviceGetUtilizationRates(self, h: int) -> object:
        return self._answer("rates", SimpleNamespace(gpu=99, memory=47))

    def nvmlDeviceGetMemoryInfo(self, h: int) -> object:
        return self._answer("memory", SimpleNamespace(total=85_520_809_984, used=42_949_672_960, free=0))

    def nvmlDeviceGetCurrentClocksEventReasons(self, h: int) -> object:
        return self._answer("reasons", self.reasons)

    def nvmlDeviceGetMaxClockInfo(self, h: int, kind: int) -> object:
        return self._answer("max", 1980)

    def nvmlDeviceGetEnforcedPowerLimit(self, h: int) -> object:
        return self._answer("limit", 700_000)

    def nvmlGpmQueryDeviceSupport(self, h: int) -> object:
        return self._answer("gpm", SimpleNamespace(isSupportedDevice=1))

    def nvmlGpmSampleAlloc(self) -> list[int]:
        return [0]

    def nvmlGpmSampleGet(self, h: int, sample: list[int]) -> None:
        self.taken += 1
        sample[0] = self.taken

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(98)])

    def nvmlGpmMetricsGet(self, query: SimpleNamespace) -> None:
        assert query.sample2[0] == query.sample1[0] + 1, "the earlier sample comes first"
        for metric in query.metrics[:query.numMetrics]:
            metric.value = {2: 91.5, 3: 33.0, 5: 62.25, 10: 48.5}[metric.metricId]


@pytest.fixture
def fake_nvml(monkeypatch):
    def install(**options: object) -> tuple[Nvml, FakeNvml]:
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return Nvml(), fake
    return install


def test_nvml_sample(fake_nvml):
    source, _ = fake_nvml(unsupported=("gpm",))
    assert source.gpus == [("NVIDIA H100 80GB HBM3", "0000:c1:00.0")]
    assert source.read(0) == {
        "power_w": pytest.approx(650.25), "energy_j": pytest.approx(5e9), "memory_temperature_c": 71, "clock_mhz": 1755,
        "memory_clock_mhz": 2619, "temperature_c": 58, "activity_pct": 99, "memory_activity_pct": 47,
        "memory_used_bytes": 42_949_672_960, "throttle": "power:100"}
    assert source.limits(0) == {"clock_limit_mhz": 1980, "power_limit_w": pytest.approx(700)}


@pytest.mark.parametrize("bits, text", [
    (0x0, "none"), (0x1, "none"), (0x4, "power:100"), (0x20, "thermal:100"), (0x48, "hw_slowdown:100 thermal:100"),
    (0x80, "power_brake:100"), (0x2, "application_clocks:100"),
])
def test_nvml_reasons(fake_nvml, bits, text):
    source, _ = fake_nvml(reasons=bits)
    assert source.read(0)["throttle"] == text


def test_nvml_falls_back_and_stops_asking(fake_nvml):
    source, fake = fake_nvml(unsupported=(186, 83, 82, "temperature", "gpm"))
    for _ in range(6):
        sample = source.read(0)
    assert sample["power_w"] == pytest.approx(640)  # the averaged reading, where there is no instant one
    assert sample["energy_j"] is None and sample["temperature_c"] is None
    assert fake.calls.count("temperature") == 3, "a query that keeps failing costs nothing any more"


def test_nvml_lost_gpu_raises(fake_nvml):
    source, fake = fake_nvml()
    fake.unsupported = ("lost",)
    with pytest.raises(NVMLError, match="lost"):
        source.read(0)


def test_gpm_averages_between_two_samples(fake_nvml, monkeypatch):
    source, _ = fake_nvml()
    now = [time.monotonic_ns()]
    monkeypatch.setattr(nvml.time, "monotonic_ns", lambda: now[0])
    seen = []
    for _ in range(5):
        seen.append(source.read(0).get("tensor_activity_pct"))
        now[0] += 60_000_000
    # The first call has no sample before it; then one value per 100 ms, every second call at 60 ms.
    assert seen == [None, None, 62.25, None, 62.25]


def test_no_library_no_source(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found, reasons = open_gpu_sources()
    assert [s.name for s in found if s.name != "sysfs"] == [] and len(reasons) >= 2


def sysfs_card(root: Path, number: int, **files: str) -> None:
    """A card's directory as amdgpu lays it out: class entries are links to the PCI device."""
    device = root.parent / "devices" / f"0000:{number + 0x29:02X}:00.0"
    hwmon = device / "hwmon" / "hwmon3"
    hwmon.mkdir(parents=True)
    (root / f"card{number}").mkdir(parents=True)
    (root / f"card{number}" / "device").symlink_to(device)
    defaults = {
        "vendor": "0x1002", "gpu_busy_percent": "97", "mem_busy_percent": "35",
        "mem_info_vram_used": "34359738368",
        "pp_dpm_sclk": "0: 132Mhz\n1: 1712Mhz *\n2: 2100Mhz\n", "pp_dpm_mclk": "0: 900Mhz\n1: 1300Mhz *\n",
        "hwmon/hwmon3/power1_average": "551000000", "hwmon/hwmon3/power1_cap": "750000000",
        "hwmon/hwmon3/freq1_input": "1698000000", "hwmon/hwmon3/freq1_label": "sclk",
        "hwmon/hwmon3/temp1_input": "44000", "hwmon/hwmon3/temp1_label": "edge",
        "hwmon/hwmon3/temp2_input": "61000", "hwmon/hwmon3/temp2_label": "junction",
        "hwmon/hwmon3/temp3_input": "52000", "hwmon/hwmon3/temp3_label": "mem",
    }
    for name, content in {**defaults, **files}.items():
        (device / name).write_text(content + "\n")


def test_sysfs_sample(tmp_path):
    root = tmp_path / "drm"
    sysfs_card(root, 1)
    sysfs_card(root, 0, vendor="0x10de")
    (root / "card1-DP-1").mkdir()
    source = Sysfs(root)
    assert source.gpus == [(None, "0000:2a:00.0")]
    assert source.read(0) == pytest.approx({
        "clock_mhz": 1698, "memory_clock_mhz": 1300, "power_w": 551, "temperature_c": 61, "memory_temperature_c": 52,
        "activity_pct": 97, "memory_activity_pct": 35, "memory_used_bytes": 34_359_738_368})
    assert source.limits(0) == {"clock_limit_mhz": 2100, "power_limit_w": 750}
    (tmp_path / "devices" / "0000:2A:00.0" / "hwmon/hwmon3/power1_average").write_text("0\n")
    assert source.read(0)["power_w"] is None, "a die without a sensor of its own"
    source.close()


def test_sysfs_without_amd_gpu(tmp_path):
    with pytest.raises(Unavailable):
        Sysfs(tmp_path)


def test_clock_levels():
    assert levels("0: 500Mhz\n1: 1500Mhz *\nS: 19Mhz *\nnonsense\n") == [(500, False), (1500, True), (19, True)]


STAT = b"""cpu  100 0 50 900 10 0 0 0 0 0
cpu0 60 0 30 400 5 0 0 5 7 0
cpu3 40 0 20 500 5 1 2 0 0 0
intr 12345
"""


def test_proc_stat_with_holes():
    assert parse_stat(STAT) == {0: (95, 500), 3: (63, 568)}


def test_busy_percent():
    assert busy_percent({0: (10, 100), 3: (10, 100)}, {0: (20, 120), 3: (10, 120), 9: (5, 10)}) == {0: 50.0}
    assert busy_percent({0: (10, 100)}, {0: (9, 101)}) == {}, "counters may fall back by a tick"


def test_thread_state_survives_any_name():
    fields = ["S", *["0"] * 10, "7", "5", *["0"] * 23, "11", "0"]
    assert thread_state(f"42 (a) b (c)) {' '.join(fields)}") == (12, 11)


def test_cpu_cores_by_siblings(tmp_path):
    rows = b"".join(b"cpu%d 1 0 1 9 0 0 0 0\n" % i for i in range(4))
    (tmp_path / "stat").write_bytes(b"cpu  0 0 0 0 0 0 0 0\n" + rows)
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    cpu = Cpu(proc=tmp_path, sys=tmp_path)
    assert cpu.cores() == {"cpu_cores": "0:0 1:1 2:0 3:1"}
    cpu.close()


def test_own_busy_thread_is_found():
    cpu = Cpu()
    cpu.threads([os.getpid()])
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    counted = cpu.threads([os.getpid()])
    assert counted is not None and counted.split(":")[1].split()[0] in {"1", "2", "3"}
    cpu.close()
