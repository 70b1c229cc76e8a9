"""Which kernels could run as one (docs/fusion.md).

A candidate is a maximal run of memory-bound kernels that follow each other on one stream, in one layer, phase and step,
with less than GAP_NS between them. Fused, what one writes and the next one reads never leaves the chip:

    traffic = Σ bytes − 2 Σ bytes that a kernel writes and the next one reads (it has an input of just that size)
    saved   = Σ duration − max(traffic / memory bandwidth, shortest of the kernels; of batch norm, its own time)

Between two batched matrix products a softmax with its neighbours is unfused attention: a fused attention kernel has no
such kernels at all, whatever the gaps between them, so all their time is saved. Bytes are those of the recorded shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pandas as pd

from tb_chopper.backend import flops
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.precision import Gpus

GAP_NS = 5_000
"""more between two kernels, and the host is the limit, not the memory"""

BANDWIDTH, BEST_KERNEL, WHOLE_CHAIN = "bandwidth", "best kernel", "whole chain"
"""What a saving assumes of the fused kernel: it runs at the GPU's memory bandwidth; at that of the fastest kernel of
the chain, where the GPU's is not known; it is part of an attention kernel."""

ATTENTION = "attention in pieces"
RESIDUAL_NORM = "residual add + norm"
BATCH_NORM = "batch norm and what follows"
NORM = "norm in pieces"
GATED = "SwiGLU"
ROTARY = "rotary embedding"
DROPOUT_ADD = "dropout + add"
CASTS = "casts"
OPTIMIZER = "optimizer update"
ELEMENTWISE = "elementwise chain"
PATTERNS = (ATTENTION, RESIDUAL_NORM, BATCH_NORM, NORM, GATED, ROTARY, DROPOUT_ADD, CASTS, OPTIMIZER, ELEMENTWISE)

REMEDIES = {
    ATTENTION: "torch.nn.functional.scaled_dot_product_attention (FlashAttention)",
    RESIDUAL_NORM: "torch.compile, or a fused residual-norm kernel (Liger, Apex, Transformer Engine)",
    BATCH_NORM: "torch.compile; channels_last, where cuDNN and MIOpen have fused kernels of batch norm and ReLU",
    NORM: "torch.nn.functional.rms_norm or layer_norm instead of its pieces; torch.compile",
    GATED: "torch.compile, or a fused SwiGLU (Liger)",
    ROTARY: "torch.compile, or a fused rotary embedding (Liger, Apex)",
    DROPOUT_ADD: "torch.compile; or no dropout, where the data is large",
    CASTS: "keep one type: autocast around the whole model, parameters stored in bf16",
    OPTIMIZER: "fused=True or foreach=True in the optimizer",
    ELEMENTWISE: "torch.compile",
}
"""What runs the kernels of a pattern as one."""

FUSED: dict[str, re.Pattern[str]] = {
    "attention": re.compile(r"flash|fmha|attn_[fb]wd|paged_attention", re.IGNORECASE),
    "torch.compile (Triton)": re.compile(r"^triton_"),
    "Liger": re.compile(r"liger", re.IGNORECASE),
    "Apex": re.compile(r"apex", re.IGNORECASE),
    "fused kernel": re.compile(r"(?<!non)(?<!un)fused(?!_dropout)", re.IGNORECASE),
}
"""Kernels that are fused already, by name. `fused_dropout` is PyTorch's only dropout kernel."""

