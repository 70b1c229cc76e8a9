"""Tensor parallelism that is too wide, or too far: gains by hand, and where the rule is silent (µs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend.rules import over_sharding
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tests.builders import TraceBuilder

STEP, STEPS = 1000, 6
ELAPSED = 4800
"""of the five complete steps: 800 of the first one, and 200 idle before each of the others"""
TENSOR = {"Process Group Name": "2", "Process Group Description": "mesh_tp", "dtype": "BFloat16"}


def record(folder: Path, transfer: float, *, ranks: int = 4, late: float = 0, mb: float = 1,
           hosts: tuple[str, ...] = ("a",) * 4, desc: str = "mesh_tp", layer: bool = False) -> list[Any]:
    """Every step computes, then reduces in `transfer`, then idles for 200; the last rank is `late`."""
    for rank in range(ranks):
        trace = TraceBuilder(rank=rank, world_size=ranks)
        trace.head["host_name"] = hosts[rank]
        trace.head["deviceProperties"][0]["numSms"] = 132
        own = late if rank == ranks - 1 else 0
        for step in range(STEPS):
            at = STEP * step
            trace.step(step, at, STEP - 5)
            if layer:
                trace.annotation("chopper::layers.0", at + 5, 40)
            end = at + 820 - transfer  # of the last rank's computation
            trace.op("aten::mm", at + 8, 10, seq=step)
            trace.launch("gemm", at + 10, at + 20, end - at - 20 - (late - own), call=2)
            trace.op("nccl:all_reduce", at + 20, 15)
            trace.collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 25, end - (late - own),
                             transfer + late - own, **{**TENSOR, "Process Group Description": desc,
                             "Group size": ranks, "Seq": step, "In msg nelems": round(mb * 5e5)})
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return over_sharding.rule(tb_chopper.open_run(folder))


def test_too_wide(tmp_path: Path):
    """300 of 960 µs of a step; two thirds of it would go with two ranks in place of four."""
    (found,) = record(tmp_path, 300)
    assert isinstance(found, Diagnosis)
    assert found.gain_ms == pytest.approx(0.300 * 2 / 3)
    assert found.severity == "warning"
    assert found.gpus == (0, 1, 2, 3)
    assert {e.label: e.value for e in found.evidence}["exposed transfer, of the layers' time"] == pytest.approx(
        5 * 300 / ELAPSED)
    assert "halve the tensor group to 2" in found.remedy
    assert found.view == "parallelism"
    assert found.explained_by == ()  # its links are not known to be slow


def test_layers_are_what_counts(tmp_path: Path):
    """With layers known the same shares, since all work of a step is in one."""
    (found,) = record(tmp_path, 300, layer=True)
    assert found.gain_ms == pytest.approx(0.2)


def test_two_ranks_need_no_tensor_parallelism(tmp_path: Path):
    (found,) = record(tmp_path, 300, ranks=2)
    assert found.gain_ms == pytest.approx(0.3)
    assert "FSDP" in found.remedy


def test_just_below(tmp_path: Path):
    """A fifth of 4800 / 5 is 192."""
    assert record(tmp_path / "a", 191) == []
    assert len(record(tmp_path / "b", 193)) == 1


def test_waiting_is_another_matter(tmp_path: Path):
    """Three of four ranks are 300 µs in their collectives, of which they wait for 250."""
    assert record(tmp_path, 50, late=250) == []


def test_other_roles_and_lone_ranks(tmp_path: Path):
    assert record(tmp_path / "a", 300, desc="mesh_dp") == []
    assert record(tmp_path / "b", 300, ranks=1) == []


TWO_HOSTS = ("a", "a", "b", "b")


def test_over_hosts(tmp_path: Path):
    """12 MB · 1.5 in 100 µs is 180 GB/s, 0.4 of an H100's 450; a ring would reach 0.7 of it inside a host."""
    (found,) = record(tmp_path, 100, mb=12, hosts=TWO_HOSTS)
    assert found.gain_ms == pytest.approx(0.1 * (1 - 180 / 315))
    assert "on 2 hosts" in found.message
    assert found.explained_by == ()
    assert "at most 2 ranks" in found.remedy


def test_slow_links_of_its_own_groups_explain_it(tmp_path: Path):
    """8 MB · 1.5 in 300 µs is 40 GB/s, 0.13 of what links inside a host should reach."""
    (found,) = record(tmp_path, 300, mb=8)
    assert found.explained_by == over_sharding.CAUSES


def test_over_hosts_fast_enough(tmp_path: Path):
    """Half of the peak: 15 MB in 100 µs."""
    assert record(tmp_path / "a", 100, mb=15.1, hosts=TWO_HOSTS) == []
    assert len(record(tmp_path / "b", 100, mb=14.9, hosts=TWO_HOSTS)) == 1
    assert record(tmp_path / "c", 100, mb=12) == []  # one host: another rule's
