"""Every published figure on FLOPs of Llama 3 8B against the formulas of flops.py and the MFU of metrics.efficiency.

The figures: torchtitan's get_num_flop_per_token and get_peak_flops, torch.utils.flop_counter and
torch._inductor.analysis.device_info, and the sizes of the model on its card.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest

from tb_chopper.backend import flops, hardware
from tb_chopper.backend.metrics.efficiency import efficiency
from tests.unit.test_efficiency import step_table, table

LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, MLP, VOCABULARY = 32, 32, 8, 128, 4096, 14336, 128256
TOKENS = 4096
BF16 = "c10::BFloat16"
PER_LAYER = 218_112_000
PARAMETERS, WITHOUT_EMBEDDING = 8_030_261_248, 7_504_924_672
FLASH = "aten::_scaled_dot_product_flash_attention"


def flop(op: str, dims: list, values: dict[int, str] | None = None) -> float:
    args = json.dumps({"Input Dims": dims, "Input type": [BF16] * len(dims),
                       "Concrete Inputs": [(values or {}).get(i, "") for i in range(len(dims))]})
    calls = pd.Series([op], dtype="category"), pd.Series([args], dtype="category")
    return float(flops.operator_costs(*calls)["flop"].iloc[0])


def linear(tokens: int, n_in: int, n_out: int) -> float:
    return flop("aten::mm", [[tokens, n_in], [n_in, n_out]])


def attention(length: int, causal: bool, backward: bool = False) -> float:
    q, kv = [1, HEADS, length, HEAD], [1, KV_HEADS, length, HEAD]
    if backward:
        return flop(FLASH + "_backward", [q, q, kv, kv, q, q[:3], *[[]] * 6], {11: str(causal)})
    return flop(FLASH, [q, kv, kv, [], []], {4: str(causal)})


def layer_linears() -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of one transformer layer."""
    kv = KV_HEADS * HEAD
    return [(HIDDEN, HIDDEN), (HIDDEN, kv), (HIDDEN, kv), (HIDDEN, HIDDEN), (HIDDEN, MLP), (HIDDEN, MLP), (MLP, HIDDEN)]


def per_token(length: int, causal: bool = False) -> float:
    """FLOPs of forward and backward, counted operator by operator, without the embedding, a lookup."""
    linears = 3 * (LAYERS * sum(linear(length, *size) for size in layer_linears())
                   + linear(length, HIDDEN, VOCABULARY))
    # A count of the model knows no recomputed scores: backward is twice forward.
    return (linears + 3 * LAYERS * attention(length, causal)) / length


def test_parameters():
    linears = sum(a * b for a, b in layer_linears())
    assert linears + 2 * HIDDEN == PER_LAYER
    assert LAYERS * PER_LAYER + HIDDEN + VOCABULARY * HIDDEN == WITHOUT_EMBEDDING
    assert WITHOUT_EMBEDDING + VOCABULARY * HIDDEN == PARAMETERS


@pytest.mark.parametrize(("n_in", "n_out", "published"), [
    (HIDDEN, HIDDEN, 1.374e11), (HIDDEN, 1024, 3.436e10), (HIDDEN, MLP, 4.810e11), (HIDDEN, VOCABULARY, 4.304e12)])
def test_linear_layers_at_4096_tokens(n_in, n_out, published):
    assert linear(TOKENS, n_in, n_out) == pytest.approx(published, rel=5e-4)
    # Backward: the gradients of input and weight.
    gradients = linear(TOKENS, n_out, n_in) + linear(n_in, TOKENS, n_out)
    assert gradients == 2 * linear(TOKENS, n_in, n_out)


def test_attention_at_4096_tokens():
    assert attention(TOKENS, causal=False) == pytest.approx(2.749e11, rel=5e-4)
    assert attention(TOKENS, causal=True) == pytest.approx(1.374e11, rel=5e-4)
    for causal in (False, True):
        assert attention(TOKENS, causal, backward=True) == 2.5 * attention(TOKENS, causal)


