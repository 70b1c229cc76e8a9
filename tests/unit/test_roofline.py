"""Roofline and counter ratios against sums by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import hardware, schema
from tb_chopper.backend.metrics.counter_ratios import counter_ratios
from tb_chopper.backend.metrics.roofline import roofline
from tb_chopper.backend.schema import AGENTS, COUNTERS, KERNELS, conform

MI300X = hardware.find("AMD Instinct MI300X")
PEAK, BANDWIDTH = 304 * 2048 * 2.1e9, 5325e9


def kernels(*rows: dict[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame([{"name": "k", "kind": "compute", "activity": "kernel", "capture": 0, "gpu": 0, "op_id": i,
                           "operation": "op", "phase": "forward", "start_ns": 0, "end_ns": 1000, **row}
                          for i, row in enumerate(rows)])
    frame["kind"] = frame["kind"].astype(pd.CategoricalDtype(list(schema.KINDS)))
    return conform(frame, KERNELS).assign(**{c: frame[c] for c in ("clock_mhz",) if c in frame})


def args(*dims: list[int]) -> str:
    n = len(dims)
    return json.dumps({"Input Dims": dims, "Input type": ["c10::BFloat16"] * n, "Concrete Inputs": [""] * n})


def test_which_side_of_the_ridge_an_operation_lies_on():
    big, thin = args([4096, 4096], [4096, 4096]), args([1, 4096], [4096, 4096])
    table = roofline(kernels(
        {"operation": "big", "cpu_op": "aten::mm", "op_args": big, "end_ns": 200_000, "clock_mhz": 1050.0},
        {"operation": "thin", "cpu_op": "aten::mm", "op_args": thin, "end_ns": 10_000},
        {"operation": "add", "cpu_op": "aten::add", "op_args": args([1 << 20], [1 << 20]), "end_ns": 2_000},
        {"operation": "add", "cpu_op": "my::op", "op_args": None, "end_ns": 2_000},
    ), {0: MI300X}).set_index("operation")
    flop, moved = 2 * 4096**3, 3 * 4096**2 * 2
    big_row = table.loc["big"]
    assert big_row["intensity"] == pytest.approx(flop / moved) and big_row["bound"] == "compute"
    assert big_row["flop_per_s"] == pytest.approx(flop / 200e-6)
    assert big_row["share_of_attainable"] == pytest.approx(flop / 200e-6 / PEAK)
    assert big_row["peak_at_clock_flop_per_s"] == pytest.approx(PEAK / 2)
    thin_row = table.loc["thin"]
    assert thin_row["bound"] == "memory"
    assert thin_row["attainable_flop_per_s"] == pytest.approx(thin_row["intensity"] * BANDWIDTH)
    add = table.loc["add"]
    assert add["bytes"] == 3 * (1 << 20) * 2 and add["known_share"] == 0.5
    assert add["share_of_attainable"] == pytest.approx(3 * (1 << 20) * 2 / 2e-6 / BANDWIDTH)


def test_measured_bytes_take_the_place_of_those_of_the_shapes():
    rows = kernels({"cpu_op": "aten::mm", "op_args": args([64, 64], [64, 64])})
    row = roofline(rows, {0: MI300X}, bytes_measured=pd.Series({0: 1e6})).iloc[0]
    assert (row["bytes"], row["bytes_source"]) == (1e6, "measured")
    blind = roofline(rows, {}).iloc[0]
    assert np.isnan(blind["attainable_flop_per_s"]) and blind["bound"] is None


def counted(**counters: list[float]) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Two dispatches per pass: the counters of each, agents, and pairs with kernels 0 and 1."""
    n = len(next(iter(counters.values())))
    table = conform(pd.DataFrame({
        "pass": [1 + i // 2 for i in range(n)], "process": 1, "agent": "Agent 2", "gpu_index": 0, "xcc": 8,
        "dispatch": range(n), "name": "k", "start_ns": -1, "end_ns": -1}), COUNTERS)
    agents = conform(pd.DataFrame([{"gpu_index": 0, "units": 304}]), AGENTS)
    pairs = pd.DataFrame({"kernel": [i % 2 for i in range(n)], "pass": table["pass"], "row": range(n)})
    return table.assign(**counters), agents, pairs


NAN = np.nan


def test_ratios_are_of_sums_within_one_pass():
    table = kernels({"end_ns": 1000}, {"end_ns": 3000}, {"operation": "other"})
    counters, agents, pairs = counted(
        GRBM_GUI_ACTIVE=[8 * 2000.0, 8 * 6000.0, 8 * 9999.0, 8 * 9999.0],
        SQ_VALU_MFMA_BUSY_CYCLES=[304 * 4 * 1000.0, 304 * 4 * 1000.0, NAN, NAN],
        SQ_BUSY_CU_CYCLES=[304 * 500.0, 304 * 9000.0, NAN, NAN],
        TCC_HIT_sum=[NAN, NAN, 30.0, 10.0], TCC_MISS_sum=[NAN, NAN, 10.0, 30.0], FETCH_SIZE=[NAN, NAN, 100.0, 300.0])
    op, other = counter_ratios(table, counters, agents, pairs).itertuples()
    assert op.matrix_utilization == pytest.approx(2000 / 8000)
    assert op.cu_active == 1.0  # 4 * 9500 quad-cycles in 8000 cycles: cut to the possible
    assert op.l2_hit == pytest.approx(40 / 80)
    assert op.fabric_read_gbs == pytest.approx(400 * 1024 / 4000)
    assert np.isnan(op.wave_occupancy) and op.matched_share == 1.0
    assert np.isnan(other.matrix_utilization) and other.matched_share == 0.0


def test_nsights_metrics_tell_the_same():
    counters, agents, pairs = counted(**{
        "sm__cycles_elapsed.avg": [1000.0, 3000.0], "sm__cycles_active.avg": [900.0, 1500.0],
        "sm__pipe_tensor_cycles_active.avg": [100.0, 300.0], "dram__bytes_read.sum": [1e6, 1e6],
        "sm__warps_active.avg.pct_of_peak_sustained_active": [50.0, 25.0]})
    row = counter_ratios(kernels({}, {}), counters, agents, pairs).iloc[0]
    assert row["matrix_utilization"] == pytest.approx(0.1) and row["cu_active"] == pytest.approx(2400 / 4000)
    assert row["wave_occupancy"] == pytest.approx((450 + 375) / 2400)
    assert row["fabric_read_gbs"] == pytest.approx(2e6 / 2000)


def test_no_counters_at_all():
    out = counter_ratios(kernels({}), conform(pd.DataFrame(), COUNTERS), conform(pd.DataFrame(), AGENTS),
                         pd.DataFrame({c: np.empty(0, np.int64) for c in ("kernel", "pass", "row")}))
    assert out["matched_share"].tolist() == [0.0] and out["l2_hit"].isna().all()
