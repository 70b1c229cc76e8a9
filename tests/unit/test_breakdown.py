"""The overhead breakdown: planted factors of a simulated node, and every definition against a plain calculation."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import hardware, schema
from tb_chopper.backend.alignment.counters import align
from tb_chopper.backend.alignment.cycles import with_cycles
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics.breakdown import overhead_breakdown, percentile_overlap, regression_overlap
from tb_chopper.backend.readers import counter_files
from tb_chopper.backend.run import open_run
from tb_chopper.backend.schema import COUNTERS, KERNELS, conform
from tb_chopper.backend.simulate.options import Options
from tb_chopper.backend.simulate.run import simulate

MI300X, H100 = hardware.find("AMD Instinct MI300X"), hardware.find("NVIDIA H100 80GB HBM3")
FACTORS = ["ovr_inst", "ovr_util", "ovr_overlap", "ovr_freq"]


# ---- a simulated node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = simulate(tmp_path_factory.mktemp("node"), Options(preset="tiny"))[0]
    truth = pd.read_parquet(run / "truth" / "kernels.parquet")
    kernels = open_run(run).kernels
    clock = truth.set_index(["rank", "correlation"])["clock_mhz"]
    key = pd.MultiIndex.from_frame(kernels[["gpu", "correlation"]])
    kernels = kernels.assign(clock_mhz=clock[~clock.index.duplicated()].reindex(key).to_numpy())
    counters = counter_files.read(run / "counters").counters
    return {"kernels": kernels, "counters": counters, "pairs": align(kernels, counters).pairs, "truth": truth,
            "gpus": {0: MI300X, 1: MI300X}, "run": run}


def planted(truth: pd.DataFrame) -> pd.DataFrame:
    """Medians by operation and phase of the matrix products that are one kernel per layer and step, ns."""
    rows = truth[(truth["type"] == "gemm") & truth["launched"]]
    rows = rows.assign(act=rows["end_ns"] - rows["start_ns"])
    single = rows.groupby(["rank", "step", "layer", "operation", "phase"], observed=True)["act"].transform("size") == 1
    return rows[single].groupby(["operation", "phase"], observed=True)[["d_thr_ns", *FACTORS, "act"]].median()


def test_every_planted_factor_is_recovered(node):
    table = overhead_breakdown(node["kernels"], node["counters"], node["pairs"], node["gpus"],
                               by=["operation", "phase"], overlap_method="clock").set_index(["operation", "phase"])
    truth = planted(node["truth"])
    common = [key for key in truth.index if table["source"].get(key) == "measured"]
    assert len(common) >= 6 and {("mlp_gp", "forward"), ("mlp_dp", "forward"), ("lp", "forward")} <= set(common)
    for key in common:
        row, right = table.loc[key], truth.loc[key]
        assert row["d_thr_us"] * 1000 == pytest.approx(right["d_thr_ns"], rel=1e-9), key
        assert row["ovr_inst"] == pytest.approx(right["ovr_inst"], rel=1e-9), key
        assert row["ovr_util"] == pytest.approx(right["ovr_util"], rel=0.01), key
        assert row["d_peak_us"] * 1000 == pytest.approx(
            right["d_thr_ns"] * right["ovr_inst"] * right["ovr_util"], rel=0.01), key
        assert row["ovr_freq"] == pytest.approx(right["ovr_freq"], rel=0.02), key
        assert row["ovr_overlap"] == pytest.approx(right["ovr_overlap"], rel=0.02), key
        assert abs(row["residual"]) < 1e-3


def test_the_product_is_the_time_at_every_granularity(node):
    for by in (["operation", "phase"], "operation", "phase", ["gpu", "operation"], ["step", "operation"],
               ["layer", "operation", "phase"]):
        table = overhead_breakdown(node["kernels"], node["counters"], node["pairs"], node["gpus"], by=by)
        some = table[(table["source"] == "measured") & (table["d_thr_us"] > 0)]
        assert len(some) > 0
        product = some["d_thr_us"] * some[FACTORS].prod(axis=1)
        assert product.to_numpy() == pytest.approx(some["d_act_us"].to_numpy(), rel=1e-3)
        assert some["d_peak_us"].to_numpy() == pytest.approx(
            (some["d_act_us"] / some["ovr_overlap"] / some["ovr_freq"]).to_numpy(), rel=1e-6)


def test_the_official_definition_from_the_raw_files(node):
    """The backward of mlp_up on GPU 0: medians of plain sums over the counter file's rows and the truth's times."""
    import csv

    truth, run = node["truth"], node["run"]
    mine = truth[(truth["rank"] == 0) & (truth["operation"] == "mlp_up") & (truth["phase"] == "backward")
                 & truth["launched"]]
    instances = [rows for _, rows in mine.groupby(["step", "layer"])]
    dispatches = pd.read_parquet(run / "truth" / "dispatches.parquet")
    dispatches = dispatches[(dispatches["rank"] == 0) & (dispatches["pass"] == 2)]
    [path] = (run / "counters" / "pass_2").rglob("r0_*_counter_collection.csv")
    value: dict[tuple[int, str], float] = {}
    with path.open() as stream:
        for row in csv.DictReader(stream):
            value[int(row["Dispatch_Id"]), row["Counter_Name"]] = float(row["Counter_Value"])
    counted = [rows for rows in instances if rows["correlation"].isin(dispatches["correlation"]).all()]

    def total(rows: pd.DataFrame, counter: str) -> float:
        ids = dispatches.set_index("correlation")["dispatch_id"].loc[rows["correlation"]]
        return sum(value[int(i), counter] for i in ids)

    f_gemm = median(rows["flop"].sum() for rows in instances)
    f_perf = median(512 * total(rows, "SQ_INSTS_VALU_MFMA_MOPS_BF16") for rows in counted)
    busy = median(total(rows, "SQ_VALU_MFMA_BUSY_CYCLES") for rows in counted)
    cycles = median(total(rows, "GRBM_GUI_ACTIVE") / 8 for rows in counted)
    act_ns = median((rows["end_ns"] - rows["start_ns"]).sum() for rows in instances)
    order = sorted(instances, key=lambda rows: (_ratio(rows, truth), rows["start_ns"].min()))
    elapsed = [int(rows["end_ns"].max() - rows["start_ns"].min()) for rows in order]
    n = len(order)
    middle = min(range(n), key=lambda i: abs(100 * (i + 1) / n - 50))
    overlap = 1.0 if _ratio(order[middle], truth) == 0 else max(1.0, elapsed[middle] / elapsed[0])
    overhead = with_cycles(node["counters"]).loc[lambda c: (c["pass"] == 2) & (c["rank"] == 0), "overhead_cycles"].max()
    cycles -= overhead * len(counted[0])
    d_peak_us = cycles / 2100
    row = overhead_breakdown(node["kernels"], node["counters"], node["pairs"], node["gpus"], by=["operation", "phase"],
                             where={"gpu": 0}, overlap_method="percentile").set_index(["operation", "phase"]).loc[
                                 ("mlp_up", "backward")]
    assert row["d_thr_us"] == pytest.approx(f_gemm / 1307.4e12 * 1e6, rel=1e-4)
    assert row["ovr_inst"] == pytest.approx(f_perf / f_gemm)
    assert row["ovr_util"] == pytest.approx(cycles * 304 * 4 / busy, rel=1e-6)
    assert row["d_peak_us"] == pytest.approx(d_peak_us, rel=1e-6)
    assert row["ovr_overlap"] == pytest.approx(overlap)
    assert row["ovr_freq"] == pytest.approx(act_ns / 1000 / d_peak_us / overlap, rel=1e-6)


def _ratio(rows: pd.DataFrame, truth: pd.DataFrame) -> float:
    """Overlap of [first start, last end) with the communication of the same GPU, ns by ns intervals merged by hand."""
    start, end = int(rows["start_ns"].min()), int(rows["end_ns"].max())
    rank = int(rows["rank"].iloc[0])
    comm = truth[(truth["rank"] == rank) & (truth["kind"] == "communication")].sort_values("start_ns")
    covered, reach = 0, start
    for s, e in zip(comm["start_ns"], comm["end_ns"], strict=True):
        s, e = max(int(s), reach), min(int(e), end)
        if e > s:
            covered, reach = covered + e - s, e
    return covered / (end - start)


# ---- definitions


def each(*rows: tuple[float, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Overlap ratio and elapsed time of instances given with their start, in order of ratio and start."""
    ordered = sorted(rows, key=lambda row: (row[0], row[2]))
    return np.array([r[0] for r in ordered]), np.array([float(r[1]) for r in ordered])


