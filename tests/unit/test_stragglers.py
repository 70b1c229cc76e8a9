"""Leads, what-if, imbalance and outlier steps on tables written by hand (µs)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.metrics import stragglers
from tests.unit import tables

NO_SAMPLES = schema.empty(schema.TELEMETRY)


def run(durations: dict[int, list[float]], idle: dict[int, float] | None = None,
        n_steps: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Kernels one after the other on each GPU, the same operations in every step, and the steps of 1000 µs."""
    rows, windows = [], []
    for gpu, each in durations.items():
        for step in range(n_steps):
            at = 1000.0 * step
            for i, d in enumerate(each):
                rows.append({"gpu": gpu, "start": at, "end": at + d, "launch": at - 1, "step": step,
                             "operation": f"op{i}"})
                at += d + (idle or {}).get(gpu, 0)
            windows.append(tables.steps((step, 1000 * step, at), gpu=gpu))
    steps = pd.concat(windows, ignore_index=True).assign(complete=True)
    return tables.kernels(rows), steps


# ---- leads -----------------------------------------------------------------------------------------------------------

def test_lead_is_the_distance_to_the_last_gpu():
    kernels, steps = run({0: [10, 10, 10], 1: [12, 12, 12]})
    led = stragglers.leads(kernels)
    table = led.pivot(index="gpu", columns="operation", values="lead_ns") / 1000
    assert table.loc[0].tolist() == [0, 2, 4]
    assert table.loc[1].tolist() == [0, 0, 0]
    per_step = stragglers.step_leads(led, steps)
    columns = ["gpu", "step", "n", "lead_us", "mean_lead_us", "max_lead_us", "last_lead_us"]
    assert per_step[columns].to_numpy().tolist() == [[0, 0, 3, 6, 2, 4, 4], [1, 0, 3, 0, 0, 0, 0]]


def test_leads_are_on_one_clock():
    kernels, _ = run({0: [10, 10], 1: [12, 12]})
    by = 7000 * kernels["gpu"]
    ahead = kernels.assign(start_ns=kernels["start_ns"] + by, end_ns=kernels["end_ns"] + by)
    assert stragglers.leads(ahead, {1: 7000})["lead_ns"].tolist() == stragglers.leads(kernels)["lead_ns"].tolist()
    assert stragglers.leads(ahead)["lead_ns"].max() == 9000


def test_operations_with_other_numbers_of_kernels_are_not_compared():
    kernels, _ = run({0: [10, 10, 10], 1: [10, 10, 10]})
    more = kernels[(kernels["gpu"] == 1) & (kernels["operation"] == "op1")]
    led = stragglers.leads(pd.concat([kernels, more], ignore_index=True))
    assert sorted(led["operation"].unique()) == ["op0", "op2"]


def test_one_gpu_leads_nobody():
    kernels, steps = run({0: [10]})
    led = stragglers.leads(kernels)
    assert len(led) == len(stragglers.step_leads(led, steps)) == 0


# ---- what it costs ---------------------------------------------------------------------------------------------------

def own(**per_gpu: list[float]) -> pd.DataFrame:
    """Own times of `g0=[...]` per step; every step lasts as long as the largest."""
    longest = np.max(list(per_gpu.values()), axis=0)
    return pd.DataFrame([
        {"gpu": int(g[1:]), "step": s, "time_us": longest[s], "wait_us": longest[s] - v, "own_us": v}
        for g, values in per_gpu.items() for s, v in enumerate(values)])


def equal(n: int, **columns: dict[int, float]) -> pd.DataFrame:
    """`imbalance` of n equal GPUs that compute 100 µs, but for some values: `slowness={1: 1.25}`."""
    usual = {"compute_us": 100.0, "load_excess_us": 0.0, "overlap_us": 0.0, "slowness": 1.0, "clock_mhz": np.nan,
             "power_share": np.nan}
    table = pd.DataFrame({"gpu": range(n), **usual, "explained_by": None})
    for column, values in columns.items():
        table.loc[list(values), column] = list(values.values())
    return table


def test_the_slowest_gpu_costs_what_it_has_more_than_the_next():
    table = stragglers.what_if(own(g0=[100], g1=[104], g2=[150], g3=[100]), equal(4)).set_index("gpu")
    assert table.loc[[0, 1, 3], "gain_us"].tolist() == [0, 0, 0]
    assert table.loc[2, "gain_us"] == 46  # GPU 1 is the slowest then
    assert table.loc[2, ["step_us", "what_if_us"]].tolist() == [150, 104]
    assert table["gain_us"].iloc[-1] == 48  # all as the median, 102
    assert table["gain_share"].iloc[-1] == pytest.approx(48 / 150)


