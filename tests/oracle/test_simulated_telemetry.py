"""From the telemetry and sidecars of a simulated node alone: the clocks, powers and energies that were planted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.alignment.telemetry import RunTelemetry, join, with_clocks
from tb_chopper.backend.metrics.cpu import cpu_utilization
from tb_chopper.backend.metrics.frequency import spread, throttle_shares
from tb_chopper.backend.metrics.power import energy
from tb_chopper.backend.readers import telemetry_logs
from tb_chopper.backend.simulate import Options, configs, schedule, simulate
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.recorded import clock_offset
from tb_chopper.backend.simulate.run import programs
from torch_ext import sidecar, telemetry_format

Case = tuple[Path, RunTelemetry, pd.DataFrame, Config]
CASES = {"one-host": Options(layers=6, seed=3),
         "skewed-hosts": Options(hosts=2, ranks=2, clock_skew_us=5000, slow={3: 0.8})}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The run's directory, its telemetry on the trace's clock, and the true kernels with their sampled clock.

    The log of a short run ends within the last step: kernels after the last sample are left out.
    """
    folder = simulate(tmp_path_factory.mktemp("run"), request.param)[0]
    sidecars = {s["identity"]["rank"]: s for s in map(sidecar.read, folder.glob("*.chopper.json"))}
    ranks = [{"capture": r, "gpu": r, "rank": r, "host": s["identity"]["host"]} for r, s in sidecars.items()]
    workers = schema.conform(pd.DataFrame(ranks), schema.WORKERS)
    logs = [telemetry_logs.read(p) for p in sorted(folder.glob(f"*{telemetry_format.SUFFIX}"))]
    telemetry = join(logs, workers, sidecars)
    truth = pd.read_parquet(folder / "truth/kernels.parquet")
    truth = truth.rename(columns={"rank": "gpu", "clock_mhz": "true_mhz", "power_w": "true_w", "energy_j": "true_j"})
    last = truth["gpu"].map(telemetry.samples.groupby("gpu")["t_ns"].max())
    inside = truth[truth["end_ns"] <= last].reset_index(drop=True)
    assert len(inside) > 0.95 * len(truth)
    return folder, telemetry, with_clocks(inside, telemetry.samples), configs(request.param)[0]


def weighted(rows: pd.DataFrame, column: str) -> float:
    return float(np.average(rows[column], weights=rows["end_ns"] - rows["start_ns"]))


def test_every_kernel_has_a_clock_and_every_host_is_placed(case):
    _, telemetry, kernels, _ = case
    assert kernels["clock_mhz"].notna().all() and telemetry.clocks["known"].all()
    assert telemetry.clocks["residual_us"].max() < 10 and not telemetry.findings


def test_clock_per_operation(case):
    """Operations that take longer than two samples in all are within a percent."""
    _, telemetry, kernels, _ = case
    period = np.median(np.diff(telemetry.samples.loc[telemetry.samples["gpu"] == 0, "t_ns"]))
    checked = 0
    for (_, _), rows in kernels.groupby(["gpu", "operation"], observed=True):
        if (rows["end_ns"] - rows["start_ns"]).sum() > 2 * period:
            assert weighted(rows, "clock_mhz") == pytest.approx(weighted(rows, "true_mhz"), rel=0.01)
            checked += 1
    assert checked > 10


def test_energy_per_step(case):
    """Against the power of every tick of the simulated power controller, summed over each step."""
    _, telemetry, kernels, config = case
    timeline = schedule.simulate(config, [programs(config)])
    first = kernels[kernels["launched"]].groupby(["gpu", "step"])["start_ns"].min().unstack()
    for gpu, starts in first.iterrows():
        power = timeline.ranks[gpu].power_w[1:]
        edges = clock_offset(config, gpu) + np.arange(len(power) + 1) * config.tick_ns
        joule = np.concatenate(([0], np.cumsum(power) * config.tick_ns * 1e-9))
        truth = np.diff(np.interp(starts - edges[0], edges - edges[0], joule))
        windows = np.full(len(truth), gpu), starts.to_numpy()[:-1], starts.to_numpy()[1:]
        counted = energy(telemetry.samples, *windows)
        assert counted["counted"].all() and counted["energy_j"].to_numpy() == pytest.approx(truth, rel=0.01)
        # Without the counter: power moves several times between two of the some fifty samples of a step.
        integral = energy(telemetry.samples.assign(energy_j=np.nan), *windows)
        assert integral["energy_j"].to_numpy() == pytest.approx(truth, rel=0.06)


def test_throttle_shares(case):
    """Against a sum over the lines of the logs."""
    folder, telemetry, *_ = case
    found = throttle_shares(telemetry.samples)
    for log in folder.glob(f"*{telemetry_format.SUFFIX}"):
        rows = [line.split(",") for line in log.read_text().splitlines() if line.startswith("gpu,")]
        place = {name: i for i, name in enumerate(telemetry_format.NAMES)}
        for gpu in {r[place["gpu"]] for r in rows}:
            own = [(int(r[place["before_ns"]]), r[place["throttle"]]) for r in rows if r[place["gpu"]] == gpu]
            power = sum((t - t0) * (float(text.removeprefix("power:")) / 100 if text != "none" else 0)
                        for (t0, _), (t, text) in pairwise(own))
            truth = power / (own[-1][0] - own[0][0])
            rank = int(gpu) + (2 if "node1" in log.name else 0)
            share = found[(found["gpu"] == rank) & (found["reason"] == "power")]["share"]
            assert share.tolist() == pytest.approx([truth], abs=1e-9)


def test_slow_gpu_is_named(case):
    _, telemetry, kernels, _ = case
    found = spread(kernels, telemetry.samples).set_index("gpu")["note"]
    slow = [gpu for gpu, note in found.items() if "slow" in note]
    assert slow == ([3] if len(found) == 4 else [])


def test_cpu_cores(case):
    folder, telemetry, *_ = case
    use = cpu_utilization(telemetry.cpu, telemetry.cores)
    assert set(use["physical"]) == {192} and (use["c_min"] <= use["c_active"]).all()
    for log in folder.glob(f"*{telemetry_format.SUFFIX}"):
        lists = [line.split(",")[telemetry_format.NAMES.index("cpu_pct")].split()
                 for line in log.read_text().splitlines() if line.startswith("cpu,")]
        own = use[use["host"] == log.name.removesuffix(telemetry_format.SUFFIX)]
        assert own["c_active"].tolist() == [len(pairs) for pairs in lists]
        totals = [sum(float(p.split(":")[1]) for p in pairs) / 100 for pairs in lists]
        assert own["c_min"].tolist() == pytest.approx(totals)
