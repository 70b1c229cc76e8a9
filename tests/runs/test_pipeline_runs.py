"""Pipeline and tensor parallelism of the example, run here over gloo: strict about what is done in which order, silent
about how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import tb_chopper
from tests.runs.record import STEPS

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def order(done: pd.DataFrame, gpu: int, step: int) -> str:
    """Actions of a rank in a step: F0 F1 B0 ...; of several stages: F0.2 (microbatch 0, stage 2)."""
    own = done[(done["gpu"] == gpu) & (done["step"] == step)]
    several = own["stage"].nunique() > 1
    return " ".join(f"{a.kind}{a.microbatch}{f'.{a.stage}' if several else ''}" for a in own.itertuples())


def check(run: tb_chopper.Run, schedule: str, ranks: int, stages: int, microbatches: int) -> pd.DataFrame:
    """What holds for every pipeline; its actions."""
    found = run.pipeline()
    assert set(found["schedule"]) == {schedule}
    assert set(found["n_stages"]) == {stages}
    assert set(found["microbatches"]) == {microbatches}
    assert len(found) == ranks * STEPS
    assert found["bubble_share"].between(0, 1).all()
    parts = found["busy_us"] + found["gaps_us"] + found["bubble_us"]
    assert parts.tolist() == pytest.approx(found["total_us"].tolist())
    assert (found["gaps_us"] >= 0).all()
    cost = run.pipeline_what_if
    assert cost["complete"].all()
    assert (cost["prompt_us"] <= cost["total_us"] + 0.01).all()  # nobody computes before its input is there
    assert run.process_groups()["role"].tolist() == ["pipeline"]
    view = run.view("parallelism")
    assert schedule.lower() in view.headline.lower()
    assert len(view.figures["pipeline"].data)
    return run.pipeline_actions()


def test_gpipe(recorded: Callable[[str], Path]) -> None:
    done = check(tb_chopper.open_run(recorded("pp+gpipe")), "GPipe", 4, 4, 4)
    for step in done["step"].unique():
        assert {order(done, gpu, step) for gpu in range(4)} == {"F0 F1 F2 F3 B0 B1 B2 B3"}


def test_1f1b(recorded: Callable[[str], Path]) -> None:
    """Rank r runs 4 − r forwards before its first backward, then one of each."""
    done = check(tb_chopper.open_run(recorded("pp+1f1b")), "1F1B", 4, 4, 8)
    for step in done["step"].unique():
        assert order(done, 0, step) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
        assert order(done, 2, step) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"
        assert order(done, 3, step) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved(recorded: Callable[[str], Path]) -> None:
    done = check(tb_chopper.open_run(recorded("pp+interleaved")), "interleaved", 2, 4, 4)
    for step in done["step"].unique():
        first = "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0"
        assert order(done, 0, step) == first


def test_zero_bubble(recorded: Callable[[str], Path]) -> None:
    run = tb_chopper.open_run(recorded("pp+zero-bubble"))
    done = check(run, "zero bubble", 2, 4, 4)
    per_step = done.groupby(["step", "gpu", "kind"]).size().unstack()
    # Stage 0 computes no gradient of its input: its four I launch nothing.
    assert per_step.loc[(slice(None), 0), :].to_numpy().tolist() == [[8, 4, 8]] * STEPS
    assert per_step.loc[(slice(None), 1), :].to_numpy().tolist() == [[8, 8, 8]] * STEPS


def test_scopes_of_the_pipeline_leave_attribution_alone(recorded: Callable[[str], Path]) -> None:
    """Every layer has work in forward and backward on the rank that holds its stage, and nowhere else; no operation
    has the name of a pipeline scope."""
    run = tb_chopper.open_run(recorded("pp+1f1b"))
    kernels = run.kernels[run.kernels["layer"].notna()]
    for gpu in range(4):
        own = kernels[kernels["gpu"] == gpu]
        assert set(own["layer"]) == {f"layers.{gpu}"}
        assert set(own["phase"]) == {"forward", "backward"}
    assert not run.kernels["operation"].astype(str).str.contains("pp::").any()


def test_every_microbatch_crosses_every_border_twice(recorded: Callable[[str], Path]) -> None:
    """microbatches · borders between stages · (output forward, gradient back)"""
    for kind, messages in (("pp+gpipe", 4 * 3 * 2), ("pp+1f1b", 8 * 3 * 2), ("pp+interleaved", 4 * 3 * 2)):
        run = tb_chopper.open_run(recorded(kind))
        sent = run.kernels[run.kernels["name"].astype(str) == "gloo:send"]
        assert sent.groupby("step").size().tolist() == [messages] * STEPS


def test_tensor_parallelism(recorded: Callable[[str], Path]) -> None:
    """All-reduces: in forward after attention and MLP of each of 4 layers; in backward before q, k, v, gate and up of
    each, and before the head. No pipeline."""
    run = tb_chopper.open_run(recorded("tp"))
    assert len(run.actions) == len(run.pipeline()) == 0
    assert run.process_groups()["role"].tolist() == ["tensor"]
    each = run.collectives(by=["phase", "step"], where={"name": "all_reduce"}).groupby("phase")["n"]
    assert each.get_group("forward").tolist() == [4 * 2] * STEPS
    assert each.get_group("backward").tolist() == [4 * 5 + 1] * STEPS
    assert run.view("parallelism").headline