@pytest.mark.parametrize(("rows", "expected"), [
    ([(0.0, 100, 0), (0.4, 130, 1), (0.9, 180, 2)], 1.0),  # 33 % and 67 % are as near to 50 %: the first of ties
    ([(0.0, 100, 0), (0.4, 130, 1), (0.5, 150, 2), (0.9, 180, 3)], 1.3),
    ([(0.0, 100, 0), (0.0, 130, 1), (0.9, 180, 2)], 1.0),  # no overlap in the middle
    ([(0.1, 200, 0), (0.4, 130, 1), (0.5, 100, 2), (0.9, 180, 3)], 1.0),  # never below 1
    ([(0.5, 120, 5), (0.5, 100, 1), (0.6, 150, 0), (0.7, 10, 0)], 1.2),  # ties by start
    ([(0.5, 120, 5)], 1.0),
])
def test_the_percentile_method_of_the_paper(rows, expected):
    assert percentile_overlap(*each(*rows)) == pytest.approx(expected)


def test_the_regression_finds_a_planted_slow_down_among_outliers():
    rng = np.random.default_rng(1)
    ratio = rng.random(80)
    elapsed = 1000 * (1 + 0.3 * ratio) * rng.normal(1, 0.01, 80)
    elapsed[::13] *= 3
    best, low, high = regression_overlap(ratio, elapsed)
    assert low <= best <= high
    clean = 1 + 0.3 * ratio.mean()
    mean_of_all = elapsed.mean() / 1000  # outliers count in the mean, not in the line
    assert best == pytest.approx(mean_of_all, rel=0.02) and best > clean
    assert np.isnan(regression_overlap(*each((0.5, 1, 0), (0.5, 2, 1)))[0])


