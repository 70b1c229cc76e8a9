"""Theoretical FLOPs and bytes against torch's own counter on recorded shapes, and against published figures."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tb_chopper.backend import flops, schema
from tb_chopper.backend.flops import MISSING_SHAPES, NO_FORMULA, SHAPES, Gemm


def recorded(dims: list[Any], types: list[str] | str = "c10::BFloat16", values: dict[int, str] | None = None) -> str:
    """The args of a traced operator."""
    types = [types] * len(dims) if isinstance(types, str) else types
    return json.dumps({"Input Dims": dims, "Input type": types,
                       "Concrete Inputs": [(values or {}).get(i, "") for i in range(len(dims))]})


def costs(*calls: tuple[str | None, str | None]) -> pd.DataFrame:
    ops, args = zip(*calls, strict=True)
    return flops.operator_costs(pd.Series(ops, dtype="category"), pd.Series(args, dtype="category"))


def cost(op: str, args: str | None) -> pd.Series:
    return costs((op, args)).iloc[0]


# ---- torch's counter


def counted(path: Path, innermost: bool) -> float:
    """FLOPs of a trace's operators that have any; of nested ones (linear, addmm) only the inner or the outer one."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "cpu_op"]
    events.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    flop = costs(*((e["name"], json.dumps(
        {k: e["args"].get(k) for k in ("Input Dims", "Input type", "Concrete Inputs")})) for e in events))["flop"]
    some = [(e["tid"], e["ts"], e["ts"] + e["dur"], f) for e, f in zip(events, flop, strict=True) if f > 0]
    nested = [(i, j) for i, a in enumerate(some) for j, b in enumerate(some)
              if i < j and a[0] == b[0] and a[1] <= b[1] and b[2] <= a[2]]
    dropped = {outer if innermost else inner for outer, inner in nested}
    return sum(f for i, (*_, f) in enumerate(some) if i not in dropped)


def _programs() -> dict[str, Callable[[Any], Any]]:
    return {
        "linear": lambda t: t.nn.Linear(32, 64)(t.randn(4, 16, 32, requires_grad=True)),
        "mm without bias": lambda t: t.randn(4, 16, 32, requires_grad=True) @ t.randn(32, 8, requires_grad=True),
        "bmm": lambda t: t.bmm(t.randn(3, 4, 5, requires_grad=True), t.randn(3, 5, 6, requires_grad=True)),
        "baddbmm": lambda t: t.baddbmm(t.randn(3, 4, 6), t.randn(3, 4, 5, requires_grad=True), t.randn(3, 5, 6)),
        "strided convolution": lambda t: t.nn.Conv2d(4, 8, 3, stride=2, padding=1)(
            t.randn(2, 4, 17, 12, requires_grad=True)),
        "dilated convolution": lambda t: t.nn.Conv1d(4, 6, 3, dilation=2)(t.randn(2, 4, 21)),
        "transposed convolution": lambda t: t.nn.ConvTranspose2d(4, 6, 3, stride=2)(
            t.randn(2, 4, 5, 7, requires_grad=True)),
    }


@pytest.mark.torch
@pytest.mark.parametrize("name", _programs())
def test_equal_to_torchs_counter_forward_and_backward(name, tmp_path):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    torch.manual_seed(0)
    program = _programs()[name]
    with FlopCounterMode(display=False) as counter:
        program(torch).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        program(torch).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert counter.get_total_flops() > 0
    for innermost in (True, False):
        assert counted(tmp_path / "t.json", innermost) == counter.get_total_flops()


@pytest.mark.torch
def test_attention_on_the_cpu_is_counted_and_halved_when_causal(tmp_path):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    total = {}
    for causal in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        total[causal] = counted(tmp_path / "t.json", innermost=True)
    scores = 2 * 2 * 4 * 16 * 16 * 8  # 2 B H Sq Sk D: one of the seven products
    assert total == {False: 7 * scores, True: 3.5 * scores}


@pytest.mark.torch
@pytest.mark.parametrize("name", [n for n in flops.ATTENTION if n.startswith("aten::")])
def test_the_positions_are_those_of_torchs_operators(name):
    torch = pytest.importorskip("torch")
    op = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if op is None:
        pytest.skip("this torch has no such operator")
    schema_of = getattr(op, "default", None) or op.low_p
    arguments = [a.name for a in schema_of._schema.arguments]
    attention = flops.ATTENTION[name]
    assert arguments[attention.q] in ("query", "q")
    assert arguments[attention.causal] in ("is_causal", "custom_mask_type")
    if attention.lengths is not None:
        assert arguments[attention.lengths] in ("cum_seq_q", "cu_seqlens_q")
        assert arguments[attention.lengths + 2] == "max_q"