def test_two_equally_slow_gpus_cost_nothing_alone():
    times = own(g0=[100], g1=[150], g2=[150], g3=[100], g4=[100])
    table = stragglers.what_if(times, equal(5))
    assert table["gain_us"].tolist() == [0, 0, 0, 0, 0, 50]
    assert stragglers.gain(times, equal(5), [1, 2]) == (50, 50, 50)
    assert stragglers.gain(times, equal(5), [1]) == (0, 0, 0)


def test_half_of_the_gpus_slow():
    """As fast as the median of the others, not of all."""
    assert stragglers.gain(own(g0=[100], g1=[150], g2=[150], g3=[102]), equal(4), [1, 2]) == (48, 48, 48)


def test_contention_by_waiting_ends_with_the_waiting():
    """The fast GPUs need 100 µs for what takes 125 µs on the slow one; 50 µs of collectives beside it make it 110."""
    gpus = equal(3, slowness={1: 1.25}, compute_us={0: 110, 1: 125, 2: 110}, overlap_us={0: 50, 2: 50})
    assert stragglers.gain(own(g0=[115], g1=[130], g2=[115]), gpus, [1]).us == pytest.approx(25)  # to 105, not 115


def test_contention_by_transfers_stays():
    """A collective adds a fifth of its time to what runs beside it, on the slow GPU (125 + 5) as on the fast (100)."""
    gpus = equal(3, slowness={1: 1.25}, compute_us={0: 115, 1: 130, 2: 115}, overlap_us={0: 75, 1: 25, 2: 75})
    assert stragglers.gain(own(g0=[120], g1=[135], g2=[120]), gpus, [1]).us == pytest.approx(25)


def test_other_kernels_are_no_contention():
    gpus = equal(3, compute_us={1: 130}, load_excess_us={1: 30})
    assert stragglers.gain(own(g0=[100], g1=[130], g2=[100]), gpus, [1]) == (30, 30, 30)


def test_at_the_power_cap_the_fast_gpus_slow_down_when_they_wait_less():
    """Their energy, the square of the clock, is spent in a shorter step: T' f² = T and T' = 100 / f."""
    columns = {"slowness": {1: 1.25}, "compute_us": {1: 125}, "clock_mhz": {0: 2000, 1: 1600, 2: 2000}}
    times = own(g0=[100], g1=[125], g2=[100])
    capped = stragglers.gain(times, equal(3, **columns, power_share=dict.fromkeys(range(3), 1.0)), [1])
    assert capped.at_least_us == pytest.approx(125 - 100 * 1.25 ** (1 / 3), abs=1e-3)
    assert capped.at_most_us == pytest.approx(25)
    assert capped.us == (capped.at_least_us + capped.at_most_us) / 2
    below = stragglers.gain(times, equal(3, **columns, power_share=dict.fromkeys(range(3), 0.5)), [1])
    assert below == pytest.approx((25, 25, 25))


def test_waiting_among_equals_remains():
    times = own(g0=[100], g1=[150], g2=[102], g3=[100])
    assert stragglers.gain(times, equal(4), [1], remaining_wait_us=3.0) == (45, 45, 45)
    assert stragglers.gain(times, equal(4), [0], remaining_wait_us=3.0) == (0, 0, 0)


def test_nothing_to_compare():
    assert len(stragglers.what_if(own(g0=[100]), equal(1))) == 0
    assert stragglers.gain(own(g0=[100]), equal(1), [0]) == (0, 0, 0)
    assert stragglers.gain(own(g0=[100], g1=[100]).iloc[:0], equal(2), [0]) == (0, 0, 0)


def test_own_time_is_without_exposed_waiting():
    _, steps = run({0: [500], 1: [900]}, n_steps=2)
    arrived = pd.DataFrame({"gpu": [0, 0, 1], "step": [0, 0, 0], "exposed_wait_ns": [300_000.0, 100_000.0, 0.0]})
    found = stragglers.own_times(arrived, steps)
    assert found.to_numpy().tolist() == [[0, 0, 1000, 400, 600], [1, 0, 1000, 0, 1000]]


# ---- why -------------------------------------------------------------------------------------------------------------

def explained(kernels: pd.DataFrame, steps: pd.DataFrame, samples: pd.DataFrame = NO_SAMPLES) -> pd.DataFrame:
    return stragglers.imbalance(kernels, steps, stragglers.leads(kernels), samples).set_index("gpu")


THREE = {0: [100.0] * 4, 1: [100.0] * 4, 2: [100.0] * 4}


def test_equal_gpus_need_no_explanation():
    assert explained(*run(THREE))["explained_by"].isna().all()


def test_a_gpu_that_idles_is_kept_by_its_host():
    row = explained(*run(THREE, idle={1: 50})).loc[1]
    assert row["explained_by"] == "host"
    assert row["host_excess_us"] == 200


def test_a_gpu_with_more_to_do():
    kernels, steps = run({**THREE, 1: [100.0] * 5})
    row = explained(kernels, steps).loc[1]
    assert row["explained_by"] == "load"
    assert row["load_excess_us"] == 100


