"""Clock, power, energy and CPU metrics on planted samples whose answers are worked out here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.metrics import cpu as cpu_metrics
from tb_chopper.backend.metrics.frequency import (
    frequency,
    regression,
    residency,
    spread,
    step_time_against_clock,
    throttle_shares,
)
from tb_chopper.backend.metrics.power import collective_energy, energy, power, step_energy
from tests.unit import tables

MS = 1000
"""the tables here are in µs"""


def samples(*gpus: dict[str, Any], until_ms: float = 1000, period_ms: float = 10) -> pd.DataFrame:
    """Samples of one row of constants (or functions of the time in ms) per GPU, from 0 on."""
    t = np.arange(0, until_ms + 1, period_ms)
    parts = [pd.DataFrame({"t_ns": (t * 1e6).astype("int64"), "gpu": g,
                           **{k: [f(x) for x in t] if callable(f) else f for k, f in columns.items()}})
             for g, columns in enumerate(gpus)]
    return schema.conform(pd.concat(parts, ignore_index=True), schema.TELEMETRY)


def step_clock(t_ms: float) -> float:
    """2000 MHz before 500 ms, 1500 after."""
    return 2000.0 if t_ms < 500 else 1500.0


# Two GEMMs, one in each half; a norm beside a collective in the second half; 50 ms in which only that runs.
ROWS = [
    {"start": 100 * MS, "end": 200 * MS, "operation": "gemm", "op_type": "gemm", "step": 0, "layer": "layers.2"},
    {"start": 600 * MS, "end": 900 * MS, "operation": "gemm", "op_type": "gemm", "step": 1, "layer": "layers.10"},
    {"start": 900 * MS, "end": 950 * MS, "operation": "norm", "step": 1},
    {"start": 900 * MS, "end": 1000 * MS, "operation": "ag", "kind": "communication", "step": 1},
]
STEPS = tables.steps((0, 100 * MS, 600 * MS), (1, 600 * MS, 1000 * MS))
POWERED = {"clock_mhz": step_clock, "memory_clock_mhz": 1300.0, "power_w": lambda t: 700.0 if t < 500 else 600.0,
               "clock_limit_mhz": 2100.0}


def by(frame: pd.DataFrame, column: str) -> dict[Any, dict[str, Any]]:
    return frame.set_index(column).to_dict("index")


def test_clock_per_operation_and_time_lost_to_it():
    found = by(frequency(tables.kernels(ROWS), STEPS, samples(POWERED), "operation"), "operation")
    gemm = found["gemm"]
    assert gemm["clock_mhz"] == pytest.approx((100 * 2000 + 300 * 1500) / 400)
    assert gemm["lost_to_clock_us"] == pytest.approx((100 * (1 - 2000 / 2100) + 300 * (1 - 1500 / 2100)) * MS)
    assert (gemm["n"], gemm["time_us"], gemm["memory_clock_mhz"], gemm["source"]) == (2, 400 * MS, 1300, "sampled")
    assert gemm["energy_j"] == pytest.approx(0.1 * 700 + 0.3 * 600) and gemm["power_w"] == pytest.approx(250 / 0.4)
    assert found["ag"]["lost_to_clock_us"] == 0 and found["ag"]["clock_mhz"] == 1500


@pytest.mark.parametrize("group", [
    "gpu", "step", ["gpu", "step"], "layer", "phase", "kernel", ["operation", "layer"], []])
def test_any_granularity(group):
    found = frequency(tables.kernels(ROWS), STEPS, samples(POWERED), group)
    assert found["time_us"].sum() == pytest.approx(550 * MS) and found["clock_mhz"].notna().all()
    assert found["lost_to_clock_us"].sum() == pytest.approx(
        (100 * (1 - 2000 / 2100) + 350 * (1 - 1500 / 2100)) * MS)
    assert found["power_w"].between(600, 700).all()


def test_filters_and_peaks():
    kernels = tables.kernels(ROWS)
    one = frequency(kernels, STEPS, samples(POWERED), "operation", where={"step": 1, "operation": "gemm"})
    assert one["clock_mhz"].tolist() == [1500] and one["energy_j"].tolist() == [pytest.approx(180)]
    told = frequency(kernels, STEPS, samples(POWERED), "operation", where={"step": 1}, peak_mhz={0: 3000.0})
    assert by(told, "operation")["gemm"]["lost_to_clock_us"] == pytest.approx(150 * MS)
    unknown = frequency(kernels, STEPS, samples({**POWERED, "clock_limit_mhz": np.nan}), "operation")
    assert np.isnan(by(unknown, "operation")["gemm"]["lost_to_clock_us"])


def test_without_samples_everything_is_unavailable():
    found = frequency(tables.kernels(ROWS), STEPS, schema.empty(schema.TELEMETRY), "operation")
    assert found["clock_mhz"].isna().all() and (found["source"] == "unavailable").all()
    assert found["energy_j"].isna().all() and found["time_us"].sum() == 550 * MS


def test_windows_include_idle_time():
    found = power(tables.kernels(ROWS), STEPS, samples(POWERED), ["gpu", "step"])
    # Power falls from 700 to 600 W between the samples at 490 and 500 ms: 5 ms at the mean of both.
    first = 0.39 * 700 + 0.01 * 650 + 0.1 * 600
    assert found["energy_j"].tolist() == [pytest.approx(first), pytest.approx(240)]
    assert found["time_us"].tolist() == [500 * MS, 400 * MS] and (found["source"] == "integral").all()
    whole = power(tables.kernels(ROWS), STEPS, samples(POWERED), "gpu")
    assert whole["energy_j"].tolist() == [pytest.approx(first + 240)]


def test_concurrent_work_of_a_group_counts_its_time_once():
    rows = [{"start": 0, "end": 100 * MS, "stream": 1}, {"start": 50 * MS, "end": 150 * MS, "stream": 2}]
    found = power(tables.kernels(rows), tables.steps(), samples(POWERED), "operation")
    assert found["energy_j"].tolist() == [pytest.approx(0.15 * 700)]


def test_energy_counter_goes_before_power():
    """The counter says 500 W where power, averaged by the driver, still shows 700."""
    counted = samples({**POWERED, "energy_j": lambda t: 1e6 + 0.5 * t})
    found = step_energy(tables.kernels(ROWS), STEPS, counted, tokens_per_step={0: 1000})
    assert found["energy_j"].tolist() == [pytest.approx(250), pytest.approx(200)]
    assert found["j_per_token"].tolist() == [pytest.approx(0.25), pytest.approx(0.2)]
    assert (found["source"] == "counter").all()
    assert step_energy(tables.kernels(ROWS), STEPS, counted)["j_per_token"].isna().all()


def test_counter_bridges_a_pause_and_power_does_not():
    held = samples({**POWERED, "energy_j": lambda t: 0.5 * t})
    held = held[~held["t_ns"].between(100e6 + 1, 900e6 - 1)].reset_index(drop=True)
    counter = energy(held, np.zeros(1, int), np.array([0]), np.array([10**9]))
    assert counter["energy_j"].tolist() == [pytest.approx(500)] and counter["counted"].all()
    integral = power(tables.kernels(ROWS), STEPS, held.assign(energy_j=np.nan), "gpu").iloc[0]
    assert integral["known_share"] < 0.5 and np.isnan(integral["energy_j"]) and integral["source"] == "unavailable"


def test_energy_while_only_communication_runs():
    found = collective_energy(tables.kernels(ROWS), samples(POWERED)).iloc[0]
    assert found["energy_j"] == pytest.approx(0.05 * 600) and found["time_us"] == 50 * MS
    assert found["share"] == pytest.approx(30 / (0.39 * 700 + 6.5 + 0.5 * 600))


def test_several_gpus_add_up():
    rows = [{"start": 0, "end": 400 * MS, "gpu": g, "operation": "gemm", "op_type": "gemm"} for g in range(3)]
    gpus = [{"clock_mhz": 2000.0 - 100 * g, "power_w": 500.0 + 100 * g, "clock_limit_mhz": 2000.0} for g in range(3)]
    found = frequency(tables.kernels(rows), tables.steps(), samples(*gpus), "operation").iloc[0]
    assert found["clock_mhz"] == pytest.approx(1900) and found["energy_j"] == pytest.approx(0.4 * 1800)
    assert found["power_w"] == pytest.approx(600), "the mean power of one GPU"
    assert found["lost_to_clock_us"] == pytest.approx(400 * MS * (0 + 0.05 + 0.1))


def test_residency():
    found = residency(samples(POWERED))
    assert found["clock_mhz"].tolist() == [1500, 2000] and found["share"].sum() == pytest.approx(1)
    assert found["time_us"].tolist() == [pytest.approx(510 * MS), pytest.approx(500 * MS)]
    within = pd.DataFrame({"gpu": [0, 0], "start_ns": [0, 700_000_000], "end_ns": [100_000_000, 1_000_000_000]})
    found = residency(samples(POWERED), within=within)
    assert found["time_us"].tolist() == [pytest.approx(300 * MS), pytest.approx(100 * MS)]


def test_residency_does_not_count_pauses():
    held = samples(POWERED)
    held = held[~held["t_ns"].between(100e6 + 1, 900e6 - 1)].reset_index(drop=True)
    assert residency(held)["time_us"].sum() == pytest.approx(22 * 10 * MS)


def test_throttle_shares_are_exact():
    texts = ["none", "power:100", "power:40", "power:50 thermal:10", None, "none"]
    frame = samples({"power_w": 1.0}, until_ms=50).assign(throttle=texts)
    found = by(throttle_shares(schema.conform(frame, schema.TELEMETRY)), "reason")
    # Intervals: 10 ms each of 100 %, 40 %, 50 %; the unknown sample's interval goes to the one after it, which is free.
    assert found["power"]["time_us"] == pytest.approx(10 * MS + 4 * MS + 5 * MS)
    assert found["thermal"]["share"] == pytest.approx(1 / 50) and found["power"]["known_us"] == 50 * MS
    assert found["none"]["time_us"] == pytest.approx(6 * MS + 5 * MS + 20 * MS)


def test_throttle_unknown_is_not_free():
    assert throttle_shares(samples(POWERED)).empty


def test_hot_and_slow_gpus_are_named():
    rows = [{"start": 0, "end": 400 * MS, "gpu": g} for g in range(4)]
    gpus = [{"clock_mhz": c, "temperature_c": t} for c, t in ((1900, 60), (1800, 75), (1905, 61), (1895, 70))]
    found = by(spread(tables.kernels(rows), samples(*gpus)), "gpu")
    assert {g: r["note"] for g, r in found.items()} == {0: "", 1: "slow, hot", 2: "", 3: ""}
    assert next(iter(found)) == 1 and found[1]["above_median_c"] == pytest.approx(75 - 65.5)


def test_step_time_against_clock_finds_the_part_that_scales():
    """T = 30 ms + 140 ms GHz / f, with noise: the interval holds 140 in 95 of 100 trials, give or take."""
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        f = rng.uniform(1.6, 2.1, 12)
        found = step_time_against_clock(1000 * (30 + 140 / f + rng.normal(0, 0.5, 12)), 1000 * f)
        assert found is not None and found.n == 12 and found.r > 0.9
        hits += found.low <= 140_000 <= found.high
    assert 180 <= hits <= 198


def test_regression_needs_something_to_regress():
    assert regression(np.array([1.0, 1, 1, 1]), np.array([1.0, 2, 3, 4])) is None
    assert regression(np.array([1.0, 2, 3]), np.array([1.0, 2, 3])) is None
    exact = regression(np.arange(5.0), 3 * np.arange(5.0) + 1)
    assert exact == pytest.approx((3, 3, 3, 1, 1, 5), abs=1e-6)


@pytest.mark.parametrize("n, t", [(4, 4.3027), (5, 3.1824), (6, 2.7764), (12, 2.2281), (32, 2.0423)])
def test_confidence_interval_has_students_width(n, t):
    rng = np.random.default_rng(n)
    x, y = np.arange(float(n)), rng.normal(0, 1, n)
    found = regression(x, y)
    rest = y - found.intercept - found.slope * x
    error = np.sqrt((rest @ rest) / (n - 2) / ((x - x.mean()) @ (x - x.mean())))
    assert (found.high - found.low) / 2 / error == pytest.approx(t, rel=0.005)


def cpu_tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Four cores with two logical CPUs each (0 and 4 are siblings); three samples, the last one idle."""
    rows = [(0, 0, 90.0), (0, 4, 10.0), (0, 1, 50.0), (10, 2, 100.0), (20, -1, 0.0)]
    cpu = pd.DataFrame([{"t_ns": t, "host": "n", "cpu": c, "busy_pct": b} for t, c, b in rows])
    cpu["threads"] = [1, 2, np.nan, np.nan, np.nan]
    cores = pd.DataFrame({"host": "n", "cpu": range(8), "core": [c % 4 for c in range(8)]})
    return schema.conform(cpu, schema.CPU), schema.conform(cores, schema.CPU_CORES)


