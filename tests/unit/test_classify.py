"""Kinds of kernels and types of compute work, by real names of kernels and operators."""

from __future__ import annotations

import pandas as pd
import pytest

from tb_chopper.backend import classify, schema


def op_type(kernel: str, operator: str | None = None) -> str:
    names = pd.Series([kernel], dtype="category")
    operators = pd.Series(pd.Categorical([operator], categories=[operator] if operator else []))
    return schema.OP_TYPES[classify.op_types(names, operators)[0]]


def kind(kernel: str, activity: str = "kernel", collective: str | None = None) -> str:
    columns = (pd.Series([v], dtype="category") for v in (kernel, activity, collective))
    return schema.KINDS[classify.kernel_kinds(*columns)[0]]


@pytest.mark.parametrize(("kernel", "operator", "expected"), [
    ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", None, "gemm"),
    ("Cijk_Ailk_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1", None, "gemm"),
    ("nvjet_tst_192x128_64x5_1x2_h_bz_coopA_TNT", None, "gemm"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", None, "gemm"),
    ("miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_f2x3_stride1", None, "gemm"),
    ("void splitKreduce_kernel<32, 16, int, float>", "aten::mm", "gemm"),
    ("triton_tem_fused_0", "aten::bmm", "gemm"),
    ("void at::native::vectorized_elementwise_kernel<4>", "aten::addmm", "gemm"),
    ("attn_fwd", None, "attention"),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>", None, "attention"),
    ("fmha_bwd_d128_bf16_a16_rtz", None, "attention"),
    ("bwd_preprocess", "aten::_flash_attention_backward", "attention"),
    ("void split_embedding_codegen_forward_unweighted_kernel<float>", "fbgemm::split_embedding_lookup", "vector"),
    ("void fbgemm_gpu::permute_indices_weights_kernel<false>", "fbgemm::permute_sparse_features", "vector"),
    ("void at::native::convert_to_fp8<float>", "aten::_to_copy", "vector"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", "aten::add_", "vector"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>", "aten::_softmax", "vector"),
    ("triton_poi_fused_add_mul_0", None, "vector"),
    ("void multi_tensor_apply_kernel<AdamFunctor>", "aten::_fused_adamw_", "vector"),
])
def test_types_of_compute(kernel: str, operator: str | None, expected: str) -> None:
    assert op_type(kernel, operator) == expected


@pytest.mark.parametrize(("kernel", "activity", "collective", "expected"), [
    ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long)", "kernel", None, "communication"),
    ("rcclGenericKernel<1, false>(ncclDevKernelArgs)", "kernel", None, "communication"),
    ("void vllm::cross_device_reduce_1stage<__half, 8>", "kernel", None, "communication"),
    ("multimem_all_reduce_kernel", "kernel", None, "communication"),
    ("anything", "kernel", "allreduce", "communication"),
    ("__amd_rocclr_copyBuffer.kd", "kernel", None, "memcpy"),
    ("Memcpy DtoH (Device -> Pinned)", "memcpy", None, "memcpy"),
    ("Memset (Device)", "memset", None, "memcpy"),
    ("void at::native::reduce_kernel<512, 1>", "kernel", None, "compute"),
])
def test_kinds_of_rows(kernel: str, activity: str, collective: str | None, expected: str) -> None:
    assert kind(kernel, activity, collective) == expected