# ---- without counters, other GPUs, nothing known


MM = json.dumps({"Input Dims": [[100, 4096], [4096, 200]], "Input type": ["c10::BFloat16"] * 2,
                 "Concrete Inputs": ["", ""]})
FLOP = 2 * 100 * 4096 * 200


def gemms(n: int = 4, **columns: Any) -> pd.DataFrame:
    frame = pd.DataFrame([{
        "name": "Cijk_Ailk_Bljk_BBS_BH_MT256x128x64_MI16x16x1", "kind": "compute", "activity": "kernel", "capture": 0,
        "gpu": 0, "step": i, "phase": "forward", "layer": "layers.0", "operation": "mlp", "op_type": "gemm",
        "cpu_op": "aten::mm", "op_id": i, "op_args": MM, "start_ns": 1000_000 * i, "end_ns": 1000_000 * i + 50_000,
        "launch_ns": 1000_000 * i - 10, "grid": "[4, 1, 1]", "block": "[256, 1, 1]", "launch_name": "hipLaunchKernel",
    } for i in range(n)])
    frame["kind"] = frame["kind"].astype(pd.CategoricalDtype(list(schema.KINDS)))
    return conform(frame, KERNELS).assign(**columns)


NOTHING = pd.DataFrame({c: np.empty(0, np.int64) for c in ("kernel", "pass", "row")})


def test_without_counters_padding_by_the_tile_and_the_rest_is_utilization():
    empty = conform(pd.DataFrame(), COUNTERS)
    padding = (256 * 128 * 4096) / (200 * 100 * 4096)
    thr_us = FLOP / MI300X.peaks["bf16"].flop_per_s * 1e6
    blind = overhead_breakdown(gemms(), empty, NOTHING, {0: MI300X}).iloc[0]
    assert blind["source"] == "estimated" and np.isnan(blind["ovr_freq"])
    assert blind["ovr_inst"] == pytest.approx(padding)
    assert blind["ovr_util"] == pytest.approx(50 / thr_us / padding)
    clocked = overhead_breakdown(gemms(clock_mhz=1400.0), empty, NOTHING, {0: MI300X}).iloc[0]
    assert clocked["ovr_freq"] == pytest.approx(1.5)
    assert clocked["ovr_util"] == pytest.approx(50 / thr_us / padding / 1.5)
    assert clocked["d_thr_us"] * clocked[FACTORS].prod() == pytest.approx(50)


