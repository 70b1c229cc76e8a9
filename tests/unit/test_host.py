"""Queues, storms, host calls and causes of idle time on tables and traces written by hand (µs)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend import schema
from tb_chopper.backend.attribution import host_calls
from tb_chopper.backend.metrics import host
from tests.builders import TraceBuilder
from tests.unit import tables


def calls(*rows: tuple[str, float, float], gpu: int = 0) -> pd.DataFrame:
    """(kind, start, end)."""
    return schema.conform(pd.DataFrame([
        {"gpu": gpu, "kind": k, "name": k, "start_ns": round(a * 1000), "end_ns": round(b * 1000), "step": 0}
        for k, a, b in rows]), schema.CALLS) if rows else schema.empty(schema.CALLS)


# ---- queues ----------------------------------------------------------------------------------------------------------

def test_queue_length_counts_launches_that_have_not_started():
    kernels = tables.kernels([{"launch": 0, "start": 10, "end": 20}, {"launch": 2, "start": 20, "end": 30},
                              {"launch": 25, "start": 30, "end": 40}])
    found = host.queue_length(kernels)
    assert (found["t_ns"] / 1000).tolist() == [0, 2, 10, 20, 25, 30]
    assert found["length"].tolist() == [1, 2, 1, 0, 1, 0]


def test_mean_and_empty_share_of_a_step():
    rows = [{"launch": 0, "start": 10, "end": 20}, {"launch": 2, "start": 20, "end": 30},
            {"launch": 25, "start": 30, "end": 40}]
    kernels = tables.kernels([{**row, "step": 0} for row in rows])
    row = host.queues(kernels, tables.steps((0, 10, 40))).iloc[0]
    # From 10 to 40: one waits in [10, 20), none in [20, 25), one in [25, 30), none in [30, 40).
    assert row[["n", "max_length"]].tolist() == [3, 1]
    assert row["mean_length"] == pytest.approx(15 / 30)
    assert row["empty_share"] == pytest.approx(15 / 30)


def test_streams_have_queues_of_their_own_and_clocks_apart_make_none_negative():
    kernels = tables.kernels([{"launch": 5, "start": 3, "end": 8, "stream": 1},
                              {"launch": 0, "start": 9, "end": 10, "stream": 2}, {"start": 9, "end": 10, "stream": 3}])
    found = host.queue_length(kernels)
    assert (found["length"] >= 0).all()
    assert sorted(found["stream"].unique()) == [1, 2]


# ---- small kernels ---------------------------------------------------------------------------------------------------

def test_storm_of_small_kernels():
    rows = [{"launch": 20 * i - 5, "start": 20 * i, "end": 20 * i + 4, "step": 0} for i in range(9)]
    kernels = tables.kernels([*rows, {"launch": 175, "start": 180, "end": 276, "step": 0}])
    row = host.launches(kernels).iloc[0]
    assert row[["n", "n_calls", "n_short"]].tolist() == [10, 10, 9]
    assert row["short_share"] == 0.9
    assert row["short_time_share"] == pytest.approx(36 / (36 + 96))
    # Each starts 16 after the last ended; the first has no gap before it.
    assert row["launch_us"] == 9 * 16


def test_kernels_of_a_graph_share_one_call():
    rows = [{"launch": 0, "start": 10 * i + 5, "end": 10 * i + 10, "correlation": 7} for i in range(5)]
    assert host.launches(tables.kernels(rows), by="gpu")[["n", "n_calls"]].to_numpy().tolist() == [[5, 1]]


# ---- causes of idle time ---------------------------------------------------------------------------------------------

def causes(kernels: pd.DataFrame, made: pd.DataFrame, by: str = "gpu") -> dict[str, float]:
    found = host.idle_causes(kernels, made, by)
    return dict(zip(found["cause"], found["idle_us"], strict=True))


GAP = [{"launch": 0, "start": 0, "end": 100}, {"launch": 190, "start": 200, "end": 210}]


def test_idle_without_calls_is_dispatch_and_device():
    assert causes(tables.kernels(GAP), calls()) == {"dispatch": 90, "device": 10}


@pytest.mark.parametrize("kind", ["loader", "allocation", "gc", "compile", "recompile"])
def test_a_call_takes_the_idle_time_under_it(kind: str):
    assert causes(tables.kernels(GAP), calls((kind, 50, 130))) == {kind: 30, "dispatch": 60, "device": 10}
    assert causes(tables.kernels(GAP), calls((kind, 195, 230))) == {"dispatch": 90, "device": 10}  # launched already


def test_a_wait_for_the_device_takes_all_that_follows():
    """While the host waited it launched nothing: the queue was empty when the wait returned at 105."""
    assert causes(tables.kernels(GAP), calls(("sync", 40, 105))) == {"sync": 90, "device": 10}
    # A wait that begins later is not why the device ran dry.
    assert causes(tables.kernels(GAP), calls(("sync", 150, 160))) == {"sync": 10, "dispatch": 80, "device": 10}


def test_each_moment_has_one_cause():
    made = calls(("sync", 90, 101), ("loader", 110, 150), ("allocation", 140, 160), ("allocation", 150, 155))
    assert causes(tables.kernels(GAP), made) == {"loader": 40, "allocation": 10, "sync": 40, "device": 10}


def test_unknown_launches_and_other_gpus():
    kernels = tables.kernels([{"start": 0, "end": 100}, {"start": 150, "end": 160}])
    assert causes(kernels, calls(("loader", 100, 150), gpu=1)) == {"unknown": 50}


def test_causes_by_what_ended_the_gap_add_up():
    kernels = tables.kernels([*GAP, {"launch": 240, "start": 250, "end": 260, "operation": "late"}])
    found = host.idle_causes(kernels, calls(("loader", 215, 225)), by="operation")
    assert found.groupby("operation")["idle_us"].sum().to_dict() == {"op": 100, "late": 40}
    assert found["idle_us"].sum() == 140


def test_host_calls_and_their_idle_time():
    made = calls(("loader", 50, 130), ("loader", 300, 310), ("sync", 0, 90))
    found = host.host_calls(made, tables.kernels(GAP), by="kind")
    assert found[["kind", "n", "time_us", "longest_us", "idle_us"]].to_numpy().tolist() == [
        ["loader", 2, 90, 80, 30], ["sync", 1, 90, 90, 0]]


def test_idle_time_by_the_call_that_caused_it():
    """The gap of GAP: from 100 to the launch at 190. The loader has 30 of it, the wait that began before it the rest;
    what one of two waits has, the one after it does not have, and of two loaders the outer one has it."""
    made = calls(("sync", 40, 105), ("loader", 150, 180), ("loader", 155, 170), ("sync", 110, 120), ("gc", 300, 310))
    kernels = tables.kernels(GAP)
    found = host.stalls(kernels, made)
    assert found[["call", "kind", "idle_ns"]].to_numpy().tolist() == [[0, "sync", 60_000], [1, "loader", 30_000]]
    assert found["at"].tolist() == ["0@200000"] * 2
    assert causes(kernels, made) == {"sync": 60, "loader": 30, "device": 10}
    calls_ = host.host_calls(made, kernels, by="kind").set_index("kind")
    assert calls_["caused_us"].to_dict() == {"sync": 60, "loader": 30, "gc": 0}


def test_stalls_add_up_to_the_causes_whatever_overlaps():
    random = np.random.default_rng(3)
    for _ in range(20):
        start = random.integers(0, 2000, 30).cumsum() // 10
        rows = [{"start": int(t), "end": int(t + random.integers(1, 40)), "launch": int(t - random.integers(0, 30))}
                for t in start]
        kinds = random.choice(host.CAUSES, 25)
        made = calls(*((k, int(a), int(a + random.integers(1, 120))) for k, a in
                       zip(kinds, random.integers(0, 3000, 25), strict=True)))
        kernels = tables.kernels(rows)
        by_call = host.stalls(kernels, made).groupby("kind")["idle_ns"].sum() / 1000
        by_cause = {c: v for c, v in causes(kernels, made).items() if c in host.CAUSES}
        assert {str(k): v for k, v in by_call.items()} == pytest.approx(by_cause)


def test_waits_in_the_middle_of_a_step():
    """One before a backward kernel, one before the optimizer, one before the next step."""
    kernels = tables.kernels([
        {"launch": 0, "start": 0, "end": 100, "step": 0},
        {"launch": 190, "start": 200, "end": 210, "step": 0, "phase": "backward"},
        {"launch": 290, "start": 300, "end": 310, "step": 0, "phase": "optimizer"},
        {"launch": 390, "start": 400, "end": 410, "step": 1}])
    found = host.stalls(kernels, calls(("sync", 90, 105), ("sync", 205, 220), ("sync", 305, 330)))
    assert found["idle_ns"].tolist() == [90_000, 80_000, 80_000]
    assert host.in_the_middle(found).tolist() == [True, False, False]


def test_stalls_by_step():
    """Loading from 50 to 130 in a window of 210: the GPU is busy until 100; 30 of it are idle time."""
    kernels = tables.kernels([{**row, "step": 0} for row in GAP])
    steps = tables.steps((0, 0, 210)).assign(start_ns=0, end_ns=210_000)
    row = host.step_stalls(kernels, steps, calls(("loader", 50, 130), ("loader", 60, 140))).iloc[0]
    assert row[["gpu", "step", "kind", "n", "time_us", "uncovered_us", "idle_us", "window_us"]].tolist() == [
        0, 0, "loader", 2, 90, 40, 40, 210]
    assert row["uncovered_share"] == pytest.approx(40 / 210)
    assert row["at"] == "0@200000"


def test_loading_between_steps_belongs_to_the_next():
    steps = tables.steps((3, 0, 100), (4, 200, 300)).assign(start_ns=[0, 150_000], end_ns=[110_000, 290_000])
    made = calls(("loader", 115, 145), ("loader", 295, 300)).assign(step=pd.array([pd.NA, pd.NA], dtype="Int64"))
    found = host.step_stalls(tables.kernels([{"launch": 0, "start": 0, "end": 100, "step": 3},
                                             {"launch": 190, "start": 200, "end": 210, "step": 4}]), steps, made)
    assert found[["step", "n", "time_us", "uncovered_us", "idle_us"]].to_numpy().tolist() == [[4, 1, 30, 30, 30]]


def stalled(values: dict[int, list[float]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of `stalls` and STEPS: µs of each gpu's steps, counted from 0."""
    rows = [{"gpu": g, "next_step": i, "idle_ns": v * 1000} for g, own in values.items() for i, v in enumerate(own)]
    steps = pd.concat([tables.steps(*((i, i, i + 1) for i in range(len(own))), gpu=g) for g, own in values.items()])
    return pd.DataFrame(rows).astype({"next_step": "Int64"}), steps