@pytest.mark.torch
def test_attention_backward_equals_torchs_counter():
    counter = pytest.importorskip("torch.utils.flop_counter")
    q, k, v = [2, 32, 64, 16], [2, 8, 48, 16], [2, 8, 48, 24]
    ours = cost("aten::_scaled_dot_product_flash_attention_backward", recorded(
        [[*q[:3], 24], q, k, v, [*q[:3], 24], q[:3], [], [], [], [], [], []], values={11: "False"}))
    grouped_k, grouped_v = [2, 32, 48, 16], [2, 32, 48, 24]  # the counter wants as many heads in all
    assert ours["flop"] == counter.sdpa_backward_flop_count([*q[:3], 24], q, grouped_k, grouped_v)


def test_each_gradient_of_a_grouped_convolution_costs_as_much_as_the_forward():
    """torch's counter counts the weight's gradient of g groups g times."""
    x, weight, out = [2, 4, 17, 12], [8, 2, 3, 3], [2, 8, 9, 6]
    forward = cost("aten::convolution", recorded([x, weight, *[[]] * 7], values={
        3: "[2, 2]", 4: "[1, 1]", 5: "[1, 1]", 6: "False", 7: "[0, 0]", 8: "2"}))["flop"]
    assert forward == 2 * 2 * 9 * 6 * 8 * 2 * 9  # 2 N out Cout Cin/groups k
    for mask, times in (("[True, True, True]", 2), ("[False, True, False]", 1)):
        backward = cost("aten::convolution_backward", recorded([out, x, weight, *[[]] * 8], values={
            7: "False", 9: "2", 10: mask}))["flop"]
        assert backward == times * forward


# ---- published figures


def test_llama_3_8b_per_layer():
    """Published: FLOPs of one layer's forward at 4096 tokens; backward is twice that, attention's 2.5 times."""
    tokens, d, hidden = 4096, 4096, 14336
    assert cost("aten::mm", recorded([[tokens, d], [d, d]]))["flop"] == pytest.approx(1.374e11, rel=5e-4)
    assert cost("aten::mm", recorded([[tokens, d], [d, 1024]]))["flop"] == pytest.approx(3.436e10, rel=5e-4)
    assert cost("aten::mm", recorded([[tokens, d], [d, hidden]]))["flop"] == pytest.approx(4.810e11, rel=5e-4)
    assert cost("aten::mm", recorded([[tokens, d], [d, 128256]]))["flop"] == pytest.approx(4.304e12, rel=5e-4)
    q, kv = [1, 32, tokens, 128], [1, 8, tokens, 128]
    forward = "aten::_scaled_dot_product_flash_attention"
    full = cost(forward, recorded([q, kv, kv, [], []], values={4: "False"}))["flop"]
    causal = cost(forward, recorded([q, kv, kv, [], []], values={4: "True"}))["flop"]
    assert (full, causal) == (pytest.approx(2.749e11, rel=5e-4), pytest.approx(1.374e11, rel=5e-4))
    backward = cost(forward + "_backward", recorded(
        [q, q, kv, kv, q, q[:3], [], [], [], [], [], []], values={11: "True"}))["flop"]
    assert backward == 2.5 * causal


def test_llama_3_8b_per_step():
    """Published: 2.108e14 FLOPs a step of 4096 tokens (1.976e14 with causal halves), from the calls of a step."""
    tokens, d, hidden, q, kv = 4096, 4096, 14336, [1, 32, 4096, 128], [1, 8, 4096, 128]
    products = [(d, d), (d, d), (d, 1024), (d, 1024), (d, hidden), (d, hidden), (hidden, d)] * 32 + [(d, 128256)]
    step = [("aten::mm", recorded(dims)) for k, n in products
            for dims in ([[tokens, k], [k, n]], [[tokens, n], [n, k]], [[k, tokens], [tokens, n]])]
    totals = {}
    for causal in ("False", "True"):
        attention = [("aten::_flash_attention_forward", recorded(
            [[1, 4096, 32, 128], [1, 4096, 8, 128], [1, 4096, 8, 128], *[[]] * 6], values={8: causal}))] * 32
        backward = [("aten::_scaled_dot_product_flash_attention_backward", recorded(
            [q, q, kv, kv, q, q[:3], *[[]] * 6], values={11: causal}))] * 32
        totals[causal] = costs(*step, *attention, *backward)["flop"].sum()
    # The published 6 N + 12 L H hd S counts attention's backward as twice the forward (no recompute): subtract it.
    scores = 2 * 32 * 4096 * 4096 * 128 * 32
    assert totals["False"] - scores == pytest.approx(2.108e14, rel=1e-3)
    assert totals["True"] - scores / 2 == pytest.approx(1.976e14, rel=1e-3)


# ---- honesty


