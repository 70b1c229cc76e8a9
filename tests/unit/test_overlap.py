"""Overlap on tables small enough to work out on paper."""

from __future__ import annotations

import numpy as np
import pytest

from tb_chopper.backend.metrics.overlap import hidden_communication, instances, overlap
from tests.unit import tables

# Two layers of one operation; the second runs under two communications that overlap each other.
ROWS = [
    dict(start=0, end=10, operation="mlp", layer="layers.0", step=0),
    dict(start=20, end=30, operation="mlp", layer="layers.0", step=0),
    dict(start=100, end=140, operation="mlp", layer="layers.10", step=0),
    dict(start=110, end=120, operation="ag", kind="communication", step=0),
    dict(start=115, end=135, operation="rs", kind="communication", step=0),
    dict(start=136, end=150, operation="rs", kind="communication", step=0),
]


def test_an_instance_counts_its_bubbles_and_each_moment_once():
    i = instances(tables.kernels(ROWS))
    assert i["layer"].tolist() == ["layers.0", "layers.10"]
    assert i["elapsed_ns"].tolist() == [30_000, 40_000]
    assert i["kernel_ns"].tolist() == [20_000, 40_000]
    assert i["overlap_ns"].tolist() == [0, 29_000]
    assert i["overlap_ratio"].tolist() == [0, pytest.approx(29 / 40)]
    assert i["sample"].tolist() == [0, 1]


def test_groups_add_up():
    o = overlap(tables.kernels(ROWS), "operation").iloc[0]
    assert (o.n, o.elapsed_us, o.overlap_us) == (2, 70, 29)
    assert o.overlap_ratio == pytest.approx(29 / 70)
    assert np.isnan(o.pearson_r)
    assert overlap(tables.kernels(ROWS), ["layer", "operation"])["layer"].tolist() == ["layers.0", "layers.10"]


def test_single_kernels():
    o = overlap(tables.kernels(ROWS), "kernel").iloc[0]
    assert (o.n, o.elapsed_us, o.overlap_us) == (3, 60, 29)


def test_hidden_communication():
    h = hidden_communication(tables.kernels(ROWS), "operation").set_index("operation")
    assert h.loc["ag", ["communication_us", "hidden_us", "exposed_us"]].tolist() == [10, 10, 0]
    assert h.loc["rs", ["communication_us", "hidden_us", "exposed_us"]].tolist() == [34, 24, 10]
    assert hidden_communication(tables.kernels(ROWS)).iloc[0]["hidden_share"] == pytest.approx(29 / 39)


def test_without_communication_a_share_is_missing_not_a_number_made_up():
    k = tables.kernels(ROWS[:3])
    assert hidden_communication(k).empty
    assert overlap(k, "gpu")["overlap_ratio"].tolist() == [0]


def test_pearson_equals_numpys():
    rng = np.random.default_rng(1)
    rows, t = [], 0.0
    for i in range(12):
        d = float(rng.integers(10, 90))
        rows += [dict(start=t, end=t + d, layer=f"layers.{i}"),
                 dict(start=t, end=t + d * rng.random(), kind="communication", operation="c")]
        t += 100
    k = tables.kernels(rows)
    i = instances(k)
    expected = np.corrcoef(i["overlap_ratio"], i["elapsed_ns"])[0, 1]
    assert overlap(k, "operation")["pearson_r"].iloc[0] == pytest.approx(expected)
