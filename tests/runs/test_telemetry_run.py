"""A real training of the example with a sampler beside it: one clock for both, and the training's own cores."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.metrics.cpu import cpu_utilization
from torch_ext import start_telemetry

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the sampler's CPU source reads /proc")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tb_chopper.Run:
    from tests.runs.record import record

    folder = tmp_path_factory.mktemp("sampled")
    telemetry = start_telemetry(folder)
    record("plain", folder)
    telemetry.stop()
    return tb_chopper.open_run(folder)


def test_log_and_trace_share_a_clock(run):
    clock = run.telemetry.clocks.iloc[0]
    assert clock["known"] and clock["n_pairs"] >= 2 and abs(clock["offset_us"]) < 1000 and clock["residual_us"] < 1000
    assert run.telemetry.cpu["t_ns"].min() < run.kernels["start_ns"].min() < run.kernels["end_ns"].max()
    assert run.kernels["end_ns"].max() < run.telemetry.cpu["t_ns"].max() + 1_000_000_000


def test_cores_are_busy_while_the_training_runs(run):
    cpu = cpu_utilization(run.telemetry.cpu, run.telemetry.cores)
    assert cpu["c_active"].max() >= 1 and (cpu["c_min"] <= cpu["c_active"]).all()
    assert cpu["physical"].nunique() == 1 and (cpu["active_physical"] <= cpu["physical"]).all()


def test_no_gpu_means_no_clock_and_no_error(run):
    if len(run.telemetry.samples):
        pytest.skip("this host has a GPU")
    assert not [f for f in run.telemetry.findings if f.severity == "error"]
