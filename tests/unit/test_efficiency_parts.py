"""What the time of kernels goes to, matrix cores, and the data types of matrix products, by hand."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import hardware
from tb_chopper.backend.metrics.efficiency import efficiency
from tb_chopper.backend.metrics.precision import matrix_types, on_matrix_cores, precision
from tests.unit.test_efficiency import step_table, table

H100, MI300X = hardware.find("NVIDIA H100 80GB HBM3", units=132), hardware.find("AMD Instinct MI300X", units=304)
BANDWIDTH = 3.35e12


def args(dims: list[list[int]], kind: str = "c10::BFloat16") -> str:
    return json.dumps({"Input Dims": dims, "Input type": [kind] * len(dims), "Concrete Inputs": [""] * len(dims)})


def test_the_time_of_kernels_is_needed_lost_slow_or_unknown():
    """A product that fills half of the SMs, an addition that fills them, a kernel of which nothing is known."""
    product, added = args([[1024, 1024], [1024, 1024]]), args([[4096, 4096], [4096, 4096]])
    kernels = table([
        {"start_ns": 0, "end_ns": 100_000, "blocks_per_sm": 0.5, "op_type": "gemm", "op_id": 1, "cpu_op": "aten::mm",
         "op_args": product},
        {"start_ns": 100_000, "end_ns": 200_000, "blocks_per_sm": 8.0, "op_type": "vector", "op_id": 2,
         "cpu_op": "aten::add", "op_args": added},
        {"start_ns": 200_000, "end_ns": 300_000, "op_type": "vector", "cpu_op": "mylib::op"}])
    row = efficiency(kernels, step_table(), {0: H100}, by=[]).iloc[0]
    of_product = 2 * 1024**3 / H100.peaks["bf16"].flop_per_s * 1e6
    moved = 3 * 4096**2 * 2 / BANDWIDTH * 1e6
    assert row["lost_us"] == pytest.approx(50)
    assert row["ideal_us"] == pytest.approx(of_product + moved)
    assert row["below_us"] == pytest.approx(50 - of_product + 100 - moved)
    assert row["unknown_us"] == pytest.approx(100)


def test_a_product_with_few_flops_needs_its_bytes():
    dims = args([[4096, 4096], [4096, 1]])
    kernels = table([{"start_ns": 0, "end_ns": 100_000, "blocks_per_sm": 1.0, "op_type": "gemm", "op_id": 1,
                      "cpu_op": "aten::mm", "op_args": dims}])
    row = efficiency(kernels, step_table(), {0: H100}).iloc[0]
    assert row["ideal_us"] == pytest.approx((4096**2 + 2 * 4096) * 2 / BANDWIDTH * 1e6)


def test_nothing_is_needed_for_longer_than_the_kernel_ran():
    kernels = table([{"start_ns": 0, "end_ns": 1_000, "blocks_per_sm": 0.25, "op_type": "vector", "op_id": 1,
                      "cpu_op": "aten::add", "op_args": args([[4096, 4096]] * 2)}])
    row = efficiency(kernels, step_table(), {0: H100}).iloc[0]
    assert (row["lost_us"], row["ideal_us"], row["below_us"]) == pytest.approx((0.75, 0.25, 0))


def test_the_whole_run_is_one_group():
    kernels = table([{"start_ns": 0, "end_ns": 100, "gpu": 0}, {"start_ns": 50, "end_ns": 250, "gpu": 1, "capture": 1}])
    row = efficiency(kernels, step_table(), {}, by=[]).iloc[0]
    assert row["time_us"] == pytest.approx(0.3) and row["gpu_utilization"] == 1


def names(*kernels: str) -> pd.Series:
    return pd.Series(kernels, dtype="category")


@pytest.mark.parametrize(("name", "on_cores", "kind"), [
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", True, "fp16"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", True, "bf16"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", True, "bf16"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(Params)", True, "tf32"),
    ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw", True, "tf32"),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma", False, "fp32"),
    ("ampere_sgemm_128x64_nn", False, "fp32"), ("cudnn_infer_ampere_scudnn_128x64_relu", False, "fp32"),
    ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", True, "fp32"),
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1_SN", True, "bf16"),
    ("Cijk_Ailk_Bljk_HHS_BH_MT16x16x64_MI16x16x16x1_SN", True, "fp16"), ("volta_sgemm_128x32_nt", False, "fp32"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", True, "bf16"),
    ("ampere_dgemm_128x64_nn", False, "fp64"), ("some_kernel", False, None)])
def test_names_tell_matrix_cores_and_types(name, on_cores, kind):
    assert on_matrix_cores(names(name)).tolist() == [on_cores]
    found = matrix_types(pd.DataFrame({"name": names(name)}), pd.Series([None], dtype=object)).iloc[0]
    assert (None if pd.isna(found) else found) == kind


def test_recorded_types_come_before_names_and_fp32_on_tensor_cores_is_tf32():
    kernels = pd.DataFrame({"name": names("s1688gemm_tensorop", "ampere_sgemm_32x32",
                                          "Cijk_Ailk_Bljk_SB_MT64x16x32_MI16x16x1", "ampere_fp16_s16816gemm")})
    recorded = pd.Series(["fp32", "fp32", "fp32", "bf16"], dtype="category")
    assert matrix_types(kernels, recorded).tolist() == ["tf32", "fp32", "fp32", "bf16"]


def test_precision_by_hand():
    bf16, fp32 = args([[64, 32], [32, 16]]), args([[64, 32], [32, 16]], "float")
    mm = {"op_type": "gemm", "cpu_op": "aten::mm"}
    kernels = table([
        {"start_ns": 0, "end_ns": 600, "name": "nvjet_tst_64x8", "op_id": 1, "op_args": bf16, **mm},
        {"start_ns": 600, "end_ns": 800, "name": "ampere_sgemm_64x64", "op_id": 2, "op_args": fp32, **mm},
        {"start_ns": 800, "end_ns": 900, "name": "splitKreduce_kernel<float>", "op_id": 2, "op_args": fp32, **mm},
        {"start_ns": 900, "end_ns": 1000, "name": "flash_fwd", "op_type": "attention"},
        {"start_ns": 1000, "end_ns": 9000, "name": "elementwise", "op_type": "vector"}])
    rows = precision(kernels, {0: H100})
    found = {(r.op_type, None if pd.isna(r.dtype) else r.dtype): r for r in rows.itertuples()}
    assert {k: r.time_us for k, r in found.items()} == pytest.approx({
        ("gemm", "bf16"): 0.6, ("gemm", "fp32"): 0.2, ("gemm", None): 0.1, ("attention", None): 0.1})
    assert found["gemm", "bf16"].share == pytest.approx(0.6) and found["gemm", "bf16"].tensor_share == 1
    assert found["gemm", "fp32"].tensor_share == 0
    assert found["gemm", "fp32"].peak_flop_per_s == H100.peaks["fp32"].flop_per_s
    assert found["gemm", "bf16"].rate_flop_per_s == pytest.approx(2 * 64 * 32 * 16 / 600e-9)
    assert found["attention", None].tensor_share == 1 and np.isnan(found["attention", None].peak_flop_per_s)
    row = efficiency(kernels, step_table(), {0: H100}).iloc[0]
    assert row["tensor_share"] == pytest.approx(700 / 1000) and row["matrix_us"] == pytest.approx(1)


def test_a_type_has_a_peak_only_where_all_its_gpus_have_that():
    common = {"start_ns": 0, "end_ns": 10, "op_type": "gemm", "cpu_op": "aten::mm", "op_args": args([[8, 8], [8, 8]])}
    kernels = table([{**common, "gpu": 0}, {**common, "gpu": 1, "capture": 1}])
    rows = precision(kernels, {0: H100, 1: MI300X})
    assert len(rows) == 1 and np.isnan(rows["peak_flop_per_s"].iloc[0])
    assert precision(kernels, {0: H100, 1: H100})["peak_flop_per_s"].iloc[0] == H100.peaks["bf16"].flop_per_s
