"""The sampler's loop with stand-in sources, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tb_chopper.backend.readers import telemetry_logs
from tb_chopper.backend.schema import TelemetryLog
from torch_ext import sampler
from torch_ext.sampler import Sampler
from torch_ext.sources import Gpu, Sample
from torch_ext.telemetry_log import Log


class Source:
    """GPUs that read `sample(i)`; the call takes `cost_s` of CPU time."""

    name = "stand-in"

    def __init__(self, sample: Callable[[int], Sample], n: int = 1, cost_s: float = 0.0) -> None:
        self.gpus = [Gpu("GPU", f"0000:{i:02x}:00.0") for i in range(n)]
        self._sample, self._cost_s = sample, cost_s

    def read(self, i: int) -> Sample:
        end = time.thread_time() + self._cost_s
        while time.thread_time() < end:
            pass
        return self._sample(i)

    def limits(self, i: int) -> Sample:
        return {"clock_limit_mhz": 2100, "power_limit_w": 750}

    def close(self) -> None: ...


def run(folder: Path, seconds: float, *sources: Source, hz: float = 50.0, budget: float | None = None) -> TelemetryLog:
    log = Log(folder / "h.telemetry.csv")
    end = time.monotonic() + seconds
    Sampler(log, sources, None, hz, "h").run(list, lambda: "done" if time.monotonic() > end else None, budget)
    log.close()
    return telemetry_logs.read(log.path)


def clock(i: int) -> Sample:
    return {"clock_mhz": 1900.0 + i, "power_w": 700, "throttle": None}


def test_rate_and_times(tmp_path):
    log = run(tmp_path, 1.6, Source(clock, n=2))
    for gpu, rows in log.samples.groupby("gpu"):
        steps = np.diff(rows["t_ns"])
        assert np.median(steps) == pytest.approx(20e6, rel=0.1) and (rows["clock_mhz"] == 1900 + gpu).all()
    assert (log.samples["uncertainty_ns"] >= 0).all() and (log.samples["clock_limit_mhz"] == 2100).all()
    text = (tmp_path / "h.telemetry.csv").read_text()
    assert text.count(",2100,") in (4, 6), "limits once per second and GPU"


def test_gpu_that_fails_is_told_once_and_the_others_go_on(tmp_path):
    def broken(i: int) -> Sample:
        if i == 0:
            raise RuntimeError("GPU is lost, really")
        return clock(i)
    log = run(tmp_path, 0.8, Source(broken, n=2))
    assert set(log.samples["gpu"]) == {1} and len(log.samples) > 20
    assert [f.message for f in log.findings if "gives no values" in f.message] == [
        "h.telemetry.csv: gpu 0 gives no values: GPU is lost  really"]


def test_slow_source_leaves_out_samples_and_does_not_catch_up(tmp_path):
    held = iter([0.5])

    def sometimes(i: int) -> Sample:
        time.sleep(next(held, 0))
        return clock(i)
    log = run(tmp_path, 1.5, Source(sometimes))
    assert len(log.samples) < 60, "the 25 samples of the hold-up are not made up for"
    assert log.samples["uncertainty_ns"].max() > 200e6, "the sample that took long says so"


def test_rate_is_lowered_to_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler._Spending, "WINDOW_S", 0.5)
    log = run(tmp_path, 3.0, Source(clock, cost_s=0.005), hz=50, budget=0.05)
    steps = np.diff(log.samples["t_ns"])
    assert np.median(steps[:10]) == pytest.approx(20e6, rel=0.3) and np.median(steps[-5:]) > 80e6
    assert any("rate lowered" in f.message for f in log.findings)


def test_rate_that_was_asked_for_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler._Spending, "WINDOW_S", 0.3)
    log = run(tmp_path, 1.5, Source(clock, cost_s=0.005), hz=50, budget=None)
    assert np.median(np.diff(log.samples["t_ns"])[-10:]) == pytest.approx(20e6, rel=0.3)