_ROLES: dict[str, str] = {
    "softmax": "_softmax _softmax_backward_data",
    "norm": "native_layer_norm layer_norm rms_norm _fused_rms_norm native_group_norm group_norm native_batch_norm "
            "batch_norm cudnn_batch_norm miopen_batch_norm native_layer_norm_backward _fused_rms_norm_backward "
            "native_group_norm_backward native_batch_norm_backward cudnn_batch_norm_backward "
            "miopen_batch_norm_backward",
    "dropout": "native_dropout native_dropout_backward dropout_ dropout bernoulli_ _fused_dropout",
    "gate": "silu silu_backward gelu gelu_backward",
    "activation": "relu relu_ sigmoid sigmoid_backward sigmoid_ tanh tanh_ tanh_backward mish softplus leaky_relu elu "
                  "hardtanh hardswish erf clamp_min clamp_min_ threshold_backward",
    "copy": "copy_ _to_copy clone contiguous",
    "add": "add add_ sub sub_ rsub",
    "mul": "mul mul_ div div_",
    "reduce": "mean sum amax amin var var_mean std norm linalg_vector_norm max min",
    "root": "pow pow_ rsqrt sqrt sqrt_ reciprocal reciprocal_",
    "cat": "cat stack",
    "other": "abs abs_ neg exp exp_ log log2 log1p sin cos clamp clamp_ maximum minimum where masked_fill "
             "masked_fill_ tril tril_ triu triu_ bitwise_and bitwise_or bitwise_not logical_and logical_or "
             "logical_not eq ne lt le gt ge lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ fmod remainder floor ceil "
             "round sign isnan isinf isfinite fill_ zero_ _log_softmax _log_softmax_backward_data",
    "foreach": "_foreach_add_ _foreach_mul_ _foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_sqrt "
               "_foreach_div_ _foreach_pow _foreach_sub_ _foreach_neg _foreach_add _foreach_mul _foreach_div",
}
"""What an operator does, for memory-bound ones."""
_ROLE_OF = {f"aten::{op}": role for role, ops in _ROLES.items() for op in ops.split()}
_ROLE_IN_NAME = (
    ("softmax", r"soft_?max"), ("norm", r"layer_?norm|rms_?norm|batch_?norm|group_?norm"), ("dropout", r"dropout"),
    ("gate", r"silu|gelu"), ("activation", r"relu|tanh|sigmoid|threshold"), ("copy", r"copy_kernel"),
    ("add", r"Functor(OnSelf|OnOther)?_add|AddFunctor"), ("mul", r"Functor_mul|MulFunctor|DivFunctor|BUnaryFunctor"),
    ("cat", r"CatArray"), ("foreach", r"multi_tensor_apply"), ("reduce", r"reduce_kernel"),
    ("root", r"pow_tensor|rsqrt|sqrt_kernel"), ("other", r"elementwise_kernel"),
)
_NAMED = tuple((role, re.compile(pattern, re.IGNORECASE)) for role, pattern in _ROLE_IN_NAME)
_BATCHED = re.compile(r"^aten::(bmm|baddbmm|matmul|einsum)\b")
ROLES = tuple(_ROLES)
FOREIGN = -2
_SHOWN_OPERATIONS = 9
_TINY_BYTES = 64
"""a counter or a scalar: adding to it is no residual sum"""


def chains(kernels: pd.DataFrame, gpus: Gpus) -> pd.DataFrame:
    """One row per candidate: capture, gpu, worker, span, step, phase, layer, stream, pattern (of PATTERNS), operations
    (its operators in order), n_kernels, start_ns, end_ns, time_us (Σ duration), traffic_bytes (of one fused kernel, NaN
    where a shape is not known), saved_us (NaN likewise), saved_by (BANDWIDTH, BEST_KERNEL, WHOLE_CHAIN or null)."""
    rows = _on_streams(kernels)
    role = _roles(rows)
    chain, attention = _numbered(rows, role)
    mine = chain >= 0
    return _table(rows[mine], role[mine], chain[mine], attention[mine], gpus)


def candidates(found: pd.DataFrame, windows: int, by: By = ("pattern",), where: Where = None) -> pd.DataFrame:
    """`chains` by group, the largest saving first: n (instances), n_kernels, time_us, saved_us, per_step_us (saved_us
    in one step of one GPU: / windows), known_share (of time_us whose saving is known), at (start of the instance that
    saves most, as `gpu@start_ns`). `windows`: see `windows_of`."""
    by = grouping.columns(by)
    found = grouping.select(found, where).reset_index(drop=True)
    codes, groups = grouping.number(found, by)
    n = len(groups)
    saved, time = found["saved_us"].fillna(0.0), found["time_us"]
    order = np.lexsort((found["start_ns"], -time, -saved))
    first = order[np.unique(codes[order], return_index=True)[1]]
    out = groups.assign(
        n=np.bincount(codes, minlength=n), n_kernels=np.bincount(codes, found["n_kernels"], n).astype(np.int64),
        time_us=np.bincount(codes, time, n), saved_us=np.bincount(codes, saved, n))
    known = np.bincount(codes, time.where(found["saved_us"].notna(), 0.0), n)
    out["per_step_us"] = out["saved_us"] / max(windows, 1)
    out["known_share"] = known / np.where(out["time_us"] > 0, out["time_us"], 1.0)
    out["at"] = [f"{g}@{s}" for g, s in zip(found["gpu"].iloc[first], found["start_ns"].iloc[first], strict=True)]
    return out.sort_values(["saved_us", "time_us"], ascending=False, kind="stable", ignore_index=True)


