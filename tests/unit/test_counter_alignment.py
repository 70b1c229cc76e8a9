"""Counters onto kernels: against the planted truth of a simulated node, and on built sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.alignment.counters import APPROXIMATE, EXACT, Alignment, align
from tb_chopper.backend.readers import counter_files
from tb_chopper.backend.run import open_run
from tb_chopper.backend.schema import COUNTERS, KERNELS, conform
from tb_chopper.backend.simulate.options import Options
from tb_chopper.backend.simulate.run import simulate

# ---- a simulated node


def simulated(directory: Path, **options: Any) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(kernels, counters, truth of the kernels, truth of the dispatches)."""
    run = simulate(directory, Options(preset="tiny", **options))[0]
    kernels, dispatches = (pd.read_parquet(run / "truth" / f"{n}.parquet") for n in ("kernels", "dispatches"))
    return open_run(run).kernels, counter_files.read(run / "counters").counters, kernels, dispatches


def wrong(aligned: Alignment, kernels: pd.DataFrame, counters: pd.DataFrame, truth: pd.DataFrame,
          dispatches: pd.DataFrame) -> int:
    """Exact pairs whose dispatch is not the same launch of the step as the kernel, by planted identities.

    A kernel and a dispatch are the same launch when they stand at the same place among the step's correlation ids.
    """
    launched = truth[truth["launched"] & truth["kind"].isin(["compute", "communication"])]
    place = launched.sort_values("correlation").groupby(["rank", "step"]).cumcount()
    at = pd.Series(place.to_numpy(), pd.MultiIndex.from_frame(launched.loc[place.index, ["rank", "correlation"]]))
    step = pd.Series(launched["step"].to_numpy(), pd.MultiIndex.from_frame(launched[["rank", "correlation"]]))
    pairs = aligned.pairs[aligned.pairs["match"] == EXACT]
    of_kernel = kernels.loc[pairs["kernel"], ["gpu", "correlation"]]
    in_step = pd.MultiIndex.from_frame(of_kernel).isin(step.index)
    row = counters.loc[pairs["row"], ["rank", "pass", "dispatch"]].astype("int64")
    identity = dispatches.set_index(["rank", "pass", "dispatch_id"])["correlation"].reindex(
        pd.MultiIndex.from_frame(row)).to_numpy()
    a = at.reindex(pd.MultiIndex.from_frame(of_kernel)).to_numpy()[in_step]
    b = at.reindex(pd.MultiIndex.from_arrays([row["rank"], identity])).to_numpy()[in_step]
    assert len(a) > 1000
    return int((a != b).sum())


@pytest.mark.parametrize("faults", [
    {}, {"drop": 0.05}, {"drop": 0.05, "reorder": 0.1, "seed": 3},
    {"drop": 0.05, "reorder": 0.05, "code_object_names": True, "counter_columns": "6.2", "jitter": 0.01, "seed": 5},
    {"drop": 0.2, "seed": 7},
])
def test_no_kernel_gets_the_counters_of_another(tmp_path, faults):
    kernels, counters, truth, dispatches = simulated(tmp_path, **faults)
    aligned = align(kernels, counters)
    assert wrong(aligned, kernels, counters, truth, dispatches) == 0
    assert aligned.matched_share > 0.9 and not aligned.findings
    mine = kernels.loc[aligned.pairs["kernel"]]
    # Collectives of two streams have one name: with any of them missing, none of them is certain.
    in_steps = (mine["step"].notna() & ((mine["kind"] == "compute") | (not faults))).to_numpy()
    certain = (aligned.pairs["match"] == EXACT)[in_steps].mean()
    assert certain >= {0: 1.0, 0.05: 0.9, 0.2: 0.6}[faults.get("drop", 0)]


def test_an_approximate_dispatch_is_of_the_same_operation(tmp_path):
    kernels, counters, truth, dispatches = simulated(tmp_path, drop=0.05)
    pairs = align(kernels, counters).pairs
    pairs = pairs[(pairs["match"] == APPROXIMATE) & kernels.loc[pairs["kernel"], "step"].notna().to_numpy()]
    operation = truth.set_index(["rank", "correlation"])["operation"]
    row = counters.loc[pairs["row"], ["rank", "pass", "dispatch"]].astype("int64")
    identity = dispatches.set_index(["rank", "pass", "dispatch_id"])["correlation"].reindex(
        pd.MultiIndex.from_frame(row)).to_numpy()
    of_kernel = operation.reindex(pd.MultiIndex.from_frame(kernels.loc[pairs["kernel"], ["gpu", "correlation"]]))
    of_row = operation.reindex(pd.MultiIndex.from_arrays([row["rank"], identity]))
    assert len(pairs) > 20 and (of_kernel.to_numpy() == of_row.to_numpy()).mean() > 0.8


# ---- built runs


