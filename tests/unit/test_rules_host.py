"""The rules about the host on traces whose stalls are written down (µs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend import rules
from tb_chopper.backend.rules import allocator_calls, data_stall, garbage_collection, synchronizing_calls
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tb_chopper.backend.run import Run
from tests.builders import TraceBuilder

STEP, STEPS = 1000, 6
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
MINE = {"data_stall", "synchronizing_calls", "allocator_calls", "garbage_collection"}
Fault = Callable[[TraceBuilder, int, int, float], None]
"""(trace, rank, number of the step, its start)"""


def run_of(folder: Path, fault: Fault, ranks: int = 2, dialect: str = "cuda", steps: int = STEPS) -> Run:
    """In every step of 1000: GPU work until 300, idle until the launch at 600 (its kernel starts at 610), work until
    900, and idle until the next step. What `fault` adds says why."""
    for rank in range(ranks):
        trace = TraceBuilder(dialect, rank=rank, world_size=ranks)  # type: ignore[arg-type]
        for number in range(steps):
            at = STEP * number
            trace.step(number, at, 995)
            trace.op("aten::mm", at + 1, 8, seq=1)
            trace.launch("gemm", at + 2, at + 10, 290)
            trace.op("aten::mm", at + 595, 12, seq=2)
            trace.launch("gemm", at + 600, at + 610, 290)
            fault(trace, rank, number, at)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def only(found: list[Diagnosis]) -> Diagnosis:
    assert len(found) == 1
    return found[0]


def loader(lengths: dict[int, float]) -> Fault:
    """Loading at the end of each step, behind the last kernel."""
    return lambda trace, rank, number, at: trace.annotation(LOADER, at + 902, lengths.get(rank, 0)) and None


def test_a_late_loader_of_one_rank(tmp_path: Path):
    """80 against 20: the others wait for rank 1 for 60 of a step of 1000."""
    run = run_of(tmp_path, loader({0: 20, 1: 80, 2: 20}), ranks=3)
    found = only(data_stall.rule(run))
    assert found.gain_ms == pytest.approx(0.060)
    assert (found.gpus, found.steps, found.severity) == ((1,), (1, 2, 3, 4, 5), "warning")
    assert found.title == "The data loader of GPU 1 is late"
    assert "non_blocking" in found.remedy and "DALI" in found.remedy
    assert found.kernel.startswith("1@")
    assert {f.code for f in rules.diagnose(run)} & MINE == {"data_stall"}


def test_a_loader_that_is_late_in_every_third_step(tmp_path: Path):
    """60 in steps 3 and 6 of 1 to 6: 20 per step."""
    late = run_of(tmp_path, lambda t, rank, n, at: t.annotation(LOADER, at + 902, 60 if n % 3 == 2 else 0) and None,
                  steps=7)
    found = only(data_stall.rule(late))
    evidence = {e.label: e.value for e in found.evidence}
    assert found.gain_ms == pytest.approx(0.020) and found.steps == (3, 6)
    assert evidence["steps with it"] == "2 of 6" and evidence["idle in such a step"] == pytest.approx(60)


def test_loaders_of_all_ranks(tmp_path: Path):
    found = only(data_stall.rule(run_of(tmp_path, loader({0: 40, 1: 45}))))
    assert found.gain_ms == pytest.approx(0.045)
    assert found.gpus == (0, 1)
    assert found.title == "The GPUs wait for data"


def test_a_fast_loader_or_one_that_the_gpu_does_not_wait_for(tmp_path: Path):
    assert data_stall.rule(run_of(tmp_path / "fast", loader({0: 9, 1: 9}))) == []  # 0.9 % of a step
    hidden = run_of(tmp_path / "hidden", lambda t, rank, n, at: t.annotation(LOADER, at + 20, 250) and None)
    assert data_stall.rule(hidden) == []


def test_a_stall_of_one_step_is_an_outlier(tmp_path: Path):
    once = run_of(tmp_path, lambda t, rank, n, at: t.annotation(LOADER, at + 902, 90 if n == 3 else 1) and None)
    assert data_stall.rule(once) == []
    single = run_of(tmp_path / "single", loader({0: 90, 1: 90}), steps=1)
    assert data_stall.rule(single) == []


def waits(begin: float, end: float, name: str = "cudaStreamSynchronize") -> Fault:
    return lambda trace, rank, number, at: trace.runtime(name, at + begin, end - begin, 10**6 + number) and None


def test_a_wait_in_the_middle_of_a_step(tmp_path: Path):
    """The wait returns at 305; nothing was launched before 600: the GPU was idle from 300 on. Without the wait the host
    would have launched 255 earlier."""
    run = run_of(tmp_path, waits(50, 305))
    found = only(synchronizing_calls.rule(run))
    assert run.stalls["idle_ns"].unique().tolist() == [300_000]
    assert found.gain_ms == pytest.approx(0.255)
    assert {e.label: e.value for e in found.evidence}["calls per GPU and step"] == 1
    assert "cudaStreamSynchronize" in found.message and found.severity == "warning"


def test_the_wait_at_the_end_of_a_step_is_normal(tmp_path: Path):
    assert synchronizing_calls.rule(run_of(tmp_path, waits(700, 905))) == []


def test_a_short_wait_in_the_middle(tmp_path: Path):
    """It begins when the GPU is idle already: 9 of a step of 1000 are its own."""
    assert synchronizing_calls.rule(run_of(tmp_path, waits(400, 409))) == []
    assert only(synchronizing_calls.rule(run_of(tmp_path / "b", waits(400, 411)))).gain_ms == pytest.approx(0.011)


@pytest.mark.parametrize("name, dialect, remedy", [
    ("cudaMalloc", "cuda", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ("hipFree", "rocm", "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"), ("cudaHostAlloc", "cuda", "pin_memory")])
def test_driver_allocations(tmp_path: Path, name: str, dialect: str, remedy: str):
    found = only(allocator_calls.rule(run_of(tmp_path, waits(350, 550, name), dialect=dialect)))
    assert found.gain_ms == pytest.approx(0.200)
    assert remedy in found.remedy and name in found.message


def test_allocations_of_the_first_step_are_the_warm_up(tmp_path: Path):
    run = run_of(tmp_path, lambda t, rank, n, at: n == 0 and t.runtime("cudaMalloc", at + 350, 200, 10**6) and None)
    assert allocator_calls.rule(run) == []


def test_ranks_that_collect_garbage_in_turn(tmp_path: Path):
    """Each rank once in three steps, but every step of the training has one that does."""
    def fault(trace: TraceBuilder, rank: int, number: int, at: float) -> None:
        if number % 3 == rank:
            trace.module("Python GC", at + 350, 100)

    run = run_of(tmp_path, fault, ranks=3)
    found = only(garbage_collection.rule(run))
    assert found.gain_ms == pytest.approx(0.100)
    assert found.gpus == (0, 1, 2)
    assert "gc.freeze" in found.remedy
    assert {f.code for f in rules.diagnose(run)} & MINE == {"garbage_collection"}


def test_cpu_only_runs_and_runs_without_calls(tmp_path: Path):
    silent = run_of(tmp_path / "none", lambda *_: None)
    cpu = TraceBuilder(rank=None)
    for number in range(4):
        cpu.step(number, 1000 * number, 900)
        cpu.annotation(LOADER, 1000 * number + 1, 400)
        cpu.op("aten::mm", 1000 * number + 410, 200)
    cpu.write(tmp_path / "cpu" / "host_1.pt.trace.json")
    for run in (silent, tb_chopper.open_run(tmp_path / "cpu")):
        for rule in (data_stall, synchronizing_calls, allocator_calls, garbage_collection):
            assert rule.rule(run) == []