def windows_of(kernels: pd.DataFrame) -> int:
    """Steps of all GPUs together; captures where there are none."""
    stepped = kernels.loc[kernels["step"].notna(), ["capture", "step"]].drop_duplicates()
    return len(stepped) or int(kernels["capture"].nunique())


def fused(kernels: pd.DataFrame, by: By = ("how",), where: Where = None) -> pd.DataFrame:
    """Kernels that are fused already, one row per group: n, time_us, share (of the time of all compute kernels), the
    longest first. `by` knows `how`, a key of FUSED, besides the columns of KERNELS."""
    by = grouping.columns(by)
    rows = grouping.select(kernels[kernels["kind"] == "compute"], where)
    total = float((rows["end_ns"] - rows["start_ns"]).sum()) / 1000
    rows = rows.assign(how=how_fused(rows))
    rows = rows[rows["how"].notna()]
    codes, groups = grouping.number(rows, by)
    time = np.bincount(codes, (rows["end_ns"] - rows["start_ns"]) / 1000, len(groups))
    out = groups.assign(n=np.bincount(codes, minlength=len(groups)), time_us=time, share=time / max(total, 1e-9))
    return out.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)


def how_fused(kernels: pd.DataFrame) -> pd.Series:
    """Key of FUSED by each kernel's name, else by that of its operator, or of its optimizer (FusedAdam.step); null for
    a kernel that is not fused."""
    keys = list(FUSED)

    def of(name: str) -> int:
        return next((i for i, key in enumerate(keys) if FUSED[key].search(name)), -1)

    by_name, by_op, by_operation = (_each(kernels[c], of, -1) for c in ("name", "cpu_op", "operation"))
    code = np.where(by_name >= 0, by_name, by_op)
    by_optimizer = np.where(kernels["phase"] == "optimizer", by_operation, -1)
    return pd.Series(pd.Categorical.from_codes(np.where(code >= 0, code, by_optimizer), keys), kernels.index)


# ---- chains ----------------------------------------------------------------------------------------------------------


def _on_streams(kernels: pd.DataFrame) -> pd.DataFrame:
    """The rows in order of stream and start. Fills are left out: matrix products clear their workspace with them."""
    rows = kernels[kernels["activity"] != "memset"]
    return rows.sort_values(["capture", "stream", "start_ns", "end_ns"], kind="stable")


def _roles(rows: pd.DataFrame) -> np.ndarray:
    """Place in ROLES of what each memory-bound kernel does, -1 for other rows and for what is fused already. The
    operator tells; where it is not PyTorch's own or not known, the kernel's name."""
    place = {role: i for i, role in enumerate(ROLES)}

    def of_op(name: str) -> int:
        return place.get(_ROLE_OF.get(name.partition(".")[0], ""), -1) if name.startswith("aten::") else FOREIGN

    by_op = _each(rows["cpu_op"], of_op, FOREIGN)
    by_name = _each(rows["name"], lambda name: next((place[r] for r, p in _NAMED if p.search(name)), -1), -1)
    bound = (rows["kind"] == "compute").to_numpy() & (rows["op_type"] == "vector").to_numpy()
    return np.where(bound & how_fused(rows).isna().to_numpy(), np.where(by_op == FOREIGN, by_name, by_op), -1)


