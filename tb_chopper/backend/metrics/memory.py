"""Device memory over time: peak and what ran then, floor, fragmentation, distance to the limit (docs/memory.md).

    fragmentation = 1 − allocated / reserved at the peak of allocated
    headroom      = memory of the device − largest reserved
    outside       = used as the driver counts − reserved: contexts, libraries, buffers of NCCL, other processes
    growth        = median over all pairs of steps of (difference of their floors / difference of their numbers)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import schema

CPU_TYPE = 0
PROFILER, SNAPSHOT, TELEMETRY = "profiler", "snapshot", "telemetry"
ALLOCATIONS = ("gpu", "t_ns", "bytes", "allocated_bytes", "reserved_bytes", "step", "source", "total_known")
STEADY, STEADY_STEPS, STEADY_BYTES = 0.5, 4, 2**20
"""a floor grows steadily where each of at least so many steps lies at least this share of the growth, and the growth at
least so many bytes, above the one before"""
CYCLES, ALIKE = 5, 0.25
"""where the floor falls now and then, as gradients are freed after several steps: so many steps, all but one, that lie
above those a cycle before by the growth, within this share of it"""
MAX_STEPS = 1000
"""beyond these every k-th step tells the growth: all pairs are compared"""


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


MEMORY_COLUMNS = ("gpu", "peak_bytes", "peak_ns", "step", "phase", "layer", "operation", "at", "floor_bytes",
                  "growth_bytes", "growth_per_step_bytes", "steady", "n_steps", "steps_left", "reserved_bytes",
                  "fragmentation", "used_bytes", "outside_bytes", "total_bytes", "headroom_bytes", "used_share",
                  "of_peers", "source", "total_known")


def memory(events: pd.DataFrame, kernels: pd.DataFrame, total_bytes: Mapping[int, int] | None = None,
           samples: pd.DataFrame | None = None, steps: pd.DataFrame | None = None,
           stages: Mapping[int, int] | None = None) -> pd.DataFrame:
    """One row per gpu with memory events, or samples of its used memory; MEMORY_COLUMNS.

    peak_bytes: largest allocated, at peak_ns; step, phase, layer, operation, at (gpu@start_ns): of the next kernel that
    was launched then, for which the block was probably allocated. floor_bytes: lowest in any step, else of all;
    growth_bytes: floor of the last step − that of the first; growth_per_step_bytes, steady and n_steps: see `growth`;
    steps_left: until the headroom is used up, where it grows steadily. reserved_bytes: largest; fragmentation: at the
    peak. used_bytes: largest that the driver counted; outside_bytes: of it, what the allocator did not hold (median
    over samples). total_bytes (by gpu, missing where unknown); headroom_bytes = total − reserved; used_share = reserved
    / total. of_peers: peak / median of the peaks of its peers, itself included; missing where
    it has none. source: profiler, snapshot, or telemetry: then floor, growth, headroom
    and shares are those of used memory, and nothing is known of peak and reserved.

    samples: TELEMETRY on the clock of the trace; steps: STEPS, for them. stages: by gpu the stage of a pipeline that it
    has; those of other stages are no peers, since the first ones keep more microbatches.
    """
    of_driver = used_memory(samples, steps, events)
    by_driver = dict(zip(of_driver["gpu"], of_driver.to_dict("records"), strict=True))
    of_events = {int(gpu): own for gpu, own in events.groupby("gpu", sort=True)}
    rows = []
    for gpu in sorted({*of_events, *by_driver}):
        total, driver = (total_bytes or {}).get(gpu), by_driver.get(gpu)
        rows.append(_of_gpu(gpu, of_events[gpu], kernels, total, driver) if gpu in of_events
                    else _of_samples(gpu, driver or {}, total))
    out = pd.DataFrame(rows, columns=[c for c in MEMORY_COLUMNS if c != "of_peers"])
    level = out["peak_bytes"] if out["peak_bytes"].notna().all() else out["used_bytes"]
    peers = level.groupby(out["gpu"].map(dict(stages or {})).fillna(schema.MISSING))
    out["of_peers"] = (level / peers.transform("median")).where(peers.transform("size") > 1)
    return out[list(MEMORY_COLUMNS)].astype({"step": "Int64"})


def _of_gpu(gpu: int, events: pd.DataFrame, kernels: pd.DataFrame, total: int | None,
            driver: Mapping[str, Any] | None) -> dict[str, object]:
    at = events.loc[events["allocated_bytes"].idxmax()]
    known = bool(events["total_known"].iloc[0])
    levels = step_memory(events)
    floors = levels["floor_bytes"]
    reserved = int(events["reserved_bytes"].max()) if known else None
    then = int(at["reserved_bytes"])
    headroom = np.nan if total is None or reserved is None else total - reserved
    place = _next_launch(kernels[kernels["gpu"] == gpu], int(at["t_ns"]))
    return {
        "gpu": gpu, "peak_bytes": int(at["allocated_bytes"]), "peak_ns": int(at["t_ns"]), "step": at["step"], **place,
        "floor_bytes": int(floors.min() if len(floors) else events["allocated_bytes"].min()),
        "growth_bytes": int(floors.iloc[-1] - floors.iloc[0]) if len(floors) > 1 else np.nan,
        **_growth(levels, headroom),
        "reserved_bytes": np.nan if reserved is None else reserved,
        "fragmentation": 1 - int(at["allocated_bytes"]) / then if known and then > 0 else np.nan,
        "used_bytes": driver["used_bytes"] if driver else np.nan,
        "outside_bytes": driver["outside_bytes"] if driver else np.nan,
        "total_bytes": np.nan if total is None else total, "headroom_bytes": headroom,
        "used_share": np.nan if total is None or reserved is None else reserved / total,
        "source": at["source"], "total_known": known}


def _of_samples(gpu: int, driver: Mapping[str, Any], total: int | None) -> dict[str, object]:
    """A GPU of which only the driver's count is known."""
    used, levels = driver["used_bytes"], driver["levels"]
    floors = levels["floor_bytes"]
    headroom = np.nan if total is None else total - used
    return {
        "gpu": gpu, "peak_bytes": np.nan, "peak_ns": driver["used_ns"], "step": driver["step"],
        **dict.fromkeys(PLACE), "floor_bytes": floors.min() if len(floors) else driver["lowest_bytes"],
        "growth_bytes": floors.iloc[-1] - floors.iloc[0] if len(floors) > 1 else np.nan, **_growth(levels, headroom),
        "reserved_bytes": np.nan, "fragmentation": np.nan, "used_bytes": used, "outside_bytes": np.nan,
        "total_bytes": np.nan if total is None else total, "headroom_bytes": headroom,
        "used_share": np.nan if total is None else used / total, "source": TELEMETRY, "total_known": False}