def trace(*names: str, steps: int = 1, gpu: int = 0, grid: str | None = "[4, 1, 1]") -> pd.DataFrame:
    rows = [{"name": n, "kind": "compute", "activity": "kernel", "gpu": gpu, "capture": gpu, "step": s,
             "launch_ns": 1000 * s + i, "start_ns": 10_000 * s + 100 * i, "end_ns": 10_000 * s + 100 * i + 50,
             "grid": grid, "block": "[256, 1, 1]", "launch_name": "hipLaunchKernel", "operation": "op", "op_id": -1}
            for s in range(steps) for i, n in enumerate(names)]
    frame = pd.DataFrame(rows)
    frame["kind"] = frame["kind"].astype(pd.CategoricalDtype(list(schema.KINDS)))
    return conform(frame, KERNELS)


def counted(*names: str, process: int = 1, rank: int | None = 0, number: int = 1, gpu_index: int = 0,
            grid: int = 1024) -> pd.DataFrame:
    return conform(pd.DataFrame([
        {"pass": number, "process": process, "rank": rank if rank is not None else pd.NA, "agent": f"Agent {gpu_index}",
         "gpu_index": gpu_index, "dispatch": i + 1, "name": n, "grid": grid, "workgroup": 256}
        for i, n in enumerate(names)]), COUNTERS)


def matches(aligned: Alignment) -> list[tuple[int, str] | None]:
    """(row, match) of each kernel in order, None where it has no dispatch."""
    by_kernel = aligned.pairs.set_index("kernel")
    n = max(by_kernel.index, default=-1) + 1
    return [(int(by_kernel.loc[i, "row"]), str(by_kernel.loc[i, "match"])) if i in by_kernel.index else None
            for i in range(n)]


def test_warm_up_before_and_work_behind_the_step_do_not_move_it():
    step = ["embed", "a", "b", "a", "b", "loss", "b", "a", "adam"]
    aligned = align(trace(*step), counted("init", "a", "b", *step, *step, "save"))
    assert matches(aligned) == [(12 + i, EXACT) for i in range(9)]  # the last whole step
    assert aligned.only_counted["name"].tolist() == ["init", "save"]


def test_a_kernel_of_the_step_before_that_slipped_in_is_not_taken():
    step = ["s", "ag", "x", "ag", "y", "e"]
    found = matches(align(trace(*step), counted("y", "s", "ag", "ag", "x", "ag", "y", "e")))
    assert found[0] == (1, EXACT) and found[2] == (4, EXACT) and found[1][1] == APPROXIMATE


def test_one_missing_from_a_row_of_equals_is_not_guessed():
    aligned = align(trace("start", "x", "x", "x", "end"), counted("start", "x", "x", "end"))
    found = matches(aligned)
    assert found[0] == (0, EXACT) and found[4] == (3, EXACT)
    assert [m[1] for m in found[1:4]] == [APPROXIMATE] * 3


def test_streams_that_changed_places_are_certain():
    aligned = align(trace("s", "a", "comm", "b", "e"), counted("s", "comm", "a", "b", "e"))
    assert matches(aligned) == [(0, EXACT), (2, EXACT), (1, EXACT), (3, EXACT), (4, EXACT)]


def test_order_counts_within_a_stream_only():
    """A collective that changed places with its neighbour, and the one behind it missing: it could be either."""
    step = ["s", "c", "a", "c", "b", "e"]
    kernels = trace(*step)
    kernels["stream"] = [0, 1, 0, 2, 0, 0]
    found = matches(align(kernels, counted("s", "a", "c", "b", "e")))
    assert found[0] == (0, EXACT) and [found[i] for i in (2, 4, 5)] == [(1, EXACT), (3, EXACT), (4, EXACT)]
    assert found[1][1] == found[3][1] == APPROXIMATE
    kernels["stream"] = [0, 1, 0, 1, 0, 0]
    found = matches(align(kernels, counted("s", "a", "c", "c", "b", "e")))  # both there, in the order of their stream
    assert found == [(0, EXACT), (2, EXACT), (1, EXACT), (3, EXACT), (4, EXACT), (5, EXACT)]


def test_every_step_of_a_kind_gets_the_counters_of_the_one_that_was_counted():
    aligned = align(trace("s", "a", "e", steps=3), counted("s", "a", "e"))
    assert matches(aligned) == [(0, EXACT), (1, EXACT), (2, EXACT)] * 3


def test_another_grid_is_another_kernel():
    kernels = trace("s", "gemm", "e")
    kernels["grid"] = pd.Categorical(["[4, 1, 1]", "[8, 1, 1]", "[4, 1, 1]"])
    counters = counted("s", "gemm", "e")
    assert matches(align(kernels, counters))[1:] == [None, (2, EXACT)]
    counters.loc[1, "grid"] = 2048
    assert matches(align(kernels, counters))[1] == (1, EXACT)
    kernels["launch_name"] = pd.Categorical(["hipExtModuleLaunchKernel"] * 3)  # threads, not blocks
    kernels["grid"] = pd.Categorical(["[1024, 1, 1]", "[2048, 1, 1]", "[1024, 1, 1]"])
    assert matches(align(kernels, counters))[1] == (1, EXACT)


