"""Memory events, snapshots and what is told of them. Sizes in bytes, times in µs."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.metrics import memory
from tb_chopper.backend.readers import memory_snapshot
from tests.builders import ZERO_NS, TraceBuilder
from tests.unit import tables


def events(*rows: tuple, device: int = 0, device_type: int = 1, totals: bool = True) -> pd.DataFrame:
    """(t, bytes, reserved) of one device; allocated is their running sum where `totals` are known."""
    frame = pd.DataFrame(rows, columns=["t", "bytes", "reserved"])
    return schema.conform(pd.DataFrame({
        "t_ns": frame["t"] * 1000, "bytes": frame["bytes"], "device_type": device_type, "device_id": device,
        "allocated_bytes": frame["bytes"].cumsum() if totals else -1,
        "reserved_bytes": frame["reserved"] if totals else -1}), schema.MEMORY)


def steps(*windows: tuple[int, float, float], gpu: int = 0) -> pd.DataFrame:
    made = tables.steps(*windows, gpu=gpu)
    return made.assign(start_ns=made["gpu_start_ns"].astype("int64"), end_ns=made["gpu_end_ns"].astype("int64"))


def allocated(*sources: memory.Source, windows: pd.DataFrame | None = None) -> pd.DataFrame:
    return memory.allocations(sources, steps() if windows is None else windows)


ONE = events((0, 100, 400), (10, 200, 400), (20, -50, 400), (30, 600, 1000), (40, -600, 1000))


def test_peak_floor_fragmentation_and_headroom():
    kernels = tables.kernels([
        {"start": 12, "end": 13, "launch": 11, "operation": "early"},
        {"start": 40, "end": 41, "launch": 31, "operation": "mlp", "phase": "backward", "layer": "layers.3"}])
    found = allocated(memory.Source(ONE, {"0": 0}, memory.PROFILER), windows=steps((5, 5, 50)))
    row = memory.memory(found, kernels, {0: 2000}).iloc[0]
    assert row[["peak_bytes", "peak_ns", "step"]].tolist() == [850, 30_000, 5]
    assert row[["phase", "layer", "operation"]].tolist() == ["backward", "layers.3", "mlp"]
    assert row["floor_bytes"] == 250 and row["at"] == "0@40000"
    assert row["fragmentation"] == pytest.approx(1 - 850 / 1000)
    assert row[["reserved_bytes", "total_bytes", "headroom_bytes", "used_share"]].tolist() == [1000, 2000, 1000, 0.5]
    assert np.isnan(row["of_peers"])


def test_growth_over_steps_and_peers():
    grows = events(*((10 * i, 10, 500) for i in range(30)))
    still = events((0, 100, 500), (5, 1, 500), (6, -1, 500), (105, 1, 500), (106, -1, 500), (205, 1, 500))
    windows = pd.concat([steps((0, 0, 100), (1, 100, 200), (2, 200, 300), gpu=g) for g in (0, 1)])
    found = allocated(memory.Source(grows, {"0": 0}, memory.PROFILER), memory.Source(still, {"0": 1}, memory.PROFILER),
                      windows=windows)
    table = memory.memory(found, tables.kernels([{"start": 0, "end": 1, "launch": 0}]))
    assert table["growth_bytes"].tolist() == [200, 1]
    assert table["of_peers"].tolist() == pytest.approx([300 / 200.5, 101 / 200.5])
    assert table["total_bytes"].isna().all()
    staged = memory.memory(found, tables.kernels([{"start": 0, "end": 1, "launch": 0}]), stages={0: 0, 1: 1})
    assert staged["of_peers"].isna().all(), "stages of a pipeline are no peers"
    assert memory.step_memory(found).query("gpu == 0")["floor_bytes"].tolist() == [10, 110, 210]


def test_without_totals_the_level_counts_from_the_lowest():
    old = events((0, -300, 0), (10, 500, 0), (20, -100, 0), totals=False)
    found = allocated(memory.Source(old, {"0": 0}, memory.PROFILER))
    assert found["allocated_bytes"].tolist() == [0, 500, 400]
    row = memory.memory(found, tables.kernels([{"start": 0, "end": 1}])).iloc[0]
    assert row["peak_bytes"] == 500
    assert not row["total_known"]
    assert np.isnan(row["reserved_bytes"])


def test_memory_of_the_host_is_not_the_gpus():
    both = pd.concat([ONE, events((0, 10**6, 0), device=-1, device_type=0)])
    assert allocated(memory.Source(both, {"2": 0}, memory.PROFILER))["allocated_bytes"].max() == 850
    cpu_only = allocated(memory.Source(both, {"cpu": 0}, memory.PROFILER))
    assert cpu_only["bytes"].tolist() == [10**6]


def test_several_devices_of_one_process():
    both = pd.concat([ONE, events((0, 7, 20), device=1)])
    found = allocated(memory.Source(both, {"0": 4, "1": 5}, memory.PROFILER))
    assert found.groupby("gpu")["allocated_bytes"].max().to_dict() == {4: 850, 5: 7}
    # A trace of one device keeps to it even where the process touched another.
    assert set(allocated(memory.Source(both, {"1": 5}, memory.PROFILER))["bytes"]) == {7}


def test_a_snapshot_replaces_what_the_profiler_saw():
    found = allocated(memory.Source(ONE, {"0": 0}, memory.PROFILER),
                      memory.Source(events((0, 5, 9)), {"0": 0}, memory.SNAPSHOT))
    assert found["source"].tolist() == ["snapshot"]


def test_no_events():
    assert len(memory.memory(allocated(), tables.kernels([{"start": 0, "end": 1}]))) == 0
    assert len(memory.step_memory(allocated())) == 0


def test_a_curve_keeps_its_peak():
    random = np.random.default_rng(1)
    many = events(*((i, int(b), 10**6) for i, b in enumerate(random.integers(-100, 101, 30_000))))
    found = allocated(memory.Source(many, {"0": 0}, memory.PROFILER))
    short = memory.curve(found, 600)
    assert len(short) <= 600
    assert short["allocated_bytes"].max() == found["allocated_bytes"].max()
    assert short["allocated_bytes"].min() == found["allocated_bytes"].min()
    assert short["t_ns"].is_monotonic_increasing
    assert short["t_ns"].iloc[-1] == found["t_ns"].iloc[-1]


# ---- snapshots -------------------------------------------------------------------------------------------------------

def entry(action: str, size: int, time_us: int | None = None) -> dict:
    made = {"action": action, "addr": 2**47, "size": size, "stream": 0, "frames": []}
    return made if time_us is None else {**made, "time_us": time_us}


def segment(total: int, allocated_size: int, device: int = 0) -> dict:
    return {"device": device, "address": 2**47, "total_size": total, "allocated_size": allocated_size, "stream": 0,
            "active_size": allocated_size, "segment_type": "large", "blocks": [], "frames": []}


HISTORY = [entry("alloc", 100, 10), entry("segment_alloc", 500, 11), entry("alloc", 300, 12),
           entry("free_requested", 100, 13), entry("free_completed", 100, 14), entry("snapshot", 0, 15)]


def dumped(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def test_a_snapshot_counts_back_from_its_final_state(tmp_path: Path):
    """900 were allocated and 1500 reserved before the history begins."""
    path = dumped(tmp_path / "s.pickle", {"segments": [segment(1500, 1000), segment(500, 200)],
                                          "device_traces": [HISTORY]})
    found = memory_snapshot.read(path)
    assert found.findings == []
    assert found.events["allocated_bytes"].tolist() == [1000, 1000, 1300, 1200]
    assert found.events["reserved_bytes"].tolist() == [1500, 2000, 2000, 2000]
    assert found.events["t_ns"].tolist() == [10_000, 11_000, 12_000, 13_000]
    assert [str(t) for t in found.events.dtypes] == [c.dtype for c in schema.MEMORY]


def test_devices_of_a_snapshot_stand_apart_and_failures_are_named(tmp_path: Path):
    path = dumped(tmp_path / "s.pickle", {
        "segments": [segment(500, 300), segment(70, 7, device=1)],
        "device_traces": [[*HISTORY, entry("oom", 10**9, 16)], [entry("alloc", 7, 3)]]})
    found = memory_snapshot.read(path)
    assert found.events.groupby("device_id")["allocated_bytes"].last().to_dict() == {0: 300, 1: 7}
    assert [(f.code, f.count, f.file) for f in found.findings] == [("out_of_memory", 1, "s.pickle")]


def test_a_snapshot_without_history_or_times_says_so(tmp_path: Path):
    none = dumped(tmp_path / "a.pickle", {"segments": [segment(5, 3)], "device_traces": [[]]})
    assert [f.code for f in memory_snapshot.read(none).findings] == ["memory_without_history"]
    old = dumped(tmp_path / "b.pickle", {"segments": [segment(5, 3)], "device_traces": [[entry("alloc", 3)]]})
    assert [f.code for f in memory_snapshot.read(old).findings] == ["memory_without_times"]


class Attack:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path):
    target = tmp_path / "owned"
    path = dumped(tmp_path / "s.pickle", {"segments": [Attack(target)]})
    with pytest.raises(UnreadableFile, match=r"^s\.pickle: refused, .*mkdir"):
        memory_snapshot.read(path)
    assert not target.exists()
    path = dumped(tmp_path / "t.pickle", {"segments": [], "device_traces": [np.float64(1)]})
    with pytest.raises(UnreadableFile, match="refused"):
        memory_snapshot.read(path)


@pytest.mark.parametrize("content", [
    b"", b"nonsense", pickle.dumps({"segments": []})[:-4], b"\x80\x04K\x01K\x01K\x01R.", pickle.dumps([1]),
    pickle.dumps({"segments": 3})])
def test_what_is_no_snapshot_is_refused_in_one_line(tmp_path: Path, content: bytes):
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile, match=r"^s\.pickle: [^\n]+$"):
        memory_snapshot.read(path)


@pytest.mark.parametrize("bad", [{"segments": [3, segment(5, 3)], "device_traces": "x"},
                                 {"segments": [segment(5, 3)], "device_traces": [3, [4, entry("alloc", 2, 1)]]},
                                 {"segments": [{"device": 0}], "device_traces": [[{"action": "alloc", "size": "x"}]]}])
def test_odd_snapshots_give_what_they_have(tmp_path: Path, bad: dict):
    memory_snapshot.read(dumped(tmp_path / "s.pickle", bad))


# ---- a run -----------------------------------------------------------------------------------------------------------

def trace(rank: int) -> TraceBuilder:
    built = TraceBuilder(rank=rank, world_size=2)
    built.head["deviceProperties"][0]["totalGlobalMem"] = 80_000
    built.training_step(0, 0)
    built.memory(100, 500, 1500, 4000)
    built.memory(450, -500, 1000 + rank, 4000)
    built.memory(460, 10**9, 10**9, 0, device_type=0)
    return built


def test_memory_of_a_run(tmp_path: Path):
    for rank in (0, 1):
        trace(rank).write(tmp_path / f"rank{rank}.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    table = run.memory()
    assert table["peak_bytes"].tolist() == [1500, 1500]
    assert table["headroom_bytes"].tolist() == [76_000, 76_000]
    assert table["operation"].tolist() == ["aten::mm", "aten::mm"]
    assert run.step_memory()["floor_bytes"].tolist() == [1000, 1001]


def test_snapshots_of_a_run_are_placed_by_rank(tmp_path: Path):
    for rank in (0, 1):
        trace(rank).write(tmp_path / f"rank{rank}.pt.trace.json")
    at = ZERO_NS // 1000
    dumped(tmp_path / "rank1_memory_snapshot.pickle", {
        "segments": [segment(9000, 7000)], "device_traces": [[entry("alloc", 7000, at + 200)]]})
    dumped(tmp_path / "rank7_memory_snapshot.pickle", {"segments": [], "device_traces": []})
    (tmp_path / "rank0_memory_snapshot.pickle").write_bytes(gzip.compress(b"x")[:9])
    run = tb_chopper.open_run(tmp_path)
    table = run.memory()[["peak_bytes", "source", "step"]]
    assert table.to_numpy().tolist() == [[1500, "profiler", 0], [7000, "snapshot", 0]]
    codes = {f.code for f in run.findings}
    assert {"memory_snapshot_unplaced", "unreadable_memory_snapshot"} <= codes