def activations(events: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu and step with a forward and memory events in it: gpu, step, begin_bytes (level as the forward
    begins to launch), forward_peak_bytes (highest until the backward begins), activation_bytes (the difference: what
    the forward keeps for the backward, and its buffers)."""
    names = ["gpu", "step", "begin_bytes", "forward_peak_bytes", "activation_bytes"]
    known = kernels[kernels["step"].notna() & kernels["launch_ns"].notna()]
    first = known.groupby(["gpu", "step", known["phase"].astype(str)])["launch_ns"].min().unstack("phase")
    if not len(events) or not {"forward", "backward"} <= {*first.columns}:
        return pd.DataFrame(columns=names)
    rows = []
    for gpu, own in events.groupby("gpu"):
        t, level = own["t_ns"].to_numpy(), own["allocated_bytes"].to_numpy()
        mine = first[first.index.get_level_values("gpu") == gpu].dropna(subset=["forward", "backward"])
        for (_, step), begin, end in zip(mine.index, mine["forward"], mine["backward"], strict=True):
            low, high = np.searchsorted(t, [int(begin), int(end)])
            if 0 < low < high:
                rows.append((int(gpu), int(step), level[low - 1], level[low:high].max(),
                             max(level[low:high].max() - level[low - 1], 0)))
    return pd.DataFrame(rows, columns=names)


# ---- growth ----------------------------------------------------------------------------------------------------------

class Growth(NamedTuple):
    """How the floor of a GPU's steps changes. per_step_bytes: robust slope, missing below two steps; steady: it rises
    all the time, by about as much; n_steps."""

    per_step_bytes: float
    steady: bool
    n_steps: int


def growth(levels: pd.DataFrame) -> Growth:
    """The growth of one gpu's floor (step, floor_bytes of `step_memory`), by the median of the slopes of all pairs of
    steps: one step that holds more for once changes nothing. Steady: at least STEADY_STEPS steps, each above the one
    before by at least STEADY of that: what is allocated once, as the states of an optimizer are, does not count. Where
    gradients are accumulated over some steps the floor rises and falls: then steps a cycle apart are compared, and the
    slope is the median of theirs."""
    own = levels.sort_values("step", kind="stable")
    own = own.iloc[::max(1, -(-len(own) // MAX_STEPS))]
    step, floor = own["step"].to_numpy(np.float64), own["floor_bytes"].to_numpy(np.float64)
    n = len(step)
    i, j = np.triu_indices(n, 1)
    if not len(i):
        return Growth(np.nan, False, n)
    slope = float(np.median((floor[j] - floor[i]) / (step[j] - step[i])))
    rises = np.diff(floor) / np.diff(step)
    if n >= STEADY_STEPS and slope >= STEADY_BYTES and (rises >= STEADY * slope).all():
        return Growth(slope, True, n)
    longest = min(n // 2, n - CYCLES) if (rises < 0).any() else 0
    for cycle in range(2, longest + 1):
        rates = (floor[cycle:] - floor[:-cycle]) / (step[cycle:] - step[:-cycle])
        rate = float(np.median(rates))
        alike = int((np.abs(rates - rate) <= ALIKE * rate).sum())
        if rate >= STEADY_BYTES and alike >= max(CYCLES, len(rates) - 1):
            return Growth(rate, True, n)
    return Growth(slope, False, n)


def _growth(levels: pd.DataFrame, headroom: float) -> dict[str, object]:
    found = growth(levels)
    return {"growth_per_step_bytes": found.per_step_bytes, "steady": found.steady, "n_steps": found.n_steps,
            "steps_left": max(headroom, 0) / found.per_step_bytes if found.steady else np.nan}


PLACE = ("phase", "layer", "operation", "at")


def _next_launch(kernels: pd.DataFrame, t_ns: int) -> dict[str, object]:
    after = kernels[kernels["launch_ns"].notna() & (kernels["launch_ns"] >= t_ns).fillna(False)]
    if not len(after):
        return dict.fromkeys(PLACE)
    row = after.loc[after["launch_ns"].idxmin()]
    return {**{n: None if pd.isna(row[n]) else row[n] for n in PLACE[:-1]}, "at": f"{row['gpu']}@{row['start_ns']}"}


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


# ---- as the driver counts --------------------------------------------------------------------------------------------

def used_samples(samples: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """The samples (TELEMETRY) that tell used memory, in order of gpu and time: gpu, t_ns, used_bytes, step."""
    known = samples[samples["memory_used_bytes"].notna()]
    rows = known[["gpu", "t_ns"]].assign(used_bytes=known["memory_used_bytes"])
    rows = rows.sort_values(["gpu", "t_ns"], kind="stable", ignore_index=True)
    return rows.assign(step=_steps(rows, steps))


USED_COLUMNS = ("gpu", "used_bytes", "used_ns", "step", "lowest_bytes", "outside_bytes", "levels")


def used_memory(samples: pd.DataFrame | None, steps: pd.DataFrame | None, events: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu with samples of its used memory: gpu, used_bytes (the largest, at used_ns in step), lowest_bytes,
    outside_bytes (median of used − reserved, missing where the allocator's level is unknown), levels (step, floor_bytes
    of each step in which it was sampled)."""
    if samples is None or steps is None or not len(samples):
        return pd.DataFrame(columns=list(USED_COLUMNS))
    rows = []
    for gpu, own in used_samples(samples, steps).groupby("gpu"):
        at = own.loc[own["used_bytes"].idxmax()]
        inside = own[own["step"].notna()]
        levels = inside.groupby("step")["used_bytes"].min().rename("floor_bytes").reset_index()
        mine = events[(events["gpu"] == gpu) & events["total_known"].astype(bool)]
        place = np.searchsorted(mine["t_ns"].to_numpy(), own["t_ns"].to_numpy(), side="right") - 1
        outside = own["used_bytes"].to_numpy()[place >= 0] - mine["reserved_bytes"].to_numpy()[place[place >= 0]]
        rows.append((int(gpu), at["used_bytes"], int(at["t_ns"]), at["step"], own["used_bytes"].min(),
                     float(np.median(outside)) if len(outside) else np.nan, levels))
    return pd.DataFrame(rows, columns=list(USED_COLUMNS))
