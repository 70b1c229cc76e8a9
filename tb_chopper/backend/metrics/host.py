"""How the host keeps its GPU fed: launches waiting in each queue, storms of small kernels, and what the host did while
the GPU was idle (docs/host.md).

    queue(t)  = launches begun before t − kernels started before t, per stream
    host idle = the part of a gap before the next launch call began; each moment of it has one cause:
                compilation before data loading before allocation before garbage collection before synchronisation
                before the rest, which is dispatch: Python and the framework
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.timeline import gaps

SHORT_NS = 10_000
"""kernels below this cost about as much to launch as to run"""
CAUSES = ("recompile", "compile", "loader", "allocation", "gc", "sync")
DISPATCH = "dispatch"


# ---- queues ----------------------------------------------------------------------------------------------------------

def queue_length(kernels: pd.DataFrame) -> pd.DataFrame:
    """The queue of every stream over time, a row per change: gpu, capture, stream, t_ns, length. A graph replay counts
    one launch per kernel. Kernels whose launch is unknown are left out."""
    known = kernels[kernels["launch_ns"].notna()]
    launch, start = known["launch_ns"].astype("int64"), known["start_ns"]
    # A kernel that starts before its own launch (clocks apart) must not make the queue negative.
    start = np.maximum(start, launch)
    streams = known[["gpu", "capture", "stream"]]
    rows = pd.concat([streams.assign(t_ns=launch, change=1), streams.assign(t_ns=start, change=-1)])
    rows = rows.groupby(["gpu", "capture", "stream", "t_ns"], as_index=False)["change"].sum()
    rows = rows.sort_values(["gpu", "capture", "stream", "t_ns"], kind="stable", ignore_index=True)
    rows["length"] = rows.groupby(["gpu", "capture", "stream"])["change"].cumsum()
    return rows.drop(columns="change")


def queues(kernels: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu, stream and step that has launches in it: gpu, stream, step, n (kernels), mean_length (over the
    step's window on the GPU), max_length, empty_share (of the window in which nothing waits: the host is behind)."""
    changes = queue_length(kernels)
    windows = steps[steps["gpu_start_ns"].notna()].astype({"gpu_start_ns": "int64", "gpu_end_ns": "int64"})
    names = ["gpu", "stream", "step", "n", "mean_length", "max_length", "empty_share"]
    rows = []
    counts = kernels[kernels["launch_ns"].notna()].groupby(["capture", "stream", "step"]).size()
    for (capture, stream), own in changes.groupby(["capture", "stream"], sort=True):
        mine = windows[windows["capture"] == capture]
        t, length = own["t_ns"].to_numpy(), own["length"].to_numpy()
        low, high = mine["gpu_start_ns"].to_numpy(), mine["gpu_end_ns"].to_numpy()
        mean, empty = (area / np.maximum(high - low, 1) for area in (
            _integral(t, length, low, high), _integral(t, (length == 0).astype(np.int64), low, high, before=1)))
        first, last = np.maximum(np.searchsorted(t, low, side="right") - 1, 0), np.searchsorted(t, high)
        for i, row in enumerate(mine.itertuples()):
            if n := int(counts.get((capture, stream, row.step), 0)):
                highest = int(length[first[i]:last[i]].max(initial=0))
                rows.append((row.gpu, stream, row.step, n, mean[i], highest, empty[i]))
    return pd.DataFrame(rows, columns=names).sort_values(["gpu", "stream", "step"], kind="stable", ignore_index=True)


def _integral(t: np.ndarray, value: np.ndarray, low: np.ndarray, high: np.ndarray, before: int = 0) -> np.ndarray:
    """∫ value dt over each [low, high) of a step function that is `before` until t[0] and value[i] from t[i] on."""
    area = np.concatenate(([0], np.cumsum(value[:-1] * np.diff(t)))) if len(t) else np.zeros(0)

    def until(x: np.ndarray) -> np.ndarray:
        at = np.searchsorted(t, x, side="right") - 1
        inside = area[np.maximum(at, 0)] + value[np.maximum(at, 0)] * (x - t[np.maximum(at, 0)])
        return np.where(at >= 0, inside, before * (x - t[0]))

    return until(high) - until(low) if len(t) else before * (high - low)


# ---- small kernels ---------------------------------------------------------------------------------------------------

