"""The rules about memory on traces and telemetry whose levels are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend import rules, schema
from tb_chopper.backend.metrics import memory
from tb_chopper.backend.rules import memory_growth, memory_imbalance, memory_limit
from tb_chopper.backend.run import Run
from tests.builders import TraceBuilder
from tests.unit import tables
from tests.unit.test_memory import steps

MIB, GIB = 2**20, 2**30
DEVICE = 80 * GIB
MINE = {"memory_limit", "memory_growth", "memory_imbalance"}


def run_of(folder: Path, levels: Callable[[int, int], tuple[float, float]], ranks: int = 2, n: int = 5) -> Run:
    """Each step of 1000 µs allocates from its floor to its peak for the backward and frees again; reserved is 2 GiB
    more than the peak. levels(rank, step): floor and peak in bytes."""
    for rank in range(ranks):
        trace = TraceBuilder(rank=rank, world_size=ranks)
        trace.head["deviceProperties"][0]["totalGlobalMem"] = DEVICE
        before = 0
        for number in range(n):
            at = 1000 * number
            trace.training_step(number, at)
            floor, peak = map(int, levels(rank, number))
            trace.memory(at + 1, floor - before, floor, peak + 2 * GIB)
            trace.memory(at + 400, peak - floor, peak, peak + 2 * GIB)
            trace.memory(at + 690, floor - peak, floor, peak + 2 * GIB)
            before = floor
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def test_a_healthy_run(tmp_path: Path):
    run = run_of(tmp_path, lambda rank, n: (20 * GIB, (60 + 2 * rank) * GIB))
    assert [f.code for f in rules.diagnose(run) if f.code in MINE] == []


def test_memory_grows_by_what_was_planted(tmp_path: Path):
    """100 MiB a step on GPU 1 from 60 GiB on: after five steps 60.4 + 2 GiB are reserved, 17.6 GiB are left."""
    run = run_of(tmp_path, lambda rank, n: (20 * GIB + 100 * MIB * n * rank, 60 * GIB + 100 * MIB * n * rank))
    found, = memory_growth.rule(run)
    evidence = {e.label: e.value for e in found.evidence}
    assert evidence["growth per step"] == 100 * MIB
    assert evidence["steps until full"] == round((80 - 62 - 400 / 1024) * 1024 / 100)
    assert (found.gpus, found.gain_ms, found.severity) == ((1,), None, "warning")
    assert "100 MiB in every step" in found.message and "loss.item()" in found.remedy
    assert [f.code for f in rules.diagnose(run) if f.code in MINE] == ["memory_growth"]


@pytest.mark.parametrize("floors", [
    (10, 14, 15, 15.2, 15.2), (10, 11, 12), (10, 11, 12, 11, 14), (10, 10.0005, 10.001, 10.0015), (14, 13, 12, 11)],
    ids=["states of the optimizer", "three steps", "falls once", "less than 1 MiB", "falls"])
def test_other_floors_do_not_grow_steadily(floors: Sequence[float]):
    levels = pd.DataFrame({"step": range(len(floors)), "floor_bytes": [f * GIB for f in floors]})
    assert not memory.growth(levels).steady


def test_growth_is_robust():
    """One step that holds 5 GiB more for once, among steps that keep 10 MiB each."""
    floors = [GIB + 10 * MIB * i for i in range(20)]
    floors[7] += 5 * GIB
    found = memory.growth(pd.DataFrame({"step": range(20), "floor_bytes": floors}))
    assert found.per_step_bytes == 10 * MIB and found.steady


@pytest.mark.parametrize("kept, steady", [(64 * MIB, True), (0, False)])
def test_growth_under_accumulated_gradients(kept: int, steady: bool):
    """Gradients of 500 MiB live from the first step of a cycle of three to its last."""
    floors = [GIB + kept * i + (500 * MIB if i % 3 else 0) for i in range(9)]
    found = memory.growth(pd.DataFrame({"step": range(9), "floor_bytes": floors}))
    assert found.steady == steady and (found.per_step_bytes == kept or not steady)


def test_floors_that_vary_at_random_do_not_grow_steadily():
    random = np.random.default_rng(5)
    levels = [pd.DataFrame({"step": range(n), "floor_bytes": random.uniform(1, 2, n) * GIB})
              for n in (4, 5, 8, 12, 20) for _ in range(200)]
    assert sum(memory.growth(made).steady for made in levels) <= 5


def test_memory_is_almost_full(tmp_path: Path):
    run = run_of(tmp_path, lambda rank, n: (20 * GIB, (60, 73)[rank] * GIB), ranks=2)
    found, = memory_limit.rule(run)
    assert {e.label: e.value for e in found.evidence}["of the device"] == 73 / 80
    assert {e.label: e.value for e in found.evidence}["left"] == 7 * GIB
    assert found.gpus == (1,) and found.gain_ms is None and "checkpointing" in found.remedy
    assert memory_limit.rule(run_of(tmp_path / "b", lambda rank, n: (20 * GIB, 71 * GIB))) == []


def test_a_gpu_above_its_peers(tmp_path: Path):
    """44 against a median of 38 GiB: 1.16 times; 40 of 38 is less than 1.1 times."""
    found, = memory_imbalance.rule(run_of(tmp_path, lambda rank, n: (GIB, (38, 44, 38)[rank] * GIB), ranks=3))
    assert {e.label: e.value for e in found.evidence}["of the median"] == pytest.approx(44 / 38)
    assert found.gpus == (1,)
    assert memory_imbalance.rule(run_of(tmp_path / "b", lambda r, n: (GIB, (38, 40, 38)[r] * GIB), ranks=3)) == []
    little = run_of(tmp_path / "c", lambda r, n: (GIB, (2, 5, 2)[r] * GIB), ranks=3)  # 3 of 80 GiB matter to no one
    assert memory_imbalance.rule(little) == []


def test_without_memory_events_no_rule_speaks(tmp_path: Path):
    run = tb_chopper.open_run(TraceBuilder().training_step(0, 0).write(tmp_path / "rank0.pt.trace.json"))
    assert memory_limit.rule(run) == memory_growth.rule(run) == memory_imbalance.rule(run) == []


# ---- as the driver counts --------------------------------------------------------------------------------------------

def samples(*rows: tuple[int, float, float]) -> pd.DataFrame:
    """(gpu, time in µs, used GiB)."""
    return schema.conform(pd.DataFrame([{"gpu": g, "t_ns": round(t * 1000), "memory_used_bytes": u * GIB}
                                        for g, t, u in rows]), schema.TELEMETRY)


def test_used_memory_stands_in_where_there_are_no_events():
    windows = steps(*((i, 100 * i, 100 * i + 100) for i in range(5)))
    used = samples(*((0, 25 * k, 10 + k // 4 * 0.5 + k % 4) for k in range(20)))
    events = memory.allocations([], windows)
    row = memory.memory(events, tables.kernels([{"start": 0, "end": 1}]), {0: DEVICE}, used, windows).iloc[0]
    assert row[["source", "used_bytes", "floor_bytes", "total_bytes"]].tolist() == [
        "telemetry", 15 * GIB, 10 * GIB, DEVICE]
    assert row["growth_per_step_bytes"] == 0.5 * GIB and row["steady"]
    assert row["steps_left"] == 130
    assert row["step"] == 4 and row["used_share"] == 15 / 80 and pd.isna(row["peak_bytes"])


def test_used_memory_beside_the_allocators():
    """The allocator holds 4 GiB from 10 on, 6 from 50 on; the driver counts 1.5 more, once 3."""
    windows = steps((0, 0, 100))
    own = schema.conform(pd.DataFrame([
        {"t_ns": 10_000, "bytes": 1, "allocated_bytes": 3 * GIB, "reserved_bytes": 4 * GIB, "device_type": 1},
        {"t_ns": 50_000, "bytes": 1, "allocated_bytes": 5 * GIB, "reserved_bytes": 6 * GIB, "device_type": 1}])
        .assign(device_id=0), schema.MEMORY)
    events = memory.allocations([memory.Source(own, {"0": 0}, memory.PROFILER)], windows)
    used = samples((0, 5, 1.5), (0, 20, 5.5), (0, 40, 7), (0, 60, 7.5), (1, 30, 2))
    table = memory.memory(events, tables.kernels([{"start": 0, "end": 1}]), {0: DEVICE}, used, windows)
    assert table["source"].tolist() == ["profiler", "telemetry"]
    assert table[["peak_bytes", "used_bytes", "outside_bytes"]].iloc[0].tolist() == [5 * GIB, 7.5 * GIB, 1.5 * GIB]


def test_a_run_with_used_memory_in_its_telemetry(tmp_path: Path):
    """Levels in the log of a sampler reach the metric: on the trace's clock and for the right GPU."""
    from tests.builders import ZERO_NS
    from torch_ext import telemetry_format as log

    trace = TraceBuilder()
    trace.head["deviceProperties"][0]["totalGlobalMem"] = DEVICE
    for number in range(5):
        trace.training_step(number, 1000 * number)
    trace.write(tmp_path / "rank0.pt.trace.json")
    lines = [log.line("start", 0, 0, text="node0"), log.line("gpu_info", 0, 0, gpu=0, source="nvml", text="H100"),
             log.line("clock", 0, 0, realtime_ns=ZERO_NS, boottime_ns=0)]
    lines += [log.line("gpu", t, t, gpu=0, memory_used_bytes=30 * GIB + t // 1_000_000 * 64 * MIB)
              for t in range(100_000, 5_000_000, 250_000)]
    lines.append(log.line("gpu", 3 * 10**9, 3 * 10**9, gpu=0, memory_used_bytes=79 * GIB))  # of another program, later
    (tmp_path / log.file_name("node0")).write_text(log.header() + "".join(lines))
    run = tb_chopper.open_run(tmp_path)
    assert run.memory()["used_bytes"].tolist() == [30 * GIB + 4 * 64 * MIB]
    found, = memory_growth.rule(run)
    assert {e.label: e.value for e in found.evidence}["growth per step"] == 64 * MIB
    assert "used memory of GPU 0" in found.message