def test_without_grids_in_the_trace_names_decide():
    assert matches(align(trace("s", "gemm", "e", grid=None), counted("s", "gemm", "e"))) == [
        (0, EXACT), (1, EXACT), (2, EXACT)]


def test_a_tuned_variant_is_approximate():
    a, b = (f"Cijk_Ailk_Bljk_BBS_BH_Bias_MT256x256x64_{s}" for s in ("X", "Y"))
    aligned = align(trace("s", a, "e"), counted("s", b, "e"))
    assert matches(aligned)[1] == (1, APPROXIMATE)


def test_what_was_not_counted_is_named_and_lowers_the_share():
    aligned = align(trace("s", "new", "new", "e"), counted("s", "old", "e"))
    assert aligned.matched_share == 0.5
    assert {f.code for f in aligned.findings} == {"counters_partly_matched", "kernels_only_counted"}
    row = aligned.names[aligned.names["name"] == "new"].iloc[0]
    assert (row["n_kernels"], row["n_exact"], row["n_approximate"], row["matched_share"]) == (2, 0, 0, 0.0)
    assert "new" in aligned.findings[0].message
    nothing = align(trace("a"), counted("b"))
    assert nothing.matched_share == 0 and "counters_unmatched" in {f.code for f in nothing.findings}


def test_ranks_by_file_by_process_and_by_place():
    kernels = pd.concat([trace("s", "e"), trace("s", "e", gpu=1)], ignore_index=True)
    for column in ("name", "kind", "activity", "grid", "block", "launch_name", "operation"):
        kernels[column] = kernels[column].astype("category")
    kernels = conform(kernels, KERNELS)

    def of(rank_0: int | None, rank_1: int | None, **options: Any) -> tuple[list[Any], set[str]]:
        both = schema.concat([counted("s", "e", process=10, rank=rank_0, gpu_index=0),
                              counted("s", "e", process=11, rank=rank_1, gpu_index=1)], COUNTERS)
        aligned = align(kernels, both, **options)
        return matches(aligned), {f.code for f in aligned.findings}

    straight = [(0, EXACT), (1, EXACT), (2, EXACT), (3, EXACT)]
    crossed = [(2, EXACT), (3, EXACT), (0, EXACT), (1, EXACT)]
    assert of(0, 1) == (straight, set())
    assert of(1, 0) == (crossed, set())
    assert of(None, None, ranks={(1, "", 10): 1, (1, "", 11): 0}) == (crossed, set())
    assert of(None, None) == (straight, {"counter_rank_guessed"})
    assert of(0, 7)[1] == {"counter_rank_unknown", "counters_partly_matched"}


def test_files_without_passes_in_their_folders_are_runs_of_their_own():
    both = schema.concat([counted("s", "e", process=10, number=0), counted("s", "e", process=11, number=0)], COUNTERS)
    pairs = align(trace("s", "e"), both).pairs
    assert sorted(zip(pairs["pass"], pairs["row"], strict=True)) == [(1, 0), (1, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize(("second", "says"), [(1.0, set()), (1.03, set()), (1.4, {"passes_disagree"})])
def test_passes_that_disagree_are_named(second, says):
    both = schema.concat([counted("s", "a", "e", process=10, number=1), counted("s", "a", "e", process=11, number=2)],
                         COUNTERS).assign(xcc=8)
    aligned = align(trace("s", "a", "e"), both.assign(GRBM_GUI_ACTIVE=[8e6] * 3 + [8e6 * second] * 3))
    assert {f.code for f in aligned.findings} == says
    assert aligned.pass_spread == pytest.approx((second - 1) / ((1 + second) / 2))


def test_no_counters_and_no_kernels():
    assert align(trace("a"), conform(pd.DataFrame(), COUNTERS)).matched_share == 0
    assert len(align(trace("a").iloc[:0], counted("a")).pairs) == 0


def test_another_order_and_missing_kernels_as_reported(shared):
    case = shared / "cases" / "39_counters_kernel_missing"
    expected = json.loads((case / "expected.json").read_text())
    kernels, counters = open_run(case / "run").kernels, counter_files.read(case / "run").counters
    aligned = align(kernels, counters)
    value = counters["SQ_INSTS_VALU"].reindex(aligned.pairs["row"]).to_numpy()
    name = kernels.loc[aligned.pairs["kernel"], "name"].astype(str).to_numpy()
    assert value[name == "attn_fwd"].mean() == expected["attn_fwd_mean"]
    gemm = np.array([n.startswith("Cijk") for n in name])
    assert len(set(aligned.pairs["row"][gemm])) == expected["gemm_samples"] and set(value[gemm]) == {400}
    assert kernels["name"].nunique() - len(set(name)) == expected["uncovered_trace_kernels"]
    assert len(aligned.only_counted) == expected["extra_counter_kernels"]
    assert len(aligned.pairs) == 4 and len(kernels) == 5
