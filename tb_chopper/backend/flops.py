"""Theoretical FLOPs and bytes of operator calls, from their recorded shapes.

A multiply-add counts 2. FLOPs are those of matrix multiplications, convolutions and attention; norms, softmax and
elementwise operators count 0 FLOPs and their bytes: every input read once, every output written once. Causal
attention over equal lengths counts half. Formulas: torch.utils.flop_counter (which does not halve) and, for the
backward of attention, five matrix products with the scores computed again.

Kernels of one call share its cost: an operator may start several (split-K and its reduction, the preprocessing of
attention's backward), and its FLOPs are counted once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend.classify import COMPUTE

SHAPES, MISSING_SHAPES, NO_FORMULA = "shapes", "missing shapes", "no formula"
SOURCES = (SHAPES, MISSING_SHAPES, NO_FORMULA)

Dims = list[int]


MAX_ELEMENTS = 2**63
"""No tensor has so many: a shape that says so is none."""


class Call(NamedTuple):
    """The recorded inputs of one operator call, one entry per argument."""

    dims: list[Any]
    """shape of a tensor (`[]` for scalars and absent tensors), list of shapes of a tensor list"""
    types: list[str]
    """`c10::BFloat16`, `float`, `Scalar`, `ScalarList`, `TensorList`, or empty"""
    values: list[str]
    """scalars and their lists as text, else empty"""


class Cost(NamedTuple):
    flop: float
    bytes: float
    written: float = math.nan
    """the part of bytes that is output"""


class Gemm(NamedTuple):
    """out[batch, m, n] = Σ_k a[batch, m, k] b[batch, k, n]"""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flop(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


Formula = Callable[[Call], Cost]
"""Raises where the recorded shapes do not tell."""

_AMOUNTS = ["flop", "bytes", "written"]

_USER: dict[str, Formula] = {}

_SIZES = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4, "short": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1, "char": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
}
_DTYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64",
           "signed char": "int8", "unsigned char": "int8", "char": "int8"}


def register(operator: str, flop: Callable[[Call], float], n_bytes: Callable[[Call], float] | None = None) -> None:
    """A formula for a custom operator (`mylib::attention`), or another one for a known operator.

    Both functions get the `Call`; an exception in them means that the shapes do not tell.
    """
    _USER[operator] = lambda call: Cost(float(flop(call)), float(n_bytes(call)) if n_bytes else math.nan)
    _cost.cache_clear()


def unregister(operator: str) -> None:
    """Forget a user's formula; an operator known from the start has its own again."""
    _USER.pop(operator, None)
    _cost.cache_clear()


