"""Pipelines of a simulated node: every action and bubble against the planted ones, and what the rule makes of causes
that were planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.rules import pipeline_bubble
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate

BASE = Options(ranks=4, layers=8, steps=3, pipeline=4, microbatches=8, balanced=True, equal_gpus=True)
PLANS = {
    "1F1B": BASE, "GPipe": replace(BASE, schedule="gpipe"),
    "interleaved": replace(BASE, schedule="interleaved", virtual=2),
    "two pipelines": replace(BASE, pipeline=2, microbatches=4),
}  # fmt: skip


def made(folder: Path, options: Options) -> tuple[Run, pd.DataFrame]:
    """The run and its planted actions."""
    path = simulate(folder, options)[0]
    truth = pd.read_parquet(path / "truth/pipeline.parquet").rename(columns={"rank": "gpu"})
    return tb_chopper.open_run(path), truth


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run, pd.DataFrame]:
    return request.param, *made(tmp_path_factory.mktemp("run"), PLANS[request.param])


def test_every_action_is_the_planted_one(plan: tuple[str, Run, pd.DataFrame]) -> None:
    _, run, truth = plan
    key = ["gpu", "step", "kind", "stage", "microbatch"]
    both = run.pipeline_actions().merge(truth, on=key, how="outer", suffixes=("", "_planted"), validate="one_to_one")
    assert (both["start_ns"] == both["start_ns_planted"]).all()
    assert (both["end_ns"] == both["end_ns_planted"]).all()


def test_bubbles_add_up_to_the_planted_ones(plan: tuple[str, Run, pd.DataFrame]) -> None:
    """Planted: before each action, from the first start of its pipeline on."""
    _, run, truth = plan
    gone = run.pipeline_bubbles()
    before = gone[gone["kind"].notna()].groupby(["gpu", "step"])["bubble_us"].sum() * 1000
    planted = truth.groupby(["gpu", "step"])["bubble_ns"].sum()
    assert before.to_numpy() == pytest.approx(planted.to_numpy(), abs=1)


def test_messages_are_matched_and_receivers_wait(plan: tuple[str, Run, pd.DataFrame]) -> None:
    """Every microbatch crosses every border between stages of different ranks twice; who receives waits for who sends,
    and all waiting of a GPU fits into the time in which it computes nothing."""
    _, run, truth = plan
    sent = run.collectives(where={"name": "send_recv"})
    stages, microbatches = truth["stage"].nunique(), truth["microbatch"].nunique()
    pipelines = run.pipeline_actions()["pipeline"].nunique()
    assert sent.groupby("step").size().tolist() == [2 * microbatches * (stages - 1) * pipelines] * 3
    assert set(sent["n_ranks"]) == {2} and set(sent["source"]) == {"measured"}
    halves = run.arrivals(where={"name": ["send", "recv"]})
    starts = halves.pivot(index="instance", columns="name", values="start_ns")
    wait = halves[halves["name"] == "recv"].set_index("instance")["wait_ns"]
    assert (wait == (starts["send"] - starts["recv"]).clip(lower=0)).all()
    exposed = run.timeline("gpu").set_index("gpu")["exposed_communication_us"]
    waits = run.arrivals().groupby("gpu")["exposed_wait_ns"].sum() / 1000
    assert (waits <= exposed + 1).all()


def test_schedule_and_theory(plan: tuple[str, Run, pd.DataFrame]) -> None:
    """p 4, m 8; v 2 interleaved; two pipelines of p 2, m 4. What is above the theory is not much in equal stages."""
    name, run, _ = plan
    rows = run.pipeline("gpu")
    assert set(rows["schedule"]) == {"1F1B" if name == "two pipelines" else name}
    theory = {"interleaved": 3 / (2 * 8 + 3), "two pipelines": 1 / (4 + 1)}.get(name, 3 / (8 + 3))
    assert rows["theory_share"].to_numpy() == pytest.approx(np.full(4, theory))
    if name == "two pipelines":
        places = run.pipeline_actions().drop_duplicates("gpu").set_index("gpu")[["pipeline", "position"]].sort_index()
        assert places.to_numpy().tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    else:
        assert (rows["bubble_share"] - theory).between(0, 0.09).all()
    cost = run.pipeline_what_if
    parts = cost[["theory_us", "imbalance_us", "variation_us", "transfer_excess_us"]].sum(axis=1)
    assert parts.to_numpy() == pytest.approx(cost["total_us"].to_numpy(), rel=1e-3)


def test_the_stage_with_head_and_loss_is_named(tmp_path: Path) -> None:
    """Without `balanced` the last stage has them; the gain against the balanced node, of the same schedule, is right
    within what the head and the loss add to the work."""
    uneven, _ = made(tmp_path / "uneven", replace(BASE, balanced=False))
    (found,) = [d for d in pipeline_bubble.rule(uneven) if "unequal" in d.title]
    assert found.gpus == (3,)
    assert found.cause == "stage 3 has more to compute than the others"
    stages = uneven.pipeline_stages()
    # 1F1B: as many microbatches as there are pass through the slowest stage one after the other.
    longer = (stages["microbatch_us"].max() - stages["microbatch_us"].mean()) / 1000
    assert found.gain_ms == pytest.approx(7 * longer, rel=0.05)


def test_two_stages_per_rank_save_what_the_rule_says(tmp_path: Path) -> None:
    """The same layers and microbatches, interleaved: the saving is the predicted one within 5 %."""
    before, _ = made(tmp_path / "1f1b", BASE)
    after, _ = made(tmp_path / "interleaved", PLANS["interleaved"])
    (found,) = [d for d in pipeline_bubble.rule(before) if "fills" in d.title]
    saved = (before.pipeline_what_if["total_us"].mean() - after.pipeline_what_if["total_us"].mean()) / 1000
    assert found.gain_ms == pytest.approx(saved, rel=0.05)


def test_a_slow_gpu_is_its_clock_and_not_its_layers(tmp_path: Path) -> None:
    slow, _ = made(tmp_path / "slow", replace(BASE, slow={1: 0.6}))
    (found,) = [d for d in pipeline_bubble.rule(slow) if "unequal" in d.title]
    assert found.gpus == (1,)
    assert found.cause == "the clock of GPU 1 is lower than that of the others"


def test_equal_stages_are_not_called_unequal(plan: tuple[str, Run, pd.DataFrame]) -> None:
    name, run, _ = plan
    assert name == "two pipelines" or not [d for d in pipeline_bubble.rule(run) if "unequal" in d.title]
