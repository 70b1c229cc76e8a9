"""Launch overhead of compute kernels (paper equations 1-3; docs/metrics.md, "Launch overhead").

Compute kernels of one GPU in start order; E the running maximum of earlier ends; t_l the start of the launch call:

    O_launch = max(0, t_ks − E);   O_prep = min(max(0, t_l − E), O_launch);   O_call = O_launch − O_prep
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend import schema
from tb_chopper.backend.classify import COMMUNICATION, COMPUTE
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where

PARTS = ("prep", "call", "call_under_communication", "graph", "unattributed")


def launch_overhead(kernels: pd.DataFrame, by: By = "gpu", where: Where = None, scope: str = "across") -> pd.DataFrame:
    """One row per group of `by`: n (compute kernels), launch_us, prep_us, call_us, call_under_communication_us,
    graph_us, unattributed_us.

    `scope`: "across" lets the sequence of kernels run through step borders, as in the paper's figures; "within"
    restarts it at each step, whose first kernel then has no overhead.
    """
    if scope not in ("across", "within"):
        raise InvalidSelection(f"scope is 'across' or 'within', not {scope!r}")
    by = grouping.columns(by)
    gaps = kernels if scope == "across" else with_gaps(kernels, within_steps=True)
    compute = grouping.select(gaps[gaps["kind"] == "compute"], where)
    codes, groups = grouping.number(compute, by)
    out = groups.assign(n=np.bincount(codes, minlength=len(groups)))
    out["launch_us"] = 0.0
    for part in PARTS:
        out[f"{part}_us"] = grouping.sums(codes, len(groups), compute[f"{part}_ns"].to_numpy()) / 1000
    out["launch_us"] = out["prep_us"] + out["call_us"]
    return out


def with_gaps(kernels: pd.DataFrame, within_steps: bool = False) -> pd.DataFrame:
    """`kernels` with prep_ns, call_ns, call_under_communication_ns, graph_ns and unattributed_ns of every row."""
    columns = {f"{p}_ns": np.zeros(len(kernels), np.int64) for p in PARTS}
    kind = schema.codes(kernels["kind"], schema.KINDS)
    activity = kernels["activity"].to_numpy()
    capture = kernels["capture"].to_numpy()
    for c in np.unique(capture):
        mine = np.flatnonzero((capture == c) & (kind == COMPUTE) & (activity != "memcpy") & (activity != "memset"))
        comm = np.flatnonzero((capture == c) & (kind == COMMUNICATION))
        parts = _gaps_of(kernels.iloc[mine], _union(kernels.iloc[comm]), within_steps)
        for name, values in parts.items():
            columns[f"{name}_ns"][mine] = values
    return kernels.assign(**columns)


def _union(rows: pd.DataFrame) -> iv.Union:
    return iv.union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())


def _gaps_of(rows: pd.DataFrame, communication: iv.Union, within_steps: bool) -> dict[str, np.ndarray]:
    """The parts of the gap before each compute kernel of one GPU, ns, in the order of `rows`."""
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    group = rows["step"].fillna(-1).to_numpy(np.int64) if within_steps else np.zeros(len(rows), np.int64)
    order = np.lexsort((end, start, group))
    s, e, g = start[order], end[order], group[order]
    first = np.concatenate(([True], g[1:] != g[:-1])) if len(g) else np.zeros(0, bool)
    # One running maximum for all groups: each group's ends stand above those of the groups before it. Ends are counted,
    # not measured, on the way: times of many groups side by side would leave int64.
    times, place = np.unique(e, return_inverse=True)
    base = np.cumsum(first) * len(times)
    reach = times[np.maximum.accumulate(place + base) - base]
    previous = np.where(first, s, np.concatenate((s[:1], reach[:-1])))
    gap = np.maximum(s - previous, 0)
    launch = rows["launch_ns"].iloc[order]
    known = launch.notna().to_numpy()
    t_l = launch.fillna(0).to_numpy(np.int64)
    replay = known & _repeated(rows["correlation"].to_numpy()[order])
    prep = np.minimum(np.maximum(t_l - previous, 0), gap)
    direct = known & ~replay
    waiting = iv.covered(np.minimum(np.maximum(t_l, previous), s), s, communication)
    sorted_parts = {
        "prep": np.where(direct, prep, 0),
        "call": np.where(direct, gap - prep, 0),
        "call_under_communication": np.where(direct & (gap > 0), np.minimum(waiting, gap - prep), 0),
        "graph": np.where(replay, gap, 0),
        "unattributed": np.where(known, 0, gap),
    }
    out = {}
    for name, values in sorted_parts.items():
        out[name] = np.empty(len(rows), np.int64)
        out[name][order] = values
    return out


def _repeated(values: np.ndarray) -> np.ndarray:
    """True where the value stood earlier in the array."""
    _, first = np.unique(values, return_index=True)
    again = np.ones(len(values), bool)
    again[first] = False
    return again