def operator_costs(cpu_op: pd.Series, op_args: pd.Series) -> pd.DataFrame:
    """One row per input row: flop, bytes, written (the part of bytes that is output; NaN where unknown), flop_source
    (one of SOURCES), dtype (bf16, fp8, ... of the operands, or null). Every distinct (operator, shapes) pair is
    computed once; the last two columns are categorical."""
    op, args = cpu_op.astype("category"), op_args.astype("category")
    ops, texts = [None, *op.cat.categories], [None, *args.cat.categories]  # code -1: missing
    code = (op.cat.codes.to_numpy(np.int64) + 1) * len(texts) + args.cat.codes.to_numpy(np.int64) + 1
    distinct, place = np.unique(code, return_inverse=True)
    rows = [_cost(o, texts[c % len(texts)]) if (o := ops[c // len(texts)]) else _UNKNOWN for c in distinct]
    table = pd.DataFrame(rows, columns=[*_AMOUNTS, "flop_source", "dtype"])
    out = table.iloc[place].set_index(cpu_op.index)
    return out.astype({**dict.fromkeys(_AMOUNTS, "float64"), "flop_source": "category", "dtype": "category"})


def kernel_costs(kernels: pd.DataFrame) -> pd.DataFrame:
    """`operator_costs` of the rows of KERNELS, the amounts of a call shared among its compute kernels by their
    duration, so that they add up to the call's: its rate is the same whatever the grouping. Copies and
    communication have none (0, with the source of their operator)."""
    out = operator_costs(kernels["cpu_op"], kernels["op_args"])
    compute = (kernels["kind"].cat.codes == COMPUTE).to_numpy()
    call = kernels.groupby(["capture", "op_id"], sort=False, observed=True).ngroup().to_numpy()
    alone = kernels["op_id"].to_numpy() < 0
    # One ns more, so that calls whose kernels all last 0 ns share equally.
    weight = np.where(compute, (kernels["end_ns"] - kernels["start_ns"]).to_numpy() + 1.0, 0.0)
    total = np.bincount(call, weights=weight, minlength=call.max(initial=-1) + 1)[call]
    share = np.where(compute, np.where(alone, 1.0, weight / np.maximum(total, 1.0)), 0.0)
    out[_AMOUNTS] = np.where(share[:, None] > 0, out[_AMOUNTS].to_numpy() * share[:, None], 0.0)
    return out


@lru_cache(maxsize=65536)
def tensor_arguments(op_args: str | None) -> tuple[tuple[str, float], ...]:
    """Recorded type and bytes of each tensor argument whose type is known."""
    call = _parse(op_args)
    return () if call is None else tuple((call.types[i], _bytes(call, i)) for i in _tensors(call) if call.dims[i])


def dtype_of(recorded: str) -> str | None:
    """bf16, fp16, fp8, ... of a recorded input type, None for those without matrix hardware."""
    return "fp8" if "Float8" in recorded else _DTYPES.get(recorded)


def gemm_shape(cpu_op: str, op_args: str | None) -> Gemm | None:
    """M, N, K and batch of a matrix product, None for other operators and unknown shapes."""
    call = _parse(op_args)
    shape = _GEMMS.get(_base(cpu_op))
    if call is None or shape is None:
        return None
    try:
        return shape(call)
    except (ValueError, IndexError):
        return None


_TILES = (
    re.compile(r"MT(\d+)x(\d+)x(\d+)"),  # Tensile: hipBLASLt, rocBLAS
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),  # cuBLAS, xmma
    re.compile(r"(?<![A-Za-z\d])(\d+)x(\d+)_(\d+)x\d+(?!\d)"),  # CUTLASS, nvjet: M x N _ K x stages
    re.compile(r"(?<![A-Za-z\d])(\d+)x(\d+)(?=_)"),  # cuBLAS: M x N
)


@lru_cache(maxsize=4096)
def tile(kernel: str) -> tuple[int, int, int] | None:
    """The tile in a GEMM kernel's name: rows and columns as BLAS counts them (column-major), and the depth of one
    iteration (1 where the name does not tell). None where the name tells no tile."""
    for pattern in _TILES:
        match = pattern.search(kernel)
        if match:
            rows, columns, *depth = map(int, match.groups())
            return (rows, columns, depth[0] if depth else 1) if min(rows, columns) >= 8 else None
    return None


def tile_padding(kernel: str, gemm: Gemm) -> float:
    """Performed over theoretical FLOPs when every dimension is padded to whole tiles; NaN without a tile.

    BLAS is column-major, torch row-major: the tile's rows run along N.
    """
    t = tile(kernel)
    if t is None or 0 in gemm:
        return math.nan
    padded = [math.ceil(size / part) * part for size, part in zip((gemm.n, gemm.m, gemm.k), t, strict=True)]
    return math.prod(padded) / (gemm.m * gemm.n * gemm.k)


# ---- one call


_Row = tuple[float, float, float, str, "str | None"]
_UNKNOWN: _Row = (math.nan, math.nan, math.nan, MISSING_SHAPES, None)


@lru_cache(maxsize=65536)
def _cost(cpu_op: str, op_args: str | None) -> _Row:
    formula = _USER.get(cpu_op) or _FORMULAS.get(_base(cpu_op))
    call = _parse(op_args)
    dtype = next(filter(None, map(dtype_of, call.types)), None) if call else None
    if formula is None:
        return math.nan, math.nan, math.nan, NO_FORMULA, dtype
    if call is None:
        return _UNKNOWN
    try:
        return *formula(call), SHAPES, dtype
    # A user's formula may raise anything.
    except Exception:
        return math.nan, math.nan, math.nan, MISSING_SHAPES, dtype


@lru_cache(maxsize=65536)
def _parse(op_args: str | None) -> Call | None:
    """None where no shape was recorded."""
    recorded = json.loads(op_args) if isinstance(op_args, str) else {}
    dims = recorded.get("Input Dims") or recorded.get("Input dims")
    if not dims or not _is_shape(dims):
        return None
    return Call([d if isinstance(d, list) else [] for d in dims],
                *(_texts(recorded.get(key), len(dims)) for key in ("Input type", "Concrete Inputs")))


def _is_shape(value: Any) -> bool:
    """Whether these are lengths, or lists of such, of no more elements than a memory could hold."""
    if not isinstance(value, list):
        return False
    lengths = [v for v in value if type(v) is int]
    return all(v >= 0 for v in lengths) and math.prod(lengths) < MAX_ELEMENTS and all(
        _is_shape(v) for v in value if type(v) is not int)


def _texts(recorded: Any, n: int) -> list[str]:
    """What was recorded of n arguments, "" for those of which nothing was."""
    known = [v if isinstance(v, str) else "" for v in recorded] if isinstance(recorded, list) else []
    return known[:n] + [""] * (n - len(known))


def _base(cpu_op: str) -> str:
    """The operator without its overload: aten::mul.Tensor is aten::mul."""
    space, colons, name = cpu_op.partition("::")
    return space + colons + name.partition(".")[0]


def _size(call: Call, i: int) -> float:
    """Bytes of an element of argument i, NaN where its type is not known."""
    return 1 if "Float8" in call.types[i] else _SIZES.get(call.types[i], math.nan)


def _bytes(call: Call, *arguments: int) -> float:
    """Bytes of the tensors among the given arguments."""
    return float(sum(math.prod(call.dims[i]) * _size(call, i) for i in arguments if call.dims[i]))


def _tensors(call: Call) -> list[int]:
    """The arguments that are tensors of a known type."""
    return [i for i, t in enumerate(call.types) if (t in _SIZES or "Float8" in t)
            and all(isinstance(n, int) for n in call.dims[i])]


def _ints(text: str) -> list[int]:
    """`[2, 2]` as integers."""
    return [int(v) for v in text.strip("[]").split(",") if v.strip()]


# ---- matrix products


def _product(a: int, b: int, extra: Sequence[int] = ()) -> tuple[Callable[[Call], Gemm], Formula]:
    """Of arguments a and b, matrices or batches of them; `extra`: arguments that are read too (bias)."""

    def shape(call: Call) -> Gemm:
        x, y = call.dims[a], call.dims[b]
        if not x or not y or x[-1] != (y[-2] if len(y) > 1 else y[0]):
            raise ValueError("no product")
        n = y[-1] if len(y) > 1 else 1
        if len(y) <= 2:
            return Gemm(math.prod(x[:-1]), n, x[-1])
        batch = np.broadcast_shapes(tuple(x[:-2]), tuple(y[:-2]))
        return Gemm(x[-2] if len(x) > 1 else 1, n, x[-1], math.prod(batch))

    def cost(call: Call) -> Cost:
        gemm = shape(call)
        # Products of 8-bit operands are written with at least 16 bit.
        out = gemm.batch * gemm.m * gemm.n * max(_size(call, a), 2)
        return Cost(gemm.flop, _bytes(call, a, b, *(i for i in extra if i < len(call.dims))) + out)

    return shape, cost


def _linear(call: Call) -> Gemm:
    x, weight = call.dims[0], call.dims[1]
    if not x or x[-1] != weight[-1]:
        raise ValueError("no product")
    return Gemm(math.prod(x[:-1]), weight[0] if len(weight) > 1 else 1, x[-1])


def _linear_cost(call: Call) -> Cost:
    gemm = _linear(call)
    return Cost(gemm.flop, _bytes(call, *_tensors(call)[:3]) + gemm.m * gemm.n * _size(call, 0))


_PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::matmul", "aten::mv", "aten::dot", "aten::_scaled_mm",
                     "aten::_int_mm"), _product(0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_", "aten::addmv", "aten::addmv_",
                     "aten::_addmm_activation"), _product(1, 2, extra=(0,))),
    "aten::linear": (_linear, _linear_cost),
}