@pytest.mark.parametrize(("length", "published"), [(4096, 5.147e10), (8192, 5.791e10)])
def test_flops_of_a_token(length, published):
    """6 (N − N_emb) + 12 L H hd S, causal not halved; norms have parameters and no FLOPs."""
    model = 6 * WITHOUT_EMBEDDING + 12 * LAYERS * HEADS * HEAD * length
    assert model == pytest.approx(published, rel=5e-4)
    norms = (2 * LAYERS + 1) * HIDDEN
    assert per_token(length) == model - 6 * norms


@pytest.mark.parametrize(("batch", "length", "published"), [
    (1, 4096, 2.108e14), (2, 4096, 4.217e14), (4, 4096, 8.433e14), (1, 8192, 4.744e14), (2, 8192, 9.489e14)])
def test_flops_of_a_step(batch, length, published):
    assert batch * length * per_token(length) == pytest.approx(published, rel=5e-4)


def test_flops_of_a_causal_step():
    assert TOKENS * per_token(TOKENS, causal=True) == pytest.approx(1.976e14, rel=5e-4)


def test_mfu_is_the_models_and_hfu_what_was_computed():
    """A step of one linear layer under activation checkpointing: forward, again in backward, and two gradients. Model
    6 N D; performed 8 N D, +2 N a token."""
    h100 = hardware.find("NVIDIA H100 80GB HBM3", units=132)
    assert h100 is not None
    peak = h100.peaks["bf16"].flop_per_s
    forward = [[TOKENS, HIDDEN], [HIDDEN, MLP]]
    backward = [[TOKENS, MLP], [MLP, HIDDEN]], [[HIDDEN, TOKENS], [TOKENS, MLP]]
    kernels = table([
        {"start_ns": i * 10**6, "end_ns": (i + 1) * 10**6, "step": 0, "op_id": i, "cpu_op": "aten::mm",
         "op_args": json.dumps({"Input Dims": dims, "Input type": [BF16] * 2}), "recompute": i == 1}
        for i, dims in enumerate((forward, forward, *backward))])
    nd = HIDDEN * MLP * TOKENS
    row = efficiency(kernels, step_table((0, 0, 4 * 10**6)), {0: h100}, by="step").iloc[0]
    assert row["mfu"] == pytest.approx(6 * nd / (4e-3 * peak)) and row["hfu"] == pytest.approx(8 * nd / (4e-3 * peak))
    told = efficiency(kernels, step_table((0, 0, 4 * 10**6)), {0: h100}, by="step", model_flop_per_step={0: 6.0 * nd})
    assert told["mfu"].iloc[0] == pytest.approx(row["mfu"]) and told["mfu_source"].iloc[0] == "model"


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA H20", 148), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA A100-SXM4-80GB", 312),
    ("AMD Instinct MI300X VF", 1307.4), ("AMD Instinct MI300X", 1307.4), ("AMD Instinct MI355X", 2500),
    ("AMD Instinct MI350X", 2309.6), ("AMD Instinct MI300A", 980.6), ("AMD Instinct MI210", 181),
    ("AMD Instinct MI250X", 191.5)])
def test_peaks_in_bf16(name, tflops):
    found = hardware.find(name)
    assert found is not None and found.peaks["bf16"].flop_per_s / 1e12 == pytest.approx(tflops, rel=0.011)


@pytest.mark.parametrize(("name", "gemm", "padding"), [
    ("Cijk_Ailk_Bljk_BBS_BH_MT256x32x64_MI16x16x1", flops.Gemm(m=100, n=300, k=100), (512 * 128 * 128) / (3 * 10**6)),
    ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn", flops.Gemm(m=64, n=128, k=64), 1.0)])
def test_padding_by_the_tile_in_the_name(name, gemm, padding):
    """Rows of the tile run along N: BLAS is column-major."""
    assert flops.tile_padding(name, gemm) == pytest.approx(padding)