@pytest.mark.parametrize("values, usual", [
    ([30, 30, 30, 30], 30), ([28, 32, 30, 30], 30), ([0, 0, 300, 0], 0), ([40, 0, 0, 0, 40, 0, 0, 0], 10),
    ([60, 0, 60, 0], 30), ([13, 101, 7], 13), ([50, 0], 0), ([50, 40], 45), ([50], None)])
def test_what_recurs(values, usual):
    found = host.recurring(*stalled({0: values}))
    assert (found and found.us) == (usual if usual is None else pytest.approx(usual))


def test_the_late_gpu_and_the_most_idle_one_of_each_step():
    late = host.recurring(*stalled({0: [0, 5, 5, 5], 1: [0, 105, 105, 105], 2: [0, 5, 5, 5]}), first=False)
    assert late is not None and (late.gpu, late.excess_us, late.us) == (1, 100, 105)
    assert late.by_step.to_dict() == {1: 105, 2: 105, 3: 105}
    assert late.excess_by_step.to_dict() == {1: 100, 2: 100, 3: 100}
    turns = host.recurring(*stalled({0: [60, 0, 0, 60, 0, 0], 1: [0, 60, 0, 0, 60, 0], 2: [0, 0, 60, 0, 0, 60]}))
    assert turns is not None and turns.us == 60 and turns.excess_us < 30


