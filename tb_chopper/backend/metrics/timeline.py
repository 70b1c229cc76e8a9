"""Timeline of a GPU: compute, exposed communication, exposed copies and idle (docs/metrics.md, "Timeline").

    compute               = |comp|            communication = |comm|            memcpy = |copy|
    overlap               = |comp ∩ comm|     exposed_communication = |comm \\ comp|
    exposed_memcpy        = |copy \\ (comp ∪ comm)|
    busy                  = |comp ∪ comm ∪ copy|,   idle = total − busy
    compute + exposed_communication + exposed_memcpy + idle = total
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend import schema
from tb_chopper.backend.classify import COMMUNICATION, COMPUTE, MEMCPY
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where

COLUMNS = ("total", "compute", "communication", "memcpy", "overlap", "exposed_communication", "exposed_memcpy",
           "busy", "idle", "idle_host", "idle_device")
CATEGORIES = (*schema.OP_TYPES, "communication", "memcpy", "idle")


class Lanes(NamedTuple):
    """What one GPU did, as three unions over one capture."""

    compute: iv.Union
    communication: iv.Union
    memcpy: iv.Union


def lanes(kernels: pd.DataFrame) -> Lanes:
    """The three unions of one capture's rows."""
    kind = schema.codes(kernels["kind"], schema.KINDS)
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    return Lanes(*(iv.union(start[kind == k], end[kind == k]) for k in (COMPUTE, COMMUNICATION, MEMCPY)))


def timeline(kernels: pd.DataFrame, steps: pd.DataFrame, by: By = "gpu", where: Where = None) -> pd.DataFrame:
    """One row per group of `by`: total_us, compute_us, communication_us, memcpy_us, overlap_us,
    exposed_communication_us, exposed_memcpy_us, busy_us, idle_us, idle_host_us, idle_device_us.

    Grouped (and filtered) by gpu, worker, span or step alone, a group is a window of time: the whole capture, or
    the step's window on the GPU. Over several GPUs the windows' times add up: a group's total is GPU time.
    Grouped by anything finer, a group is the work of its rows: each time is a union over the group's rows of one
    GPU, `overlap` counts their compute covered by any communication of the GPU, `exposed_*` the part of theirs
    not covered by other work, and the idle time before an activity belongs to the activity that ended it, so that
    the idle times of all groups add up to the GPU's. `idle_host`: the next launch call began after the previous
    end; `idle_device`: launched in time, started late; the rest of idle has an unknown launch.
    """
    by = grouping.columns(by)
    asked = {grouping.source(c, kernels) for c in (*by, *(where or {}))}
    in_windows = asked <= grouping.WINDOW_COLUMNS
    rows = _window_rows(kernels, steps, by, where) if in_windows else _work_rows(kernels, by, where)
    codes, groups = grouping.number(rows, by)
    out = groups.copy()
    for name in COLUMNS:
        out[f"{name}_us"] = grouping.sums(codes, len(groups), rows[name].to_numpy()) / 1000
    return out


