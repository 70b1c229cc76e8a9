"""How the host keeps its GPU fed: launches waiting in each queue, storms of small kernels, and what the host did while
the GPU was idle (docs/host.md).

    queue(t)  = launches begun before t − kernels started before t, per stream
    host idle = the part of a gap before the next launch call began; each moment of it has one cause:
                compilation before data loading before allocation before garbage collection before synchronisation
                before the rest, which is dispatch: Python and the framework
    data stall = |data loading \\ GPU work| / window of the step (reference: data-loader stalls)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.timeline import Gaps, gaps, timeline

SHORT_NS = 10_000
"""kernels below this cost about as much to launch as to run"""
CAUSES = ("profiler", "recompile", "compile", "loader", "allocation", "gc", "sync")
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
               where: Where = None, stalled: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per group of CALLS: n, time_us (Σ duration), longest_us, idle_us (the part under which the GPU had
    nothing to do: it may have waited for it), caused_us (idle time whose cause they are, as in `idle_causes`), sorted
    by idle time. stalled: of `stalls`, where it is at hand."""
    by = grouping.columns(by)
    caused = stalls(kernels, calls) if stalled is None else stalled
    chosen = grouping.select(calls.assign(caused=pd.Series(0, index=calls.index)).reset_index(drop=True), where)
    caused = caused[caused["call"].isin(chosen.index)]
    chosen.loc[caused["call"], "caused"] = caused["idle_ns"].to_numpy()
    start, end = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    idle = _uncovered(chosen, kernels)
    codes, groups = grouping.number(chosen, by)
    n = len(groups)
    longest = np.zeros(n, np.int64)
    np.maximum.at(longest, codes, end - start)
    out = groups.assign(n=np.bincount(codes, minlength=n), time_us=grouping.sums(codes, n, end - start) / 1000,
                        longest_us=longest / 1000, idle_us=grouping.sums(codes, n, idle) / 1000,
                        caused_us=grouping.sums(codes, n, chosen["caused"].to_numpy()) / 1000)
    return out.sort_values("idle_us", ascending=False, kind="stable", ignore_index=True)


def _uncovered(calls: pd.DataFrame, kernels: pd.DataFrame) -> np.ndarray:
    """Of each call the time under which nothing runs on its GPU, ns."""
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    idle = np.zeros(len(calls), np.int64)
    for gpu, rows in kernels.groupby("gpu"):
        mine = np.flatnonzero(calls["gpu"] == gpu)
        idle[mine] = iv.covered(start[mine], end[mine], _idle(rows))
    return idle


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
    low, high = gap.end, gap.end + gap.host
    found: list[tuple[str, np.ndarray]] = [(b.cause, iv.covered(low, high, b.whole)) for b in _blames(gap, calls)]
    rest = gap.host - sum(ns for _, ns in found)
    found += [(DISPATCH, rest), ("device", gap.device), ("unknown", gap.start - gap.end - gap.host - gap.device)]
    return [rows[some].assign(cause=cause, idle_ns=ns[some]) for cause, ns in found if (some := ns > 0).any()]


class _Blame(NamedTuple):
    """What one cause is blamed for. whole: the time; idle: of each call, the idle time due to it, ns."""

    cause: str
    whole: iv.Union
    idle: np.ndarray


def _blames(gap: Gaps, calls: pd.DataFrame) -> list[_Blame]:
    """Who is blamed for the host parts of gaps, in order of precedence: no moment is blamed on two."""
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    kind = calls["kind"].astype(object).to_numpy()
    low, high = gap.end, gap.end + gap.host
    hosts = iv.union(low, high)
    taken = iv.union(low[:0], high[:0])
    out = []
    for cause in CAUSES:
        mine = np.flatnonzero(kind == cause)
        # Of calls within each other the outer one, which began first.
        mine = mine[np.argsort(start[mine], kind="stable")]
        begin = np.maximum(start[mine], np.concatenate((start[mine][:1], np.maximum.accumulate(end[mine])[:-1])))
        whole, free = iv.union(start[mine], end[mine]), iv.subtract(hosts, taken)
        idle = np.zeros(len(calls), np.int64)
        if cause == "sync" and len(mine):
            # The gap begins within the wait: the device ran dry because nobody launched meanwhile.
            dry = np.flatnonzero((iv.covered(low, low + 1, whole) > 0) & (high > low))
            waited = mine[np.searchsorted(begin, low[dry], side="right") - 1]
            np.add.at(idle, waited, iv.covered(low[dry], high[dry], free))
            of_gaps = iv.union(low[dry], high[dry])
            whole, free = iv.merge(whole, of_gaps), iv.subtract(free, of_gaps)
        idle[mine] += iv.covered(begin, np.maximum(end[mine], begin), free)
        out.append(_Blame(cause, iv.subtract(whole, taken), idle))
        taken = iv.merge(taken, whole)
    return out