def test_what_the_shapes_do_not_tell_is_said_and_not_guessed():
    table = costs(
        ("aten::mm", None),  # recorded without shapes
        ("mylib::swizzle", recorded([[4, 4]])),  # no formula
        (None, None),  # launched before the capture
        ("aten::mm", recorded([[4, 5], [6, 7]])),  # shapes that do not multiply
        ("aten::convolution", json.dumps({"Input Dims": [[1, 2, 8, 8], [4, 2, 3, 3]]})),  # an old trace: no stride
        ("aten::relu", recorded([[4, 4]])),
    )
    assert list(table["flop_source"]) == [MISSING_SHAPES, NO_FORMULA, MISSING_SHAPES, MISSING_SHAPES, MISSING_SHAPES,
                                          SHAPES]
    assert table["flop"].isna().tolist() == [True] * 5 + [False]
    assert table["flop"].iloc[5] == 0 and table["bytes"].iloc[5] == 4 * 4 * 2 * 2


def test_packed_sequences_count_only_when_they_have_one_length():
    dims = [[300, 8, 64]] * 3 + [[4], [4], [], [], [], []]
    known = cost("aten::_flash_attention_forward", recorded(dims, values={5: "100", 6: "100", 8: "True"}))
    assert known["flop"] == 4 * 3 * 8 * 100 * 100 * 64 / 2
    unknown = cost("aten::_flash_attention_forward", recorded(dims, values={5: "160", 6: "160", 8: "True"}))
    assert unknown["flop_source"] == MISSING_SHAPES and math.isnan(unknown["flop"])


def test_a_causal_mask_over_unequal_lengths_is_not_halved():
    q, kv = [1, 4, 16, 8], [1, 4, 64, 8]
    full = cost("aten::scaled_dot_product_attention", recorded([q, kv, kv, [], [], []], values={5: "True"}))
    assert full["flop"] == 4 * 4 * 16 * 64 * 8


@pytest.mark.parametrize(("op", "dims", "types", "values", "expected"), [
    ("aten::mm", [[8, 4], [4, 2]], "c10::BFloat16", {}, (32 + 8 + 16) * 2),
    ("aten::_scaled_mm", [[8, 4], [4, 2]], "c10::Float8_e4m3fn", {}, 32 + 8 + 16 * 2),
    ("aten::mul.Tensor", [[4, 16, 32], [4, 16, 1]], "float", {}, (2048 + 64 + 2048) * 4),
    ("aten::add_", [[64], [64]], "float", {}, 3 * 64 * 4),
    ("aten::copy_", [[64], [64]], ["c10::BFloat16", "float"], {}, 64 * 2 + 64 * 4),
    ("aten::fill_", [[64], []], ["float", "Scalar"], {}, 64 * 4),
    ("aten::embedding", [[1000, 32], [4, 16]], ["c10::BFloat16", "long int"], {}, 64 * 8 + 2 * 64 * 32 * 2),
    ("aten::_fused_rms_norm", [[4, 32], [], [32]], ["c10::BFloat16", "ScalarList", "c10::BFloat16"], {},
     (128 + 32 + 128) * 2),
    ("aten::sum", [[4, 32], []], ["float", "ScalarList"], {}, 128 * 4),
    ("aten::_scaled_dot_product_flash_attention", [[1, 8, 64, 16], [1, 2, 64, 16], [1, 2, 64, 16], [], []],
     "c10::BFloat16", {4: "True"}, (8 + 2 + 2 + 8) * 64 * 16 * 2),
    ("aten::convolution", [[2, 3, 9, 9], [8, 3, 3, 3], [8], [], [], [], [], [], []], "float",
     {3: "[2, 2]", 4: "[0, 0]", 5: "[1, 1]", 6: "False", 7: "[0, 0]", 8: "1"}, (486 + 216 + 2 * 8 * 16) * 4),
])
def test_bytes_are_read_once_and_written_once(op, dims, types, values, expected):
    assert cost(op, recorded(dims, types, values))["bytes"] == expected


def test_a_users_formula_counts_and_a_failing_one_is_a_missing_shape():
    flops.register("mylib::attn", lambda call: 4.0 * call.dims[0][0] * call.dims[1][0], lambda call: 7.0)
    try:
        good, bad = cost("mylib::attn", recorded([[3, 1], [5, 1]])), cost("mylib::attn", recorded([[3, 1]]))
        assert (good["flop"], good["bytes"]) == (60.0, 7.0)
        assert bad["flop_source"] == MISSING_SHAPES
    finally:
        flops.unregister("mylib::attn")
    assert cost("mylib::attn", recorded([[3, 1], [5, 1]]))["flop_source"] == NO_FORMULA


