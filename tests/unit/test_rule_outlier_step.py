"""The rule about outlier steps on small traces of two ranks that reduce once a step (µs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import outlier_step, thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tests.builders import ZERO_NS, TraceBuilder

STEPS, STEP = 8, 1000
ODD = 4


def run_of(folder: Path, *, late: float = 0, transfer: float = 0, compute: float = 0, kernels: int = 0,
           middle: float = 0, during: Callable[[TraceBuilder, float], None] | None = None, steps: int = STEPS) -> Run:
    """Two ranks. In step ODD rank 0 begins `late` µs later, stops for `middle` before its reduction, computes `compute`
    longer and runs so many more `kernels` of 1 µs; the reduction of both takes `transfer` longer. `during` adds what
    the host of rank 0 did while it was late."""
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        start = 0.0
        for number in range(steps):
            odd = number == ODD
            mine = odd and rank == 0
            length = STEP + odd * (late + transfer + compute + middle + kernels)
            trace.step(number, start, length - 5)
            at = start + 10 + mine * late
            if mine and during is not None:
                during(trace, start + 5)
            trace.op("aten::mm", at, 20)
            trace.launch("gemm", at + 1, at + 10, 500 + mine * compute)
            at += 510 + mine * compute
            for _ in range(mine * kernels):
                trace.launch("tiny", at - 6, at, 1)
                at += 1
            if mine and middle:
                at += middle
                trace.op("c10d::allreduce_", at - 8, 6)
            end = start + 10 + 510 + odd * (late + compute + kernels + middle + transfer) + 100
            trace.collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at - 6, at, end - at, Seq=number)
            trace.op("aten::mul", end - 30, 10)
            trace.launch("mul", end - 25, end, 370)
            start += length
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def said(run: Run) -> list[Diagnosis]:
    found = [d for d in outlier_step.rule(run) if isinstance(d, Diagnosis)]
    for d in found:
        assert trace_link.find(run.kernels, d.kernel)["gpu"] in d.gpus
        run.view(d.view, **d.selection)
    return found


def evidence(d: Diagnosis) -> dict[str, float | str]:
    return {e.label: e.value for e in d.evidence}


def test_a_host_that_begins_a_step_late(tmp_path):
    """The gap before the first kernel of step 4 lies in the window of step 3 on GPU 0 and, as waiting, in that of step
    4 on GPU 1: it is one outlier, of step 4 and GPU 0."""
    d, = said(run_of(tmp_path, late=700))
    assert (d.steps, d.gpus) == ((ODD,), (0,))
    assert evidence(d)["longer than the median step"] == pytest.approx(700)
    assert evidence(d)["grew most"] == "idle"
    assert d.gain_ms == pytest.approx(0.7 / (STEPS - 1))  # the last step has no next one
    assert "no call in the trace says why" in d.cause


def test_a_host_that_stops_in_the_middle_of_a_step(tmp_path):
    d, = said(run_of(tmp_path, middle=700))
    assert (d.steps, d.gpus) == ((ODD,), (0,))
    assert evidence(d)["longer than the median step"] == pytest.approx(700)
    assert d.kernel == f"0@{ZERO_NS + 1000 * (4 * STEP + 520 + 700)}"




@pytest.mark.parametrize(("add", "cause"), [
    (lambda t, at: t.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 690), "data"),
    (lambda t, at: t.runtime("cudaMalloc", at, 690, 99), "the driver was asked for memory"),
    (lambda t, at: t.span("python_function", "Python GC", at, 690), "garbage"),
    (lambda t, at: t.annotation("dynamo_data: compile_id=0/1", at, 690), "compiled again"),
])
def test_the_host_call_that_took_the_time(tmp_path, add, cause: str):
    d, = said(run_of(tmp_path, late=700, during=add))
    assert cause in d.cause
    idle = next(v for k, v in evidence(d).items() if k.startswith("idle by"))
    assert idle == pytest.approx(690, abs=6)


def test_a_call_that_took_a_small_part_is_no_cause(tmp_path):
    d, = said(run_of(tmp_path, late=700, during=lambda t, at: t.runtime("cudaMalloc", at, 100, 99)))
    assert "no call in the trace says why" in d.cause


def test_a_slow_collective(tmp_path):
    d, = said(run_of(tmp_path, transfer=400))
    assert d.steps == (ODD,)
    assert evidence(d)["grew most"] == "exposed communication"
    assert evidence(d)["longer than the median step"] == pytest.approx(400)
    assert d.gain_ms == pytest.approx(0.4 / (STEPS - 1))


def test_slow_kernels(tmp_path):
    d, = said(run_of(tmp_path, compute=400))
    assert (d.steps, d.gpus) == ((ODD,), (0,))
    assert evidence(d)["grew most"] == "compute"


def test_a_step_with_other_work_is_no_outlier(tmp_path):
    assert said(run_of(tmp_path, kernels=400)) == []


@pytest.mark.parametrize("late", [0, 150])
def test_steps_that_differ_little(tmp_path, late: float):
    assert said(run_of(tmp_path, late=late)) == []


def test_too_few_steps(tmp_path):
    """Five measured steps have a usual time, four have none."""
    assert len(said(run_of(tmp_path / "six", late=700, steps=6))) == 1
    assert said(run_of(tmp_path / "five", late=700, steps=5)) == []


def test_what_is_worth_little_is_not_said(tmp_path, monkeypatch):
    run = run_of(tmp_path, late=700)
    monkeypatch.setattr(thresholds, "SMALL_GAIN", 0.7 / (STEPS - 1) + 0.01)
    assert said(run) == []
