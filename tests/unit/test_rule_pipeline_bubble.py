"""Bubbles of a pipeline: gains by hand, and where the rule keeps silent (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import pipeline_bubble
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tests.builders import TraceBuilder
from tests.unit.test_pipeline import INTERLEAVED, Row, gpipe, one_f_one_b, played

STEPS = 4


def record(folder: Path, rows: list[Row], rest: float = 100, scale: float = 10, gpus: tuple[int, ...] = (),
           scopes: bool = True) -> tb_chopper.Run:
    """Each of STEPS steps plays the schedule once (times · scale), then `rest` µs of optimizer."""
    length, world = max(row[5] for row in rows) * scale, len({row[0] for row in rows})
    for rank in gpus or sorted({row[0] for row in rows}):
        trace = TraceBuilder(rank=rank, world_size=world)
        for step in range(STEPS):
            at = step * (length + rest)
            trace.step(step, at, length + rest - 1)
            own = [row for row in rows if row[0] == rank]
            for i, (_, kind, stage, mb, start, end) in enumerate(own):
                # All is launched at once at the beginning: the device is what waits.
                call = at + 0.5 + 0.1 * i
                if scopes:
                    trace.annotation(f"chopper::pp::{kind}::stage{stage}::mb{mb}", call, 0.1)
                trace.launch("gemm", call + 0.01, at + 10 + scale * start, scale * (end - start), call=0.05)
            trace.launch("adamw", at + 9, at + 10 + length, rest)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def test_filling_and_draining(tmp_path: Path) -> None:
    """p 4, m 4, f 100, b 200 µs: 2100 µs with a bubble of 900; m 8 of half the size: 1650 with 450."""
    (found,) = pipeline_bubble.rule(record(tmp_path, played(one_f_one_b(4, 4), 10, 20)))
    assert isinstance(found, Diagnosis)
    assert found.gain_ms == pytest.approx(0.450)
    assert found.severity == "warning"
    assert found.message.startswith("1F1B over 4 ranks with 4 microbatches idles for 43%")
    assert "8 microbatches" in found.remedy and "ScheduleInterleaved1F1B" in found.remedy
    evidence = {e.label: e.value for e in found.evidence}
    assert evidence["bubble"] == pytest.approx(900 / 2200)
    assert evidence["bubble of the perfect schedule"] == pytest.approx(3 / 7)
    assert evidence["with twice the microbatches"] == pytest.approx(3 / 11)


def test_what_doubling_would_give_is_the_doubled_schedule(tmp_path: Path) -> None:
    """The gain against the schedule itself, with twice as many microbatches of half the size."""
    for name, orders in (("gpipe", gpipe), ("1f1b", one_f_one_b)):
        now, then = (max(row[5] for row in played(orders(4, m), f, 2 * f)) * 10 for m, f in ((4, 10), (8, 5)))
        (found,) = pipeline_bubble.rule(record(tmp_path / name, played(orders(4, 4), 10, 20)))
        assert found.gain_ms == pytest.approx((now - then) / 1000)


def test_unequal_stages(tmp_path: Path) -> None:
    """p 2, m 8; the second stage is twice as slow. Work 30 · 8 and 60 · 8, so 45 · 8 on average.
    Its length is 10 + 60 · 8 + 20; with equal stages 45 · 9."""
    rows: list[Row] = []
    for k in range(8):
        rows += [(0, "F", 0, k, 10 * k, 10 * k + 10), (1, "F", 1, k, 10 + 20 * k, 30 + 20 * k),
                 (1, "B", 1, k, 170 + 40 * k, 210 + 40 * k), (0, "B", 0, k, 210 + 40 * k, 230 + 40 * k)]
    run = record(tmp_path, rows)
    assert set(run.pipeline()["total_us"]) == {5100}
    (found,) = [d for d in pipeline_bubble.rule(run) if "unequal" in d.title]
    assert found.gain_ms == pytest.approx((510 - 45 * 9) * 10 / 1000)
    assert found.gpus == (1,)
    assert found.message.startswith("stage 1 takes 33% longer")
    assert "from stage 1 to stage 0" in found.remedy
    assert found.cause == "stage 1 has more to compute than the others"


def test_late_messages(tmp_path: Path) -> None:
    """Every message takes 5 µs of 10 µs forwards: what is lost is the length minus that without them."""
    with_, without = (played(one_f_one_b(4, 4), 10, 20, latency) for latency in (5, 0))
    (found,) = [d for d in pipeline_bubble.rule(record(tmp_path, with_)) if "late" in d.title]
    assert found.gain_ms == pytest.approx((max(r[5] for r in with_) - max(r[5] for r in without)) * 10 / 1000)


def test_silent_where_the_bubble_is_small(tmp_path: Path) -> None:
    """Interleaved, p 2, m 4: 300 µs of 2700, and of the step with its optimizer just above a tenth, or just below."""
    rows = played(INTERLEAVED, 10, 20)
    assert len(pipeline_bubble.rule(record(tmp_path / "tenth", rows, rest=290))) == 1
    assert pipeline_bubble.rule(record(tmp_path / "less", rows, rest=310)) == []


def test_silent_without_scopes_ranks_or_gpu(tmp_path: Path) -> None:
    rows = played(one_f_one_b(4, 4), 10, 20)
    assert pipeline_bubble.rule(record(tmp_path / "scopes", rows, scopes=False)) == []
    assert pipeline_bubble.rule(record(tmp_path / "ranks", rows, gpus=(0, 1))) == []
    assert pipeline_bubble.rule(record(tmp_path / "last", rows, gpus=(3,))) == []


def test_the_kernel_behind_the_largest_bubble_is_in_the_trace(tmp_path: Path) -> None:
    from tb_chopper.backend.views import trace_link

    run = record(tmp_path, played(one_f_one_b(4, 4), 10, 20))
    (found,) = pipeline_bubble.rule(run)
    row = trace_link.find(run.kernels, found.kernel)
    assert (row["gpu"], row["name"]) == (0, "gemm")
