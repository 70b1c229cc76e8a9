"""In which data type matrix products run, and on which units (docs/efficiency.md, "Precision").

The type is that of the operands as recorded with the operator (`record_shapes=True`); fp32 operands may be multiplied
as tf32, which only the kernel's name tells. Without recorded types the name alone speaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from tb_chopper.backend import flops
from tb_chopper.backend.hardware import Hardware
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where

Gpus = Mapping[int, Hardware | None]
"""What each `gpu` of KERNELS is; None or absent: not known."""

TYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""Data types of matrix products."""
MATRIX_TYPES = ("gemm", "attention")
"""Those of schema.OP_TYPES that multiply matrices."""

_TF32 = re.compile("tf32")
_AMD = re.compile(r"Cijk_|mfma|xdl|gtcx")
"""Their matrix cores multiply fp32 as it is; NVIDIA's tensor cores know it as tf32 only."""
_MATRIX_CORES = re.compile(
    r"[sh]1688|[sh]16816|[sh]884|s161616|i8816|i16832|hmma|imma|wgmma|wmma|nvjet|xmma|tensorop|_tn_align|mfma|xdl"
    r"|igemm_\w+_gtcx|Cijk_.*_MI\d+x|flash|fmha|attn_[fb]wd|\bfa[23]?_[fb]wd|bwd_kernel_d[kqv]|triton_tem_",
    re.IGNORECASE)
_VECTOR_UNITS = re.compile(r"ffma|simt|sgemm", re.IGNORECASE)
_HELPERS = re.compile(
    r"nchwToNhwc|nhwcToNchw|transpose|elementwise|reduce|SubTensorOp|pack|cast|copy|convertTensor", re.IGNORECASE)
# Types in the names of cuBLAS, CUTLASS, nvjet, cuDNN, MIOpen and of Tensile (behind its two index strings).
_TENSILE = r"Cijk_[A-Za-z]+_[A-Za-z]+_"
_NAMED_TYPES = tuple((name, re.compile(pattern)) for name, pattern in (
    ("fp8", rf"e4m3|e5m2|_fp8_|nvjet_q|{_TENSILE}F8"),
    ("int8", rf"imma|i8i8|int8|{_TENSILE}I8"),
    ("bf16", rf"bf16|bfloat|BFloat|nvjet_t|{_TENSILE}B"),
    ("fp16", rf"fp16|_f16|half|Half|hgemm|h884|h1688|h16816|s884gemm|s16816gemm|nvjet_h|{_TENSILE}H"),
    ("tf32", r"tf32|s1688"),
    ("fp64", rf"dgemm|d884|f64f64|double|{_TENSILE}D"),
    ("fp32", rf"sgemm|scudnn|f32f32|float|{_TENSILE}S"),
))


def precision(kernels: pd.DataFrame, gpus: Gpus, by: By = ("op_type", "dtype"), where: Where = None) -> pd.DataFrame:
    """One row per group of GEMM and attention kernels: n, time_us (Σ duration), share (of all groups' time),
    tensor_share (of its time on matrix cores), flop, rate_flop_per_s and peak_flop_per_s (NaN where not known, or
    where the group has several).

    Besides the columns of KERNELS `by` knows dtype: of TYPES; null for kernels whose type is not known and for those
    that only move or add up what others multiply (layout, split-K).
    """
    by = grouping.columns(by)
    cost = flops.kernel_costs(kernels)
    types = matrix_types(kernels, cost["dtype"])
    rows = kernels.assign(flop=cost["flop"], peak=peaks(kernels, types, gpus),
                          dtype=types.mask(_has(_HELPERS, kernels["name"]) & ~on_matrix_cores(kernels["name"])))
    rows = grouping.select(rows[rows["op_type"].isin(MATRIX_TYPES)], where)
    codes, groups = grouping.number(rows, by)
    n = len(groups)

    def total(values: pd.Series) -> np.ndarray:
        return np.bincount(codes, values, n)

    duration = (rows["end_ns"] - rows["start_ns"]) / 1000
    time = total(duration)
    by_code = rows["peak"].groupby(codes)
    lowest, highest = by_code.min().reindex(range(n)), by_code.max().reindex(range(n))
    return groups.assign(
        n=np.bincount(codes, minlength=n), time_us=time, share=time / max(time.sum(), 1e-9),
        tensor_share=_over(total(duration.where(on_matrix_cores(rows["name"]), 0.0)), time),
        flop=total(rows["flop"].fillna(0.0)),
        rate_flop_per_s=_over(total(rows["flop"].fillna(0.0)), total(duration.where(rows["flop"] > 0, 0.0)) / 1e6),
        peak_flop_per_s=highest.where(lowest == highest).to_numpy())


def matrix_types(kernels: pd.DataFrame, recorded: pd.Series) -> pd.Series:
    """Data type (of TYPES) in which each row multiplies: the recorded one of its operands, else its name's; null where
    neither tells. fp32 operands are multiplied as tf32 on tensor cores."""
    names = kernels["name"]
    named = named_types(names)
    told = recorded.astype(object).to_numpy()
    kind = np.where(pd.notna(told), told, named)
    tf32 = _has(_TF32, names) | (on_matrix_cores(names) & ~_has(_AMD, names))
    return pd.Series(pd.Categorical(np.where((kind == "fp32") & tf32, "tf32", kind), categories=list(TYPES)),
                     kernels.index)


def named_types(names: pd.Series) -> np.ndarray:
    """Data type (of TYPES) that each kernel's name (categorical) tells, None where it tells none."""
    return np.array([*map(_type_in, names.cat.categories), None], dtype=object)[names.cat.codes.to_numpy()]


def on_matrix_cores(names: pd.Series) -> np.ndarray:
    """Whether a kernel's name (categorical) says that it uses tensor or matrix cores."""
    return _has(_MATRIX_CORES, names) & ~_has(_VECTOR_UNITS, names)


def peaks(kernels: pd.DataFrame, dtype: pd.Series, gpus: Gpus) -> pd.Series:
    """Peak of each row's GPU and data type (categorical of TYPES) in FLOP/s, NaN where not known."""
    place, present = pd.factorize(kernels["gpu"])
    table = np.full((len(present), len(TYPES) + 1), np.nan)  # the last column: no type
    for i, gpu in enumerate(present):
        known = gpus.get(gpu)
        if known is not None:
            table[i, :-1] = [peak.flop_per_s if (peak := known.peak(t)) else np.nan for t in TYPES]
    return pd.Series(table[place, dtype.cat.codes.to_numpy()], kernels.index)


def _type_in(name: str) -> str | None:
    return next((kind for kind, pattern in _NAMED_TYPES if pattern.search(name)), None)


def _has(pattern: re.Pattern[str], names: pd.Series) -> np.ndarray:
    """Whether each name (categorical) matches; False for a missing one."""
    found = [bool(pattern.search(n)) for n in names.cat.categories]
    return np.array([*found, False])[names.cat.codes.to_numpy()]


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
