"""From the files of a simulated run alone, the analysis recovers what was planted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.alignment.counters import align
from tb_chopper.backend.readers import counter_files
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate

NAMES = {"opt_step": "AdamW.step"}
"""Operations that the analysis calls otherwise: the optimizer by its class."""


@pytest.fixture(scope="module", params=[
    Options(), Options(fsdp=1), Options(dialect="cuda", seed=5), Options(hosts=2, ranks=2, jitter=0.02, slow={1: 0.8}),
], ids=["rocm", "fsdp1", "cuda", "slow-gpu-two-hosts"])
def case(request, tmp_path_factory) -> tuple[Run, pd.DataFrame, pd.DataFrame]:
    """The run, its truth, and both joined by rank and correlation."""
    directory = simulate(tmp_path_factory.mktemp("run"), request.param)[0]
    run = tb_chopper.open_run(directory)
    truth = pd.read_parquet(directory / "truth/kernels.parquet")
    planted = truth.rename(columns={"rank": "gpu"})
    return run, truth, run.kernels.merge(planted, on=["gpu", "correlation"], suffixes=("", "_true"))


def differing(both: pd.DataFrame, column: str) -> pd.DataFrame:
    mine, true = both[column].astype(object), both[f"{column}_true"].astype(object)
    return both.loc[(mine != true).to_numpy(), ["name", column, f"{column}_true"]]


def test_every_activity_is_found(case):
    run, truth, both = case
    assert len(run.kernels) == len(truth) == len(both)


@pytest.mark.parametrize("column", ["kind", "start_ns", "end_ns"])
def test_activities_are_as_recorded(case, column: str):
    assert differing(case[2], column).empty


@pytest.mark.parametrize(
    "column", ["overlap_ns", "prep_ns", "call_ns", "call_under_communication_ns", "unattributed_ns"])
def test_overlap_and_launch_overhead_to_the_nanosecond(case, column: str):
    both = case[2]
    assert differing(both, column).empty
    assert both[column].sum() > 0  # the rule was put to use


def test_every_launched_kernel_has_its_step_and_launch(case):
    launched = case[2][case[2]["launched"]]
    assert (launched["step"] == launched["step_true"]).all()
    assert (launched["launch_ns"] == launched["launch_ns_true"]).all()
    early = case[2][~case[2]["launched"]]
    assert early["step"].isna().all()
    assert early["launch_ns"].isna().all()
    assert (early["operation"] == "launched before capture").all()


def test_every_launched_kernel_has_its_phase_operation_and_layer(case):
    """100 % of the compute kernels, and of the communication that names what it belongs to."""
    rows = case[2][case[2]["launched"] & (case[2]["kind"] == "compute")]
    assert len(rows) > 1000
    assert differing(rows, "phase").empty
    expected = rows["operation_true"].astype(str).replace(NAMES)
    wrong = rows[rows["operation"].astype(str) != expected]
    assert wrong.empty, wrong[["name", "operation", "operation_true"]].drop_duplicates()
    layer = rows["layer"].astype(object).fillna("Layer-1").astype(str)
    assert (layer == "Layer" + rows["layer_true"].astype(str)).all()
    assert (rows["cpu_op"].astype(str) == rows["cpu_op_true"].astype(str)).all()


def test_communication_has_its_phase_group_and_sequence(case):
    run, _, both = case
    rows = both[both["launched"] & (both["kind"] == "communication")]
    assert differing(rows, "phase").empty
    assert (rows["group_seq"] == rows["seq"]).all()
    assert (rows["group_size"] == run.workers["gpu"].nunique()).all()


def test_timeline_from_the_truth(case):
    """Compute, communication, overlap, idle of each GPU, counted ns by ns on a grid of all borders."""
    run, truth, _ = case
    timeline = run.timeline(by="gpu").set_index("gpu")
    for rank, rows in truth.groupby("rank"):
        borders = np.unique(rows[["start_ns", "end_ns"]].to_numpy())
        length = np.diff(borders)
        active = {kind: np.zeros(len(length), bool) for kind in ("compute", "communication", "memcpy")}
        for kind, start, end in zip(rows["kind"], rows["start_ns"], rows["end_ns"], strict=True):
            active[kind][np.searchsorted(borders, start):np.searchsorted(borders, end)] = True
        compute, communication, copy = active["compute"], active["communication"], active["memcpy"]
        expected = {
            "compute_us": compute, "communication_us": communication, "overlap_us": compute & communication,
            "exposed_communication_us": communication & ~compute, "exposed_memcpy_us": copy & ~compute & ~communication,
            "busy_us": compute | communication | copy, "idle_us": ~(compute | communication | copy)}
        for column, mask in expected.items():
            assert timeline.loc[rank, column] == pytest.approx(length[mask].sum() / 1000, abs=1e-3), column
        assert timeline.loc[rank, "total_us"] == pytest.approx((borders[-1] - borders[0]) / 1000, abs=1e-3)


def test_launch_overhead_adds_up_by_operation(case):
    run, truth, _ = case
    measured = run.launch_overhead(by="gpu").set_index("gpu")
    for column in ("prep", "call", "unattributed"):
        expected = truth.groupby("rank")[f"{column}_ns"].sum() / 1000
        np.testing.assert_allclose(measured[f"{column}_us"], expected, atol=1e-3)


def test_runs_are_known_to_be_simulated(case):
    run = case[0]
    assert all(c.sidecar["simulated"] for c in run.captures)


def test_a_cut_trace_is_named_and_the_other_one_whole(tmp_path: Path):
    directory = simulate(tmp_path, Options(truncate=1))[0]
    run = tb_chopper.open_run(directory)
    truth = pd.read_parquet(directory / "truth/kernels.parquet")
    assert (run.kernels["gpu"] == 0).sum() == (truth["rank"] == 0).sum()
    workers = run.workers.set_index("rank")
    assert bool(workers.loc[0, "complete"])
    assert 1 not in workers.index or not bool(workers.loc[1, "complete"])
    assert any(f.severity in ("warning", "error") for f in run.findings)


def test_sampled_clocks_are_those_that_the_controller_set(case):
    """Duration-weighted clock of each operation and GPU, from telemetry, against the clock while the kernels ran."""
    run, truth, _ = case
    by = ["gpu", "phase", "operation"]
    sampled = run.frequency(by=by, where={"phase": ["forward", "backward"]}).set_index(by)["clock_mhz"].dropna()
    planted = truth[truth["launched"] & truth["phase"].isin(["forward", "backward"])]
    planted = planted.assign(gpu=planted["rank"], length=planted["end_ns"] - planted["start_ns"])
    planted = planted.assign(cycles=planted["length"] * planted["clock_mhz"])
    sums = planted.groupby(by, observed=True)[["cycles", "length"]].sum()
    clock = sums["cycles"] / sums["length"]
    common = sampled.index.intersection(clock.index)
    assert len(common) > 40
    np.testing.assert_allclose(sampled[common], clock[common], rtol=0.02)


@pytest.mark.parametrize("options", [
    Options(), Options(drop=0.05, reorder=0.3), Options(code_object_names=True, counter_columns="6.2"),
    Options(fsdp=1, optimizer_every=12, counter_steps=2, drop=0.03),
], ids=["plain", "damaged", "kd-names", "fsdp1-two-steps"])
def test_counters_go_to_their_kernels(tmp_path: Path, options: Options):
    """A pair that the alignment calls exact is the same place in the model; without damage every pair is exact."""
    directory = simulate(tmp_path, options)[0]
    kernels = tb_chopper.open_run(directory).kernels
    counted = counter_files.read(directory / "counters").counters
    pairs = align(kernels, counted).pairs
    place = ["operation", "phase", "layer", "flop"]
    truth = pd.read_parquet(directory / "truth/kernels.parquet").set_index(["rank", "correlation"])
    truth = truth[place].astype(object)
    dispatches = pd.read_parquet(directory / "truth/dispatches.parquet")
    real = dispatches.set_index(["rank", "pass", "dispatch_id"])["correlation"]
    of_kernel = kernels.loc[pairs["kernel"], ["gpu", "correlation", "step"]].reset_index(drop=True)
    of_row = real.loc[list(zip(of_kernel["gpu"], pairs["pass"], counted.loc[pairs["row"], "dispatch"], strict=True))]
    keep = (of_kernel["step"].notna() & (of_row.to_numpy() >= 0)).to_numpy()
    gpu, exact = of_kernel["gpu"][keep], (pairs["match"] == "exact").to_numpy()[keep]
    mine = truth.loc[list(zip(gpu, of_kernel["correlation"][keep], strict=True))].to_numpy()
    planted = truth.loc[list(zip(gpu, of_row.to_numpy()[keep], strict=True))].to_numpy()
    same = (mine == planted).all(axis=1)
    assert same[exact].all()
    assert exact.sum() > 3000
    if not options.drop:
        assert exact.all()
        assert set(pairs["kernel"]) >= set(kernels.index[(kernels["kind"] == "compute") & kernels["step"].notna()])