# ---- convolution


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Formula:
    """Forward; the positions of its arguments differ between back ends. After `transposed` come the padding of the
    output and the groups."""

    def cost(call: Call) -> Cost:
        x, weight = call.dims[0], call.dims[1]
        spread = [(_ints(call.values[i]) * len(x))[:len(x) - 2] for i in (stride, padding, dilation)]
        sizes = list(zip(x[2:], weight[2:], *spread, strict=True))
        if transposed is not None and call.values[transposed] == "True":
            more = (_ints(call.values[transposed + 1]) * len(x))[:len(x) - 2]
            out = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + extra
                   for (n, k, s, p, d), extra in zip(sizes, more, strict=True)]
            channels, positions = weight[1] * int(call.values[transposed + 2]), x[2:]
        else:
            out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
            channels, positions = weight[0], out
        return Cost(2.0 * x[0] * math.prod(positions) * math.prod(weight),
                    _bytes(call, 0, 1) + x[0] * channels * math.prod(out) * _size(call, 0))

    return cost


def _convolution_backward(call: Call) -> Cost:
    """The gradients asked for, each as many FLOPs as the forward."""
    grad_out, x, weight = call.dims[:3]
    transposed, wanted = call.values[7] == "True", call.values[10]
    positions = (x if transposed else grad_out)[2:]
    mask = [part.strip(" []") == "True" for part in wanted.split(",")]
    if len(mask) != 3:
        raise ValueError("the gradients asked for were not recorded")
    one = 2.0 * x[0] * math.prod(positions) * math.prod(weight)
    written = mask[0] * _bytes(call, 1) + mask[1] * _bytes(call, 2)
    return Cost(one * (mask[0] + mask[1]), _bytes(call, 0, 1, 2) + written)


