"""Tensor parallelism of the example, run here over gloo, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tb_chopper
from tests.runs.record import LAYERS, STEPS


def test_exchanges_of_every_layer(recorded: Callable[[str], Path]) -> None:
    """Forward reduces after attention and MLP; backward before q, k, v, gate and up. The head gathers in forward and
    reduces in backward."""
    run = tb_chopper.open_run(recorded("tp"))
    rows = run.exchanges(["role", "layer", "phase", "name"])
    assert set(rows["role"]) == {"tensor"}
    inside = rows[rows["layer"].notna()]
    assert inside["layer"].nunique() == LAYERS
    assert set(inside["name"]) == {"all_reduce"}
    assert inside.loc[inside["phase"] == "forward", "n_per_step"].tolist() == [2] * LAYERS
    assert inside.loc[inside["phase"] == "backward", "n_per_step"].tolist() == [5] * LAYERS
    assert (inside["n"] == inside["n_per_step"] * STEPS).all()
    head = rows[rows["layer"].isna()].set_index(["phase", "name"])["n_per_step"]
    assert head.to_dict() == {("forward", "all_gather"): 1, ("backward", "all_reduce"): 1}
    assert ((inside["exposed_us"] > 0) & (inside["exposed_us"] <= inside["elapsed_us"])).all()
    view = run.view("parallelism")
    note = next(k.note for k in view.key_figures if k.label == "Tensor exchange, exposed")
    assert note == "7 per layer and step"
