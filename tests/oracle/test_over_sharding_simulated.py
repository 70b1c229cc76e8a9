"""Tensor parallelism halved in a simulated node: what the rule foretells, and what the same work then takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import over_sharding
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate


def node(folder: Path, tensor: int, shape: str) -> Run:
    (path,) = simulate(folder, Options(preset="healthy", ranks=8, layers=3, steps=4, tensor=tensor, shape=shape))
    return tb_chopper.open_run(path)


def transfer_ms(run: Run) -> float:
    groups = run.group_islands()
    return float(groups.loc[groups["role"] == "tensor", "transfer_us"].mean()) / 1000


def test_half_as_many_ranks(tmp_path: Path):
    """The same global batch over 8 ranks, and over 4 ranks twice: half of the bytes each, and 3/4 in place of 7/8."""
    wide, half = node(tmp_path / "wide", 8, "b4s4"), node(tmp_path / "half", 4, "b2s4")
    (found,) = over_sharding.rule(wide)
    saved = transfer_ms(wide) - transfer_ms(half)
    assert found.gain_ms == pytest.approx(saved, rel=0.05)
    assert found.gain_ms == pytest.approx(transfer_ms(wide) * 4 / 7)
    steps = [float(r.own_times.groupby("step")["time_us"].max().median()) / 1000 for r in (wide, half)]
    assert found.gain_ms == pytest.approx(steps[0] - steps[1], rel=0.15)  # FSDP over two costs and hides, too