def _numbered(rows: pd.DataFrame, role: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of each row's chain in order, -1 for a row of none, and whether that chain is unfused attention."""
    bound = role >= 0
    place = np.column_stack([
        rows["capture"], rows["stream"], rows["step"].fillna(-1).to_numpy(np.int64), rows["phase"].cat.codes,
        rows["layer"].cat.codes])
    here = np.zeros(len(rows), bool)  # in the same place as the row before
    here[1:] = (place[1:] == place[:-1]).all(axis=1)
    joined = here & bound & _before(bound)
    attention = _between_products(rows, role, np.cumsum(~joined) - 1, here)
    gap = rows["start_ns"].to_numpy() - _before(rows["end_ns"].to_numpy())
    # Inside unfused attention gaps do not matter: the fused kernel has none of these launches.
    chain = np.cumsum(~(joined & ((gap < GAP_NS) | attention))) - 1
    calls = np.bincount(chain, _begins(chain, rows["op_id"].to_numpy()))
    keep = bound & ((calls[chain] > 1) | attention)
    numbers = np.full(len(rows), -1, np.int64)
    numbers[keep] = np.unique(chain[keep], return_inverse=True)[1]
    return numbers, attention


def _between_products(rows: pd.DataFrame, role: np.ndarray, run: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Whether each row's run of memory-bound kernels has a softmax and stands between two batched matrix products."""
    batched = _each(rows["cpu_op"], lambda name: bool(_BATCHED.search(name)), True).astype(bool)
    product = batched & (rows["op_type"] == "gemm").to_numpy()
    first = np.flatnonzero(_begins(run))
    following = np.append(first[1:], len(run))
    before = product[first - 1] & here[first] if len(first) else np.zeros(0, bool)
    after = np.append(product, False)[following] & np.append(here, False)[following]
    softmax = np.bincount(run, role == ROLES.index("softmax"), len(first)) > 0
    return (before & after & softmax)[run] & (role >= 0)


def _table(rows: pd.DataFrame, role: np.ndarray, chain: np.ndarray, attention: np.ndarray, gpus: Gpus) -> pd.DataFrame:
    """One row per chain from its kernels: place, pattern, operators and saving."""
    first = np.flatnonzero(_begins(chain))
    n = len(first)
    head = rows.iloc[first].reset_index(drop=True)
    duration = ((rows["end_ns"] - rows["start_ns"]) / 1000).to_numpy()
    shortest, end = np.full(n, np.inf), np.zeros(n, np.int64)
    np.minimum.at(shortest, chain, duration)
    np.maximum.at(end, chain, rows["end_ns"].to_numpy())
    out = head[["capture", "gpu", "worker", "span", "step", "phase", "layer", "stream"]].assign(
        n_kernels=np.bincount(chain, minlength=n), start_ns=head["start_ns"], end_ns=end,
        time_us=np.bincount(chain, duration, n))
    calls = _calls(rows, role, chain, duration)
    roles, ops = (_tuples(calls[c], calls["chain"].to_numpy()) for c in ("role", "op"))
    out["pattern"] = pd.Categorical(
        [_pattern(*of) for of in zip(roles, ops, attention[first], head["phase"], strict=True)], list(PATTERNS))
    out["operations"] = pd.Categorical([_sequence(names) for names in ops])
    bandwidth = head["gpu"].map({g: h.memory_bytes_per_s for g, h in gpus.items() if h}).astype("float64")
    out = out.assign(**_savings(out, calls, shortest, bandwidth))
    return out[out["pattern"].notna()].reset_index(drop=True)


def _calls(rows: pd.DataFrame, role: np.ndarray, chain: np.ndarray, duration: np.ndarray) -> pd.DataFrame:
    """One row per operator call of a chain: chain, role (of ROLES; cast for a copy into another type), op (its
    operator, else its role), time_us, bytes, passed (bytes that it writes and the next call of the chain reads)."""
    new = _begins(chain, rows["op_id"].to_numpy())
    chosen, of = rows[new], chain[new]
    cost = flops.operator_costs(chosen["cpu_op"], chosen["op_args"])
    written = cost["written"].to_numpy()
    names = np.array(ROLES, object)[role[new]]
    names[(written <= _TINY_BYTES) & (names != "reduce")] = "other"
    arguments = _each(chosen["op_args"], flops.tensor_arguments, ())
    copied = np.array([len(a) > 1 and a[0][0] != a[1][0] for a in arguments], bool)
    names[(names == "copy") & (copied | (chosen["cpu_op"] == "aten::_to_copy").to_numpy())] = "cast"
    last = np.append(of[1:] != of[:-1], True)[:len(of)]
    read = [*arguments[1:], ()]
    passed = [w if not end and any(size == w for _, size in next_ones) else 0.0
              for w, end, next_ones in zip(written, last, read, strict=False)]
    return pd.DataFrame({
        "chain": of, "role": names,
        "op": chosen["cpu_op"].astype(object).where(chosen["cpu_op"].notna(), names).str.removeprefix("aten::").array,
        "time_us": np.bincount(np.cumsum(new) - 1, duration, len(of)), "bytes": cost["bytes"].to_numpy(),
        "passed": passed})


def _savings(out: pd.DataFrame, calls: pd.DataFrame, shortest: np.ndarray, bandwidth: pd.Series) -> dict[str, object]:
    """traffic_bytes, saved_us and saved_by of each chain."""
    # The sum of a residual connection is read again later: it has to be written.
    residual = (out["pattern"] == RESIDUAL_NORM).to_numpy()[calls["chain"]] & (calls["role"] == "add")
    # What is not known of one call is not known of the chain: bincount adds NaN, too.
    traffic = pd.Series(np.bincount(
        calls["chain"], calls["bytes"] - np.where(residual, 1, 2) * calls["passed"], len(out)))
    rate = (calls["bytes"] / calls["time_us"].where(calls["time_us"] > 0)).groupby(calls["chain"]).max()
    needed = (traffic / (bandwidth / 1e6)).fillna(traffic / rate)
    # Batch norm needs the statistics of the whole batch first: what is fused with it does not make it shorter.
    norms = np.bincount(calls["chain"], calls["time_us"].where(calls["role"] == "norm", 0.0), len(out))
    shortest = np.where(out["pattern"] == BATCH_NORM, np.maximum(norms, shortest), shortest)
    attention = out["pattern"] == ATTENTION
    saved = (out["time_us"] - np.maximum(needed, shortest)).clip(lower=0.0).where(~attention, out["time_us"])
    how = pd.Series(np.where(attention, WHOLE_CHAIN, np.where(bandwidth.notna(), BANDWIDTH, BEST_KERNEL)))
    return {"traffic_bytes": traffic.where(~attention), "saved_us": saved,
            "saved_by": pd.Categorical(how.where(saved.notna()), categories=[BANDWIDTH, BEST_KERNEL, WHOLE_CHAIN])}


# ---- names -----------------------------------------------------------------------------------------------------------


def _pattern(roles: tuple[str, ...], ops: tuple[str, ...], attention: bool, phase: object) -> str | None:
    """What a chain is, by what its operators do; the most telling name first. None for copies that only change the
    layout: nothing says that they follow from each other."""
    has = set(roles)
    if attention:
        return ATTENTION
    if phase == "optimizer" or "foreach" in has:
        return OPTIMIZER
    if "norm" in has and any("batch_norm" in op for op in ops):
        return BATCH_NORM
    if "norm" in has and "add" in has:
        return RESIDUAL_NORM
    if {"root", "reduce", "mul"} <= has:
        return NORM
    if "gate" in has and "mul" in has:
        return GATED
    if "cat" in has and "mul" in has and any(op.startswith("neg") for op in ops):
        return ROTARY
    if "dropout" in has and "add" in has:
        return DROPOUT_ADD
    if has <= {"copy", "cast"}:
        return CASTS if "cast" in has else None
    return ELEMENTWISE


def _sequence(ops: tuple[str, ...]) -> str:
    """`pow → mean → add → rsqrt → mul ×2`; of a long chain the different operators."""
    if len(ops) > _SHOWN_OPERATIONS:
        different = list(dict.fromkeys(ops))
        more = ", …" if len(different) > _SHOWN_OPERATIONS else ""
        return f"{', '.join(different[:_SHOWN_OPERATIONS])}{more} in {len(ops)} calls"
    parts: list[tuple[str, int]] = []
    for op in ops:
        again = bool(parts) and parts[-1][0] == op
        parts[-1:] = [(op, parts[-1][1] + 1)] if again else [*parts[-1:], (op, 1)]
    return " → ".join(op if n == 1 else f"{op} ×{n}" for op, n in parts)


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _each(column: pd.Series, value: Callable[[str], object], missing: object) -> np.ndarray:
    """`value` of each name (categorical), computed once per distinct one."""
    values = [*map(value, column.cat.categories), missing]
    out = np.empty(len(values), object if isinstance(missing, tuple) else np.array(values).dtype)
    out[:] = values
    return out[column.cat.codes.to_numpy()]


def _tuples(values: pd.Series, group: np.ndarray) -> list[tuple[str, ...]]:
    """The values of each group, whose rows stand together."""
    plain = values.to_list()
    bounds = [*np.flatnonzero(_begins(group)).tolist(), len(plain)]
    return [tuple(plain[a:b]) for a, b in pairwise(bounds)]


def _before(values: np.ndarray) -> np.ndarray:
    """The values one row later; the first stays."""
    return np.concatenate((values[:1], values[:-1]))


def _begins(group: np.ndarray, call: np.ndarray | None = None) -> np.ndarray:
    """True at the first row of each group and, with `call`, where another call begins (-1: of no known call)."""
    begins = np.ones(len(group), bool)
    begins[1:] = group[1:] != group[:-1]
    if call is not None:
        begins[1:] |= (call[1:] != call[:-1]) | (call[1:] < 0)
    return begins
