"""Samples onto kernels: planted clock curves whose mean over any interval is known in closed form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_chopper.backend import schema
from tb_chopper.backend.alignment.clock import anchor, correction, sidecar_pairs
from tb_chopper.backend.alignment.curve import Curve, Grid, rise
from tb_chopper.backend.alignment.telemetry import join, with_clocks
from tb_chopper.backend.readers import telemetry_logs
from tb_chopper.backend.readers.log_times import TimeBase
from torch_ext import telemetry_format
from torch_ext.telemetry_format import line

T0 = 1_775_000_000 * 10**9
MS, S = 10**6, 10**9
BOOT = 7_000 * S
"""CLOCK_MONOTONIC at T0"""


def sine(t_s: np.ndarray) -> np.ndarray:
    """A clock that moves over three seconds by a tenth: the time scale of power management under load."""
    return 1800 + 180 * np.sin(2 * np.pi * t_s / 3)


def sine_mean(a_s: float, b_s: float) -> float:
    w = 2 * np.pi / 3
    return 1800 + 180 * (np.cos(w * a_s) - np.cos(w * b_s)) / (w * (b_s - a_s))


def write_log(path: Path, seconds: float = 20.0, hz: float = 20.0, gpus: int = 1, skew_ns: int = 0, drift: float = 0.0,
              lost: tuple[float, float] = (0, 0), clock: Callable[[np.ndarray], np.ndarray] = sine, seed: int = 1,
              pairs: bool = True) -> Path:
    """A sampler's log from T0 on. The host's CLOCK_REALTIME, as the sampler sees it, is `skew_ns` ahead of the
    trace's and gains `drift`; `lost`: seconds without samples."""
    rng = np.random.default_rng(seed)
    rows = [telemetry_format.header(), line("start", BOOT, BOOT, text="node0")]
    rows += [line("gpu_info", BOOT, BOOT, gpu=g, pci_address=f"0000:{5 + g:02x}:00.0") for g in range(gpus)]
    for second in range(int(seconds) + 1 if pairs else 1):
        m = BOOT + second * S
        rows.append(line("clock", m, m + 400, realtime_ns=T0 + second * S + skew_ns + round(drift * second * S) + 200))
    for i in range(int(seconds * hz)):
        t = i / hz + rng.uniform(0, 0.1) / hz
        if not lost[0] <= t < lost[1]:
            m = BOOT + round(t * S)
            rows += [line("gpu", m - 100_000, m + 100_000, gpu=g, clock_mhz=float(clock(np.array(t)) - 100 * g),
                          power_w=700.0, memory_clock_mhz=1300) for g in range(gpus)]
    path.write_text("".join(rows))
    return path


def workers(*ranks: int, host: str = "node0") -> pd.DataFrame:
    rows = [{"capture": r, "gpu": r, "rank": r, "host": host, "worker": f"w{r}"} for r in ranks]
    return schema.conform(pd.DataFrame(rows), schema.WORKERS)


def sidecar(rank: int = 0, pci: str | None = None, at: tuple[float, ...] = (0.5, 19.5), index: int | None = None,
            boot: int = BOOT) -> dict[str, Any]:
    return {"clocks": [{"where": "stop", "realtime_ns": T0 + round(t * S), "monotonic_ns": boot + round(t * S),
                        "boottime_ns": None, "uncertainty_ns": 300} for t in at],
            "identity": {"host": "node0", "rank": rank, "device": {"pci_address": pci, "index": index}}}


def kernels(*spans: tuple[float, float], gpu: int = 0) -> pd.DataFrame:
    """Compute kernels by start and end in seconds after T0."""
    return schema.conform(pd.DataFrame([{
        "name": "k", "kind": "compute", "activity": "kernel", "gpu": gpu, "capture": gpu, "operation": "op",
        "start_ns": T0 + round(a * S), "end_ns": T0 + round(b * S)} for a, b in spans]), schema.KERNELS)


def joined(path: Path, side: dict[int, dict[str, Any]] | None = None, **base: Any) -> Any:
    return join([telemetry_logs.read(path, TimeBase(**base))], workers(0), side or {})


def codes(run: Any) -> set[str]:
    return {f.code for f in run.findings}


LONG = ((1.0, 1.11), (2.3, 2.75), (5.0, 9.0), (14.2, 17.9))


