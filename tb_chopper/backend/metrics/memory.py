"""Device memory over time: peak and what ran then, floor, fragmentation, distance to the limit (docs/memory.md).

    fragmentation = 1 − allocated / reserved at the peak of allocated
    headroom      = memory of the device − largest reserved
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import schema

CPU_TYPE = 0
PROFILER, SNAPSHOT = "profiler", "snapshot"
ALLOCATIONS = ("gpu", "t_ns", "bytes", "allocated_bytes", "reserved_bytes", "step", "source", "total_known")
FULL, ABOVE_PEERS = 0.9, 1.1
"""a GPU whose reserved memory reaches this share of its own is close to its limit; one whose peak is this factor on the
median of the others stands out"""


class Source(NamedTuple):
    """Memory events of one file: MEMORY rows; by device label the gpu that they belong to; PROFILER or SNAPSHOT."""

    events: pd.DataFrame
    gpus: Mapping[str, int]
    kind: str


def allocations(sources: Iterable[Source], steps: pd.DataFrame) -> pd.DataFrame:
    """One row per event of the allocators, in order of gpu and time: ALLOCATIONS. step: by host time, missing outside.

    Events of devices, or of the CPU in a profile without a device. A GPU that has a snapshot keeps to it, since it
    holds every event. total_known: False where the trace has no totals (before 2022, or of the CPU): allocated_bytes
    then counts from the lowest level of the capture, and reserved_bytes is missing (-1).
    """
    parts = [part for source in sources if len(part := _of_source(source))]
    if not parts:
        return pd.DataFrame(columns=list(ALLOCATIONS))
    every = pd.concat(parts, ignore_index=True)
    has_snapshot = every.loc[every["source"] == SNAPSHOT, "gpu"].unique()
    every = every[(every["source"] == SNAPSHOT) | ~every["gpu"].isin(has_snapshot)]
    every = every.sort_values(["gpu", "t_ns"], kind="stable", ignore_index=True)
    return every.assign(step=_steps(every, steps))[list(ALLOCATIONS)]


def _of_source(source: Source) -> pd.DataFrame:
    on_cpu = "cpu" in source.gpus
    events = source.events
    mine = events[(events["device_type"] == CPU_TYPE) if on_cpu else (events["device_type"] != CPU_TYPE)]
    ids = mine["device_id"].value_counts()
    if on_cpu:
        of_id = dict.fromkeys(ids.index, source.gpus["cpu"])
    elif len(source.gpus) == 1:
        # The label of a trace's device need not be the index by which the allocator knows it.
        label, gpu = next(iter(source.gpus.items()))
        of_id = {int(label) if label.isdigit() and int(label) in ids.index else ids.index[0]: gpu} if len(ids) else {}
    else:
        of_id = {i: source.gpus[str(i)] for i in ids.index if str(i) in source.gpus}
    mine = mine[mine["device_id"].isin(list(of_id))]
    gpu = mine["device_id"].map(of_id).astype("int64")
    known = bool((mine["allocated_bytes"] >= 0).any()) and not on_cpu
    if not known:
        level = mine.groupby("device_id")["bytes"].cumsum()
        mine = mine.assign(allocated_bytes=level - np.minimum(level.groupby(mine["device_id"]).transform("min"), 0),
                           reserved_bytes=schema.MISSING)
    return mine.assign(gpu=gpu, source=source.kind, total_known=known)


def _steps(events: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """The step whose host window holds each event."""
    out = pd.Series(pd.NA, index=events.index, dtype="Int64")
    for gpu, own in steps.groupby("gpu"):
        own = own.sort_values("start_ns")
        rows = np.flatnonzero((events["gpu"] == gpu).to_numpy())
        t = events["t_ns"].to_numpy()[rows]
        at = np.searchsorted(own["start_ns"].to_numpy(), t, side="right") - 1
        inside = (at >= 0) & (t < own["end_ns"].to_numpy()[np.maximum(at, 0)])
        out.iloc[rows[inside]] = own["step"].to_numpy()[at[inside]]
    return out


MEMORY_COLUMNS = ("gpu", "peak_bytes", "peak_ns", "step", "phase", "layer", "operation", "floor_bytes", "growth_bytes",
                  "reserved_bytes", "fragmentation", "total_bytes", "headroom_bytes", "used_share", "of_peers",
                  "source", "total_known")


def memory(events: pd.DataFrame, kernels: pd.DataFrame, total_bytes: Mapping[int, int] | None = None) -> pd.DataFrame:
    """One row per gpu with memory events; MEMORY_COLUMNS.

    peak_bytes: largest allocated, at peak_ns; step, phase, layer, operation: of the next kernel that was launched then,
    for which the block was probably allocated. floor_bytes: lowest in any step, else of all; growth_bytes: floor of the
    last step − that of the first. reserved_bytes: largest; fragmentation: at the peak. total_bytes (by gpu, missing
    where unknown); headroom_bytes = total − reserved; used_share = reserved / total. of_peers: peak / median of peaks.
    """
    rows = [_of_gpu(int(gpu), own, kernels, (total_bytes or {}).get(int(gpu)))
            for gpu, own in events.groupby("gpu", sort=True)]
    out = pd.DataFrame(rows, columns=[c for c in MEMORY_COLUMNS if c != "of_peers"])
    out["of_peers"] = out["peak_bytes"] / out["peak_bytes"].median() if len(out) > 1 else np.nan
    return out[list(MEMORY_COLUMNS)].astype({"step": "Int64"})


def _of_gpu(gpu: int, events: pd.DataFrame, kernels: pd.DataFrame, total: int | None) -> dict[str, object]:
    at = events.loc[events["allocated_bytes"].idxmax()]
    known = bool(events["total_known"].iloc[0])
    floors = step_memory(events)["floor_bytes"]
    reserved = int(events["reserved_bytes"].max()) if known else None
    then = int(at["reserved_bytes"])
    place = _next_launch(kernels[kernels["gpu"] == gpu], int(at["t_ns"]))
    return {
        "gpu": gpu, "peak_bytes": int(at["allocated_bytes"]), "peak_ns": int(at["t_ns"]), "step": at["step"], **place,
        "floor_bytes": int(floors.min() if len(floors) else events["allocated_bytes"].min()),
        "growth_bytes": int(floors.iloc[-1] - floors.iloc[0]) if len(floors) > 1 else np.nan,
        "reserved_bytes": np.nan if reserved is None else reserved,
        "fragmentation": 1 - int(at["allocated_bytes"]) / then if known and then > 0 else np.nan,
        "total_bytes": np.nan if total is None else total,
        "headroom_bytes": np.nan if None in (total, reserved) else total - reserved,  # type: ignore[operator]
        "used_share": np.nan if None in (total, reserved) else reserved / total,  # type: ignore[operator]
        "source": at["source"], "total_known": known}


def _next_launch(kernels: pd.DataFrame, t_ns: int) -> dict[str, object]:
    names = ("phase", "layer", "operation")
    after = kernels[kernels["launch_ns"].notna() & (kernels["launch_ns"] >= t_ns).fillna(False)]
    if not len(after):
        return dict.fromkeys(names)
    row = after.loc[after["launch_ns"].idxmin()]
    return {n: None if pd.isna(row[n]) else row[n] for n in names}


def step_memory(events: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu and step with events: gpu, step, floor_bytes, peak_bytes, reserved_bytes (largest; missing where
    no totals are known), n (events), allocated_bytes (sum of what was allocated in it)."""
    inside = events[events["step"].notna()]
    grouped = inside.groupby(["gpu", "step"])
    out = grouped["allocated_bytes"].agg(["min", "max", "size"]).reset_index()
    out.columns = ["gpu", "step", "floor_bytes", "peak_bytes", "n"]
    keys = [inside["gpu"], inside["step"]]
    reserved = inside["reserved_bytes"].where(inside["total_known"].astype(bool)).groupby(keys)
    asked = inside["bytes"].clip(lower=0).groupby(keys)
    return out.assign(reserved_bytes=reserved.max().to_numpy(), allocated_bytes=asked.sum().to_numpy())[
        ["gpu", "step", "floor_bytes", "peak_bytes", "reserved_bytes", "n", "allocated_bytes"]]


def curve(events: pd.DataFrame, max_points: int = 2000) -> pd.DataFrame:
    """The level over time of one gpu in at most about `max_points` rows: t_ns, allocated_bytes, reserved_bytes. Of each
    stretch of events the lowest, the highest and the last are kept, so that no peak is lost."""
    if len(events) <= max_points:
        return events[["t_ns", "allocated_bytes", "reserved_bytes"]].reset_index(drop=True)
    bucket = np.arange(len(events)) * (max_points // 3) // len(events)
    grouped = events["allocated_bytes"].reset_index(drop=True).groupby(bucket)
    keep = np.unique(np.concatenate([grouped.idxmin(), grouped.idxmax(), grouped.tail(1).index]))
    return events[["t_ns", "allocated_bytes", "reserved_bytes"]].iloc[keep].reset_index(drop=True)
