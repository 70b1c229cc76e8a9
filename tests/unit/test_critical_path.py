"""The critical path of steps written down by hand (µs), and of simulated ones."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.metrics import collectives
from tb_chopper.backend.metrics.critical_path import critical_path, path_shares
from tb_chopper.backend.simulate import Options, simulate
from tests.unit import tables

EPOCH_US = 1_763_990_928_000_000


def path(rows: list[dict], ahead_us: int = 0) -> pd.DataFrame:
    """The path of step 0. Whole µs since the epoch, whose ns float64 could not hold; GPU 1's clock is ahead."""
    told = {"stream": 7, **dict.fromkeys(("group_size", "group_seq", "in_nelems", "out_nelems"), -1)}
    moved = []
    for row in rows:
        by = EPOCH_US + (ahead_us if row.get("gpu") == 1 else 0)
        times = {k: row[k] + by for k in ("start", "end", "launch") if row.get(k) is not None}
        moved.append({"step": 0, **told, **row, **times})
    kernels = tables.kernels(moved)
    steps = pd.concat([tables.steps((0, 0, 1), gpu=g) for g in kernels["gpu"].unique()])
    arrived, _ = collectives.arrivals(kernels, {0: "a", 1: "a"})
    ahead_ns = (arrived["gpu"] == 1) * ahead_us * 1000
    arrived = arrived.assign(start_ns=arrived["start_ns"] - ahead_ns, end_ns=arrived["end_ns"] - ahead_ns)
    return critical_path(kernels, steps, arrived, {1: ahead_us * 1000})


def pieces(found: pd.DataFrame) -> list[tuple]:
    """(gpu, kind, start, end) in µs since the epoch of the test."""
    return [(r.gpu, r.kind, r.start_ns / 1000 - EPOCH_US, r.end_ns / 1000 - EPOCH_US) for r in found.itertuples()]


def comm(gpu: int, start: float, end: float, launch: float) -> dict:
    return {"gpu": gpu, "start": start, "end": end, "launch": launch, "kind": "communication", "name": "nccl_AllReduce",
            "collective": "allreduce", "group": "0", "group_seq": 1, "group_size": 2, "stream": 20}


def test_one_gpu_with_a_late_launch():
    found = path([{"start": 0, "end": 100, "launch": -5}, {"start": 150, "end": 200, "launch": 130, "operation": "b"}])
    assert pieces(found) == [
        (0, "compute", 0, 100), (0, "host", 100, 130), (0, "launch", 130, 150), (0, "compute", 150, 200)]
    assert found["operation"].tolist() == ["op", "b", "b", "b"]


def test_through_a_collective_to_the_rank_that_came_late():
    """GPU 0 is done at 100 and waits; GPU 1 computes until 180 and starts the collective at 190."""
    rows = [{"gpu": 0, "start": 0, "end": 100, "launch": -5}, comm(0, 100, 250, 50),
            {"gpu": 0, "start": 255, "end": 300, "launch": 60},
            {"gpu": 1, "start": 0, "end": 180, "launch": -5}, comm(1, 190, 249, 185)]
    expected = [(1, "compute", 0, 180), (1, "host", 180, 185), (1, "launch", 185, 190), (0, "communication", 190, 250),
                (0, "launch", 250, 255), (0, "compute", 255, 300)]
    assert pieces(path(rows)) == expected
    assert pieces(path(rows, ahead_us=3)) == expected


def test_work_under_another_stream_is_not_on_the_path():
    found = path([{"start": 0, "end": 100, "launch": -5}, {"start": 10, "end": 60, "launch": 0, "stream": 9},
                  {"start": 100, "end": 120, "launch": 1}])
    assert pieces(found) == [(0, "compute", 0, 100), (0, "compute", 100, 120)]


def test_kernels_without_a_length_or_a_launch():
    found = path([{"start": 0, "end": 10}, {"start": 20, "end": 20, "launch": 15},
                  {"start": 20, "end": 20, "launch": 16}, {"start": 30, "end": 40}])
    assert [p[1:] for p in pieces(found)] == [("compute", 0, 10), ("host", 10, 15), ("launch", 15, 20),
                                              ("unknown", 20, 30), ("compute", 30, 40)]


def test_shares():
    found = path([{"start": 0, "end": 100, "launch": -5}, {"start": 150, "end": 200, "launch": 130}])
    table = path_shares(found).set_index("kind")
    assert table["time_us"].to_dict() == {"compute": 150, "host": 30, "launch": 20}
    assert table["share"].sum() == pytest.approx(1)


@pytest.mark.parametrize("options", [
    Options(ranks=4, layers=3, steps=3, slow={1: 0.5}),
    Options(hosts=2, ranks=2, layers=3, steps=3, slow={1: 0.5}, clock_skew_us=4000, fsdp=1)], ids=["host", "two-hosts"])
def test_the_path_of_a_simulated_job_runs_over_its_slow_gpu(tmp_path: Path, options: Options):
    run = tb_chopper.open_run(simulate(tmp_path, options)[0])
    found = run.critical_path
    for step, own in found.groupby("step"):
        assert (own["start_ns"].to_numpy()[1:] == own["end_ns"].to_numpy()[:-1]).all(), step  # it tiles the step
        kernels = run.kernels[run.kernels["step"] == step]
        offset = kernels["gpu"].map(run._offsets_ns())
        assert own["start_ns"].iloc[0] == (kernels["start_ns"] - offset).min()
        assert own["end_ns"].iloc[-1] == (kernels["end_ns"] - offset).max()
    share = run.path_shares(by="gpu", where={"kind": "compute"}).set_index("gpu")["share"]
    assert share[1] > 0.8
