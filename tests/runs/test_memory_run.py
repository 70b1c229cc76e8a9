"""Real trainings that keep what they should not, and that wait for their data: what was planted is what is told."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import data_stall, memory_growth

pytest.importorskip("torch")

KEPT, SAMPLE_MS, BATCH = 2 * 2**20, 4, 8
TRAIN = f"""
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset
from torch_ext import annotate, chopper_trace_handler

class Slow(Dataset):
    def __len__(self):
        return {8 * BATCH}

    def __getitem__(self, i):
        time.sleep({SAMPLE_MS / 1000})
        return torch.randn(256)

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
annotate(model)
optimizer = torch.optim.AdamW(model.parameters())
kept, size = [], int(sys.argv[2])
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=6), profile_memory=True,
             record_shapes=True, on_trace_ready=chopper_trace_handler(sys.argv[1], model=model, telemetry=False)) as p:
    for batch in DataLoader(Slow(), batch_size={BATCH}):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if size:
            kept.append(torch.zeros(size // 4))
        p.step()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tb_chopper.Run]:
    @functools.cache
    def train(kept: int) -> tb_chopper.Run:
        folder = tmp_path_factory.mktemp("trained")
        subprocess.run([sys.executable, "-c", TRAIN, str(folder), str(kept)], check=True, timeout=300,
                       capture_output=True)
        return tb_chopper.open_run(folder)

    return train


def test_a_list_that_keeps_a_tensor_of_every_step(trained: Callable[[int], tb_chopper.Run]):
    run = trained(KEPT)
    row = run.memory().iloc[0]
    assert row["steady"] and row["growth_per_step_bytes"] == pytest.approx(KEPT, rel=0.05)
    found, = memory_growth.rule(run)
    assert "memory of process 0 grows by 2 MiB in every step" in found.message


def test_a_clean_training_waits_for_data_and_keeps_nothing(trained: Callable[[int], tb_chopper.Run]):
    run = trained(0)
    assert memory_growth.rule(run) == [] == data_stall.rule(run), "no GPU: nothing idles"
    loading = run.host_calls(by=["kind", "step"]).query("kind == 'loader'")
    assert len(loading) == 6 and (loading["time_us"] >= BATCH * SAMPLE_MS * 1000).all()
    table = run.view("host").tables["calls"].rows
    assert table["step_us"].tolist() == [pytest.approx(loading["time_us"].sum() / 6)]


def test_parameters_of_the_module_table(trained: Callable[[int], tb_chopper.Run]):
    """Four linear layers of 256 · 256 + 256 float32 parameters, Adam: 16 bytes each; one process divides nothing."""
    row = trained(0).model_state().iloc[0]
    assert row["parameters"] == 4 * (256 * 256 + 256) and row["state_bytes"] == 16 * row["parameters"]
    assert (row["optimizer"], row["plan"], row["assumed"]) == ("AdamW", "not divided", "")


@pytest.mark.parametrize("kind", ["fsdp2", "tp", "pp+interleaved"])
def test_what_the_ranks_hold_adds_up_to_the_model(recorded: Callable[[str], Path], kind: str):
    """Whatever divides it: shards, halves of matrices, or stages, several of which are on one rank."""
    whole = tb_chopper.open_run(recorded("ddp")).model_state()["parameters"]
    assert len(whole) == 2 and whole.nunique() == 1, "DDP divides nothing"
    rows = tb_chopper.open_run(recorded(kind)).model_state()
    assert rows["parameters"].sum() == whole[0] > 0
    assert (rows["bytes_per_parameter"] == 16).all() and (rows["optimizer"] == "AdamW").all()