def exclusive(kernels: pd.DataFrame, steps: pd.DataFrame, by_step: bool = True) -> pd.DataFrame:
    """Every ns of every window given to one thing: columns capture, gpu, step, phase, category, time_us.

    Category is one of gemm, attention, vector, communication, memcpy, idle. Where several run at once the first
    of that list wins (so communication and copies are the exposed ones); an idle time has the phase of the activity
    that ended it. The times of a window add up to it exactly. Without `by_step`, one window per capture, step missing.
    """
    parts = [
        _exclusive_of(rows, window)
        for capture, rows in kernels.groupby("capture", sort=True)
        if len(window := _windows(rows, steps[steps["capture"] == capture], by_step))
    ]
    names = ["capture", "gpu", "step", "phase", "category", "time_us"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def _exclusive_of(rows: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    kind = schema.codes(rows["kind"], schema.KINDS)
    op_type = schema.codes(rows["op_type"], schema.OP_TYPES)
    category = np.where(kind == COMPUTE, np.maximum(op_type, 0), len(schema.OP_TYPES) - 1 + kind)
    phase = schema.codes(rows["phase"], schema.PHASES)
    low, high = windows["start_ns"].to_numpy(), windows["end_ns"].to_numpy()
    taken = iv.union(start[:0], end[:0])
    out = []

    def give(c: int, p: int, share: iv.Union) -> None:
        out.append(windows[["capture", "gpu", "step"]].assign(
            phase=schema.PHASES[p], category=CATEGORIES[c], time_us=iv.covered(low, high, share) / 1000))

    for c in range(len(CATEGORIES) - 1):
        for p in range(len(schema.PHASES)):
            mine = (category == c) & (phase == p)
            if mine.any():
                whole = iv.union(start[mine], end[mine])
                give(c, p, iv.subtract(whole, taken))
                taken = iv.merge(taken, whole)
    everything = iv.union(np.array([min(low.min(), start.min())]), np.array([max(high.max(), end.max())]))
    gaps = iv.subtract(everything, taken)
    order = np.argsort(start, kind="stable")
    next_row = np.searchsorted(start[order], gaps.ends, side="left")
    gap_phase = phase[order[np.minimum(next_row, len(order) - 1)]]
    for p in range(len(schema.PHASES)):
        mine = gap_phase == p
        if mine.any():
            give(len(CATEGORIES) - 1, p, iv.Union(gaps.starts[mine], gaps.ends[mine]))
    table = pd.concat(out, ignore_index=True)
    return table[table["time_us"] > 0]


def _windows(rows: pd.DataFrame, steps: pd.DataFrame, by_step: bool) -> pd.DataFrame:
    """The windows of one capture: capture, gpu, step, start_ns, end_ns (ns, int64)."""
    if by_step:
        start, end = _step_windows(steps)
        return steps[["capture", "gpu"]].assign(step=steps["step"].astype("Int64"), start_ns=start, end_ns=end)
    first = rows.iloc[0]
    return pd.DataFrame({
        "capture": [first["capture"]], "gpu": [first["gpu"]], "step": pd.array([pd.NA], dtype="Int64"),
        "start_ns": [rows["start_ns"].min()], "end_ns": [rows["end_ns"].max()]})


def _step_windows(steps: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each step on the GPU, ns. A step without kernels has the time between the last kernel of the
    steps before it and the first of those after it; several of them share it at the times of their beginning."""
    first, last = steps["gpu_start_ns"], steps["gpu_end_ns"]
    is_empty = first.isna().to_numpy()
    if is_empty.all():
        return steps["start_ns"].to_numpy(), steps["start_ns"].to_numpy()
    low = last.ffill().fillna(first.bfill()).to_numpy(np.int64)
    high = np.maximum(first.bfill().fillna(last.ffill()).to_numpy(np.int64), low)
    follows = is_empty & np.concatenate(([False], is_empty[:-1]))
    start = np.where(follows, np.clip(steps["start_ns"].to_numpy(), low, high), low)
    end = np.where(np.concatenate((follows[1:], [False])), np.concatenate((start[1:], high[-1:])), high)
    return (np.where(is_empty, start, first.fillna(0).to_numpy(np.int64)),
            np.where(is_empty, end, last.fillna(0).to_numpy(np.int64)))


def _window_rows(kernels: pd.DataFrame, steps: pd.DataFrame, by: list[str], where: Where) -> pd.DataFrame:
    """One row per window with its times in ns and the columns that `by` may ask for."""
    by_step = "step" in by or "step" in (where or {})
    parts = []
    for capture, rows in kernels.groupby("capture", sort=True):
        windows = _windows(rows, steps[steps["capture"] == capture], by_step)
        for column in ("worker", "span", "device"):
            windows[column] = rows[column].iloc[0]
        windows = grouping.select(windows, where)
        if len(windows):
            parts.append(_measure_windows(rows, windows))
    if not parts:
        return pd.DataFrame({c: [] for c in (*grouping.WINDOW_COLUMNS, *COLUMNS)}).astype(
            dict.fromkeys(COLUMNS, "int64"))
    return pd.concat(parts, ignore_index=True)


def _measure_windows(rows: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    low, high = windows["start_ns"].to_numpy(), windows["end_ns"].to_numpy()
    comp, comm, copy = lanes(rows)
    active = iv.merge(comp, comm)
    busy = iv.merge(active, copy)

    def measure(u: iv.Union) -> np.ndarray:
        return iv.covered(low, high, u)

    gap = gaps(rows)
    out = windows.assign(
        total=high - low, compute=measure(comp), communication=measure(comm), memcpy=measure(copy),
        overlap=measure(iv.intersect(comp, comm)), exposed_communication=measure(iv.subtract(comm, comp)),
        exposed_memcpy=measure(iv.subtract(copy, active)), busy=measure(busy))
    return out.assign(
        idle=out["total"] - out["busy"],
        idle_host=measure(iv.union(gap.end, gap.end + gap.host)),
        idle_device=measure(iv.union(gap.start - gap.device, gap.start)))


class Gaps(NamedTuple):
    """The idle time before each row, ns: [end, start) of which `host` comes first and `device` last."""

    end: np.ndarray
    start: np.ndarray
    host: np.ndarray
    device: np.ndarray


def gaps(rows: pd.DataFrame) -> Gaps:
    """The idle time that each row of one capture ended; zero-length gaps where it ended none."""
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    order = np.argsort(start, kind="stable")
    reach = np.empty(len(start), np.int64)
    reach[order] = np.concatenate((start[order][:1], np.maximum.accumulate(end[order])[:-1]))
    previous = np.minimum(reach, start)
    launch = rows["launch_ns"].astype("Int64")
    known = launch.notna().to_numpy()
    began = np.clip(launch.fillna(0).to_numpy(np.int64), previous, start)
    host = np.where(known, began - previous, 0)
    device = np.where(known, start - began, 0)
    return Gaps(previous, start, host, device)


def _work_rows(kernels: pd.DataFrame, by: list[str], where: Where) -> pd.DataFrame:
    """One row per (capture, group) with the group's times in ns."""
    parts = []
    for _, rows in kernels.groupby("capture", sort=True):
        chosen = grouping.select(rows, where)
        if len(chosen):
            codes, groups = grouping.number(chosen, by)
            position = rows.index.get_indexer(chosen.index)
            parts.append(_measure_work(rows, chosen, position, codes, groups))
    if not parts:
        return pd.DataFrame({c: [] for c in (*by, *COLUMNS)}).astype(dict.fromkeys(COLUMNS, "int64"))
    return pd.concat(parts, ignore_index=True)


def _measure_work(rows: pd.DataFrame, chosen: pd.DataFrame, position: np.ndarray, codes: np.ndarray,
                  groups: pd.DataFrame) -> pd.DataFrame:
    n = len(groups)
    comp, comm, _ = lanes(rows)
    start, end = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    kind = schema.codes(chosen["kind"], schema.KINDS)

    def lane(k: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mine = slice(None) if k is None else kind == k
        return union_by_group(start[mine], end[mine], codes[mine])

    def total(pieces: tuple[np.ndarray, np.ndarray, np.ndarray], cover: iv.Union | None = None) -> np.ndarray:
        low, high, group = pieces
        return grouping.sums(group, n, iv.covered(low, high, cover) if cover is not None else high - low)

    compute, communication, memcpy = lane(COMPUTE), lane(COMMUNICATION), lane(MEMCPY)
    gap = gaps(rows)
    idle, host, device = (grouping.sums(codes, n, v[position]) for v in (gap.start - gap.end, gap.host, gap.device))
    out = groups.assign(
        compute=total(compute), communication=total(communication), memcpy=total(memcpy),
        overlap=total(compute, comm),
        exposed_communication=total(communication) - total(communication, comp),
        exposed_memcpy=total(memcpy) - total(memcpy, iv.merge(comp, comm)),
        busy=total(lane(None)), idle=idle, idle_host=host, idle_device=device)
    return out.assign(total=out["compute"] + out["exposed_communication"] + out["exposed_memcpy"] + out["idle"])


def union_by_group(start: np.ndarray, end: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The union of each group's intervals as (starts, ends, groups), all groups in one sweep.

    Each group is moved to a stretch of time of its own, so that one union of all of them keeps them apart. Times are
    counted, not measured, on the way: times of many groups side by side would leave int64.
    """
    times = np.unique(np.concatenate((start, end)))
    stride = len(times) + 1
    u = iv.union(np.searchsorted(times, start) + group * stride, np.searchsorted(times, end) + group * stride)
    which = u.starts // stride
    return times[u.starts - which * stride], times[u.ends - which * stride], which
