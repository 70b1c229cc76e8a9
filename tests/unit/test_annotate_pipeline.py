"""Scopes of pipeline schedules: what a schedule of one process alone writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile

from torch_ext import annotate_pipeline, sidecar

pytestmark = pytest.mark.torch
MICROBATCHES = 3


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def schedule(cls: str, n_stages: int = 1) -> Any:
    stages = [pipelining.PipelineStage(nn.Linear(4, 4), i, n_stages, torch.device("cpu")) for i in range(n_stages)]
    made = getattr(pipelining, cls)
    return made(stages if n_stages > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)


def scopes(of: Any) -> list[str]:
    """Names of the pipeline scopes of one step, in order of start."""
    batch = torch.ones(MICROBATCHES, 4)
    of.step(batch, target=batch)  # the first one finds out shapes
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        of.step(batch, target=batch)
    events = [e for e in recorded.events() if e.name.startswith(sidecar.PIPELINE_PREFIX)]
    return [e.name.removeprefix(sidecar.PIPELINE_PREFIX) for e in sorted(events, key=lambda e: e.time_range.start)]


def test_gpipe_is_all_forward_then_all_backward() -> None:
    made = schedule("ScheduleGPipe")
    annotate_pipeline(made)
    # The last stage's loss is a second scope of the same forward.
    forward = [f"F::stage0::mb{i}" for i in range(3) for _ in range(2)]
    assert scopes(made) == ["schedule::ScheduleGPipe::stages1::mb3::v1", *forward,
                            *(f"B::stage0::mb{i}" for i in range(3))]


def test_1f1b_of_one_stage_alternates() -> None:
    made = schedule("Schedule1F1B")
    annotate_pipeline(made)
    assert scopes(made)[1:] == [f"{kind}::stage0::mb{i}" for i in range(3) for kind in "FFB"]


@pytest.mark.parametrize(
    ("cls", "kinds"), [("ScheduleInterleaved1F1B", "FB"), ("ScheduleInterleavedZeroBubble", "FIW")])
def test_several_stages_per_process(cls: str, kinds: str) -> None:
    made = schedule(cls, 2)
    annotate_pipeline(made)
    found = scopes(made)
    assert found[0] == f"schedule::{cls}::stages2::mb3::v2"
    assert set(found[1:]) == {f"{k}::stage{s}::mb{m}" for k in kinds for s in range(2) for m in range(3)}


def test_annotating_again_replaces_and_remove_leaves_nothing() -> None:
    made = schedule("ScheduleGPipe")
    before = dict(made.__dict__), dict(made._stage.__dict__)
    annotate_pipeline(made)
    annotation = annotate_pipeline(made)
    assert scopes(made).count("B::stage0::mb0") == 1
    annotation.remove()
    assert scopes(made) == []
    assert made.__dict__.keys() == before[0].keys()
    assert "forward_one_chunk" not in made._stage.__dict__


def test_the_results_are_those_without_scopes() -> None:
    torch.manual_seed(0)
    made = schedule("ScheduleGPipe")
    batch, target, losses = torch.rand(3, 4), torch.rand(3, 4), []
    with annotate_pipeline(made):
        output = made.step(batch, target=target, losses=losses)
    whole = made._stage.submod(batch)
    assert torch.allclose(output, whole)
    assert torch.stack(losses).mean().item() == pytest.approx(nn.functional.mse_loss(whole, target).item())


def test_names_are_no_modules_and_survive_every_exporter() -> None:
    for name in (sidecar.pipeline_action_name("F", 3, 12), sidecar.pipeline_schedule_name('My"Schédule', 4, 8, 1)):
        assert name.isascii() and '"' not in name and "\\" not in name
        assert sidecar.scope_fqn(name) is None


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a schedule"):
        annotate_pipeline(nn.Linear(2, 2))
