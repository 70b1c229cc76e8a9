"""What is wrong with the records themselves: impossible times are repaired, gaps of the capture are counted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend.classify import COMMUNICATION, kernel_kinds
from tb_chopper.backend.findings import Finding, Severity

MIN_OVERRUN_NS = 100_000
MIN_OVERRUN_RATIO = 10.0
"""A kernel is taken to be corrupt when it runs at least 100 µs into its successor on the same stream, and ten
times longer than the successor's start allows. Programmatic dependent launch overlaps by a few µs, legally."""

DAY_NS = 86_400 * 10**9

_LAUNCH = re.compile(r"Launch")
_GRAPH_LAUNCH = re.compile(r"GraphLaunch")
_NO_LAUNCH = re.compile(r"HostFunc|Callback")


def without_strays(device: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    """The activities of the capture, without those a day or more away from the middle one: no capture lasts that
    long, and one time that was written wrongly would be all of it."""
    if device.empty:
        return device, []
    start = device["start_ns"].to_numpy()
    near = np.abs(start - np.int64(np.median(start))) < DAY_NS
    n = int((~near).sum())
    if not n:
        return device, []
    return device[near].reset_index(drop=True), [Finding("implausible_time", "warning", (
        f"{n} device activities lie more than a day from the others: their times are wrong and they are left out"), n)]


def repair(device: pd.DataFrame) -> list[Finding]:
    """Clip kernels whose duration is corrupt to the start of their successor (in place); `raw_end_ns` stays."""
    if device.empty:
        return []
    corrupt, limit = _overruns(device)
    if not corrupt.any():
        return []
    first = int(np.flatnonzero(corrupt)[0])
    row = device.iloc[first]
    end = device["end_ns"].to_numpy(copy=True)
    end[corrupt] = limit[corrupt]
    device["end_ns"] = end
    n = int(corrupt.sum())
    return [Finding("kernel_overruns_successor", "warning", (
        f"{n} kernel(s) have an impossible duration, first {_short(row['name'])} on stream {row['stream']} of device "
        f"{row['device']}: {(row['raw_end_ns'] - row['start_ns']) / 1000:.3f} µs, but the next kernel of the stream "
        f"starts after {(limit[first] - row['start_ns']) / 1000:.3f} µs; clipped to that"), n)]


def _overruns(device: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Which rows run impossibly far into their successor, and the successor's start for every row.

    Left alone: kernels of a graph launch (CUPTI may give parallel branches one stream) and, within the time of the
    other activities, communication (several HIP streams may share one queue, and it waits for other ranks).
    """
    start, end = device["start_ns"].to_numpy(), device["end_ns"].to_numpy()
    lane = device.groupby(["device", "stream"], observed=True, sort=False).ngroup().to_numpy()
    order = np.lexsort((start, lane))
    following = np.full(len(device), np.iinfo(np.int64).max)
    same = lane[order][1:] == lane[order][:-1]
    following[order[:-1][same]] = start[order[1:][same]]
    known = following != np.iinfo(np.int64).max
    room = np.where(known, following - start, 1)
    overrun = np.where(known, end - following, 0)
    corrupt = (overrun >= MIN_OVERRUN_NS) & (overrun >= MIN_OVERRUN_RATIO * room)
    if corrupt.any():
        correlation = device["correlation"]
        in_graph = (device["graph_node"] != -1) | (correlation.duplicated(keep=False) & (correlation != -1))
        kinds = kernel_kinds(device["name"], device["activity"], device["collective"])
        last_other_end = end[~corrupt].max() if (~corrupt).any() else 0
        corrupt &= ~in_graph.to_numpy()
        corrupt &= (kinds != COMMUNICATION) | (end > last_other_end)
    return corrupt, following


def check(host: pd.DataFrame, device: pd.DataFrame, meta: dict[str, Any]) -> list[Finding]:
    """Gaps of the capture that one file shows."""
    runtime = host.loc[(host["kind"] == "runtime") & (host["correlation"] != -1), ["name", "start_ns", "correlation"]]
    launches = runtime[_matches(runtime["name"], _LAUNCH) & ~_matches(runtime["name"], _NO_LAUNCH)]
    orphans = int((~launches["correlation"].isin(device["correlation"])).sum())
    severity: Severity = "warning" if orphans else "info"
    if device.empty:
        lost = f" ({orphans} kernel launches without a kernel)" if orphans else ""
        return [Finding("no_gpu_events", severity, f"no GPU events in this trace{lost}", max(1, orphans))]
    findings = []
    if host.empty:
        findings.append(Finding("no_cpu_events", "info", (
            "no CPU events in this trace: launches and operators are unknown")))
    else:
        findings += _launch_findings(runtime, device)
    if orphans:
        findings.append(Finding("launch_without_kernel", "warning", (
            f"{orphans} kernel launches have no kernel in the file: the profiler lost records, or they still ran when "
            "it stopped"), orphans))
    kinds = kernel_kinds(device["name"], device["activity"], device["collective"])
    world_size = (meta.get("distributedInfo") or {}).get("world_size", 1)
    if isinstance(world_size, int) and world_size > 1 and not (kinds == COMMUNICATION).any():
        lost = f" although {orphans} launches have no kernel" if orphans else ""
        findings.append(Finding("no_communication", severity, (
            f"no communication kernels on a job of {world_size} ranks{lost}"), max(1, orphans)))
    return findings


def _launch_findings(runtime: pd.DataFrame, device: pd.DataFrame) -> list[Finding]:
    calls = runtime.drop_duplicates("correlation").set_index("correlation")
    kernels = device.loc[device["correlation"] != -1, ["start_ns", "correlation", "activity"]]
    launch_ns = kernels["correlation"].map(calls["start_ns"])
    findings = []
    before = int(launch_ns.isna().sum()) + int((device["correlation"] == -1).sum())
    if before:
        findings.append(Finding("launched_before_capture", "info", (
            f"{before} of {len(device)} device activities were launched before the capture began (no launch in the "
            "file)"), before))
    early = int((kernels["start_ns"] < launch_ns).sum())
    if early:
        findings.append(Finding("kernel_before_launch", "warning", (
            f"{early} device activities start before their launch call: host and GPU clocks are skewed; their launch "
            "delay counts as 0"), early))
    shared = kernels[kernels["correlation"].duplicated() & (kernels["activity"] == "kernel") & launch_ns.notna()]
    names = shared["correlation"].map(calls["name"].astype(object))
    n = int((~names.astype(str).str.contains(_GRAPH_LAUNCH)).sum())
    if n:
        findings.append(Finding("duplicate_correlation", "warning", (
            f"{n} kernels share the launch of an earlier one that is no graph launch: their operators may be "
            "wrong"), n))
    return findings


def _matches(names: pd.Series, pattern: re.Pattern[str]) -> pd.Series:
    """Rows whose (categorical) name matches; tried once per distinct name."""
    hit = np.array([*(bool(pattern.search(str(n))) for n in names.cat.categories), False])
    return pd.Series(hit[names.cat.codes.to_numpy()], index=names.index, dtype=bool)


def _short(name: Any, length: int = 60) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