@pytest.mark.parametrize("options", [
    {}, {"skew_ns": 5 * MS}, {"drift": 50e-6}, {"skew_ns": -5 * MS, "drift": -50e-6}, {"hz": 100.0}])
def test_kernels_longer_than_two_periods_within_a_percent(tmp_path, options):
    run = joined(write_log(tmp_path / "node0.telemetry.csv", **options), {0: sidecar()})
    found = with_clocks(kernels(*LONG), run.samples)
    for (a, b), clock in zip(LONG, found["clock_mhz"], strict=True):
        assert clock == pytest.approx(sine_mean(a, b), rel=0.01)
    assert (found["clock_source"] == "sampled").all() and (found["power_w"] == 700).all()


@pytest.mark.parametrize("skew_ns, drift", [(5 * MS, 0.0), (-5 * MS, 50e-6), (300 * MS, -50e-6)])
def test_skew_and_drift_are_undone(tmp_path, skew_ns, drift):
    run = joined(write_log(tmp_path / "node0.telemetry.csv", skew_ns=skew_ns, drift=drift), {0: sidecar()})
    true = joined(write_log(tmp_path / "true.telemetry.csv"), {0: sidecar()}).samples["t_ns"]
    assert np.abs(run.samples["t_ns"] - true).max() < 5_000
    fit = run.clocks.iloc[0]
    assert -fit["offset_us"] == pytest.approx(skew_ns / 1000 + drift * 10e6, abs=5)
    assert -fit["drift_ppm"] == pytest.approx(drift * 1e6, abs=0.5) and fit["residual_us"] < 10
    assert "telemetry_clock_offset" in codes(run)


def test_skew_without_a_sidecar_is_said_to_be_unknown(tmp_path):
    run = joined(write_log(tmp_path / "node0.telemetry.csv", skew_ns=5 * MS))
    assert "telemetry_clock_unchecked" in codes(run) and not run.clocks["known"].iloc[0]


def test_clock_set_during_the_run_is_said(tmp_path):
    log = telemetry_logs.read(write_log(tmp_path / "node0.telemetry.csv"))
    pairs = sidecar(at=(0.5, 5.0, 10.0, 19.5))
    pairs["clocks"][2]["realtime_ns"] += 40 * MS
    run = join([log], workers(0), {0: pairs})
    assert "telemetry_clock_residual" in codes(run) and run.clocks["residual_us"].iloc[0] > 10_000


def test_another_boot_is_not_corrected(tmp_path):
    run = joined(write_log(tmp_path / "node0.telemetry.csv"), {0: sidecar(boot=BOOT + 10**6 * S)})
    assert "telemetry_clock_unrelated" in codes(run)
    assert np.abs(with_clocks(kernels((5.0, 9.0)), run.samples)["clock_mhz"][0] - sine_mean(5, 9)) < 5


def test_kernels_shorter_than_the_period_share_their_stretch(tmp_path):
    run = joined(write_log(tmp_path / "node0.telemetry.csv"), {0: sidecar()})
    t = (run.samples["t_ns"].to_numpy() - T0) / S
    a, b = t[40], t[41]
    spans = [(a + x * (b - a), a + x * (b - a) + 50e-6) for x in (0.1, 0.4, 0.8)]
    found = with_clocks(kernels(*spans), run.samples)["clock_mhz"].to_numpy()
    assert np.ptp(found) == 0 and found[0] == pytest.approx((sine(a) + sine(b)) / 2, abs=0.01)


def test_pauses_are_not_bridged(tmp_path):
    run = joined(write_log(tmp_path / "node0.telemetry.csv", lost=(6.0, 12.0)), {0: sidecar()})
    found = with_clocks(kernels((7.0, 7.2), (5.0, 7.5), (5.0, 6.5), (13.0, 14.0)), run.samples)
    assert found["clock_mhz"].isna().tolist() == [True, True, False, False]
    assert found["clock_source"].isna().tolist() == [True, True, False, False]
    assert found["clock_mhz"][2] == pytest.approx(sine_mean(5.0, 6.0), rel=0.01), "the part that is known"
    assert "telemetry_gaps" in codes(run)


def test_outside_the_log_there_is_no_clock(tmp_path):
    run = joined(write_log(tmp_path / "node0.telemetry.csv"), {0: sidecar()})
    found = with_clocks(kernels((-3.0, -2.0), (25.0, 25.1), (18.0, 30.0)), run.samples)
    assert found["clock_mhz"].isna().all()


