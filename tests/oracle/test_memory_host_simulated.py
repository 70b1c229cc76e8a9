"""Memory and stalls of simulated nodes against what was planted: another program wrote the traces by other formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend.rules import data_stall, memory_growth
from tb_chopper.backend.simulate import Options, simulate

RANKS, LATE, LATE_MS, GROWS, GROWTH_MIB = 4, 2, 8.0, 1, 64
MINE = {"data_stall", "synchronizing_calls", "allocator_calls", "garbage_collection", "memory_limit", "memory_growth",
        "memory_imbalance"}
Made = Callable[..., tb_chopper.Run]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(steps: int = 6, **faults: Any) -> tb_chopper.Run:
        options = Options(preset="healthy", ranks=RANKS, layers=4, steps=steps, memory=True, **faults)
        return tb_chopper.open_run(simulate(tmp_path_factory.mktemp("made"), options)[0])

    return make


@pytest.fixture(scope="module")
def clean(made: Made) -> tb_chopper.Run:
    return made()


def test_a_clean_run_has_no_diagnosis_of_ours(clean: tb_chopper.Run):
    assert MINE & {f.code for f in clean.diagnosis} == set()


def test_the_floor_is_the_expected_state(clean: tb_chopper.Run):
    """bfloat16 parameters and two moments, divided by the ranks, in blocks of 512 bytes."""
    rows = clean.model_state()
    assert rows["floor_ratio"].tolist() == pytest.approx([1.0] * RANKS, rel=1e-3)
    assert (rows["optimizer"] == "AdamW").all() and (rows["plan"] == f"dp_shard {RANKS}").all()
    assert (rows["assumed"] == "").all()


def test_planted_growth(made: Made):
    run = made(memory_growth={GROWS: GROWTH_MIB})
    found, = memory_growth.rule(run)
    assert found.gpus == (GROWS,)
    assert {e.label: e.value for e in found.evidence}["growth per step"] == pytest.approx(GROWTH_MIB * 2**20, rel=0.05)
    assert {f.code for f in run.diagnosis} & MINE == {"memory_growth"}


def test_growth_while_gradients_accumulate(made: Made):
    """The optimizer runs in every third step: between, the gradients stand on the floor."""
    run = made(memory_growth={GROWS: GROWTH_MIB}, optimizer_every=3, steps=9)
    table = run.memory().set_index("gpu")
    assert table["growth_per_step_bytes"][GROWS] == pytest.approx(GROWTH_MIB * 2**20, rel=0.05)
    assert table["steady"].to_dict() == {gpu: gpu == GROWS for gpu in range(RANKS)}


def test_planted_late_loader(made: Made, clean: tb_chopper.Run):
    """The gain is what was planted, and what the step became longer by."""
    run = made(late_loader={LATE: LATE_MS})
    found, = data_stall.rule(run)
    assert found.gpus == (LATE,)
    assert found.gain_ms == pytest.approx(LATE_MS, rel=0.05)
    longer = [float(r.throughput()["iteration_ms"].iloc[-1]) for r in (run, clean)]
    assert found.gain_ms == pytest.approx(longer[0] - longer[1], rel=0.05)
    assert {f.code for f in run.diagnosis} & (MINE | {"late_host", "low_utilization", "slow_gpu"}) == {"data_stall"}


def test_planted_faults_are_in_the_truth(made: Made, tmp_path: Path):
    """Both at once: each is told by its own size."""
    folder = simulate(tmp_path, Options(preset="healthy", ranks=RANKS, layers=4, steps=6, memory=True,
                                        memory_growth={GROWS: GROWTH_MIB}, late_loader={LATE: LATE_MS}))[0]
    planted = {p["fault"] for p in json.loads(next((folder / "truth").glob("*.json")).read_text())["planted"]}
    codes = {f.code for f in tb_chopper.open_run(folder).diagnosis} & MINE
    assert len(planted) == 2 and codes == {"memory_growth", "data_stall"}


def test_stages_of_a_pipeline_are_no_peers(tmp_path: Path):
    """1F1B: the first stage keeps as many microbatches as there are stages, the last one only one: no fault."""
    options = Options(preset="healthy", ranks=RANKS, layers=4, steps=4, memory=True, pipeline=RANKS)
    run = tb_chopper.open_run(simulate(tmp_path, options)[0])
    peaks = run.memory()["peak_bytes"]
    assert peaks[0] > 1.5 * peaks[3], "and yet"
    assert MINE & {f.code for f in run.diagnosis} == set()
    assert run.model_state()["floor_ratio"].tolist() == pytest.approx([1.0] * RANKS, rel=1e-3)