def launches(kernels: pd.DataFrame, by: By = ("gpu", "step"), where: Where = None) -> pd.DataFrame:
    """One row per group of compute kernels: n, n_calls (launch calls; a graph's kernels share one), time_us (Σ
    duration), mean_us, n_short (below 10 µs), short_share (of n), short_time_share (of time_us), launch_us (prep +
    call, see metrics.launch)."""
    by = grouping.columns(by)
    compute = grouping.select(kernels[kernels["kind"] == "compute"], where)
    codes, groups = grouping.number(compute, by)
    n = len(groups)
    duration = (compute["end_ns"] - compute["start_ns"]).to_numpy()
    short = duration < SHORT_NS
    calls = compute[["capture", "launch_ns"]].assign(code=codes)
    count, time = np.bincount(codes, minlength=n), grouping.sums(codes, n, duration)
    n_short = np.bincount(codes, short, n).astype(np.int64)
    short_time = grouping.sums(codes, n, np.where(short, duration, 0))
    n_calls = calls.dropna().drop_duplicates()["code"].value_counts().reindex(range(n), fill_value=0)
    wait = grouping.sums(codes, n, (compute["prep_ns"] + compute["call_ns"]).to_numpy())
    return groups.assign(
        n=count, n_calls=n_calls.to_numpy(), time_us=time / 1000, mean_us=time / np.maximum(count, 1) / 1000,
        n_short=n_short, short_share=n_short / np.maximum(count, 1), short_time_share=short_time / np.maximum(time, 1),
        launch_us=wait / 1000)


# ---- what the host did -----------------------------------------------------------------------------------------------

def host_calls(calls: pd.DataFrame, kernels: pd.DataFrame, by: By = ("gpu", "kind", "name"),
               where: Where = None) -> pd.DataFrame:
    """One row per group of CALLS: n, time_us (Σ duration), longest_us, idle_us (the part under which the GPU had
    nothing to do: it may have waited for it), sorted by idle time."""
    by = grouping.columns(by)
    chosen = grouping.select(calls, where)
    start, end = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    idle = np.zeros(len(chosen), np.int64)
    for gpu, rows in kernels.groupby("gpu"):
        mine = np.flatnonzero(chosen["gpu"] == gpu)
        free = _idle(rows)
        idle[mine] = iv.covered(start[mine], end[mine], free)
    codes, groups = grouping.number(chosen, by)
    n = len(groups)
    longest = np.zeros(n, np.int64)
    np.maximum.at(longest, codes, end - start)
    out = groups.assign(n=np.bincount(codes, minlength=n), time_us=grouping.sums(codes, n, end - start) / 1000,
                        longest_us=longest / 1000, idle_us=grouping.sums(codes, n, idle) / 1000)
    return out.sort_values("idle_us", ascending=False, kind="stable", ignore_index=True)


def _idle(rows: pd.DataFrame) -> iv.Union:
    """The time between the first start and the last end of one GPU's captures in which nothing runs on it."""
    free = []
    for _, own in rows.groupby("capture"):
        gap = gaps(own)
        free.append(iv.union(gap.end, gap.start))
    return iv.merge(*free)


def idle_causes(kernels: pd.DataFrame, calls: pd.DataFrame, by: By = "gpu", where: Where = None) -> pd.DataFrame:
    """One row per group of `by` (gpu, step, phase, layer, operation of the kernel that ended the gap) and cause: cause
    (of CAUSES, or dispatch; `device`: launched in time, started late; `unknown`: the launch is not in the capture),
    idle_us, n (gaps). The idle times of a GPU add up to its idle time.

    A gap that began while the host waited for the device is due to that wait in all of its host part: the queue was
    empty when the wait returned.
    """
    by = grouping.columns(by)
    parts = [part for capture, rows in kernels.groupby("capture", sort=True)
             for part in _causes_of(rows, calls[calls["gpu"] == rows["gpu"].iloc[0]])]
    if not parts:
        return pd.DataFrame(columns=[*by, "cause", "idle_us", "n"])
    every = grouping.select(pd.concat(parts, ignore_index=True), where)
    codes, groups = grouping.number(every, [*by, "cause"])
    out = groups.assign(idle_us=grouping.sums(codes, len(groups), every["idle_ns"].to_numpy()) / 1000,
                        n=np.bincount(codes, minlength=len(groups)))
    return out.sort_values([*by, "idle_us"], ascending=[True] * len(by) + [False], kind="stable", ignore_index=True)


def _causes_of(rows: pd.DataFrame, calls: pd.DataFrame) -> list[pd.DataFrame]:
    """Rows of one capture that ended a gap, once per cause of it, with idle_ns."""
    gap = gaps(rows)
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    kind = calls["kind"].astype(object).to_numpy()
    low, high = gap.end, gap.end + gap.host
    taken = iv.union(low[:0], high[:0])
    found: list[tuple[str, np.ndarray]] = []
    for cause in CAUSES:
        mine = kind == cause
        whole = iv.union(start[mine], end[mine])
        if cause == "sync":
            # The gap begins within the wait: the device ran dry because nobody launched meanwhile.
            dry = iv.covered(low, low + 1, whole) > 0
            whole = iv.merge(whole, iv.union(low[dry], high[dry]))
        found.append((cause, iv.covered(low, high, iv.subtract(whole, taken))))
        taken = iv.merge(taken, whole)
    rest = gap.host - sum(ns for _, ns in found)
    found += [(DISPATCH, rest), ("device", gap.device), ("unknown", gap.start - gap.end - gap.host - gap.device)]
    return [rows[some].assign(cause=cause, idle_ns=ns[some]) for cause, ns in found if (some := ns > 0).any()]
