"""How much slower computation runs beside communication: planted and found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tb_chopper.backend.metrics.contention import contention
from tests.unit import tables


def row(start: float, dur: float, under: float, **more: Any) -> list[dict]:
    """A kernel of which `under` µs lie under communication."""
    beside = [{"start": start, "end": start + under, "kind": "communication", "name": "nccl"}] if under else []
    return [{"start": start, "end": start + dur, **more}, *beside]


def test_overlapped_time_runs_at_four_fifths():
    """80 µs alone; under communication a fifth of the time is lost: D = 80 + 0.2 · O."""
    rows = [r for i, share in enumerate((0, 0.25, 0.5, 1.0))
            for r in row(1000 * i, 80 / (1 - 0.2 * share), share * 80 / (1 - 0.2 * share))]
    assert contention(tables.kernels(rows)) == pytest.approx(0.2, rel=1e-4)  # times are whole ns


def test_kernels_that_are_longer_for_another_reason_are_no_contention():
    """Twice as long, half of it overlapped or none of it, in equal parts: overlap grows with the duration. Of twenty
    such kernels nothing can be told; of a thousand that there is none."""
    def some(times: int) -> list[dict]:
        return [r for i, (dur, share) in enumerate([(80, 0), (80, 0.5), (160, 0), (160, 0.5)] * times)
                for r in row(1000 * i, dur, share * dur)]

    assert np.isnan(contention(tables.kernels(some(5))))
    assert contention(tables.kernels(some(250))) == pytest.approx(0, abs=1e-9)


def test_types_of_work_differ():
    """GEMMs lose a fifth of 3/4 of the overlapped time, vectors nothing of the rest."""
    rows = []
    for i, share in enumerate((0, 0.5, 1.0)):
        rows += row(2000 * i, 240 / (1 - 0.2 * share), share * 240 / (1 - 0.2 * share), name="gemm", op_type="gemm")
        rows += row(2000 * i + 1000, 90, share * 90, name="add", op_type="vector")
    gemm, vector = 240 * 0.5 / 0.9 + 240 / 0.8, 1.5 * 90
    assert contention(tables.kernels(rows)) == pytest.approx(0.2 * gemm / (gemm + vector), rel=1e-4)
    # Attention that is always overlapped tells nothing, and counts as not slower.
    rows += row(9000, 500, 500, name="flash", op_type="attention")
    assert contention(tables.kernels(rows)) == pytest.approx(0.2 * gemm / (gemm + vector + 500), rel=1e-4)


def test_different_kernels_are_not_compared():
    """Long ones are overlapped and short ones are not, by what they are."""
    rows = [r for i, (name, dur, under) in enumerate([("a", 200, 200), ("b", 50, 0)] * 3)
            for r in row(1000 * i, dur, under, name=name)]
    assert np.isnan(contention(tables.kernels(rows)))


def test_noise():
    """0.15 through 3 % of noise, on 400 kernels of four kinds."""
    random = np.random.default_rng(1)
    rows = []
    for i in range(400):
        share, base = random.uniform(0, 1), (20, 50, 90, 200)[i % 4] * random.normal(1, 0.03)
        dur = base / (1 - 0.15 * share)
        rows += row(1000 * i, dur, share * dur, name=f"k{i % 4}")
    assert contention(tables.kernels(rows)) == pytest.approx(0.15, abs=0.01)


def test_bounds():
    faster = [r for i, (dur, under) in enumerate([(100, 0), (80, 80)] * 3) for r in row(1000 * i, dur, under)]
    assert contention(tables.kernels(faster)) == 0
    slower = [r for i, (dur, under) in enumerate([(100, 0), (500, 500)] * 3) for r in row(1000 * i, dur, under)]
    assert contention(tables.kernels(slower)) == 0.5
    assert np.isnan(contention(tables.kernels(row(0, 10, 0))))