def test_the_type_of_the_operands_is_told():
    table = costs(("aten::_scaled_mm", recorded([[8, 4], [4, 2]], "c10::Float8_e4m3fnuz")),
                  ("aten::mm", recorded([[8, 4], [4, 2]], "float")), ("aten::mm", None))
    assert table["dtype"].iloc[:2].tolist() == ["fp8", "fp32"] and pd.isna(table["dtype"].iloc[2])


# ---- per kernel


def test_the_kernels_of_a_call_share_its_flops_by_time():
    args = recorded([[64, 32], [32, 16]])
    rows = [
        # op_id, kind, start, end: a call of two kernels and a copy, a second call, one of another capture
        (0, 7, "compute", 0, 300), (0, 7, "compute", 400, 500), (0, 7, "memcpy", 500, 900),
        (0, 8, "compute", 900, 900), (1, 7, "compute", 0, 10),
    ]
    kernels = schema.conform(pd.DataFrame({
        "name": "k", "cpu_op": "aten::mm", "op_args": args,
        **{c: [r[i] for r in rows] for i, c in enumerate(("capture", "op_id", "kind", "start_ns", "end_ns"))},
    }).astype({"kind": pd.CategoricalDtype(list(schema.KINDS))}), schema.KERNELS)
    flop = flops.kernel_costs(kernels)["flop"].tolist()
    whole = 2 * 64 * 32 * 16
    assert flop[0] + flop[1] == pytest.approx(whole) and flop[0] / flop[1] == pytest.approx(3, rel=0.01)
    assert flop[2:] == [0, whole, whole]


# ---- GEMM shapes and tiles


@pytest.mark.parametrize(("op", "dims", "expected"), [
    ("aten::mm", [[128, 5], [5, 64]], Gemm(128, 64, 5)),
    ("aten::addmm", [[64], [128, 5], [5, 64]], Gemm(128, 64, 5)),
    ("aten::bmm", [[3, 128, 5], [3, 5, 64]], Gemm(128, 64, 5, 3)),
    ("aten::baddbmm", [[3, 128, 64], [3, 128, 5], [3, 5, 64]], Gemm(128, 64, 5, 3)),
    ("aten::linear", [[2, 4, 16, 32], [64, 32], [64]], Gemm(128, 64, 32)),
    ("aten::matmul", [[7, 1, 4, 5], [2, 5, 6]], Gemm(4, 6, 5, 14)),
    ("aten::mm", [[128, 5], [6, 64]], None),
    ("aten::relu", [[128, 5]], None),
])
def test_gemm_shape(op, dims, expected):
    assert flops.gemm_shape(op, recorded(dims)) == expected


@pytest.mark.parametrize(("kernel", "expected"), [
    ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB0", (256, 192, 64)),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute", (128, 256, 64)),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn", (128, 64, 1)),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>", (256, 128, 32)),
    ("nvjet_tst_192x128_64x4_2x1_v_bz_coopA_NNT", (192, 128, 64)),
    ("ampere_sgemm_32x128_tn", (32, 128, 1)),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", None),
])
def test_tile_of_a_kernel_name(kernel, expected):
    assert flops.tile(kernel) == expected


def test_padding_is_what_the_tiles_add():
    name = "Cijk_Ailk_Bljk_BBS_BH_MT256x128x64_MI16x16x1"
    assert flops.tile_padding(name, Gemm(4096, 14336, 4096)) == 1.0
    # rows of the tile along N: 200 -> 256, 100 -> 128, 70 -> 128
    assert flops.tile_padding(name, Gemm(m=100, n=200, k=70)) == (256 * 128 * 128) / (200 * 100 * 70)
    assert math.isnan(flops.tile_padding("splitKreduce_kernel", Gemm(1, 1, 1)))


@pytest.mark.parametrize("name", ["bert_small_mi300x", "timesformer_mi300x", "vit_mi300x"])
def test_the_tiles_of_real_kernels_fill_their_grids(shared, name):
    """The grid of a Tensile kernel is the number of its tiles (times a split of K): rows of the tile along N."""
    with gzip.open(shared / "traces" / name / "worker0.pt.trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    operators = {e["args"].get("External id"): e for e in events if e.get("cat") == "cpu_op"}
    exact = 0
    for e in (e for e in events if e.get("cat") == "kernel" and e["name"].startswith("Cijk_") and "grid" in e["args"]):
        operator = operators[e["args"]["External id"]]
        gemm = flops.gemm_shape(operator["name"], json.dumps(operator["args"]))
        tile = flops.tile(e["name"])
        assert gemm is not None and tile is not None
        groups = math.prod(e["args"]["grid"]) // math.prod(e["args"]["block"])
        tiles = math.ceil(gemm.n / tile[0]) * math.ceil(gemm.m / tile[1]) * gemm.batch
        assert groups % tiles == 0
        exact += groups == tiles
    assert exact > 20
