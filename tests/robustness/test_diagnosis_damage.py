"""The diagnosis of traces that hold what no profiler means: every rule is silent or right, none fails."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.flops import operator_costs
from tb_chopper.backend.rules.diagnosis import Diagnosis, step_ms
from tests.builders import TraceBuilder

Event = dict[str, Any]


def kernels(event: Event) -> bool:
    return event.get("cat") == "kernel"


def operators(event: Event) -> bool:
    return event.get("cat") == "cpu_op"


def recorded(folder, which: Callable[[Event], bool], change: Callable[[Event], None]) -> tb_chopper.Run:
    for rank in range(2):
        t = TraceBuilder(rank=rank, world_size=2)
        for i in range(3):
            t.training_step(i, 1000 * i)
        for event in filter(which, t.events):
            change(event)
        t.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


def check(run: tb_chopper.Run) -> None:
    """No rule fails or warns, no number is none, no gain is negative or above the step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found, step = run.diagnosis, step_ms(run)
        run.overhead_breakdown()
        run.what_if()
        run.throughput()
    for f in found:
        assert isinstance(f, Diagnosis), f.message
        assert all(isinstance(e.value, str) or math.isfinite(e.value) for e in f.evidence), f.code
        assert f.gain_ms is None or (step is not None and 0 <= f.gain_ms <= step), f.code


ARGUMENTS: dict[str, tuple[Callable[[Event], bool], Event]] = {
    "shapes beyond memory": (operators, {"Input Dims": [[10**18, 10**18], [10**18, 10**18]]}),
    "negative shapes": (operators, {"Input Dims": [[-8, 8], [8, -8]]}),
    "shapes as text": (operators, {"Input Dims": "x"}),
    "lengths as text": (operators, {"Input Dims": [["a"], ["b"]]}),
    "lists in place of lengths": (operators, {"Input Dims": [[[[]]], [[8]]]}),
    "values that are no list": (operators, {"Concrete Inputs": 7}),
    "types that are no text": (operators, {"Input type": [None, 7]}),
    "types that are no list": (operators, {"Input type": 7}),
    "more types than shapes": (operators, {"Input type": ["float"] * 9}),
    "a grid as text": (kernels, {"grid": "x", "block": [[1]]}),
    "a negative grid": (kernels, {"grid": [-1, 1, 1], "block": [0, 0, 0]}),
    "numbers beyond float32": (kernels, {"blocks per SM": 1e308, "est. achieved occupancy %": 1e300}),
}


@pytest.mark.parametrize(("which", "args"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(tmp_path, which, args):
    check(recorded(tmp_path, which, lambda event: event["args"].update(args)))


TIMES: dict[str, Event] = {
    "no kernel takes time": {"dur": 0}, "negative durations": {"dur": -5},
    "all kernels at once": {"ts": 100, "dur": 800}, "no time at all": {"ts": 0, "dur": 0},
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_times(tmp_path, times):
    check(recorded(tmp_path, kernels, lambda event: event.update(times)))


def test_shapes_beyond_memory_have_no_flop():
    def flop(dims: list[list[int]]) -> float:
        args = json.dumps({"Input Dims": dims, "Input type": ["float", "float"]})
        costs = operator_costs(pd.Series(["aten::mm"], dtype="category"), pd.Series([args], dtype="category"))
        return float(costs["flop"].iloc[0])

    assert flop([[4, 8], [8, 2]]) == 2 * 4 * 8 * 2
    assert math.isnan(flop([[10**18, 10**18], [10**18, 10**18]]))
    assert math.isnan(flop([[-4, 8], [8, -2]]))


@pytest.mark.parametrize("column", ["operation", "kernel", "nothing"])
def test_graph_breaks_are_asked_for_by_what_regions_have(tmp_path, column):
    run = recorded(tmp_path, kernels, lambda event: None)
    with pytest.raises(InvalidSelection, match="gpu, step, layer"):
        run.graph_breaks(by=column)


def test_groups_are_told_apart_once(tmp_path, monkeypatch):
    """With hundreds of groups this takes seconds, and every rule about communication asks."""
    from tb_chopper.backend.metrics import process_groups

    run, asked, real = recorded(tmp_path, kernels, lambda event: None), [], process_groups.process_groups
    monkeypatch.setattr(process_groups, "process_groups", lambda *args: asked.append(args) or real(*args))
    assert run.diagnosis is not None and len(run.collectives()) and len(run.process_groups())
    assert len(asked) == 1
    assert run.process_groups({"0": "tensor"})["role"].tolist() == ["tensor"]
