"""The timeline on tables small enough to work out on paper."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics.timeline import exclusive, timeline
from tests.unit import tables

# compute 0-100 and 150-300, communication 80-200, copy 190-220 and 400-420 (the second one alone)
ROWS = [
    dict(start=0, end=100, launch=-10, operation="mlp", phase="forward", op_type="gemm", step=0),
    dict(start=80, end=200, launch=70, operation="ag", kind="communication", phase="forward", step=0),
    dict(start=150, end=300, launch=120, operation="attn", phase="backward", op_type="attention", step=0),
    dict(start=190, end=220, launch=100, operation="copy", kind="memcpy", phase="other", step=0),
    dict(start=400, end=420, launch=350, operation="copy", kind="memcpy", phase="other", step=1),
]


def row(frame: pd.DataFrame, **where: object) -> dict[str, float]:
    for column, value in where.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0].to_dict()


def test_one_gpu():
    t = row(timeline(tables.kernels(ROWS), tables.steps()))
    assert {k: t[f"{k}_us"] for k in (
        "total", "compute", "communication", "memcpy", "overlap", "exposed_communication", "exposed_memcpy", "busy",
        "idle",
    )} == dict(total=420, compute=250, communication=120, memcpy=50, overlap=70, exposed_communication=50,
               exposed_memcpy=20, busy=320, idle=100)
    # The gap 300-400 ends with a copy whose launch came at 350: half of it the host's, half the device's.
    assert (t["idle_host_us"], t["idle_device_us"]) == (50, 50)


def test_step_windows_cut_what_runs_across_them():
    t = timeline(tables.kernels(ROWS), tables.steps((0, 0, 180), (1, 180, 420)), by="step")
    first, second = row(t, step=0), row(t, step=1)
    assert (first["total_us"], first["compute_us"], first["communication_us"], first["idle_us"]) == (180, 130, 100, 0)
    assert (second["total_us"], second["compute_us"]) == (240, 120)
    assert (second["communication_us"], second["memcpy_us"]) == (20, 50)
    assert second["idle_us"] == 100


def test_a_step_without_kernels_is_idle_not_missing():
    s = tables.steps((0, 0, 100), (1, 0, 0), (2, 0, 0), (3, 300, 420), (4, 0, 0))
    s.loc[[1, 2, 4], ["gpu_start_ns", "gpu_end_ns"]] = pd.NA
    s["start_ns"] = [-50_000, 90_000, 150_000, 250_000, 500_000]
    rows = [dict(start=0, end=100, step=0), dict(start=300, end=420, step=3)]
    t = timeline(tables.kernels(rows), s, by="step")
    assert t[["step", "total_us", "busy_us", "idle_us"]].values.tolist() == [
        [0, 100, 100, 0], [1, 50, 0, 50], [2, 150, 0, 150], [3, 120, 120, 0], [4, 0, 0, 0]]


def test_many_groups_over_a_long_time_stay_apart():
    year = 3.2e13
    rows = [dict(start=i * year / 40, end=i * year / 40 + 10, operation=f"op{i % 20}", step=i // 4) for i in range(40)]
    t = timeline(tables.kernels(rows), tables.steps(), by=["step", "operation"])
    assert t["busy_us"].tolist() == [10] * 40


def test_a_group_of_work_keeps_its_own_share():
    t = timeline(tables.kernels(ROWS), tables.steps(), by="operation")
    assert row(t, operation="mlp")["overlap_us"] == 20
    assert row(t, operation="attn")["overlap_us"] == 50
    assert row(t, operation="ag")["exposed_communication_us"] == 50
    assert row(t, operation="copy")["idle_us"] == 100
    assert t["idle_us"].sum() == 100


def test_by_kernel():
    t = timeline(tables.kernels([{**r, "name": r["operation"]} for r in ROWS]), tables.steps(), by=["gpu", "kernel"])
    assert row(t, kernel="attn")["compute_us"] == 150


def test_where_filters_windows_and_work():
    k, s = tables.kernels(ROWS), tables.steps((0, 0, 180), (1, 180, 420))
    assert row(timeline(k, s, "gpu", {"step": [1]}))["total_us"] == 240
    assert row(timeline(k, s, "operation", {"phase": "backward"}))["compute_us"] == 150
    assert timeline(k, s, "operation", {"phase": "optimizer"}).empty
    with pytest.raises(InvalidSelection, match="no column 'colour'"):
        timeline(k, s, "colour")


def test_gpu_time_of_several_gpus_adds_up():
    k = tables.kernels([*ROWS, *({**r, "gpu": 1} for r in ROWS)])
    by_gpu = timeline(k, tables.steps(), "gpu")
    assert by_gpu["gpu"].tolist() == [0, 1]
    assert by_gpu["compute_us"].tolist() == [250, 250]
    assert row(timeline(k, tables.steps(), "operation"), operation="attn")["compute_us"] == 300


def test_exclusive_gives_each_moment_to_one_thing():
    e = exclusive(tables.kernels(ROWS), tables.steps((0, 0, 180), (1, 180, 420)))
    got = {(r["step"], r["phase"], r["category"]): r["time_us"] for r in e.to_dict("records")}
    assert got == {
        (0, "forward", "gemm"): 100, (0, "forward", "communication"): 50, (0, "backward", "attention"): 30,
        (1, "backward", "attention"): 120, (1, "other", "memcpy"): 20, (1, "other", "idle"): 100,
    }


times = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 60), st.sampled_from(["compute", "communication", "memcpy"]),
              st.sampled_from(["forward", "backward"]), st.sampled_from(["gemm", "vector"])),
    min_size=1, max_size=15)


@given(times)
def test_identities_hold_for_any_rows(spans):
    k = tables.kernels([
        dict(start=s, end=s + d, kind=kind, phase=phase, op_type=op if kind == "compute" else None, launch=s - 5)
        for s, d, kind, phase, op in spans])
    t = timeline(k, tables.steps()).iloc[0]
    assert t.compute_us + t.exposed_communication_us + t.exposed_memcpy_us + t.idle_us == pytest.approx(t.total_us)
    assert t.idle_host_us + t.idle_device_us == pytest.approx(t.idle_us)
    assert timeline(k, tables.steps(), "phase")["idle_us"].sum() == pytest.approx(t.idle_us)
    assert exclusive(k, tables.steps(), by_step=False)["time_us"].sum() == pytest.approx(t.total_us)
