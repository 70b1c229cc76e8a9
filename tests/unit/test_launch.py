"""Launch overhead: the equations on gaps worked out on paper."""

from __future__ import annotations

import pytest

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics.launch import launch_overhead
from tests.unit import tables

ROWS = [
    dict(start=0, end=10, launch=-5, operation="first", step=0),       # nothing before it: no overhead
    dict(start=30, end=40, launch=25, operation="late", step=0),        # gap 20: 15 preparation, 5 call
    dict(start=50, end=60, launch=20, operation="queued", step=0),      # launched long before: gap 10 is all call
    dict(start=55, end=80, launch=21, operation="early", step=0),       # starts before the previous end: no gap
    dict(start=100, end=110, launch=90, operation="next", step=1),      # gap 20 after 80: 10 preparation, 10 call
    dict(start=95, end=99, launch=90, operation="wait", kind="communication", step=1),
    dict(start=120, end=130, launch=115, operation="graph", correlation=77, step=1),
    dict(start=135, end=140, launch=115, operation="graph", correlation=77, step=1),
    dict(start=150, end=160, launch=None, operation="unknown", step=1),
    dict(start=161, end=170, launch=165, operation="skewed", step=1),   # starts before its launch: gap 1, all prep
]


def overhead(**arguments):
    frame = launch_overhead(tables.kernels(ROWS), **arguments)
    return {r["operation"]: r for r in frame.to_dict("records")}


def test_every_gap_has_its_part():
    o = overhead(by="operation")
    parts = ("prep_us", "call_us", "graph_us", "unattributed_us")
    assert [o["first"][p] for p in parts] == [0, 0, 0, 0]
    assert [o["late"][p] for p in parts] == [15, 5, 0, 0]
    assert [o["queued"][p] for p in parts] == [0, 10, 0, 0]
    assert [o["early"][p] for p in parts] == [0, 0, 0, 0]
    assert [o["next"][p] for p in parts] == [10, 10, 0, 0]
    assert [o["graph"][p] for p in parts] == [5, 5, 5, 0]
    assert [o["unknown"][p] for p in parts] == [0, 0, 0, 10]
    assert [o["skewed"][p] for p in parts] == [1, 0, 0, 0]
    assert "wait" not in o


def test_waiting_for_communication_is_told_apart():
    assert overhead(by="operation")["next"]["call_under_communication_us"] == 4


def test_launch_and_the_rest_are_all_gaps():
    total = launch_overhead(tables.kernels(ROWS), "gpu").iloc[0]
    assert total["n"] == 9
    assert total["launch_us"] == total["prep_us"] + total["call_us"]
    assert total["launch_us"] + total["graph_us"] + total["unattributed_us"] == 20 + 10 + 20 + 10 + 5 + 10 + 1


def test_within_steps_the_first_kernel_has_no_overhead():
    assert overhead(by="operation", scope="within")["next"]["launch_us"] == 0
    assert overhead(by="operation", scope="within")["late"]["launch_us"] == 20
    with pytest.raises(InvalidSelection, match="scope"):
        overhead(by="operation", scope="step")


def test_within_many_steps_over_a_long_time():
    day = 86_400_000_000
    rows = [dict(start=at, end=at + 10, launch=at - 4, step=s) for s in range(400) for at in (s * day, s * day + 20)]
    assert launch_overhead(tables.kernels(rows), "step", scope="within")["launch_us"].tolist() == [10] * 400


def test_gpus_do_not_see_each_other():
    rows = [dict(start=0, end=10, launch=0), dict(start=50, end=60, launch=40),
            dict(start=0, end=45, launch=0, gpu=1), dict(start=50, end=60, launch=40, gpu=1)]
    assert launch_overhead(tables.kernels(rows), "gpu")["launch_us"].tolist() == [40, 5]