_CONVOLUTIONS: dict[str, Formula] = {
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"),
                    _convolution(3, 4, 5, 6)),
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d"), _convolution(3, 4, 5)),
    "aten::cudnn_convolution": _convolution(3, 2, 4),
    **dict.fromkeys(("aten::miopen_convolution", "aten::mkldnn_convolution", "aten::miopen_depthwise_convolution"),
                    _convolution(4, 3, 5)),
    "aten::convolution_backward": _convolution_backward,
}


# ---- attention


@dataclass(frozen=True)
class _Attention:
    """Where an attention operator has its inputs."""

    q: int
    """position of the query; key and value follow"""
    causal: int
    """position of is_causal or of the kind of mask (0: none)"""
    heads_first: bool
    """[batch, heads, length, dim], else [batch, length, heads, dim]"""
    backward: bool = False
    lengths: int | None = None
    """position of cum_seq_q, cum_seq_k, max_q, max_k where the operator takes packed sequences"""

    def __call__(self, call: Call) -> Cost:
        q, k, v = call.dims[self.q:self.q + 3]
        if len(q) == 4:
            batch, heads, length_q = (q[0], q[1], q[2]) if self.heads_first else (q[0], q[2], q[1])
            length_k = k[2] if self.heads_first else k[1]
        elif len(q) == 3 and self.lengths is not None:
            batch, heads, length_q, length_k = self._packed(call, q, k)
        else:
            raise ValueError("no attention")
        halved = call.values[self.causal] in ("True", "1", "2") and length_q == length_k
        products = (3 * q[-1] + 2 * v[-1]) if self.backward else (q[-1] + v[-1])
        flop = 2.0 * batch * heads * length_q * length_k * products * (0.5 if halved else 1.0)
        ins = _bytes(call, self.q, self.q + 1, self.q + 2)
        out = math.prod(q[:-1]) * v[-1] * _size(call, self.q)
        # Backward reads the inputs, the output and its gradient, and writes the gradients of the inputs.
        return Cost(flop, 2 * ins + 2 * out if self.backward else ins + out)

    def _packed(self, call: Call, q: Dims, k: Dims) -> tuple[int, int, int, int]:
        """Only sequences of one length tell their FLOPs: the lengths themselves are not recorded."""
        assert self.lengths is not None
        n = call.dims[self.lengths][0] - 1
        length_q, length_k = int(call.values[self.lengths + 2]), int(call.values[self.lengths + 3])
        if n * length_q != q[0] or n * length_k != k[0]:
            raise ValueError("sequences of different lengths")
        return n, q[1], length_q, length_k


