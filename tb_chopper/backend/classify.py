"""What kind of work a device activity is, by its name: data first, extendable by the user.

Definitions: docs/metrics.md, "Device activities and their class".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection

COMMUNICATION_PATTERNS: list[str] = [
    r"nccl", r"rccl", r"cross_device_reduce", r"multimem_", r"one_shot_all_reduce", r"two_shot_all_reduce",
    r"msccl", r"nvshmem", r"oneccl", r"deep_ep", r"ep::(internode|intranode)",
]
"""Regular expressions (case-insensitive, searched) of communication kernels. NCCL, RCCL, custom all-reduces
of vLLM and TensorRT-LLM, symmetric memory, MSCCL++, NVSHMEM, DeepEP."""

COPY_PATTERNS: list[str] = [r"^__amd_rocclr_", r"^MEMORY_COPY_"]
"""Kernels that are copies: ROCclr's fill and copy kernels, and rocprofiler-sdk's names of them."""

ATTENTION_PATTERNS: list[str] = [
    r"flash", r"fmha", r"attn_fwd", r"attn_bwd", r"attention", r"\bfa[23]?_(fwd|bwd)", r"bwd_kernel_(dk|dq|dkdv)",
]
GEMM_PATTERNS: list[str] = [
    r"(?<!fb)gemm", r"^Cijk_", r"^Custom_Cijk", r"cutlass", r"nvjet", r"xmma", r"\bmatmul", r"splitK", r"gemv",
    r"hipblaslt", r"conv(?!ert)", r"winograd", r"miopen.*(conv|igemm)", r"implicit_", r"wgrad", r"dgrad",
]

COMPUTE, COMMUNICATION, MEMCPY = 0, 1, 2
"""Codes of `schema.KINDS`."""
GEMM, ATTENTION, VECTOR = 0, 1, 2
"""Codes of `schema.OP_TYPES`."""


def _regex(patterns: Sequence[str]) -> re.Pattern[str]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidSelection(f"{pattern!r} is no regular expression: {error}") from None
    return re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE)


def kernel_kinds(names: pd.Series, activity: pd.Series, collective: pd.Series,
                 extra_communication: Sequence[str] = ()) -> np.ndarray:
    """Code of `schema.KINDS` per device row.

    `names`, `activity` (kernel, memcpy, memset) and `collective` are categoricals of equal length. Patterns are
    tried once per distinct name. A kernel that carries a collective's name is communication whatever its own.
    """
    communication, copy = _regex([*COMMUNICATION_PATTERNS, *extra_communication]), _regex(COPY_PATTERNS)
    by_name = [
        MEMCPY if copy.search(n) else COMMUNICATION if communication.search(n) else COMPUTE
        for n in names.cat.categories
    ]
    kinds = np.asarray([*by_name, COMPUTE], np.int8)[names.cat.codes.to_numpy()]
    kinds[collective.notna().to_numpy() & (kinds != MEMCPY)] = COMMUNICATION
    kinds[(activity != "kernel").to_numpy()] = MEMCPY
    return kinds


def op_types(names: pd.Series, cpu_ops: pd.Series) -> np.ndarray:
    """Code of `schema.OP_TYPES` per compute row: the operator decides first, the kernel's name where it says nothing.

    `names` and `cpu_ops` are categoricals of equal length; `cpu_ops` may hold nulls.
    """
    from_name = _types_of(names)
    from_op = _types_of(cpu_ops)
    # A split-K reduction or a bias kernel of aten::mm belongs to the GEMM; an elementwise op has no GEMM kernel.
    return np.where(from_op != VECTOR, from_op, from_name).astype(np.int8)


OP_ATTENTION_PATTERNS = [*ATTENTION_PATTERNS, r"scaled_dot_product"]
OP_GEMM_PATTERNS = [
    *GEMM_PATTERNS, r"aten::(_?scaled_)?(add)?(b?a?d?d?b)?mm\b", r"aten::(linear|mv|addmv|dot|einsum)\b",
    r"^extern_kernels",
]


def _types_of(names: pd.Series) -> np.ndarray:
    attention, gemm = _regex(OP_ATTENTION_PATTERNS), _regex(OP_GEMM_PATTERNS)
    by_name = [ATTENTION if attention.search(n) else GEMM if gemm.search(n) else VECTOR for n in names.cat.categories]
    return np.asarray([*by_name, VECTOR], np.int8)[names.cat.codes.to_numpy()]
