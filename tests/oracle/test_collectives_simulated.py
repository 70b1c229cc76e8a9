"""From the traces of a simulated job alone: the waits, clocks and roles that were planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.metrics import collectives
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate

OFFSET_US = 5000


@pytest.fixture(scope="module", params=[1, 2], ids=["fsdp1", "fsdp2"])
def case(request, tmp_path_factory) -> tuple[Run, pd.DataFrame]:
    """Two hosts of two GPUs, the second host's clock 5 ms ahead, rank 3 at 80 % of its clock; the run and its truth."""
    options = Options(hosts=2, ranks=2, clock_skew_us=OFFSET_US, slow={3: 0.8}, fsdp=request.param, seed=4)
    directory = simulate(tmp_path_factory.mktemp("run"), options)[0]
    truth = pd.read_parquet(directory / "truth/kernels.parquet")
    return tb_chopper.open_run(directory), truth[truth["seq"] >= 0]


def planted(run: Run, truth: pd.DataFrame) -> pd.DataFrame:
    """Arrivals with what is true of them, joined by the recorded start. Those launched before the capture have no
    sequence number in the trace."""
    recorded = run.arrivals(correct_clocks=False)["start_ns"]
    arrived = run.arrivals().assign(recorded_ns=recorded)
    true = truth.rename(columns={"rank": "gpu", "start_ns": "recorded_ns"})
    return arrived.merge(true, on=["gpu", "recorded_ns"], suffixes=("", "_true"))


def test_offset_of_the_clocks(case):
    clocks = case[0].clock_offsets
    assert clocks["gpus"].tolist() == [[0, 1], [2, 3]]
    assert clocks["known"].all()
    assert clocks["offset_us"].tolist() == pytest.approx([0, OFFSET_US], abs=0.05)
    assert clocks["residual_us"].max() < 1


def test_waits_of_every_collective_and_rank(case):
    run, truth = case
    whole = truth[truth["wait_ns"] >= 0]
    both = planted(run, whole)
    assert len(both) == len(whole) > 100
    assert (both.groupby("instance")["seq_true"].nunique() == 1).all()
    assert np.abs(both["wait_ns"] - both["wait_ns_true"]).max() <= 100  # the estimate of the offset
    assert both["wait_ns_true"].max() > 100_000


def test_the_slow_gpu_waits_least_and_arrives_last_most_often(case):
    by_gpu = case[0].collectives(by="gpu").set_index("gpu")
    assert by_gpu["wait_us"].idxmin() == 3
    true = case[1][case[1]["wait_ns"] >= 0]
    alone_last = true[true["wait_ns"] == 0].groupby("seq")["rank"].agg(list)
    alone_last = alone_last[alone_last.map(len) == 1].map(min)
    assert (alone_last == 3).mean() > 0.8
    assert by_gpu.loc[3, "n_last"] >= (alone_last == 3).sum() > 10
    assert by_gpu["n_last"].sum() == (case[0].collectives()["skew_us"] > 0).sum()


def test_without_correction_the_early_clock_looks_late(case):
    run = case[0]
    assert run.collectives(by="gpu", correct_clocks=False).set_index("gpu")["n_last"].loc[[0, 1]].sum() == 0


def test_the_same_without_sequence_numbers(case):
    """Traces of older versions tell no sequence numbers: occurrence in the step must find the same collectives."""
    run = case[0]
    hosts = dict(zip(run.workers["gpu"], run.workers["host"].astype(object), strict=True))
    blind, _ = collectives.arrivals(run.kernels.assign(group_seq=-1, group=None), hosts)
    told = run.arrivals()
    pairs = blind.assign(key=blind["gpu"].astype(str) + "," + blind["start_ns"].astype(str)).merge(
        told.assign(key=told["gpu"].astype(str) + "," + told["start_ns"].astype(str)), on="key")
    inside = pairs[pairs["n_ranks_y"] == 4]
    assert len(inside) > 100
    assert (inside["n_ranks_x"] == 4).all()
    assert (inside["wait_ns_x"] == inside["wait_ns_y"]).all()


def test_roles_bytes_and_bandwidth(case):
    run, truth = case
    groups = run.process_groups()
    assert groups.iloc[0][["role", "size"]].tolist() == ["shard", 4]
    each = run.collectives(where={"name": ["all_gather", "reduce_scatter"]})
    planted = truth.groupby("seq")["bytes"].max()
    assert (each["bytes"].to_numpy() == each["seq"].map(planted).to_numpy()).all()
    whole = each[(each["n_ranks"] == 4) & each["transfer_us"].gt(0)]
    assert (whole["busbw_gbs"] / (whole["bytes"] / whole["transfer_us"] / 1000)).to_numpy() == pytest.approx(0.75)
    assert run.collectives(roles={groups.iloc[0]["group"]: "data"})["role"].eq("data").any()