def test_a_gpu_whose_computation_shares_time_with_communication():
    kernels, steps = run({**THREE, 1: [100.0, 100.0, 160.0, 160.0]})
    beside = (kernels["gpu"] == 1) & kernels["operation"].isin(["op2", "op3"])
    row = explained(kernels.assign(overlap_ns=np.where(beside, 100_000, 0)), steps).loc[1]
    assert row["explained_by"] == "contention"
    assert row["contention_excess_us"] == pytest.approx(120)
    assert row["slowness"] == 1


def sampled(temperature: dict[int, float]) -> pd.DataFrame:
    rows = [{"gpu": g, "t_ns": 0, "temperature_c": t} for g, t in temperature.items()]
    return schema.conform(pd.DataFrame(rows), schema.TELEMETRY)


@pytest.mark.parametrize("clock, power, heat, why", [
    (1600, 500, 60, "clock"), (1600, 600, 60, "power"), (1600, 500, 75, "cooling"), (2000, 500, 60, "unknown"),
    (None, None, 60, "unknown")])
def test_a_slow_gpu(clock: float | None, power: float | None, heat: float, why: str):
    kernels, steps = run({**THREE, 1: [125.0] * 4})
    slow = kernels["gpu"] == 1
    if clock is not None:
        kernels = kernels.assign(clock_mhz=np.where(slow, clock, 2000.0), power_w=np.where(slow, power, 500.0))
    row = explained(kernels, steps, sampled({0: 60, 1: heat, 2: 60})).loc[1]
    assert row["explained_by"] == why
    assert row["slowness"] == pytest.approx(1.25)
    assert row["slow_excess_us"] == pytest.approx(100)


# ---- outlier steps ---------------------------------------------------------------------------------------------------

def in_steps(durations: list[float], gap: float = 0, kind: str = "compute") -> tuple[pd.DataFrame, pd.DataFrame]:
    """One GPU; each step: a kernel of 100 µs, `gap` µs of idle in step 3, then `odd` of the given duration."""
    rows, windows, at = [], [], 0.0
    for step, d in enumerate(durations):
        begin = at
        rows.append({"start": at, "end": at + 100, "step": step, "operation": "plain"})
        at += 100 + (gap if step == 3 else 0)
        rows.append({"start": at, "end": at + d, "step": step, "operation": "odd", "kind": kind})
        at += d
        windows.append((step, begin, at))
    return tables.kernels(rows), tables.steps(*windows).assign(complete=True)


def test_an_outlier_and_the_operation_that_grew():
    table = stragglers.outlier_steps(*in_steps([50, 51, 49, 250, 50, 52, 50]))
    assert table["outlier"].tolist() == [False, False, False, True, False, False]
    row = table.iloc[3]
    x = np.array([150, 151, 149, 350, 150, 152])
    assert row["z"] == pytest.approx(0.6745 * (350 - np.median(x)) / np.median(np.abs(x - np.median(x))))
    assert row[["grew", "operation"]].tolist() == ["compute", "odd"]
    assert row["operation_delta_us"] == pytest.approx(200, abs=1)


@pytest.mark.parametrize("kind, grew", [("communication", "exposed_communication"), ("memcpy", "exposed_memcpy")])
def test_what_grew(kind: str, grew: str):
    row = stragglers.outlier_steps(*in_steps([50, 51, 49, 250, 50, 52, 50], kind=kind)).iloc[3]
    assert row[["outlier", "grew", "operation"]].tolist() == [True, grew, "odd"]


def test_an_outlier_that_waited():
    row = stragglers.outlier_steps(*in_steps([50, 51, 49, 50, 50, 52, 50], gap=300)).iloc[3]
    assert row[["outlier", "grew", "operation"]].tolist() == [True, "idle", "odd"]
    assert row["idle_delta_us"] == 300


def test_steps_that_differ_by_a_tenth_are_no_outliers():
    assert not stragglers.outlier_steps(*in_steps([50, 50, 50, 65, 50, 50, 50]))["outlier"].any()
    assert stragglers.outlier_steps(*in_steps([50, 50, 50, 100, 50, 50, 50]))["outlier"].tolist()[3]  # MAD is 0


def test_few_steps_have_no_usual_time():
    table = stragglers.outlier_steps(*in_steps([50, 250, 50, 50]))
    assert table["z"].isna().all()
    assert not table["outlier"].any()


def test_a_run_of_one_step_is_compared_by_its_windows():
    _, steps = run({0: [500], 1: [900]})
    arrived = pd.DataFrame({"gpu": [0], "step": [0], "exposed_wait_ns": [100_000.0]})
    assert stragglers.own_times(arrived, steps).to_numpy().tolist() == [[0, 0, 500, 100, 400], [1, 0, 900, 0, 900]]


def test_no_steps():
    kernels, _ = run(THREE)
    assert len(stragglers.outlier_steps(kernels, schema.empty(schema.STEPS))) == 0
