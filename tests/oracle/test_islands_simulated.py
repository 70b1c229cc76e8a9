"""Islands planted in a simulated node: their links, what spans them, and what they cost against the node without."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.metrics.topology import as_text
from tb_chopper.backend.rules import islands, slow_link
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate

FACTOR = 0.2
"""bandwidth between the islands over the one inside"""


def node(folder: Path, factor: float | None, **plan: int) -> Run:
    (path,) = simulate(folder, Options(preset="healthy", ranks=4, layers=2, steps=4, islands=factor, **plan))
    return tb_chopper.open_run(path)


def step_ms(run: Run) -> float:
    return float(run.own_times.groupby("step")["time_us"].max().median()) / 1000


@pytest.mark.parametrize("plan", [{}, {"tensor": 2}, {"tensor": 4}], ids=["fsdp", "tensor2", "tensor4"])
def test_what_islands_cost(tmp_path: Path, plan: dict[str, int]):
    whole, split = node(tmp_path / "whole", None, **plan), node(tmp_path / "split", FACTOR, **plan)
    cost = step_ms(split) - step_ms(whole)
    assert cost > 0.05 * step_ms(split)
    (found,) = islands.rule(split)
    assert found.gain_ms == pytest.approx(cost, rel=0.05)
    assert "the islands 0-1 | 2-3;" in found.message
    assert islands.rule(whole) == []
    assert [d.code for d in split.diagnosis if d.code == "slow_link"] == []  # the cause stands for the symptom
    assert slow_link.rule(whole) == []


def test_which_groups_span_them_and_how_fast_they_are(tmp_path: Path):
    """Tensor groups lie inside an island, those that shard parameters span both."""
    run = node(tmp_path, FACTOR, tensor=2)
    assert set(run.topology.links.loc[run.topology.links["fast"], "link"]) == {"XGMI"}
    groups = run.group_islands()
    told = groups[groups["role"].isin(("tensor", "shard"))]
    assert {(r, as_text(i), bool(s)) for r, i, s in zip(told["role"], told["islands"], told["spans"], strict=True)} == {
        ("tensor", "0-1", False), ("tensor", "2-3", False), ("shard", "0 | 2", True), ("shard", "1 | 3", True)}
    shards = told[told["spans"]]
    assert set(shards["within_source"]) == {"measured"}
    assert shards["ratio"].tolist() == pytest.approx([FACTOR] * 2, rel=0.06)  # latency weighs less in long transfers
