"""A storm of small kernels: its gain is what the GPU waits for their launches, and nothing else (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import TraceBuilder
from tests.unit.test_rules import STEP, STEPS, compute, evidence, found, run_of


def storm(trace: TraceBuilder, start: float, n: int, dur: float, wait: float, op: str = "aten::mul_") -> float:
    """n kernels, each launched `wait` before it starts when the one before has ended; returns the end."""
    for i in range(n):
        at = start + i * (wait + dur)
        trace.op(op, at, wait - 0.5, dims=[[64]])
        trace.launch("vectorized_elementwise_kernel", at=at + 0.5, start=at + wait, dur=dur, call=1)
    return start + n * (wait + dur)


@pytest.mark.parametrize(("n", "speaks"), [(40, True), (7, False)])
def test_the_gain_is_the_wait_for_launches(tmp_path: Path, n: int, speaks: bool) -> None:
    """Each kernel waits 7 µs; below 5 % of the step that is not worth a word."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 980 - 10 * n)
        storm(trace, start + 990 - 10 * n, n, 3, 7)

    said = found(run_of(tmp_path, 2, step), "small_kernels")
    assert len(said) == speaks
    for d in said:
        assert d.gain_ms == pytest.approx(n * 7 / 1000)
        numbers = evidence(d)
        assert numbers["kernels below 10 µs in a step"] == n
        assert numbers["their share of the kernels"] == pytest.approx(n / (n + 1))
        assert numbers["of them in aten::mul_"] == n
        assert numbers["waits for launches in aten::mul_"] == pytest.approx(n * 7)
        assert "torch.compile" in d.remedy and d.severity == "warning"


def test_an_optimizer_has_its_own_remedy(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 500)
        trace.annotation("Optimizer.step#AdamW.step", start + 508, 440)
        storm(trace, start + 510, 40, 3, 7)

    (said,) = found(run_of(tmp_path, 1, step), "small_kernels")
    assert "fused=True" in said.remedy and evidence(said)["of them in AdamW.step"] == 40


def test_long_stalls_before_small_kernels_and_waits_of_another_cause_do_not_count(tmp_path: Path) -> None:
    def stalled(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        compute(trace, start + 10, 100)
        trace.op("aten::add", start + 480, 8, dims=[[64]])
        trace.launch("vectorized_elementwise_kernel", at=start + 488, start=start + 495, dur=3)  # 385 µs after
        storm(trace, start + 500, 3, 3, 0.6)

    assert found(run_of(tmp_path, 1, stalled), "small_kernels") == []

    def waiting(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        for i in range(40):  # the host asks the device for a number before each
            at = start + 10 + 20 * i
            trace.runtime("cudaStreamSynchronize", at, 15, 9000 + i)
            trace.op("aten::add", at + 15, 2, dims=[[64]])
            trace.launch("vectorized_elementwise_kernel", at=at + 15.5, start=at + 16, dur=4, call=1)

    # Only the half µs after each launch call is launching.
    assert found(run_of(tmp_path / "sync", 1, waiting), "small_kernels") == []


def test_silent_where_long_kernels_wait_and_without_a_gpu(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        storm(trace, start + 10, 40, 14, 7)

    assert found(run_of(tmp_path, 1, step), "small_kernels") == []
    import tb_chopper
    trace = TraceBuilder()
    for number in range(STEPS):
        trace.step(number, STEP * number, 990)
        for i in range(40):
            trace.op("aten::mul", STEP * number + 10 + 10 * i, 3)
    trace.write(tmp_path / "cpu" / "rank0.pt.trace.json")
    assert found(tb_chopper.open_run(tmp_path / "cpu"), "small_kernels") == []
