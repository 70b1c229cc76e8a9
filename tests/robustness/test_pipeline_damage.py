"""Pipelines of damaged and odd traces: no traceback, no number that does not add up."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import pipeline_bubble
from tb_chopper.backend.run import Run
from tests.builders import TraceBuilder
from tests.unit.test_pipeline import UNEVEN, traced
from tests.unit.test_rule_pipeline_bubble import record


def check(run: Run) -> None:
    """Everything that the tab and the rule ask for; the parts of each total add up."""
    rows = run.pipeline()
    parts = rows["busy_us"] + rows["gaps_us"] + rows["bubble_us"]
    assert parts.tolist() == pytest.approx(rows["total_us"].tolist())
    assert (rows[["busy_us", "gaps_us", "bubble_us"]] >= 0).all().all()
    phases = rows["fill_us"] + rows["steady_us"] + rows["drain_us"]
    reasons = rows[["wait_previous_us", "wait_next_us", "message_us", "own_us", "end_us"]].sum(axis=1)
    assert phases.tolist() == pytest.approx(rows["bubble_us"].tolist())
    assert reasons.tolist() == pytest.approx(rows["bubble_us"].tolist())
    json.dumps(run.view("parallelism").as_dict(), allow_nan=False)
    pipeline_bubble.rule(run)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8, 0.97])
def test_a_truncated_rank(tmp_path: Path, keep: float) -> None:
    record(tmp_path, UNEVEN)
    file = tmp_path / "rank1.pt.trace.json"
    text = file.read_text()
    file.write_text(text[: int(keep * len(text))])
    check(tb_chopper.open_run(tmp_path))


@pytest.mark.parametrize("seed", range(6))
def test_scopes_and_kernels_missing_doubled_or_moved(tmp_path: Path, seed: int) -> None:
    traced(tmp_path)
    chance = random.Random(seed)
    for file in tmp_path.iterdir():
        trace = json.loads(file.read_text())
        events = []
        for event in trace["traceEvents"]:
            if chance.random() < 0.8 or str(event.get("name", "")).startswith("ProfilerStep"):
                events += [event] * (1 if chance.random() < 0.9 else 2)
                if chance.random() < 0.1 and "dur" in event:
                    event["dur"] = chance.choice([0, -5, 1e6])
        trace["traceEvents"] = events
        file.write_text(json.dumps(trace))
    check(tb_chopper.open_run(tmp_path))


@pytest.mark.parametrize("name", [
    "chopper::pp::F::stage0::mb99999999999999999999", "chopper::pp::X::stage0::mb1", "chopper::pp::F::stage::mb",
    "chopper::pp::schedule::", "PP:()OVERLAP_F_B", "PP:99F", "Forward x", "chopper::pp::F::stage999999999::mb0",
])  # fmt: skip
def test_odd_names(tmp_path: Path, name: str) -> None:
    trace = TraceBuilder()
    trace.step(0, 0, 100)
    trace.annotation(name, 1, 50)
    trace.launch("gemm", 5, 10, 30)
    run = tb_chopper.open_run(trace.write(tmp_path / "w.pt.trace.json"))
    check(run)
    assert run.kernels["operation"].notna().all()


def test_actions_that_overlap_on_the_device(tmp_path: Path) -> None:
    """On two streams, as DualPipe runs them: no time counts twice."""
    trace = TraceBuilder()
    trace.step(0, 0, 400)
    actions = (("F", 0, 10, 7), ("B", 0, 60, 7), ("F", 1, 70, 8), ("B", 1, 120, 7))
    for i, (kind, mb, start, stream) in enumerate(actions):
        trace.annotation(f"chopper::pp::{kind}::stage0::mb{mb}", 1 + 5 * i, 4)
        trace.launch("gemm", 2 + 5 * i, start, 50, call=1, stream=stream)
    run = tb_chopper.open_run(trace.write(tmp_path / "w.pt.trace.json"))
    rows = run.pipeline()
    assert rows["total_us"].tolist() == [160]
    assert rows[["busy_us", "gaps_us", "bubble_us"]].to_numpy().tolist() == [[160, 0, 0]]
    check(run)