def test_cpu_equations():
    found = cpu_metrics.cpu_utilization(*cpu_tables())
    assert found["t_ns"].tolist() == [0, 10, 20]
    assert found["c_active"].tolist() == [3, 1, 0] and found["c_min"].tolist() == [1.5, 1.0, 0.0]
    assert found["active_physical"].tolist() == [2, 1, 0] and found["physical"].tolist() == [4, 4, 4]
    assert found["both_siblings"].tolist() == [1, 0, 0]
    assert found["threads"].tolist()[0] == 3 and np.isnan(found["threads"][1])
    assert (found["c_min"] <= found["c_active"]).all()
    summary = cpu_metrics.summary(found).iloc[0]
    assert (summary["c_active"], summary["c_min"], summary["active_physical_share"]) == (1, 1.0, 0.25)
    assert summary["both_siblings_share"] == pytest.approx(1 / 3)


def test_cores_for_the_heat_map():
    found = cpu_metrics.core_activity(*cpu_tables())
    cells = found[["t_ns", "core", "active", "busy_pct"]].to_numpy().tolist()
    assert cells == [[0, 0, 2, 100], [0, 1, 1, 50], [10, 2, 1, 100]]
    busy = by(cpu_metrics.busy_by_cpu(cpu_tables()[0]), "cpu")
    assert busy[2] == pytest.approx({"host": "n", "busy_pct": 100 / 3, "active_share": 1 / 3})


def test_cpu_without_topology_or_host():
    cpu, cores = cpu_tables()
    found = cpu_metrics.cpu_utilization(cpu, cores.iloc[:0])
    assert found["c_active"].tolist() == [3, 1, 0] and found["active_physical"].isna().all()
    found = cpu_metrics.cpu_utilization(schema.conform(cpu.assign(host=None), schema.CPU), cores.iloc[:0])
    assert found["c_active"].tolist() == [3, 1, 0]
    assert cpu_metrics.cpu_utilization(schema.empty(schema.CPU), cores).empty
