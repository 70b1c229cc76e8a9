"""Overlap of computation with communication, C3 (docs/metrics.md, "Overlap")."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.timeline import lanes, union_by_group

INSTANCE = ["gpu", "capture", "step", "phase", "layer", "operation"]
"""One instance of an operation: its compute kernels of one (gpu, step, phase, layer, operation)."""


def with_overlap(kernels: pd.DataFrame) -> pd.DataFrame:
    """`kernels` with overlap_ns: the part of each row covered by communication of its GPU (0 for communication)."""
    overlap = np.zeros(len(kernels), np.int64)
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    capture, other = kernels["capture"].to_numpy(), (kernels["kind"] != "communication").to_numpy()
    for c in np.unique(capture):
        mine = np.flatnonzero(capture == c)
        overlap[mine] = iv.covered(start[mine], end[mine], lanes(kernels.iloc[mine]).communication)
    return kernels.assign(overlap_ns=np.where(other, overlap, 0))


def instances(kernels: pd.DataFrame, where: Where = None) -> pd.DataFrame:
    """One row per instance of an operation, in time order: the INSTANCE columns, op_type, n_kernels, start_ns,
    elapsed_ns (last end − first start, bubbles included), kernel_ns (sum of durations), overlap_ns (the part of
    [start, end) covered by communication), overlap_ratio (0–1), sample (occurrence of the operation on its GPU).
    """
    compute = grouping.select(kernels[kernels["kind"] == "compute"], where)
    codes, groups = grouping.number(compute, INSTANCE)
    n = len(groups)
    start, end = np.full(n, np.iinfo(np.int64).max), np.full(n, np.iinfo(np.int64).min)
    np.minimum.at(start, codes, compute["start_ns"].to_numpy())
    np.maximum.at(end, codes, compute["end_ns"].to_numpy())
    overlap = np.zeros(n, np.int64)
    for c in groups["capture"].unique():
        mine = np.flatnonzero((groups["capture"] == c).to_numpy())
        rows = kernels[kernels["capture"] == c]
        overlap[mine] = iv.covered(start[mine], end[mine], lanes(rows).communication)
    first = np.full(n, -1)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    out = groups.assign(
        op_type=compute["op_type"].astype(object).to_numpy()[first],
        n_kernels=np.bincount(codes, minlength=n), start_ns=start, elapsed_ns=end - start,
        kernel_ns=grouping.sums(codes, n, (compute["end_ns"] - compute["start_ns"]).to_numpy()), overlap_ns=overlap)
    out["overlap_ratio"] = np.divide(overlap, end - start, out=np.zeros(n), where=end > start)
    out = out.sort_values("start_ns", kind="stable", ignore_index=True)
    out["sample"] = out.groupby(["capture", "phase", "operation"], dropna=False).cumcount()
    return out


def overlap(kernels: pd.DataFrame, by: By = "operation", where: Where = None) -> pd.DataFrame:
    """One row per group of `by`: n (instances), elapsed_us, overlap_us, overlap_ratio (0–1), pearson_r.

    `by` may name gpu, step, phase, layer, operation, op_type and (for single kernels as instances) kernel.
    pearson_r correlates overlap ratio with elapsed time over the group's instances; missing below three instances
    or where one of the two does not vary. Elapsed times of instances that run at the same time add up.
    """
    by = grouping.columns(by)
    each = single_kernels(kernels, where) if "kernel" in by else instances(kernels, where)
    codes, groups = grouping.number(each, by)
    n = len(groups)
    elapsed = grouping.sums(codes, n, each["elapsed_ns"].to_numpy())
    covered = grouping.sums(codes, n, each["overlap_ns"].to_numpy())
    return groups.assign(
        n=np.bincount(codes, minlength=n), elapsed_us=elapsed / 1000, overlap_us=covered / 1000,
        overlap_ratio=np.divide(covered, elapsed, out=np.full(n, np.nan), where=elapsed > 0),
        pearson_r=_pearson(codes, n, each["overlap_ratio"].to_numpy(float), each["elapsed_ns"].to_numpy(float)))


def single_kernels(kernels: pd.DataFrame, where: Where = None) -> pd.DataFrame:
    """Compute kernels in the shape of `instances`: each is its own instance, elapsed is its duration."""
    compute = grouping.select(kernels[kernels["kind"] == "compute"], where)
    duration = (compute["end_ns"] - compute["start_ns"]).to_numpy()
    ratio = np.divide(compute["overlap_ns"].to_numpy(), duration, out=np.zeros(len(compute)), where=duration > 0)
    return compute.assign(elapsed_ns=duration, overlap_ratio=ratio)


def hidden_communication(kernels: pd.DataFrame, by: By = "gpu", where: Where = None) -> pd.DataFrame:
    """One row per group of communication rows: n, communication_us, hidden_us, exposed_us, hidden_share (0–1, missing
    where there is no communication).

    hidden = |comm ∩ comp| of the group's communication and all compute of its GPU.
    """
    by = grouping.columns(by)
    parts = []
    for _, rows in kernels.groupby("capture", sort=True):
        mine = grouping.select(rows[rows["kind"] == "communication"], where)
        codes, groups = grouping.number(mine, by)
        low, high, group = union_by_group(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy(), codes)
        parts.append(groups.assign(
            n=np.bincount(codes, minlength=len(groups)), communication=grouping.sums(group, len(groups), high - low),
            hidden=grouping.sums(group, len(groups), iv.covered(low, high, lanes(rows).compute))))
    if not parts:
        parts = [pd.DataFrame({c: [] for c in (*by, "n", "communication", "hidden")})]
    rows = pd.concat(parts, ignore_index=True)
    codes, groups = grouping.number(rows, by)
    n, communication, hidden = (
        grouping.sums(codes, len(groups), rows[c].to_numpy(np.int64)) for c in ("n", "communication", "hidden"))
    share = np.divide(hidden, communication, out=np.full(len(groups), np.nan), where=communication > 0)
    return groups.assign(n=n, communication_us=communication / 1000, hidden_us=hidden / 1000,
                         exposed_us=(communication - hidden) / 1000, hidden_share=share)


def findings(kernels: pd.DataFrame) -> list[Finding]:
    """Which kernels were taken as communication: names change with libraries, and a wrong one moves every number."""
    rows = kernels[(kernels["kind"] == "communication") & (kernels["activity"] == "kernel")]
    names = rows["name"].value_counts()
    names = names[names > 0]
    if not len(names):
        return []
    shown = ", ".join(str(n)[:60] for n in names.index[:8])
    return [Finding("communication_kernels", "info", f"{len(names)} kernel names were taken as communication: {shown}"
                    f"{', ...' if len(names) > 8 else ''}", len(rows))]


def _pearson(codes: np.ndarray, n: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson r of x and y per group; NaN below three members or without variance."""
    count = np.bincount(codes, minlength=n).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        dx = x - (np.bincount(codes, x, n) / count)[codes]
        dy = y - (np.bincount(codes, y, n) / count)[codes]
        var_x, var_y = np.bincount(codes, dx * dx, n), np.bincount(codes, dy * dy, n)
        r = np.bincount(codes, dx * dy, n) / np.sqrt(var_x * var_y)
    return np.where((count >= 3) & (var_x > 0) & (var_y > 0), r, np.nan)
