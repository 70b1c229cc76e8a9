"""Kernels that could be one: which runs are found, what they are called, and what fusing them saves (hand-computed)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.metrics import fusion
from tb_chopper.backend.run import Run
from tests.builders import TraceBuilder

BANDWIDTH = 3.35e6
"""bytes/µs of an H100"""
WIDE = [4096, 4096]
SIZE = 4096 * 4096 * 2
"""bytes of it in bf16"""
BF16, FP32 = "c10::BFloat16", "float"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"


def trace_of(sms: int = 132) -> TraceBuilder:
    trace = TraceBuilder()
    trace.head["deviceProperties"][0]["numSms"] = sms
    return trace


class Stream:
    """Puts operators one after the other on one stream: op() by op()."""

    def __init__(self, trace: TraceBuilder, at: float = 0) -> None:
        self.trace, self.host, self.free = trace, at, at + 500

    def op(self, name: str, dur: float, *arguments: tuple[list[int], str], kernel: str = ELEMENTWISE, gap: float = 1,
           shapes: bool = True) -> Stream:
        dims, types = [list(a[0]) for a in arguments], [a[1] for a in arguments]
        more = {"dims": dims, "Input type": types} if shapes else {}
        self.trace.op(name, self.host, 3, **more)
        self.trace.launch(kernel, at=self.host + 1, start=self.free + gap, dur=dur, call=1)
        self.host += 4
        self.free += gap + dur
        return self


def run_of(trace: TraceBuilder, folder: Path) -> Run:
    trace.write(folder / "w.pt.trace.json")
    return tb_chopper.open_run(folder)


def only(run: Run) -> pd.Series:
    assert len(run.chains) == 1
    return run.chains.iloc[0]


X, HALF = (WIDE, BF16), ([4096], BF16)


def test_residual_add_and_norm_write_the_sum_once(tmp_path):
    stream = Stream(trace_of())
    stream.op("aten::add", 40, X, X, ([], "Scalar"))
    stream.op("aten::native_layer_norm", 30, X, ([], "ScalarList"), HALF, HALF, ([], "Scalar"))
    chain = only(run_of(stream.trace, tmp_path))
    assert (chain["pattern"], chain["operations"]) == (fusion.RESIDUAL_NORM, "add → native_layer_norm")
    # Reads both and the weights, writes the sum and the norm.
    traffic = 4 * SIZE + 2 * 4096 * 2
    assert chain["traffic_bytes"] == traffic
    assert chain["time_us"] == 70 and chain["saved_us"] == pytest.approx(70 - traffic / BANDWIDTH)
    assert chain["saved_by"] == fusion.BANDWIDTH and chain["n_kernels"] == 2


def test_what_is_fused_with_a_batch_norm_does_not_make_it_shorter(tmp_path):
    """Its statistics are of the whole batch: fused with a ReLU it still takes the 90 µs that it takes alone."""
    stream = Stream(trace_of())
    stream.op("aten::cudnn_batch_norm", 90, X, HALF, HALF).op("aten::clamp_min_", 25, X, ([], "Scalar"))
    chain = only(run_of(stream.trace, tmp_path))
    assert (chain["pattern"], chain["time_us"], chain["saved_us"]) == (fusion.BATCH_NORM, 115, 25)
    assert "Liger" not in fusion.REMEDIES[fusion.BATCH_NORM]


def test_swiglu_reads_two_and_writes_one(tmp_path):
    stream = Stream(trace_of())
    stream.op("aten::silu", 25, X).op("aten::mul", 35, X, X)
    chain = only(run_of(stream.trace, tmp_path))
    assert chain["pattern"] == fusion.GATED and chain["traffic_bytes"] == 3 * SIZE
    assert chain["saved_us"] == pytest.approx(60 - 3 * SIZE / BANDWIDTH)


@pytest.mark.parametrize(("ops", "pattern"), [
    ((("aten::pow", 1), ("aten::mean", 1), ("aten::add", 1), ("aten::rsqrt", 1), ("aten::mul", 2)), fusion.NORM),
    ((("aten::mul", 2), ("aten::neg", 1), ("aten::cat", 1), ("aten::mul", 2), ("aten::add", 2)), fusion.ROTARY),
    ((("aten::native_dropout", 1), ("aten::add", 2)), fusion.DROPOUT_ADD),
    ((("aten::gelu_backward", 2), ("aten::mul", 2)), fusion.GATED),
    ((("aten::add", 2), ("aten::relu", 1)), fusion.ELEMENTWISE),
    ((("aten::cudnn_batch_norm", 1), ("aten::add_", 2)), fusion.BATCH_NORM),
])
def test_patterns_by_what_the_operators_do(ops, pattern, tmp_path):
    stream = Stream(trace_of())
    for name, n in ops:
        stream.op(name, 20, *[X] * n)
    assert only(run_of(stream.trace, tmp_path))["pattern"] == pattern


def test_casts_are_copies_into_another_type_and_layouts_are_left_alone(tmp_path):
    stream = Stream(trace_of())
    stream.op("aten::copy_", 30, (WIDE, FP32), X).op("aten::copy_", 30, X, (WIDE, FP32))
    chain = only(run_of(stream.trace, tmp_path))
    # S + 2 S and 2 S + S, of which 2 S written and read again: reads S, writes S.
    assert chain["pattern"] == fusion.CASTS and chain["traffic_bytes"] == 2 * SIZE
    layout = Stream(trace_of())
    layout.op("aten::copy_", 30, X, X).op("aten::copy_", 30, X, X)
    assert not len(run_of(layout.trace, tmp_path / "layout").chains)


def products(stream: Stream, gap: float, gemm: str = "aten::bmm") -> Stream:
    stream.op(gemm, 100, X, X, kernel="gemm_bf16")
    stream.op("aten::mul", 20, X, ([], "double"), gap=gap)
    stream.op("aten::_softmax", 30, X, ([], "Scalar"), ([], "Scalar"), kernel="softmax_warp_forward", gap=gap)
    return stream.op(gemm, 100, X, X, kernel="gemm_bf16")


@pytest.mark.parametrize("gap", [1, 50])
def test_softmax_between_two_batched_products_is_attention_whatever_the_gaps(gap, tmp_path):
    chain = only(run_of(products(Stream(trace_of()), gap).trace, tmp_path))
    assert chain["pattern"] == fusion.ATTENTION and chain["operations"] == "mul → _softmax"
    assert chain["saved_us"] == chain["time_us"] == 50 and chain["saved_by"] == fusion.WHOLE_CHAIN


def test_a_softmax_after_a_linear_layer_is_no_attention(tmp_path):
    run = run_of(products(Stream(trace_of()), 1, gemm="aten::mm").trace, tmp_path)
    assert run.chains["pattern"].tolist() == [fusion.ELEMENTWISE]


def test_a_chain_ends_at_a_long_gap_another_layer_a_product_and_another_stream(tmp_path):
    trace = trace_of()
    stream = Stream(trace)
    stream.op("aten::add", 10, X, X).op("aten::mul", 10, X, X, gap=4.9)  # a chain
    stream.op("aten::relu", 10, X, gap=5)  # too far away
    stream.op("aten::mm", 10, X, X, kernel="gemm").op("aten::relu", 10, X)  # alone between product and layer
    begin = stream.host
    stream.op("aten::mul", 10, X, X).op("aten::add", 10, X, X)  # the chain of a layer
    trace.annotation("Layer0", begin - 0.5, stream.host - begin)
    stream.op("aten::sigmoid", 10, X)
    trace.launch(ELEMENTWISE, at=stream.host + 1, start=stream.free + 1, dur=10, stream=9)
    run = run_of(trace, tmp_path)
    assert run.chains["operations"].tolist() == ["add → mul", "mul → add"]
    assert [None if pd.isna(layer) else layer for layer in run.chains["layer"]] == [None, "Layer0"]


def test_several_kernels_of_one_operator_are_no_candidate(tmp_path):
    trace = trace_of()
    trace.op("aten::sum", 0, 20, dims=[WIDE])
    for i in range(3):
        trace.launch("reduce_kernel", at=2 + 5 * i, start=50 + 11 * i, dur=10)
    assert not len(run_of(trace, tmp_path).chains)


def test_fills_between_do_not_matter_and_outputs_nobody_reads_stay(tmp_path):
    stream = Stream(trace_of())
    stream.op("aten::add", 40, X, X)
    stream.trace.launch("Memset (Device)", at=stream.host - 1.5, start=stream.free + 0.2, dur=0.3, cat="gpu_memset")
    stream.op("aten::mul", 20, ([4096, 8], BF16), ([4096, 8], BF16))  # of another size: does not read the sum
    chain = only(run_of(stream.trace, tmp_path))
    assert chain["traffic_bytes"] == 3 * SIZE + 3 * 4096 * 8 * 2


def test_a_fused_kernel_takes_at_least_as_long_as_the_shortest(tmp_path):
    tiny = ([64], BF16)
    stream = Stream(trace_of()).op("aten::add", 3, tiny, tiny).op("aten::relu", 2, tiny)
    assert only(run_of(stream.trace, tmp_path))["saved_us"] == 3


def test_without_the_gpus_bandwidth_the_fastest_kernel_tells_it(tmp_path):
    stream = Stream(trace_of(sms=100))  # a slice of an H100, whose bandwidth is not known
    stream.op("aten::add", 40, X, X).op("aten::relu", 40, X)
    chain = only(run_of(stream.trace, tmp_path))
    assert chain["saved_by"] == fusion.BEST_KERNEL
    # 3 S in 40 µs is the faster one; fused: reads 2 S, writes S.
    assert chain["saved_us"] == pytest.approx(80 - 40)


def test_without_shapes_there_is_time_and_no_saving(tmp_path):
    stream = Stream(trace_of())
    stream.op("aten::add", 40, shapes=False).op("aten::relu", 40, shapes=False)
    run = run_of(stream.trace, tmp_path)
    chain = only(run)
    assert chain["time_us"] == 80 and np.isnan(chain["saved_us"]) and pd.isna(chain["saved_by"])
    row = run.fusion().iloc[0]
    assert (row["n"], row["time_us"], row["known_share"], row["per_step_us"]) == (1, 80, 0, 0)


def test_candidates_count_instances_over_steps(tmp_path):
    trace = trace_of()
    for step in range(3):
        trace.step(step, 1000 * step, 990)
        stream = Stream(trace, 1000 * step + 1)
        stream.op("aten::silu", 25, X).op("aten::mul", 35, X, X, gap=2)
        stream.op("aten::mm", 50, X, X, kernel="gemm")
        stream.op("aten::silu", 25, X).op("aten::mul", 45, X, X)
    run = run_of(trace, tmp_path)
    saved = 25 + 35 - 3 * SIZE / BANDWIDTH + 25 + 45 - 3 * SIZE / BANDWIDTH
    row = run.fusion().iloc[0]
    assert (row["n"], row["n_kernels"], row["time_us"]) == (6, 12, 3 * 130)
    assert row["per_step_us"] == pytest.approx(saved) and row["known_share"] == 1
    one = run.fusion(where={"step": 1}).iloc[0]
    assert one["n"] == 2 and one["per_step_us"] == pytest.approx(saved)
    # The instance that saves most: the second one, which took longer.
    gpu, start = row["at"].split("@")
    assert int(start) in set(run.kernels["start_ns"]) and gpu == "0"
    assert int(start) == run.chains.loc[run.chains["time_us"] == 70, "start_ns"].min()


@pytest.mark.parametrize(("kernel", "how"), [
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"), ("attn_fwd", "attention"),
    ("triton_poi_fused_add_mul_tanh_0", "torch.compile (Triton)"), ("triton__0d1d2d3de", "torch.compile (Triton)"),
    ("_liger_rms_norm_forward", "Liger"), ("multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "fused kernel"),
    ("at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>", None), (ELEMENTWISE, None),
    ("void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>", None)])
def test_what_is_fused_already(kernel, how, tmp_path):
    stream = Stream(trace_of())
    stream.op("aten::add", 10, X, X).op("mylib::op", 30, X, kernel=kernel)
    run = run_of(stream.trace, tmp_path)
    if how is None:
        assert not len(run.fused())
    else:
        row = run.fused().iloc[0]
        assert (row["how"], row["n"], row["time_us"], row["share"]) == (how, 1, 30, 0.75)
        assert not len(run.chains)  # never proposed again


def test_optimizers_are_a_pattern_of_their_own(tmp_path):
    stream = Stream(trace_of())
    for _ in range(4):
        stream.op("aten::mul_", 4, X, ([], "double")).op("aten::addcdiv_", 6, X, X, X)
    stream.trace.annotation("Optimizer.step#AdamW.step", -1, stream.host + 2)
    chain = only(run_of(stream.trace, tmp_path))
    assert chain["pattern"] == fusion.OPTIMIZER and chain["n_kernels"] == 8


def test_a_fused_optimizer_is_known_by_its_scope(tmp_path):
    """Apex' FusedAdam calls no operator: its kernels are multi_tensor_apply."""
    trace = trace_of()
    for i in range(3):
        trace.launch("multi_tensor_apply_kernel<AdamFunctor>", at=10 + 5 * i, start=100 + 11 * i, dur=10)
    trace.annotation("Optimizer.step#FusedAdam.step", 5, 40)
    run = run_of(trace, tmp_path)
    assert not len(run.chains) and run.fused()["n"].tolist() == [3]


def test_an_empty_run_has_no_candidates():
    from tb_chopper.backend import schema
    empty = schema.empty(schema.KERNELS)
    assert not len(fusion.chains(empty, {})) and not len(fusion.candidates(fusion.chains(empty, {}), 0))
    assert not len(fusion.fused(empty))
