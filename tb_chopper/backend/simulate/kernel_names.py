"""Names of device kernels, as the libraries of each vendor spell them."""

from __future__ import annotations

_NATIVE = "at::native::"
_HIDDEN = "at::native::(anonymous namespace)::"
_FLASH = "void pytorch_flash::"
_FLASH_BACKWARD = "Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2, false, false, cutlass::bfloat16_t>"

GATHER = f"void {_HIDDEN}vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)"
EMBEDDING_BACKWARD = (
    f"void {_HIDDEN}compute_grad_weight<c10::BFloat16, float, long>"
    "(long const*, c10::BFloat16 const*, long const*, long, long, int)"
)
SORT = {
    "rocm": "void rocprim::detail::radix_sort_block_sort_kernel<long>(long*, long*, unsigned int)",
    "cuda": "void cub::DeviceRadixSortSingleTileKernel<long>(long const*, long*, int)",
}
CAT = f"void {_HIDDEN}CatArrayBatchedCopy<{_HIDDEN}OpaqueType<2u>, unsigned int, 3, 64, 64>(char*)"
LOG_SOFTMAX = (
    "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
    "(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)"
)
LOG_SOFTMAX_BACKWARD = (
    "void (anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, "
    "(anonymous namespace)::LogSoftMaxBackwardEpilogue>(float*, float const*, float const*, long)"
)
RMS_NORM = (
    f"void {_HIDDEN}vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float, c10::BFloat16 const*, "
    "c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)"
)
RMS_NORM_BACKWARD = (
    f"void {_HIDDEN}layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float, true>(c10::BFloat16 const*, "
    "c10::BFloat16 const*, float const*, float const*, c10::BFloat16 const*, c10::BFloat16*, int)"
)
RMS_NORM_GAMMA = (
    f"void {_HIDDEN}GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32u, 32u, 8u, true, true, true>(long, "
    "long, c10::BFloat16 const*, c10::BFloat16 const*, float const*, float const*, c10::BFloat16*, c10::BFloat16*)"
)
NLL = f"void {_HIDDEN}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*)"
NLL_BACKWARD = f"void {_HIDDEN}nll_loss_backward_reduce_cuda_kernel_2d<float, long>(float*, float*)"
COPY_IN = f"void {_HIDDEN}multi_tensor_copy_kernel<c10::BFloat16>({_HIDDEN}TensorListMetadata<2>)"
COPY_OUT = (
    f"void {_HIDDEN}split_with_sizes_copy_out_contiguous_no_cast_kernel<16, char>(char**, char**, long*, long*)"
)
CHUNK_CAT = (
    f"void {_HIDDEN}chunk_cat_cuda_kernel<c10::BFloat16, c10::BFloat16>"
    "(c10::BFloat16**, c10::BFloat16*, long*, long*)"
)

ATTENTION = {
    "rocm": ("attn_fwd", "bwd_preprocess", "bwd_kernel_dk_dv", "bwd_kernel_dq"),
    "cuda": (
        f"{_FLASH}flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>, "
        "false, true, false, false, true, true, false, false>(pytorch_flash::Flash_fwd_params)",
        f"{_FLASH}flash_bwd_dot_do_o_kernel<true, {_FLASH_BACKWARD} >(pytorch_flash::Flash_bwd_params)",
        f"{_FLASH}flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<{_FLASH_BACKWARD}, false, true, false, false, true, "
        "true, false>(pytorch_flash::Flash_bwd_params)",
        f"{_FLASH}flash_bwd_convert_dq_kernel<{_FLASH_BACKWARD} >(pytorch_flash::Flash_bwd_params, int)",
    ),
}
"""Forward; backward: preparation, first and second kernel."""

_STORAGE = "(ncclDevKernelArgsStorage<4096ul>)"
_COLLECTIVES = {
    "_allgather_base": "AllGather_RING_LL",
    "_reduce_scatter_base": "ReduceScatter_Sum_{}_RING_LL",
    "allreduce": "AllReduce_Sum_{}_RING_LL",
    "send": "SendRecv",
    "recv": "SendRecv",
}

_TENSILE_AXES = {"TN": "Alik_Bljk", "NN": "Ailk_Bljk", "NT": "Ailk_Bjlk"}


def collective(dialect: str, name: str, dtype: str) -> str:
    """`dtype` as the profiler writes it: BFloat16, Float."""
    if dialect == "rocm":
        return f"ncclDevKernel_Generic_1{_STORAGE}"
    return f"ncclDevKernel_{_COLLECTIVES[name].format({'BFloat16': 'bf16', 'Float': 'f32'}[dtype])}{_STORAGE}"


def elementwise(functor: str, operands: int) -> str:
    arguments = f"{_NATIVE}{functor}, std::array<char*, {operands}ul>"
    return f"void {_NATIVE}vectorized_elementwise_kernel<4, {arguments} >(int, {arguments})"


def reduction(functor: str) -> str:
    operator = f"{_NATIVE}ReduceOp<float, {_NATIVE}{functor}, unsigned int, float, 4, 4>"
    return f"void {_NATIVE}reduce_kernel<512, 1, {operator} >({operator})"


def foreach(functor: str) -> str:
    arguments = f"{_HIDDEN}TensorListMetadata<1>, {_HIDDEN}{functor}"
    return f"void {_HIDDEN}multi_tensor_apply_kernel<{arguments}>({arguments})"


def gemm(dialect: str, layout: str, tile: tuple[int, int, int]) -> str:
    """`layout`: transposition of the two operands as the column-major library sees them (TN, NN, NT)."""
    if dialect == "cuda":
        return f"nvjet_tst_{tile[0]}x{tile[1]}_{tile[2]}x4_2x1_v_bz_coopA_{layout}T"
    return (
        f"Cijk_{_TENSILE_AXES[layout]}_BBS_BH_Bias_HA_S_SAV_UserArgs_MT{tile[0]}x{tile[1]}x{tile[2]}_MI16x16x1_SN_LDSB1_"
        "AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_DTVA0_DTVB0_EPS0_FDSI0_GRPM1_GRVWA8_GRVWB8_GSUAMB_GLS0_ISA942_IU1_K1_"
        "LBSPPA1024_LBSPPB1024_PGR2_PLR1_SIA3_SS1_SPO0_SU0_TLDS1_VWA8_VWB2_WSGRA0_WSGRB0_WS64_WG32_8_1"
    )