def test_nothing():
    none = schema.empty(schema.KERNELS)
    assert len(host.idle_causes(none, calls())) == len(host.queue_length(none)) == len(host.launches(none)) == 0
    assert len(host.host_calls(calls(), none)) == 0


# ---- which events are calls ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, kind", [
    ("cudaDeviceSynchronize", "sync"), ("hipStreamSynchronize", "sync"), ("cuCtxSynchronize", "sync"),
    ("cudaMemcpy", "sync"), ("hipMemcpyWithStream", "sync"), ("hipMemcpyDtoH", "sync"), ("cudaMemcpyAsync", None),
    ("cudaMemcpyToSymbolAsync", None), ("cuMemcpyDtoH_v2", "sync"), ("cuMemcpyDtoHAsync_v2", None),
    ("cudaMalloc", "allocation"), ("hipFree", "allocation"), ("cudaHostAlloc", "allocation"),
    ("cuMemMap", "allocation"),
    ("cudaMallocAsync", "allocation"), ("cudaLaunchKernel", None), ("cudaEventQuery", None), ("cudaMemGetInfo", None),
    ("cudaStreamWaitEvent", None)])
def test_runtime_calls(tmp_path: Path, name: str, kind: str | None):
    trace = TraceBuilder().training_step(0, 0)
    trace.runtime(name, 300, 20, 9000)
    found = tb_chopper.open_run(trace.write(tmp_path / "rank0.pt.trace.json")).calls
    assert found["kind"].tolist() == ([kind] if kind else [])


