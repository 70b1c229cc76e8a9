"""Traces made after public bug reports: what attribution makes of each, as their expected.md says."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import Attributed, attribute
from tb_chopper.backend.intervals import union
from tb_chopper.backend.readers import kineto


def attributed(path: Path) -> Attributed:
    return attribute(kineto.read(path))


def case(shared: Path, name: str, rank: str = "run/rank0") -> Attributed:
    return attributed(shared / "cases" / name / f"{rank}.pt.trace.json")


def busy_us(kernels: pd.DataFrame) -> float:
    return union(kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()).length / 1000


def finding(result: Attributed, code: str) -> str:
    (found,) = (f for f in result.findings if f.code == code)
    return found.message


def test_a_profile_without_gpu_says_so(shared: Path) -> None:
    result = case(shared, "09_top_level_list", "run/legacy")
    assert len(result.kernels) == 3 and set(result.kernels["device"]) == {"cpu"}
    assert "CPU operations stand in" in finding(result, "cpu_operations")


def test_communication_is_told_by_kernel_name(shared: Path) -> None:
    kernels = case(shared, "19_comm_names").kernels
    communication = kernels[kernels["kind"] == "communication"]
    assert len(communication) == 8 and busy_us(communication) == 400
    assert busy_us(kernels[kernels["kind"] == "compute"]) == 540


def test_overlapping_steps(shared: Path) -> None:
    result = case(shared, "21_steps_overlap")
    assert list(result.steps["step"]) == [0, 1, 2] and list(result.kernels["step"]) == [1, 1, 2]
    assert (result.kernels["end_ns"] - result.kernels["start_ns"]).sum() == 300_000


def test_a_step_without_kernels_and_one_cut_short(shared: Path) -> None:
    steps = case(shared, "23_step_without_kernels").steps
    assert list(steps["n_kernels"]) == [10, 0, 10, 3] and list(steps["complete"]) == [True, True, True, False]


def test_ranks_that_lost_a_stream_or_the_whole_gpu(shared: Path) -> None:
    one, three = (case(shared, "27_missing_rank_and_stream", f"run/rank{r}") for r in (1, 3))
    assert len(one.kernels) == 4 and not one.steps["complete"].any()
    assert len(three.kernels) == 0 and not three.findings


@pytest.mark.parametrize("gpu", ["amd", "nv"])
def test_graph_replays_and_an_orphan(shared: Path, gpu: str) -> None:
    result = case(shared, "31_graph_launch", f"run_{gpu}/rank0")
    kernels = result.kernels
    assert len(kernels) == 17 and kernels["launch_ns"].nunique() == 2
    assert [busy_us(kernels[kernels["step"] == s]) for s in (0, 1)] == [400, 410]
    assert list(kernels["attributed_by"]).count("time") == 1


def test_a_kernel_before_its_launch_keeps_it(shared: Path) -> None:
    kernels = case(shared, "33_negative_launch_delay").kernels
    assert (kernels["start_ns"] - kernels["launch_ns"] < 0).sum() == 4 and kernels["launch_ns"].notna().all()


def test_a_profile_of_the_gpu_alone(shared: Path) -> None:
    result = case(shared, "35_gpu_only")
    kernels = result.kernels
    assert busy_us(kernels) == 1400 and busy_us(kernels[kernels["kind"] == "compute"]) == 800
    assert set(kernels.loc[kernels["kind"] == "compute", "operation"]) == {schema.UNATTRIBUTED}
    assert kernels["launch_ns"].isna().all() and kernels["step"].isna().all()


def test_steps_end_with_the_optimizer_without_profiler_step(shared: Path) -> None:
    result = attributed(shared / "malformed" / "09_no_profilerstep.json")
    good = attributed(shared / "malformed" / "00_good.json")
    assert list(result.steps["source"]) == ["optimizer"]
    assert list(result.steps["n_kernels"]) == [14] and good.steps["n_kernels"].sum() == 14
    assert "optimizer" in finding(result, "steps_without_profiler")


def test_duplicate_correlations_lose_nothing(shared: Path) -> None:
    result = attributed(shared / "malformed" / "13_duplicate_correlation.json")
    good = attributed(shared / "malformed" / "00_good.json")
    assert len(result.kernels) == len(good.kernels) and busy_us(result.kernels) == busy_us(good.kernels)
    assert result.kernels["launch_ns"].notna().sum() == good.kernels["launch_ns"].notna().sum()
