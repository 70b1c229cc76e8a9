"""No damaged, foreign or odd run makes a metric over ranks, memory or the host raise."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.errors import ChopperError
from tests.conftest import DATA

FOLDERS = [*DATA.glob("malformed/*"), *DATA.glob("cases/*/run*")] if DATA.is_dir() else []


@pytest.mark.parametrize("path", sorted(FOLDERS), ids=lambda p: "/".join(p.parts[-2:]))
def test_every_metric_of_odd_runs(path: Path):
    try:
        run = tb_chopper.open_run(path)
    except ChopperError:
        pytest.skip("holds no trace")
    each = run.collectives()
    assert (each["transfer_us"].dropna() >= 0).all()
    assert (run.arrivals()["wait_ns"].dropna() >= 0).all()
    by_gpu = run.collectives(by="gpu")
    assert (by_gpu["exposed_wait_us"] <= by_gpu["exposed_us"] + 1e-6).all()
    assert (by_gpu["exposed_us"] <= by_gpu["duration_us"] + 1e-6).all()
    for metric in (run.process_groups, run.gradient_barrier, run.stragglers, run.what_if, run.outlier_steps, run.memory,
                   run.step_memory, run.queues, run.launches, run.host_calls, run.step_leads):
        metric()
    idle = run.idle_causes().groupby("gpu")["idle_us"].sum()
    assert idle.sum() == pytest.approx(run.timeline(by="gpu")["idle_us"].sum(), abs=0.01)
    path_rows = run.critical_path
    assert (path_rows["end_ns"] > path_rows["start_ns"]).all()
