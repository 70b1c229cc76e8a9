"""Collectives of the example, run here by two processes over gloo: no metadata, no group, no sequence numbers."""

from __future__ import annotations

import pytest

import tb_chopper
from tests.runs.record import LAYERS, STEPS

pytestmark = pytest.mark.torch


def test_fsdp2(recorded):
    """Layers and root: gathered in forward, and in backward all but the root, which stays; each reduced once.
    gloo reduces and scatters by an all-reduce; one more is the norm of the gradients."""
    run = tb_chopper.open_run(recorded("fsdp2"))
    each = run.collectives()
    assert (each["n_ranks"] == 2).all()
    assert (each["transfer_us"] > 0).all()
    per_step = run.collectives(by=["step", "name"]).set_index(["step", "name"])["n"]
    steps = per_step.index.get_level_values("step").unique()
    assert len(steps) == STEPS
    for step in steps:
        assert per_step[step, "all_gather"] == (LAYERS + 1) + LAYERS
        assert per_step[step, "all_reduce"] == (LAYERS + 1) + 1
    assert run.process_groups()[["role", "role_source", "size"]].to_numpy().tolist() == [["shard", "callers", 2]]


def test_ddp(recorded):
    run = tb_chopper.open_run(recorded("ddp"))
    each = run.collectives()
    assert each["name"].tolist() == ["broadcast", "all_reduce"] * STEPS
    assert (each["n_ranks"] == 2).all()
    assert run.process_groups()[["role", "role_source"]].to_numpy().tolist() == [["data", "pattern"]]
    barrier = run.gradient_barrier()
    assert len(barrier) == STEPS
    # One of the two waits for the other, as long as the collective's skew.
    waits = run.arrivals(where={"name": "all_reduce"}).groupby("step")["wait_ns"]
    assert (waits.min() == 0).all()
    assert waits.max().tolist() == pytest.approx((barrier["skew_us"] * 1000).tolist())
    assert len(run.clock_offsets) == 1


def test_one_process_waits_for_nobody(recorded):
    run = tb_chopper.open_run(recorded("plain"))
    assert len(run.collectives()) == len(run.process_groups()) == len(run.what_if()) == 0
