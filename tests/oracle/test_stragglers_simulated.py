"""A slow GPU planted in a simulated node: what the analysis says it costs, against the same node without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.simulate import config as presets

SLOW, FACTOR = 1, 0.55


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp1", "fsdp2"])
def pair(request, tmp_path_factory) -> tuple[Run, Run, pd.DataFrame]:
    """A node of four GPUs, the same with GPU 1 at 55 % of its clock, and the truth of that."""
    runs = []
    for slow in ({}, {SLOW: FACTOR}):
        options = Options(ranks=4, layers=5, steps=4, fsdp=request.param, jitter=0.01, slow=slow)
        runs.append(simulate(tmp_path_factory.mktemp("run"), options)[0])
    truth = pd.read_parquet(runs[1] / "truth/kernels.parquet")
    return tb_chopper.open_run(runs[0]), tb_chopper.open_run(runs[1]), truth


def step_us(run: Run) -> float:
    return float(run.throughput().iloc[-1]["iteration_ms"]) * 1000


def test_the_planted_gpu_comes_first_and_its_clock_explains_it(pair):
    first = pair[1].stragglers().iloc[0]
    assert first["gpu"] == SLOW
    assert first["explained_by"] == "clock"
    assert first["exposed_wait_us"] < 0.02 * pair[1].stragglers()["exposed_wait_us"].max()


COSTS = {
    # name: healthy node, slow GPUs, within which share of the cost
    "one": (Options("healthy"), {1: 0.8}, 0.05),
    "a-little": (Options("healthy"), {1: 0.93}, 0.05),
    "fsdp1": (Options("healthy", fsdp=1), {3: 0.8}, 0.05),
    "two-of-four": (Options("healthy"), {1: 0.8, 2: 0.85}, 0.05),
    "short-steps": (Options("healthy", shape="b1s2"), {0: 0.8}, 0.05),
    # At the power cap the middle of two models of what the others do when they wait less.
    "capped": (Options("mi300x-llama3-8b", ranks=4, layers=4, optimizer_every=1, equal_gpus=True), {1: 0.8}, 0.07),
    "capped-fsdp1": (Options("mi300x-llama3-8b", ranks=4, layers=4, optimizer_every=1, equal_gpus=True, fsdp=1),
                     {1: 0.8}, 0.07),
    "capped-cuda": (Options("h200-llama3-8b", ranks=4, layers=4, optimizer_every=1, equal_gpus=True), {2: 0.85}, 0.07),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_slow_gpus_cost(name: str, tmp_path):
    """Against the same node, seed and work without them."""
    options, slow, within = COSTS[name]
    options = replace(options, steps=6, compress=False)
    runs = [tb_chopper.open_run(simulate(tmp_path / part, replace(options, slow=planted))[0])
            for part, planted in (("clean", {}), ("slow", slow))]
    cost = step_us(runs[1]) - step_us(runs[0])
    found = runs[1].gain(list(slow))
    assert found.us == pytest.approx(cost, rel=within)
    assert found.at_least_us * (1 - within) <= cost <= found.at_most_us * (1 + within)


def test_the_hot_gpus_of_the_published_node(tmp_path, monkeypatch):
    """GPUs 2 and 6 leak more than the others; one alone would gain nothing. Against the node with usual GPUs there."""
    options = Options("mi300x-llama3-8b", layers=3, steps=6, optimizer_every=1, compress=False)
    hot = tb_chopper.open_run(simulate(tmp_path / "hot", options)[0])
    usual = presets.Silicon((-10.0, -18.0, -15.0, -13.0, -22.0, -9.0, -15.0, -16.0))
    published = presets.PRESETS["mi300x-llama3-8b"]
    monkeypatch.setitem(presets.PRESETS, "mi300x-llama3-8b", replace(published, silicon=usual))
    cost = step_us(hot) - step_us(tb_chopper.open_run(simulate(tmp_path / "usual", options)[0]))
    assert hot.what_if().set_index("gpu")["gain_us"].loc[[2, 6]].max() < 0.1 * cost
    said, = [d for d in hot.diagnosis if d.code == "slow_gpu"]
    assert said.gpus == (2, 6)
    assert said.cause == "hotter than the others, at a lower clock"
    assert said.gain_ms == pytest.approx(cost / 1000, rel=0.07)


def test_slowness_is_what_the_clocks_make_of_it(pair):
    """Over the kernels that no communication overlaps, from the true clocks and cycles."""
    truth = pair[2]
    free = truth[(truth["kind"] == "compute") & truth["launched"]]
    key = ["step", "phase", "layer", "operation"]
    free = free.sort_values("start_ns").assign(k=lambda t: t.groupby(["rank", *key]).cumcount())
    alone = free.groupby([*key, "k"])["overlap_ns"].transform("max") == 0
    free = free[alone]
    duration = free["end_ns"] - free["start_ns"]
    median = duration.groupby([free[c] for c in [*key, "k"]]).transform("median")
    expected = duration.groupby(free["rank"]).sum() / median.groupby(free["rank"]).sum()
    found = pair[1].imbalance().set_index("gpu")["slowness"]
    assert found.to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-9)
    assert found[SLOW] > 1.2


def test_leads_against_the_true_starts(pair):
    run, truth = pair[1], pair[2]
    true = truth[(truth["kind"] == "compute") & truth["launched"]].sort_values("start_ns")
    key = ["step", "phase", "layer", "operation"]
    true = true.assign(k=true.groupby(["rank", *key]).cumcount())
    lead = true.groupby([*key, "k"])["start_ns"].transform("max") - true["start_ns"]
    expected = lead.groupby([true["rank"], true["step"]]).sum() / 1000
    found = run.step_leads().set_index(["gpu", "step"])["lead_us"]
    assert np.asarray(found) == pytest.approx(np.asarray(expected))
    assert found.loc[SLOW].sum() < 0.02 * found.sum()