ATTENTION: dict[str, _Attention] = {
    "aten::scaled_dot_product_attention": _Attention(0, 5, True),
    "aten::_scaled_dot_product_attention_math": _Attention(0, 5, True),
    "aten::_scaled_dot_product_flash_attention": _Attention(0, 4, True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention(0, 4, True),
    "aten::_scaled_dot_product_efficient_attention": _Attention(0, 6, True),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(0, 6, True),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Attention(0, 5, True),
    "aten::_flash_attention_forward": _Attention(0, 8, False, lengths=3),
    "aten::_efficient_attention_forward": _Attention(0, 9, False),
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(1, 11, True, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention(1, 7, True, backward=True),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(1, 11, True, backward=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(1, 14, True, backward=True),
    "aten::_flash_attention_backward": _Attention(1, 11, False, backward=True, lengths=6),
    "aten::_efficient_attention_backward": _Attention(1, 14, False, backward=True),
    "flash_attn::_flash_attn_forward": _Attention(0, 5, False),
    "flash_attn::_flash_attn_varlen_forward": _Attention(0, 9, False, lengths=3),
    "flash_attn::_flash_attn_backward": _Attention(1, 11, False, backward=True),
}


# ---- bytes only


def _moves(read: Sequence[int] | None, written: Sequence[int]) -> Formula:
    """No FLOPs; bytes of the arguments read (None: all tensors) and of outputs as large as those in `written`."""

    def cost(call: Call) -> Cost:
        out = _bytes(call, *written)
        return Cost(0.0, _bytes(call, *(_tensors(call) if read is None else read)) + out, out)

    return cost


def _elementwise(call: Call) -> Cost:
    """Reads all tensors, writes one as large as they broadcast to, of the first tensor's type."""
    tensors = _tensors(call)
    out = math.prod(np.broadcast_shapes(*(tuple(call.dims[i]) for i in tensors))) * _size(call, tensors[0])
    return Cost(0.0, _bytes(call, *tensors) + out, out)


def _list(call: Call) -> Cost:
    """The type of a tensor list is not recorded: its bytes stay unknown."""
    return Cost(0.0, math.nan)


def _embedding(call: Call) -> Cost:
    rows, index = call.dims[0], math.prod(call.dims[1])
    return Cost(0.0, _bytes(call, 1) + 2.0 * index * rows[-1] * _size(call, 0))


def _aten(names: str) -> list[str]:
    return [f"aten::{name}" for name in names.split()]


_POINTWISE = """
    add sub rsub mul div pow neg abs exp log log2 log1p sqrt rsqrt reciprocal sin cos tanh sigmoid relu gelu silu mish
    softplus leaky_relu elu hardtanh hardswish erf clamp clamp_min clamp_max maximum minimum where masked_fill
    bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not eq ne lt le gt ge lerp addcmul addcdiv fmod
    remainder floor ceil round sign isnan isinf isfinite tril triu clone silu_backward gelu_backward
    sigmoid_backward tanh_backward threshold_backward native_dropout native_dropout_backward _softmax _log_softmax
    _softmax_backward_data _log_softmax_backward_data _to_copy
"""
_IN_PLACE = """
    add_ sub_ mul_ div_ pow_ neg_ abs_ exp_ sqrt_ rsqrt_ reciprocal_ tanh_ sigmoid_ relu_ clamp_ clamp_min_
    masked_fill_ lerp_ addcmul_ addcdiv_ tril_ triu_ dropout_
"""
_NORMS = """
    layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm native_batch_norm
    cudnn_batch_norm miopen_batch_norm
"""
_NORMS_BACKWARD = """
    native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward native_batch_norm_backward
    cudnn_batch_norm_backward miopen_batch_norm_backward
"""
_REDUCTIONS = "sum mean amax amin max min prod norm linalg_vector_norm var std argmax argmin any all nll_loss_forward"
_LISTS = "cat stack _foreach_add_ _foreach_mul_ _foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_sqrt " \
         "_foreach_div_ _foreach_norm _foreach_copy_ _fused_adamw_ _fused_adam_ _fused_sgd_ split_with_sizes_copy"

_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_aten(_POINTWISE), _elementwise),
    **dict.fromkeys(_aten(_IN_PLACE), _moves(None, (0,))),
    **dict.fromkeys(_aten(_NORMS), _moves(None, (0,))),
    **dict.fromkeys(_aten(_NORMS_BACKWARD), _moves(None, (1,))),
    **dict.fromkeys(_aten(_REDUCTIONS), _moves((0,), ())),
    **dict.fromkeys(_aten(_LISTS), _list),
    **dict.fromkeys(_aten("fill_ zero_ normal_ uniform_ random_ bernoulli_"), _moves((), (0,))),
    "aten::copy_": _moves((1,), (0,)),
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _moves((0, 1), (0,)),
    **{name: cost for name, (_, cost) in _PRODUCTS.items()},
    **_CONVOLUTIONS,
    **ATTENTION,
}
_GEMMS = {name: shape for name, (shape, _) in _PRODUCTS.items()}