# ---- which call, how often -------------------------------------------------------------------------------------------

STALL_COLUMNS = ("call", "gpu", "kind", "name", "start_ns", "end_ns", "step", "idle_ns", "next_step", "next_phase",
                 "next_operation", "at")


def stalls(kernels: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """One row per call that kept its GPU idle, in order of gpu and time: call (row of `calls`, counted from 0), gpu,
    kind, name, start_ns, end_ns and step of the call, idle_ns (whose cause it is: they add up to `idle_causes`), and of
    the kernel that ended the idle time: next_step, next_phase, next_operation, at (gpu@start_ns)."""
    parts = [part for _, rows in kernels.groupby("capture", sort=True)
             if len(part := _stalls_of(rows, calls.reset_index(drop=True)))]
    if not parts:
        return pd.DataFrame(columns=list(STALL_COLUMNS))
    return pd.concat(parts).sort_values(["gpu", "start_ns"], kind="stable", ignore_index=True)


def _stalls_of(rows: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    mine = calls[calls["gpu"] == rows["gpu"].iloc[0]]
    gap = gaps(rows)
    idle = sum((b.idle for b in _blames(gap, mine)), np.zeros(len(mine), np.int64))
    chosen = mine[idle > 0]
    # The first idle time on the host's side that ends after the call began is the one that it caused.
    order = np.argsort(gap.end, kind="stable")
    order = order[gap.host[order] > 0]
    first = np.searchsorted((gap.end + gap.host)[order], chosen["start_ns"].to_numpy(), side="right")
    ended = rows.iloc[order[np.minimum(first, len(order) - 1)]] if len(chosen) else rows.iloc[:0]
    return pd.DataFrame({
        "call": chosen.index, **{c: chosen[c].array for c in ("gpu", "kind", "name", "start_ns", "end_ns", "step")},
        "idle_ns": idle[idle > 0], "next_step": ended["step"].array,
        **{f"next_{c}": ended[c].astype(object).array for c in ("phase", "operation")},
        "at": [f"{g}@{t}" for g, t in zip(ended["gpu"], ended["start_ns"], strict=True)]})


def in_the_middle(stalled: pd.DataFrame) -> pd.Series:
    """Which stalls are waits for the device in the middle of a step: a kernel of the same step's forward or backward
    ended them. The wait at the end of a step, and those for the norm of the gradients, are part of most trainings."""
    same = (stalled["step"] == stalled["next_step"]).fillna(False).astype(bool)
    return (stalled["kind"] == "sync") & same & (stalled["next_phase"] != "optimizer")


def step_stalls(kernels: pd.DataFrame, steps: pd.DataFrame, calls: pd.DataFrame,
                stalled: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per gpu, step and kind of call that either ran in the step or kept the GPU idle before a kernel of it:
    gpu, step, kind, n (calls that began in it; those between steps count to the next), time_us (their union),
    uncovered_us (of it, what no GPU work covers), idle_us (idle time before the step's kernels that is due to such
    calls), window_us (of the step on the GPU), uncovered_share and idle_share (of the window), at (the kernel that
    ended the longest stall). stalled: of `stalls`, where it is at hand."""
    keys = ["gpu", "step", "kind"]
    own = calls.assign(step=_step_or_next(calls, steps))
    own = own[own["step"].notna()].astype({"kind": object})
    free = {int(g): _idle(rows) for g, rows in kernels.groupby("gpu")}
    rows = []
    for (gpu, step, kind), some in own.groupby(keys):
        whole = iv.union(some["start_ns"].to_numpy(), some["end_ns"].to_numpy())
        uncovered = iv.intersect(whole, free[gpu]).length if gpu in free else 0
        rows.append((gpu, step, kind, len(some), whole.length / 1000, uncovered / 1000))
    ran = pd.DataFrame(rows, columns=[*keys, "n", "time_us", "uncovered_us"])
    found = stalls(kernels, calls) if stalled is None else stalled
    found = found[found["next_step"].notna()].sort_values("idle_ns", ascending=False, kind="stable")
    found = found.assign(step=found["next_step"], kind=found["kind"].astype(object))
    idle = found.groupby(keys).agg(idle_us=("idle_ns", "sum"), at=("at", "first")).reset_index()
    idle["idle_us"] = idle["idle_us"] / 1000
    types = {"gpu": "int64", "step": "int64"}
    out = ran.astype(types).merge(idle.astype(types), on=keys, how="outer")
    windows = timeline(kernels, steps, ["gpu", "step"])[["gpu", "step", "total_us"]].dropna()
    out = out.merge(windows.astype(types).rename(columns={"total_us": "window_us"}), on=["gpu", "step"], how="left")
    zero = {"n": 0, "time_us": 0.0, "uncovered_us": 0.0, "idle_us": 0.0}
    out = out.fillna(zero).astype({"n": "int64"})
    window = out["window_us"].where(out["window_us"] > 0)
    return out.assign(uncovered_share=out["uncovered_us"] / window, idle_share=out["idle_us"] / window)[
        [*keys, "n", "time_us", "uncovered_us", "idle_us", "window_us", "uncovered_share", "idle_share", "at"]]


def _step_or_next(calls: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """The step of each call; of one between steps the next that begins on the host: loaders often run there."""
    out = calls["step"].astype("Int64").copy()
    for gpu, own in steps.groupby("gpu"):
        own = own.sort_values("start_ns")
        mine = np.flatnonzero((calls["gpu"] == gpu) & out.isna())
        at = np.searchsorted(own["start_ns"].to_numpy(), calls["start_ns"].to_numpy()[mine])
        there = at < len(own)
        out.iloc[mine[there]] = own["step"].to_numpy("int64")[at[there]]
    return out


ONCE = 2.0
"""a value above this factor on the next largest stands alone"""


class Recurring(NamedTuple):
    """What idle time costs in every step. us: of a step on its most idle GPU; gpu and excess_us: the GPU that has most
    more than the median of the others, and how much of it; per_gpu: of each GPU, µs per step; by_step: µs of the most
    idle GPU, excess_by_step: of `gpu` beyond the others, of each step that was measured."""

    us: float
    gpu: int
    excess_us: float
    per_gpu: pd.Series
    by_step: pd.Series
    excess_by_step: pd.Series


def recurring(stalled: pd.DataFrame, steps: pd.DataFrame, first: bool = True) -> Recurring | None:
    """The idle time of some rows of `stalls` as it comes back in the steps of a run; None below two steps.

    By the step of the kernel that ended it; `first=False` leaves out the first step of each capture, for what comes
    before the first kernel of a step: there it is not recorded. A mean over steps. Where the largest stands alone, the
    median or the mean of the others instead, whichever is more: what happens once is an outlier, not a habit.
    """
    known = steps[steps["gpu_start_ns"].notna()]
    if not first:
        known = known[known["step"] > known.groupby("capture")["step"].transform("min")]
    idle = stalled[stalled["next_step"].notna()].groupby(["gpu", "next_step"])["idle_ns"].sum() / 1000
    at = pd.MultiIndex.from_frame(known[["gpu", "step"]].drop_duplicates().astype("int64"))
    index = idle.index.set_names(["gpu", "step"])
    table = pd.Series(idle.to_numpy("float64"), index=index).reindex(at).fillna(0.0).unstack("gpu")
    if len(table) < 2:
        return None
    per_gpu = table.apply(lambda c: _usual(c.dropna().to_numpy()))
    by_step = table.max(axis=1)
    more = {int(g): (table[g] - table.drop(columns=g).median(axis=1)).fillna(0.0) for g in table}
    late = max(more, key=lambda g: _usual(more[g].to_numpy()))
    return Recurring(_usual(by_step.to_numpy()), late, _usual(more[late].to_numpy()), per_gpu, by_step, more[late])


def _usual(values: np.ndarray) -> float:
    if len(values) < 2:
        return 0.0
    ordered = np.sort(values)
    if ordered[-1] > ONCE * ordered[-2]:
        return max(float(ordered[:-1].mean()), float(ordered[(len(ordered) - 1) // 2]))
    return float(values.mean())
