"""Utilization, SM efficiency, occupancy, MFU and HFU against sums over every single nanosecond."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import hardware, schema
from tb_chopper.backend.metrics.efficiency import blocks_per_unit, efficiency
from tb_chopper.backend.schema import KERNELS, STEPS, conform

MI300X, H100 = hardware.find("AMD Instinct MI300X"), hardware.find("NVIDIA H100 80GB HBM3")
MM = json.dumps({"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2, "Concrete Inputs": ["", ""]})
MM_FLOP = 2 * 64 * 32 * 16


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """KERNELS of rows that name only what matters."""
    common = {"name": "k", "kind": "compute", "activity": "kernel", "capture": 0, "gpu": 0, "worker": "w", "span": 0,
              "device": "0", "phase": "forward", "operation": "op", "recompute": False, "op_id": -1}
    frame = pd.DataFrame([{**common, **row} for row in rows])
    frame["kind"] = frame["kind"].astype(pd.CategoricalDtype(list(schema.KINDS)))
    return conform(frame, KERNELS)


def step_table(*windows: tuple[int, int, int], gpu: int = 0, complete: bool = True) -> pd.DataFrame:
    """STEPS of (step, gpu_start_ns, gpu_end_ns)."""
    return conform(pd.DataFrame([
        {"capture": gpu, "gpu": gpu, "step": n, "start_ns": a, "end_ns": b, "gpu_start_ns": a, "gpu_end_ns": b,
         "n_kernels": 1, "complete": complete, "source": "ProfilerStep"} for n, a, b in windows]), STEPS)


def ns_by_ns(kernels: pd.DataFrame, low: int, high: int) -> tuple[float, float]:
    """Utilization and SM efficiency of a window, one ns at a time."""
    busy, saturated = 0, 0.0
    for t in range(low, high):
        running = kernels[(kernels["start_ns"] <= t) & (kernels["end_ns"] > t)]
        busy += len(running) > 0
        saturated += min(1.0, running.loc[running["activity"] == "kernel", "blocks_per_sm"].sum())
    return busy / (high - low), saturated / (high - low)


def test_utilization_and_sm_efficiency_of_random_kernels_per_gpu_and_step():
    rng = np.random.default_rng(3)
    start = rng.integers(0, 300, 40)
    kernels = table([
        {"start_ns": s, "end_ns": s + rng.integers(0, 25), "blocks_per_sm": rng.choice([0.1, 0.45, 0.8, 3.0]),
         "step": int(s >= 150), "activity": rng.choice(["kernel", "kernel", "memset"])} for s in sorted(start)])
    kernels["kind"] = kernels["kind"].where(kernels["activity"] == "kernel", "memcpy")
    end = int(kernels["end_ns"].max())
    steps = step_table((0, int(start.min()), 150), (1, 150, end))
    whole = efficiency(kernels, steps, {}).iloc[0]
    assert (whole["gpu_utilization"], whole["sm_efficiency"]) == pytest.approx(
        ns_by_ns(kernels, int(start.min()), end))
    by_step = efficiency(kernels, steps, {}, by="step")
    for row, (low, high) in zip(by_step.itertuples(), [(int(start.min()), 150), (150, end)], strict=True):
        assert (row.gpu_utilization, row.sm_efficiency) == pytest.approx(ns_by_ns(kernels, low, high))


def test_one_sm_of_132_is_busy_and_not_efficient():
    kernels = table([{"start_ns": 0, "end_ns": 1000, "blocks_per_sm": 1 / 132}])
    row = efficiency(kernels, step_table(), {}).iloc[0]
    assert row["gpu_utilization"] == 1 and row["sm_efficiency"] == pytest.approx(0.0076, abs=1e-4)


def test_occupancy_and_efficiency_say_how_much_they_know():
    kernels = table([
        {"start_ns": 0, "end_ns": 300, "blocks_per_sm": 0.5, "occupancy": 40.0, "operation": "a"},
        {"start_ns": 300, "end_ns": 400, "blocks_per_sm": 9.0, "occupancy": 80.0, "operation": "a"},
        {"start_ns": 400, "end_ns": 500, "operation": "b"},
        {"start_ns": 500, "end_ns": 600, "blocks_per_sm": np.inf, "operation": "b"}])
    row = efficiency(kernels, step_table(), {}).iloc[0]
    assert row["occupancy"] == pytest.approx(0.5) and row["occupancy_known"] == pytest.approx(4 / 6)
    assert row["sm_known"] == pytest.approx(4 / 6)
    a, b = efficiency(kernels, step_table(), {}, by="operation").itertuples()
    assert a.sm_efficiency == pytest.approx((300 * 0.5 + 100 * 1) / 400)
    assert np.isnan(b.sm_efficiency) and np.isnan(b.occupancy) and b.sm_known == 0


@pytest.mark.parametrize(("launch", "grid", "block", "blocks"), [
    ("hipExtModuleLaunchKernel", "[17920, 1, 4]", "[256, 1, 1]", 280),
    ("hipModuleLaunchKernel", "[70, 1, 4]", "[256, 1, 1]", 280),
    ("hipLaunchKernel", "[280, 1, 1]", "[64, 4, 1]", 280),
    ("hipLaunchKernel", None, None, None),
])
def test_the_grid_of_rocm_is_in_threads_for_one_launch_call(launch, grid, block, blocks):
    kernels = table([{"start_ns": 0, "end_ns": 1, "launch_name": launch, "grid": grid, "block": block}])
    value = blocks_per_unit(kernels, {0: MI300X}).iloc[0]
    assert np.isnan(value) if blocks is None else value == pytest.approx(blocks / 304)
    assert np.isnan(blocks_per_unit(kernels, {}).iloc[0])  # number of CUs not known


def matmuls() -> pd.DataFrame:
    """Two calls in step 0 (one recomputed), one of two kernels in step 1, one without shapes."""
    mm = {"cpu_op": "aten::mm", "op_args": MM}
    return table([
        {"start_ns": 0, "end_ns": 100, "step": 0, "op_id": 1, "operation": "mlp", **mm},
        {"start_ns": 100, "end_ns": 200, "step": 0, "op_id": 2, "operation": "mlp", "recompute": True, **mm},
        {"start_ns": 200, "end_ns": 250, "step": 1, "op_id": 3, "operation": "attn", **mm, "name": "a"},
        {"start_ns": 250, "end_ns": 300, "step": 1, "op_id": 3, "operation": "attn", **mm, "name": "b"},
        {"start_ns": 300, "end_ns": 400, "step": 1, "op_id": 4, "operation": "mlp", "cpu_op": "aten::mm"}])


def test_counted_flops_once_per_call_and_without_recomputation_in_mfu():
    peak = MI300X.peaks["bf16"].flop_per_s
    row = efficiency(matmuls(), step_table((0, 0, 200), (1, 200, 400)), {0: MI300X}).iloc[0]
    assert row["flop"] == pytest.approx(3 * MM_FLOP)
    assert row["hfu"] == pytest.approx(3 * MM_FLOP / (400e-9 * peak))
    assert row["mfu"] == pytest.approx(2 * MM_FLOP / (400e-9 * peak)) and row["mfu_source"] == "counted"
    assert row["flop_known"] == pytest.approx(300 / 400)
    by_op = efficiency(matmuls(), step_table(), {0: MI300X}, by="operation").set_index("operation")
    assert by_op.loc["attn", "hfu"] == pytest.approx(MM_FLOP / (100e-9 * peak))
    assert by_op.loc["attn", "time_us"] == pytest.approx(0.1)
    assert by_op["flop"].sum() == pytest.approx(row["flop"])
    half = efficiency(matmuls(), step_table(), {0: MI300X}, by="operation", where={"kernel": ["b"]}).iloc[0]
    assert half["flop"] == pytest.approx(MM_FLOP / 2, rel=1e-3)  # its share of the call, not all of it


def test_the_models_flops_over_complete_steps_win():
    peak = MI300X.peaks["bf16"].flop_per_s
    steps = pd.concat([step_table((0, 0, 200)), step_table((1, 200, 400), complete=False)], ignore_index=True)
    row = efficiency(matmuls(), steps, {0: MI300X}, model_flop_per_step={0: 1e6}).iloc[0]
    assert row["mfu"] == pytest.approx(1e6 / (200e-9 * peak)) and row["mfu_source"] == "model"
    by_step = efficiency(matmuls(), steps, {0: MI300X}, by="step", model_flop_per_step={0: 1e6})
    assert by_step["mfu_source"].tolist() == ["model", "counted"]


def test_each_data_type_is_held_to_its_own_peak():
    fp8 = MM.replace("c10::BFloat16", "c10::Float8_e4m3fn")
    kernels = table([{"start_ns": 0, "end_ns": 100, "op_id": 1, "cpu_op": "aten::mm", "op_args": MM},
                     {"start_ns": 100, "end_ns": 200, "op_id": 2, "cpu_op": "aten::_scaled_mm", "op_args": fp8},
                     {"start_ns": 200, "end_ns": 300, "op_id": 3, "cpu_op": "aten::mm",
                      "op_args": MM.replace("c10::BFloat16", "float"), "name": "sm80_xmma_gemm_f32f32_tf32f32_f32_tn"}])
    row = efficiency(kernels, step_table(), {0: H100}).iloc[0]
    seconds = sum(MM_FLOP / H100.peaks[dtype].flop_per_s for dtype in ("bf16", "fp8", "tf32"))
    assert row["hfu"] == pytest.approx(seconds / 300e-9)


def test_without_a_peak_or_shapes_nothing_is_guessed():
    for kernels, gpus in ((matmuls(), {}), (matmuls(), {0: None}), (table([{"start_ns": 0, "end_ns": 9}]), {0: H100})):
        row = efficiency(kernels, step_table(), gpus).iloc[0]
        assert np.isnan(row["hfu"]) and np.isnan(row["mfu"])
        assert row["mfu_source"] == "unavailable" and row["flop_known"] == 0


def test_an_unknown_gpu_has_no_efficiency_even_beside_operators_without_flops():
    relu = {"cpu_op": "aten::relu", "op_args": json.dumps({"Input Dims": [[4]], "Input type": ["float"]})}
    kernels = pd.concat([matmuls(), table([{"start_ns": 400, "end_ns": 500, "op_id": 9, **relu}])], ignore_index=True)
    for column in ("name", "kind", "activity", "worker", "device", "phase", "operation", "cpu_op", "op_args"):
        kernels[column] = kernels[column].astype("category")
    row = efficiency(conform(kernels, KERNELS), step_table(), {0: None}).iloc[0]
    assert np.isnan(row["hfu"]) and row["mfu_source"] == "unavailable" and row["flop_known"] == pytest.approx(0.2)


def raw_kernels(path: Path) -> pd.DataFrame:
    """Device rows of a CUDA trace, read without any of the project's code."""
    with gzip.open(path) as stream:
        events = json.load(stream)["traceEvents"]
    rows = []
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, args = round(float(e["ts"]) * 1000), e["args"]
            rows.append({"start_ns": start, "end_ns": start + round(float(e["dur"]) * 1000),
                         "activity": e["cat"].removeprefix("gpu_"), "blocks_per_sm": args.get("blocks per SM", np.nan),
                         "occupancy": args.get("est. achieved occupancy %", np.nan),
                         "kind": "compute" if e["cat"] == "kernel" else "memcpy"})
    return table(rows)


def test_a_real_trace_has_its_published_values(shared):
    """0.235, 0.171 and 35 % were published for this trace, over a window of its own."""
    row = efficiency(raw_kernels(shared / "traces" / "nccl_a100" / "rank0.pt.trace.json.gz"), step_table(), {}).iloc[0]
    assert row["gpu_utilization"] == pytest.approx(0.235, abs=0.004)
    assert row["sm_efficiency"] == pytest.approx(0.171, abs=0.002)
    assert row["occupancy"] == pytest.approx(0.35, abs=0.01)