def test_scopes_and_garbage_collection(tmp_path: Path):
    trace = TraceBuilder().training_step(0, 0).training_step(1, 1000)
    trace.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 5, 40)
    trace.annotation("dynamo_data: compile_id=0/0", 100, 50)
    trace.annotation("dynamo_data: compile_id=0/2", 1100, 60)
    trace.module("Python GC", 1200, 30)
    trace.module("nn.Module: Linear_0", 1300, 30)
    run = tb_chopper.open_run(trace.write(tmp_path / "rank0.pt.trace.json"))
    assert run.calls[["kind", "step"]].astype(object).to_numpy().tolist() == [
        ["loader", 0], ["compile", 0], ["recompile", 1], ["gc", 1]]
    assert [c.name for c in schema.CALLS] == run.calls.columns.tolist()
    again = tb_chopper.open_run(tmp_path / "rank0.pt.trace.json").calls  # from the cache
    pd.testing.assert_frame_equal(again, run.calls)


def test_traces_of_2021_have_the_loader_as_an_operator(tmp_path: Path):
    trace = TraceBuilder().training_step(0, 0)
    trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 40)
    trace.op("mylib::get_batch", 50, 40)  # an operator of somebody's own is not taken for a loader
    found = tb_chopper.open_run(trace.write(tmp_path / "rank0.pt.trace.json")).calls
    assert found[["kind", "start_ns"]].to_numpy().tolist() == [["loader", found["start_ns"].min()]]


def test_a_loader_in_the_background_keeps_no_gpu_waiting(tmp_path: Path):
    trace = TraceBuilder().training_step(0, 0)
    trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5, 900, tid=99)
    trace.annotation("load_batch", 5, 40)
    found = tb_chopper.open_run(trace.write(tmp_path / "rank0.pt.trace.json")).calls
    assert found["name"].tolist() == ["load_batch"]


def test_no_host_events():
    assert len(host_calls.find(schema.empty(schema.HOST), schema.empty(schema.STEPS))) == 0