def test_nvidias_tensor_cycles_take_the_place_of_matrix_core_cycles():
    counters = conform(pd.DataFrame([{"pass": 1, "process": 1, "rank": 0, "agent": "GPU 0", "gpu_index": 0, "xcc": 1,
                                      "dispatch": i, "name": gemms()["name"].iloc[0], "grid": 1024, "workgroup": 256}
                                     for i in range(4)]), COUNTERS)
    cycles, active = 60_000.0, 12_000.0
    counters = counters.assign(**{"sm__cycles_elapsed.avg": cycles, "sm__pipe_tensor_cycles_active.avg": active})
    pairs = pd.DataFrame({"kernel": range(4), "pass": 1, "row": range(4)})
    row = overhead_breakdown(gemms(), counters, pairs, {0: H100}, overlap_method="percentile").iloc[0]
    assert row["source"] == "measured" and row["matched_share"] == 1
    assert row["ovr_util"] == pytest.approx(cycles / active)
    assert row["flop_performed"] == pytest.approx(active * 132 * 4096)
    assert row["d_peak_us"] == pytest.approx(cycles / 1830)
    assert row["d_thr_us"] * row[FACTORS].prod() == pytest.approx(50)


def test_unknown_gpus_and_shapes_are_unavailable_and_not_guessed():
    empty = conform(pd.DataFrame(), COUNTERS)
    for kernels, gpus in ((gemms(), {0: None}), (gemms(), {}), (gemms(op_args=None), {0: MI300X})):
        if kernels["op_args"].isna().all():
            kernels["op_args"] = kernels["op_args"].astype("category")
        row = overhead_breakdown(kernels, empty, NOTHING, gpus).iloc[0]
        assert row["source"] == "unavailable" and row[["d_thr_us", *FACTORS]].isna().all()
        assert row["d_act_us"] == 50
    with pytest.raises(InvalidSelection, match="'name'"):
        overhead_breakdown(gemms(), empty, NOTHING, {0: MI300X}, by="name")


# ---- cycles


def runs(overhead: float, clock_ghz: float = 2.0, n: int = 40, short: bool = False) -> pd.DataFrame:
    duration = np.linspace(2000, 3000 if short else 400_000, n).astype(int)
    rows = conform(pd.DataFrame({"pass": 1, "process": 1, "agent": "Agent 2", "dispatch": range(n), "xcc": 8,
                                 "name": [f"k{i}" for i in range(n)], "grid": 1, "start_ns": 1000,
                                 "end_ns": 1000 + duration}), COUNTERS)
    noise = np.random.default_rng(0).normal(1, 0.002, n)
    return rows.assign(GRBM_GUI_ACTIVE=8 * (clock_ghz * duration * noise + overhead), true=clock_ghz * duration)


def test_the_cycles_of_counting_itself_are_taken_away():
    out = with_cycles(runs(16_000))
    assert out["overhead_cycles"].max() == pytest.approx(16_000, rel=0.05)
    long = out["true"] > 100_000
    assert out.loc[long, "cycles"].to_numpy() == pytest.approx(out.loc[long, "true"].to_numpy(), rel=0.02)


@pytest.mark.parametrize("counters", [
    runs(0), runs(500_000), runs(16_000, clock_ghz=9), runs(16_000, n=4), runs(16_000, short=True),
])
def test_a_fit_that_cannot_be_trusted_changes_nothing(counters):
    out = with_cycles(counters)
    off = out["overhead_cycles"] > 200
    assert not off.any()


def test_without_the_clock_counter_or_the_dies_there_are_no_cycles():
    assert with_cycles(runs(0).drop(columns="GRBM_GUI_ACTIVE"))["cycles"].isna().all()
    unknown = runs(0).assign(xcc=pd.array([pd.NA] * 40, dtype="Int64"))
    assert with_cycles(unknown)["cycles"].isna().all()


def test_reading_and_breaking_down_leave_the_inputs_alone(node, tmp_path: Path):
    before = node["kernels"].copy()
    overhead_breakdown(node["kernels"], node["counters"], node["pairs"], node["gpus"])
    pd.testing.assert_frame_equal(before, node["kernels"])
