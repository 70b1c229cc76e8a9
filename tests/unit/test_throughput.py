"""Iteration time and tokens per second against hand-made steps."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.metrics.throughput import iterations, throughput
from tb_chopper.backend.schema import STEPS, conform

MS = 1_000_000


def steps(*rows: tuple[int, int, float | None, bool]) -> pd.DataFrame:
    """STEPS of (gpu, step, first device activity in ms, complete)."""
    return conform(pd.DataFrame([
        {"capture": gpu, "gpu": gpu, "step": step, "start_ns": 0, "end_ns": 0, "n_kernels": 1, "complete": complete,
         "gpu_start_ns": pd.NA if at is None else int(at * MS), "source": "ProfilerStep", "gpu_end_ns": pd.NA}
        for gpu, step, at, complete in rows], columns=[c.name for c in STEPS]), STEPS)


def test_iteration_is_from_first_activity_to_the_next_steps():
    table = steps((0, 10, 5.0, True), (0, 11, 15.0, True), (0, 12, 27.0, True), (0, 13, 37.0, False))
    out = iterations(table)
    assert out["step"].tolist() == [10, 11, 12] and out["iteration_ns"].tolist() == [10 * MS, 12 * MS, 10 * MS]


def test_gaps_in_the_steps_make_no_iteration():
    # step 2 has no device activity, step 4 is incomplete, 6 follows no 5
    table = steps((0, 1, 0, True), (0, 2, None, True), (0, 3, 20, True), (0, 4, 30, False), (0, 6, 50, True))
    assert iterations(table)["step"].tolist() == [3]


def test_the_run_is_as_fast_as_its_slowest_gpu():
    table = steps((0, 0, 0, True), (0, 1, 10, True), (0, 2, 20, True), (1, 0, 0, True), (1, 1, 12, True),
                  (1, 2, 24, True))
    out = throughput(table, {0: 4096, 1: 2048})
    assert out["gpu"].tolist()[:2] == [0, 1] and pd.isna(out["gpu"].iloc[2])
    assert out["iteration_ms"].tolist() == pytest.approx([10, 12, 12])
    assert out["tokens_per_s"].tolist() == pytest.approx([4096 / 0.010, 2048 / 0.012, (4096 + 2048) / 0.012])
    assert out["tokens_per_s_per_gpu"].iloc[2] == pytest.approx(3072 / 0.012)
    assert out["steps_per_s"].iloc[2] == pytest.approx(1 / 0.012)
    assert set(out["kind"]) == {"tokens/s/gpu"}


def test_without_tokens_steps_per_second_and_without_steps_nothing():
    out = throughput(steps((0, 0, 0, True), (0, 1, 10, True)))
    assert set(out["kind"]) == {"steps/s"} and out["steps_per_s"].tolist() == pytest.approx([100, 100])
    assert out["tokens_per_s"].isna().all()
    alone = throughput(steps((0, 0, 0, True)), {0: 10})
    assert alone["n_steps"].tolist() == [0, 0] and np.isnan(alone["tokens_per_s"]).all()
    assert len(throughput(steps())) == 1