def test_samples_every_second_give_what_they_can(tmp_path):
    """A clock of one-second samples follows a curve of 12 s, and says nothing finer."""
    def slow(t: np.ndarray) -> np.ndarray:
        return 1800 + 180 * np.sin(2 * np.pi * t / 12)
    run = joined(write_log(tmp_path / "node0.telemetry.csv", hz=1.0, clock=slow), {0: sidecar()})
    found = with_clocks(kernels((2.0, 8.0)), run.samples)["clock_mhz"][0]
    w = 2 * np.pi / 12
    assert found == pytest.approx(1800 + 180 * (np.cos(w * 2) - np.cos(w * 8)) / (w * 6), rel=0.01)


def nvidia_smi(path: Path, offset_h: float) -> Path:
    t = np.arange(0, 20, 0.05)
    stamp = pd.to_datetime(T0 + (t * S).astype("int64") + round(offset_h * 3600 * S))
    rows = [f"{s:%Y/%m/%d %H:%M:%S}.{s.microsecond // 1000:03d}, 0, {sine(x):.2f} MHz"
            for s, x in zip(stamp, t, strict=True)]
    path.write_text("\n".join(["timestamp, index, clocks.current.sm [MHz]", *rows, ""]))
    return path


@pytest.mark.parametrize("base", [{"time_zone": "+05:45"}, {"near_ns": T0 + 10 * S}])
def test_time_zone_told_or_found_by_the_run(tmp_path, base):
    run = joined(nvidia_smi(tmp_path / "smi.csv", 5.75), **base)
    assert with_clocks(kernels((5.0, 9.0)), run.samples)["clock_mhz"][0] == pytest.approx(sine_mean(5, 9), rel=0.01)


def test_wrong_time_zone_gives_no_clock_rather_than_a_wrong_one(tmp_path):
    run = joined(nvidia_smi(tmp_path / "smi.csv", 5.75))
    assert with_clocks(kernels((5.0, 9.0)), run.samples)["clock_mhz"].isna().all() and "no_time_zone" in codes(run)


def test_gpus_by_pci_address(tmp_path):
    """The log counts in the order of the bus, the ranks do not."""
    log = telemetry_logs.read(write_log(tmp_path / "node0.telemetry.csv", gpus=3))
    side = {0: sidecar(0, "0000:07:00.0"), 1: sidecar(1, "0000:05:00.0")}
    run = join([log], workers(0, 1), side)
    mean = run.samples.groupby("gpu")["clock_mhz"].mean()
    assert mean[1] - mean[0] == pytest.approx(200) and set(mean.index) == {0, 1}
    assert "telemetry_other_gpus" in codes(run) and "telemetry_gpus" not in codes(run)


def test_second_capture_without_a_sidecar(tmp_path):
    log = telemetry_logs.read(write_log(tmp_path / "node0.telemetry.csv", gpus=2))
    two = pd.concat([workers(0), workers(0).assign(capture=1)], ignore_index=True)
    run = join([log], two, {0: sidecar(0, "0000:06:00.0")})
    assert run.samples["clock_mhz"].mean() == pytest.approx(log.samples.groupby("gpu")["clock_mhz"].mean()[1])


def test_gpus_by_order_or_index_or_not_at_all(tmp_path):
    log = telemetry_logs.read(write_log(tmp_path / "node0.telemetry.csv", gpus=2))
    run = join([log], workers(4, 5), {4: sidecar(4), 5: sidecar(5)})
    assert set(run.samples["gpu"]) == {4, 5} and "telemetry_gpus" in codes(run)
    run = join([log], workers(0), {0: sidecar(0, index=1)})
    assert run.samples["clock_mhz"].mean() == pytest.approx(log.samples.groupby("gpu")["clock_mhz"].mean()[1])
    run = join([log], workers(0), {0: sidecar(0)})
    assert run.samples.empty and "left aside" in " ".join(f.message for f in run.findings)


