"""The calls and scopes of a host that may keep its GPU waiting: a small table beside the kernels."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from tb_chopper.backend import schema

RUNTIME: dict[str, re.Pattern[str]] = {
    "sync": re.compile(r"^(cuda|hip|cu)(Device|Stream|Event|Ctx|Context)Synchronize"
                       r"|^(cuda|hip|cu)Memcpy(?!\w*(Async|Peer))"),
    "allocation": re.compile(r"^(cuda|hip)(Malloc|Free(?!Graph)|Host(Alloc|Malloc|Free|Register|Unregister))"
                             r"|^cuMem(Alloc|Free|Create|Release|Map|Unmap|SetAccess|AddressReserve)"),
}
SCOPES: dict[str, re.Pattern[str]] = {
    "loader": re.compile(r"^enumerate\(DataLoader\)|\bdata_?load|\bload_(batch|data)|\b(get|next)_batch",
                         re.IGNORECASE),
    "recompile": re.compile(r"^dynamo_data: compile_id=\d+/[1-9]"),
    "compile": re.compile(r"^dynamo_data: compile_id=|^_compile(\.compile_inner)? \(dynamo_timed\)$"),
}
"""Patterns of names by kind of call, tried in this order. compile_id=F/K: the K-th time that code F is compiled."""
COMPILED: dict[str, re.Pattern[str]] = {
    "region": re.compile(r"^Torch-Compiled Region"),
    "compiled": re.compile(r"^CompiledFunction$|^## Call CompiledFxGraph"),
}
"""Those of operators; old traces have them as annotations."""
OLD_SCOPES: dict[str, re.Pattern[str]] = {"loader": re.compile(r"^enumerate\(DataLoader\)")}
"""Scopes that traces of 2021 have as operators."""


def find(host: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """CALLS without gpu, in order of start, of a HOST table. steps: schema.STEPS of the file."""
    kind = host["kind"].cat.codes.to_numpy()
    runtime, annotation, operator = (schema.ALL_HOST_KINDS.index(k) for k in ("runtime", "annotation", "cpu_op"))
    code = np.full(len(host), -1, np.int8)
    for same in (schema.GC, schema.PROFILER):
        code[kind == schema.ALL_HOST_KINDS.index(same)] = schema.CALL_KINDS.index(same)
    names = host["name"].cat.codes.to_numpy()
    for of_kind, patterns in ((runtime, RUNTIME), (annotation, SCOPES | COMPILED), (operator, OLD_SCOPES | COMPILED)):
        by_name = np.array([_first(patterns, name) for name in host["name"].cat.categories], np.int8)
        rows = np.flatnonzero(kind == of_kind)
        if len(rows):
            code[rows] = by_name[names[rows]]
    code[(code == schema.CALL_KINDS.index("loader")) & ~_drives(host)] = -1
    at = np.flatnonzero(code >= 0)
    at = at[np.argsort(host["start_ns"].to_numpy()[at], kind="stable")]
    chosen = host.iloc[at]
    start = chosen["start_ns"].to_numpy()
    return schema.conform(pd.DataFrame({
        "kind": pd.Categorical.from_codes(code[at], list(schema.CALL_KINDS)),
        "name": chosen["name"].cat.remove_unused_categories().array, "start_ns": start,
        "end_ns": chosen["end_ns"].to_numpy(), "thread": chosen["thread"].to_numpy("int64"),
        "step": _steps(start, steps), "gpu": 0}), schema.CALLS)


STEP = "ProfilerStep#"
MAIN_SHARE = 0.1
"""of the runtime calls of a file: a thread with so many launches what the training needs"""


def _drives(host: pd.DataFrame) -> np.ndarray:
    """Of each row whether its thread holds the steps or launches much of the work: a loader in the background keeps no
    GPU waiting. True everywhere where no thread does either."""
    thread = host["thread"].to_numpy()
    runtime = host["kind"].cat.codes.to_numpy() == schema.ALL_HOST_KINDS.index("runtime")
    counts = np.bincount(thread[runtime], minlength=int(thread.max(initial=-1)) + 1)
    drives = counts >= max(MAIN_SHARE * counts.sum(), 1)
    steps = [i for i, name in enumerate(host["name"].cat.categories) if name.startswith(STEP)]
    drives[thread[np.isin(host["name"].cat.codes.to_numpy(), steps)]] = True
    return drives[thread] if drives.any() else np.ones(len(host), bool)


def _first(patterns: dict[str, re.Pattern[str]], name: str) -> int:
    return next((schema.CALL_KINDS.index(kind) for kind, pattern in patterns.items() if pattern.search(name)), -1)


def _steps(time: np.ndarray, steps: pd.DataFrame) -> pd.Series:
    """The step whose window on the host holds each time; the one that began last where several do."""
    windows = steps.drop_duplicates("step").sort_values("start_ns")
    if not len(windows):
        return pd.Series(pd.NA, index=range(len(time)), dtype="Int64")
    at = np.searchsorted(windows["start_ns"].to_numpy(), time, side="right") - 1
    inside = (at >= 0) & (time < windows["end_ns"].to_numpy()[np.maximum(at, 0)])
    return pd.Series(windows["step"].to_numpy()[np.maximum(at, 0)], dtype="Int64").mask(~inside)
