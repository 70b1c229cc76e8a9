"""Groups over islands: the rule's gain by hand, and where it keeps silent (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.rules import islands
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tests.builders import TraceBuilder
from tests.unit.test_topology import FOUR

STEP = 3000
WITHIN_US = 100
"""20 MB · 2 · 1/2 in 100 µs: 200 GB/s"""
ALL = {"Process Group Name": "1", "Process Group Description": "mesh_dp", "Group size": 4}


def pair(rank: int) -> dict:
    return {"Process Group Name": "2" if rank < 2 else "3", "Process Group Description": "mesh_tp", "Group size": 2}


def record(folder: Path, across_us: float, topology: str | None = FOUR, hosts: tuple[str, ...] = ("n",) * 4,
           within: bool = True, steps: int = 4) -> tb_chopper.Run:
    """Every step: 500 µs of computation, 20 MB reduced in pairs, 20 MB reduced by all four in `across_us`."""
    for rank in range(4):
        trace = TraceBuilder(rank=rank, world_size=4)
        trace.head["host_name"] = hosts[rank]
        trace.head["deviceProperties"][0]["numSms"] = 132
        for step in range(steps):
            at = STEP * step
            trace.step(step, at, STEP - 10)
            trace.op("aten::mm", at + 10, 20, seq=step)
            trace.launch("gemm", at + 15, at + 20, 500)
            size = {"dtype": "BFloat16", "In msg nelems": 10_000_000, "Seq": step + 1}
            if within:
                trace.collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 30, at + 600, WITHIN_US,
                                 **pair(rank), **size)
            trace.collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 40, at + 800, across_us, **ALL, **size)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    if topology:
        (folder / "topology.txt").write_text(topology)
    return tb_chopper.open_run(folder)


def test_a_group_over_two_islands(tmp_path: Path):
    """20 MB · 2 · 3/4 in 600 µs is 50 GB/s, a quarter of the 200 inside: of 600 µs 450 would go."""
    (found,) = islands.rule(record(tmp_path, 600))
    assert isinstance(found, Diagnosis)
    assert found.gain_ms == pytest.approx(0.450)
    assert found.severity == "warning"
    assert found.gpus == (0, 1, 2, 3)
    assert "group 1 spans the islands 0-1 | 2-3" in found.message
    assert "50 GB/s, 25% of the 200 GB/s measured inside one" in found.message
    assert found.title == "Data-parallel groups span islands of GPUs"
    assert "SYS" in found.cause
    assert '(2, 2), mesh_dim_names=("replicate", "shard")' in found.remedy
    evidence = {e.label: e.value for e in found.evidence}
    assert evidence["of the bandwidth inside"] == pytest.approx(0.25)
    assert evidence["bare transfer, of the step"] == pytest.approx(600 / STEP)


@pytest.mark.parametrize("role, parts, advice", [
    ("tensor", [[0, 1], [2, 3]], "inside an island of 4 GPUs"),
    ("expert", [[0], [1]], '("dp", "ep")) with n of 4 at most'),
    ("data", [[0, 1, 2], [3, 4, 5]], '(2, 3), mesh_dim_names=("replicate", "shard")'),
    ("shard", [[0], [4]], "replicate over the islands in place of sharding"),
    ("data", [[0], [4]], "exchange the dimensions of the mesh"),
])
def test_advice_fits_the_group(role: str, parts: list[list[int]], advice: str):
    assert advice in islands._remedy(role, parts, 4)


def test_without_groups_inside_an_island(tmp_path: Path):
    """Against 0.7 of an H100's 450 GB/s: 600 · (1 − 50 / 315)."""
    (found,) = islands.rule(record(tmp_path, 600, within=False))
    assert found.gain_ms == pytest.approx(0.6 * (1 - 50 / 315))
    assert "that links inside one should reach" in found.message


def test_just_fast_enough(tmp_path: Path):
    """0.4 of 200 GB/s is 80 GB/s: 20 MB · 1.5 in 375 µs."""
    assert islands.rule(record(tmp_path / "a", 376))
    assert not islands.rule(record(tmp_path / "b", 374))


def test_a_large_part_of_the_step(tmp_path: Path):
    """1000 µs of 3000 are exposed transfer; a larger message makes it half as fast as inside, no slower."""
    for rank in range(4):
        trace = TraceBuilder(rank=rank, world_size=4)
        for step in range(4):
            at = STEP * step
            trace.step(step, at, STEP - 10)
            size = {"dtype": "BFloat16", "Seq": step + 1}
            trace.launch("gemm", at + 15, at + 20, 500)
            trace.collective("nccl", at + 30, at + 600, 100, **pair(rank), **size, **{"In msg nelems": 10_000_000})
            trace.collective("nccl", at + 40, at + 800, 1000, **ALL, **size, **{"In msg nelems": 33_333_333})
        trace.write(tmp_path / f"rank{rank}.pt.trace.json")
    (tmp_path / "topology.txt").write_text(FOUR)
    (found,) = islands.rule(tb_chopper.open_run(tmp_path))
    assert found.gain_ms == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("change", [
    {"topology": None},
    {"topology": FOUR.replace("SYS", "NV4")},
    {"topology": "no devices were found\n"},
    {"hosts": ("a", "a", "b", "b")},
    {"across_us": 160},
])
def test_silence(tmp_path: Path, change: dict):
    """Nothing recorded, one island, nothing readable, two hosts with an island each, fast enough."""
    given = {"across_us": 600, **change}
    if "hosts" in change:
        given["topology"] = "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n"
    assert islands.rule(record(tmp_path, **given)) == []


def test_one_rank_alone(tmp_path: Path):
    TraceBuilder().training_step(0, 0).training_step(1, 1000).write(tmp_path / "w.pt.trace.json")
    (tmp_path / "topology.txt").write_text("\tGPU0\nGPU0\tX\n")
    assert islands.rule(tb_chopper.open_run(tmp_path)) == []