def test_hosts(tmp_path):
    log = telemetry_logs.read(write_log(tmp_path / "node0.telemetry.csv"))
    two = pd.concat([workers(0), workers(1, host="node1")], ignore_index=True)
    assert set(join([log], two, {}).samples["gpu"]) == {0}
    assert join([log], workers(0, host="other"), {}).samples["gpu"].tolist()[:1] == [0]
    elsewhere = pd.concat([workers(0, host="a"), workers(1, host="b")], ignore_index=True)
    run = join([log], elsewhere, {})
    assert run.samples.empty and "telemetry_no_host" in codes(run)


def test_quantities_from_several_logs(tmp_path):
    for name, first, at in (("power_w", 500, 5), ("clock_mhz", 1900, 2)):
        rows = "".join(f"{T0 // S + i}.{at},0,{first + i}\n" for i in range(9))
        (tmp_path / f"{name}.csv").write_text(f"timestamp,gpu,{name}\n{rows}")
    logs = [telemetry_logs.read(tmp_path / name) for name in ("power_w.csv", "clock_mhz.csv")]
    found = with_clocks(kernels((2.0, 5.0)), join(logs, workers(0), {}).samples).iloc[0]
    assert found["power_w"] == pytest.approx(502.95, abs=0.1)
    assert found["clock_mhz"] == pytest.approx(1903.25, abs=0.1)


def test_case_steps_by_anchor(shared):
    """Case 49: steps of 0.8 s of kernel time, the clock 10 MHz lower in each."""
    log = telemetry_logs.read(shared / "cases/49_smi_monotonic/run/clock_boottime.csv",
                              TimeBase(anchor=(5_011_200_000_000_000, 1_767_225_600_000_000_000)))
    one = workers(0).assign(host=None)
    rows = kernels(*((s + 0.1, s + 0.9) for s in range(4)))
    shift = 1_767_225_600_000_000_000 - T0
    rows = rows.assign(start_ns=rows["start_ns"] + shift, end_ns=rows["end_ns"] + shift)
    found = with_clocks(rows, join([log], one, {}).samples)["clock_mhz"]
    want = json.loads((shared / "cases/49_smi_monotonic/expected.json").read_text())["clock_per_step"]
    assert found.tolist() == pytest.approx(want)


def test_anchor_from_a_sidecar():
    pairs = sidecar_pairs([sidecar()], "node0")
    assert anchor(pairs) == (BOOT + S // 2, T0 + S // 2) and anchor(pairs, "boottime_ns") is None
    assert correction(schema.empty(schema.CLOCKS), pairs).known is False


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(100, 3000)), min_size=1, max_size=30),
       st.integers(-200, 4000), st.integers(0, 3000))
def test_integral_of_a_curve(steps, start, length):
    """Against a sum over every nanosecond of the definition, pauses included."""
    t = np.cumsum([s for s, _ in steps]).astype(np.int64)
    v = np.array([v for _, v in steps])
    grid = Grid(t)
    period = int(np.median(np.diff(t))) if len(t) > 1 else 0
    half = max(period // 2, 1)
    at = np.arange(start, start + length) + 0.5
    i = np.searchsorted(t, at) - 1
    value = np.full(len(at), np.nan)
    for k, x in enumerate(at):
        left, right = i[k], i[k] + 1
        if left >= 0 and right < len(t) and t[right] - t[left] <= 3 * max(period, 1):
            value[k] = v[left] + (v[right] - v[left]) * (x - t[left]) / (t[right] - t[left])
        elif left >= 0 and x < t[left] + half:
            value[k] = v[left]
        elif right < len(t) and x > t[right] - half:
            value[k] = v[right]
    a, b = np.array([start]), np.array([start + length])
    assert grid.covered_ns(a, b)[0] == np.isfinite(value).sum()
    assert Curve(grid, v).integral(a, b)[0] == pytest.approx(np.nansum(value), rel=1e-6, abs=1e-6)


def test_counters_count_on_through_pauses():
    t, counter = np.array([0, 10, 1000]), np.array([5.0, 15.0, 1005.0])
    found = rise(t, counter, np.array([0, 5, 500, -1, 0]), np.array([10, 15, 600, 5, 1001]))
    assert found[:3].tolist() == [10, 10, 100] and np.isnan(found[3:]).all()


def test_no_samples_at_all():
    found = with_clocks(kernels((0, 1)), schema.empty(schema.TELEMETRY))
    assert found["clock_mhz"].isna().all() and len(with_clocks(kernels((0, 1)).iloc[:0], found.iloc[:0])) == 0
