"""The rule about slow GPUs on small traces of ranks that reduce once a step (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import slow_gpu
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tests.builders import TraceBuilder

STEPS = 4
TRANSFER, REST = 50, 100


def run_of(folder: Path, compute: list[float], late: list[float] | None = None, more: list[float] | None = None) -> Run:
    """A rank per entry: four kernels that take `compute` together, `more` in another one, a reduction, another 100 µs.
    Each begins `late` µs after the step."""
    late, more = late or [0] * len(compute), more or [0] * len(compute)
    arrive = [10 + d + c + m for c, d, m in zip(compute, late, more, strict=True)]
    end = max(arrive) + TRANSFER
    length = end + REST + 10
    for rank, (total, delay, extra) in enumerate(zip(compute, late, more, strict=True)):
        trace = TraceBuilder(rank=rank, world_size=len(compute))
        for number in range(STEPS):
            start = number * length
            trace.step(number, start, length - 5)
            at = start + 10 + delay
            for i in range(4):
                trace.op(f"aten::op{i}", at - 8, 6)
                trace.launch(f"k{i}", at - 6, at, total / 4)
                at += total / 4
            if extra:
                trace.op("aten::extra", at - 8, 6)
                trace.launch("extra", at - 6, at, extra)
            trace.op("c10d::allreduce_", start + arrive[rank] - 8, 6)
            trace.collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start + arrive[rank] - 6, start + arrive[rank],
                             end - arrive[rank], Seq=number)
            trace.op("aten::last", start + end - 8, 6)
            trace.launch("last", start + end - 6, start + end, REST)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def said(run: Run) -> list[Diagnosis]:
    found = [d for d in slow_gpu.rule(run) if isinstance(d, Diagnosis)]
    for d in found:
        assert trace_link.find(run.kernels, d.kernel)["gpu"] in d.gpus
        run.view(d.view, **d.selection)
    return found


def evidence(d: Diagnosis) -> dict[str, float | str]:
    return {e.label: e.value for e in d.evidence}


def test_one_slow_gpu(tmp_path):
    """The last kernel is as long on all: of 500 and 100 µs, GPU 2 needs 625 and 100."""
    d, = said(run_of(tmp_path, [500, 500, 625, 500]))
    assert d.gpus == (2,)
    assert evidence(d)["GPU 2 slower than the others"] == pytest.approx(725 / 600 - 1)
    assert d.gain_ms == pytest.approx(0.125)
    assert evidence(d)["arrives last"] == 1
    assert d.title == "GPU 2 holds the others up"


def test_equally_slow_gpus_are_one_diagnosis(tmp_path):
    """Each of them alone would gain nothing."""
    run = run_of(tmp_path, [500, 500, 625, 500, 500, 500, 625, 500])
    assert run.what_if().set_index("gpu")["gain_us"].loc[[2, 6]].tolist() == [0, 0]
    d, = said(run)
    assert d.gpus == (2, 6)
    assert d.message.startswith("GPU 2 needs 20.8% longer for the same kernels, GPU 6 needs 20.8% longer")
    assert d.gain_ms == pytest.approx(0.125)
    assert d.title == "GPUs 2 and 6 hold the others up"


def test_unequally_slow_gpus_are_one_diagnosis(tmp_path):
    d, = said(run_of(tmp_path, [500, 600, 700, 500, 500]))
    assert d.gpus == (1, 2)
    assert d.gain_ms == pytest.approx(0.2)
    assert evidence(d)["GPU 1 slower than the others"] == pytest.approx(700 / 600 - 1)


def test_half_of_the_gpus(tmp_path):
    d, = said(run_of(tmp_path, [500, 650, 650, 500]))
    assert (d.gpus, d.gain_ms) == ((1, 2), pytest.approx(0.15))


def test_a_gpu_with_more_to_compute(tmp_path):
    d, = said(run_of(tmp_path, [500, 500, 500], more=[0, 120, 0]))
    assert (d.gpus, d.gain_ms) == ((1,), pytest.approx(0.12))
    assert d.cause == "more to compute than the others"
    assert evidence(d)["GPU 1 computes more"] == pytest.approx(120)
    assert d.message.startswith("GPU 1 computes 0.12 ms a step more than the median of the others; it arrives last")


@pytest.mark.parametrize("compute", [[500, 500, 500], [500, 520, 500], [500]])
def test_equal_gpus(tmp_path, compute: list[float]):
    """20 µs are 3.3 % of what a GPU computes: below what counts as equal."""
    assert said(run_of(tmp_path, compute)) == []


def test_a_late_host_is_another_rules(tmp_path):
    assert said(run_of(tmp_path, [500, 500, 500], late=[0, 200, 0])) == []
