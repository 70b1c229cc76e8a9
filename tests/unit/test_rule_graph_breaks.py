"""Graph breaks as a diagnosis: the gain is the idle time of the GPU in them (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import TraceBuilder
from tests.unit.test_fusion_graph_breaks import graph, region
from tests.unit.test_rules import evidence, found, run_of


@pytest.mark.parametrize(("late", "speaks"), [(40, True), (6, False), (0, False)])
def test_the_gain_is_the_idle_time_in_the_breaks(tmp_path: Path, late: float, speaks: bool) -> None:
    """An eager kernel and the resumed region start `late` after the one before has ended."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        region(trace, "0/0", start + 10, 300)
        graph(trace, start + 12, [(start + 20, 100)])
        trace.op("aten::nonzero", start + 112 + late, 6, dims=[[8]])
        trace.launch("nonzero_kernel", at=start + 114 + late, start=start + 120 + late, dur=20)
        region(trace, "1/0", start + 130 + 2 * late, 80)
        graph(trace, start + 134 + 2 * late, [(start + 140 + 2 * late, 600)])

    said = found(run_of(tmp_path, 1, step), "graph_breaks")
    assert len(said) == speaks
    for d in said:
        assert d.gain_ms == pytest.approx(2 * late / 1000)
        assert evidence(d) == pytest.approx({
            "graph breaks in a step": 1, "compiled regions in a step": 2, "eager kernels in a step": 1,
            "their time in a step": 20, "GPU idle in a step": 2 * late})
        assert "aten::nonzero" in d.message


def test_silent_without_breaks(tmp_path: Path) -> None:
    """Two regions after each other, the GPU idle between them: nothing broke."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        for i in range(2):
            region(trace, f"{i}/0", start + 10 + 200 * i, 100)
            graph(trace, start + 12 + 200 * i, [(start + 20 + 200 * i, 50)])

    assert found(run_of(tmp_path, 1, step), "graph_breaks") == []
