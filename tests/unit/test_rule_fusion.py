"""Fusion as a diagnosis: all patterns together, without the optimizer's (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tb_chopper.backend.run import Run
from tests.builders import TraceBuilder
from tests.unit.test_fusion import BANDWIDTH, SIZE, Stream, X
from tests.unit.test_rules import compute, evidence, found, run_of


def chains(folder: Path, dur: float, optimizer: bool = False, shapes: bool = True) -> Run:
    """SwiGLU of two kernels of `dur` each, behind a product."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 500)
        stream = Stream(trace, start + 20)
        stream.free = start + 510
        stream.op("aten::silu", dur, X, gap=0, shapes=shapes).op("aten::mul", dur, X, X, gap=1, shapes=shapes)
        if optimizer:
            trace.annotation("Optimizer.step#AdamW.step", start + 19, 20)

    return run_of(folder, 1, step)


@pytest.mark.parametrize(("dur", "speaks"), [(60, True), (39, False)])
def test_the_gain_is_the_time_without_what_one_kernel_takes(tmp_path: Path, dur: float, speaks: bool) -> None:
    said = found(chains(tmp_path, dur), "fusion")
    saved = 2 * dur - max(3 * SIZE / BANDWIDTH, dur)  # at least as long as the shortest
    assert len(said) == speaks and (saved >= 50) == speaks
    for d in said:
        assert d.gain_ms == pytest.approx(saved / 1000)
        assert evidence(d) == pytest.approx({"runs of kernels in a step": 1, "their time in a step": 2 * dur,
                                             "saved: SwiGLU": saved})
        assert "SwiGLU" in d.message and "Liger" in d.remedy


def test_silent_about_the_optimizer_and_without_shapes(tmp_path: Path) -> None:
    assert found(chains(tmp_path / "optimizer", 60, optimizer=True), "fusion") == []
    assert found(chains(tmp_path / "shapes", 60, shapes=False), "fusion") == []
