"""Counters and spans of one GPU over time, from its kernels and samples: what timelines show beside the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals, schema
from tb_chopper.backend.classify import COMMUNICATION, COMPUTE
from tb_chopper.backend.hardware import Hardware
from tb_chopper.backend.metrics.efficiency import blocks_per_unit

SAMPLED = {
    "clock_mhz": ("Engine clock", "MHz"),
    "memory_clock_mhz": ("Memory clock", "MHz"),
    "power_w": ("Power", "W"),
    "temperature_c": ("Temperature", "°C"),
}
MARGIN_NS = 10**9
"""Samples up to a second outside the capture are shown: they give the first kernels a level."""


class Counter(NamedTuple):
    """A quantity that keeps each value until the next time."""

    name: str
    unit: str
    t_ns: np.ndarray
    value: np.ndarray


class Spans(NamedTuple):
    """Stretches of one kind (`Step`, `Phase`, `Layer`) that do not overlap, in order of time. `step` and `phase` say
    where each belongs: -1 and "" for what lies outside."""

    kind: str
    start_ns: np.ndarray
    end_ns: np.ndarray
    label: list[str]
    step: np.ndarray
    phase: list[str]


def counters(kernels: pd.DataFrame, gpus: Mapping[int, Hardware | None],
             samples: pd.DataFrame) -> Iterator[Counter]:
    """The counters of one capture (KERNELS of one `capture`); samples: TELEMETRY on the trace's clock."""
    if len(samples):
        mine = samples[samples["gpu"] == kernels["gpu"].iloc[0]].sort_values("t_ns", kind="stable")
        low, high = kernels["start_ns"].min() - MARGIN_NS, kernels["end_ns"].max() + MARGIN_NS
        mine = mine[mine["t_ns"].between(low, high)]
        for column, (name, unit) in SAMPLED.items():
            if (known := mine[column].notna()).any():
                yield Counter(name, unit, mine.loc[known, "t_ns"].to_numpy("int64"),
                              mine.loc[known, column].to_numpy("float64"))
    yield from filter(lambda c: len(c.t_ns) > 0, (activity(kernels, gpus), exposed_communication(kernels)))
    yield from queue_lengths(kernels)


def activity(kernels: pd.DataFrame, gpus: Mapping[int, Hardware | None]) -> Counter:
    """Share of SMs or CUs that have a block, in %: min(1, Σ blocks / units) of the kernels that run. An estimate;
    kernels whose grid is unknown add nothing."""
    load = blocks_per_unit(kernels, gpus)
    known = (load.notna() & (kernels["activity"] == "kernel")).to_numpy()
    t, level = _level(kernels["start_ns"].to_numpy()[known], kernels["end_ns"].to_numpy()[known],
                      load.to_numpy()[known])
    return Counter("SM/CU activity (estimated)", "%", *_changes(t, np.round(100 * np.clip(level, 0, 1), 2)))


def exposed_communication(kernels: pd.DataFrame) -> Counter:
    """1 while communication runs and no computation does, else 0."""
    kind = schema.codes(kernels["kind"], schema.KINDS)
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    busy = {k: intervals.union(start[kind == k], end[kind == k]) for k in (COMMUNICATION, COMPUTE)}
    exposed = intervals.subtract(busy[COMMUNICATION], busy[COMPUTE])
    t, level = _level(exposed.starts, exposed.ends, np.ones(len(exposed)))
    return Counter("Exposed communication", "", *_changes(t, level))


def queue_lengths(kernels: pd.DataFrame) -> Iterator[Counter]:
    """Per stream: activities whose launch call has begun and that have not started. Those whose launch is unknown do
    not count; one that starts before its launch call (skewed clocks) is not queued."""
    known = kernels[kernels["launch_ns"].notna()]
    for stream, rows in known.groupby("stream", sort=True):
        launch, start = rows["launch_ns"].to_numpy("int64"), rows["start_ns"].to_numpy()
        queued = launch < start
        t, level = _level(launch[queued], start[queued], np.ones(int(queued.sum())))
        if len(t):
            yield Counter(f"Queue length, stream {stream}", "", *_changes(t, level))


def spans(kernels: pd.DataFrame, steps: pd.DataFrame) -> Iterator[Spans]:
    """Steps, phases and layers of one capture on the GPU: runs of compute kernels, in order of start, that belong
    together. A run ends with its last kernel, or where the next run begins."""
    found = steps[steps["gpu_start_ns"].notna()].sort_values("gpu_start_ns")
    if len(found):
        number = found["step"].to_numpy("int64")
        yield Spans("Step", found["gpu_start_ns"].to_numpy("int64"), found["gpu_end_ns"].to_numpy("int64"),
                    [f"step {n}" for n in number], number, [""] * len(found))
    compute = kernels[schema.codes(kernels["kind"], schema.KINDS) == COMPUTE]
    compute = compute.sort_values("start_ns", kind="stable")
    for kind, columns in (("Phase", ["step", "phase"]), ("Layer", ["step", "phase", "layer"])):
        made = _runs(kind, compute, columns)
        if made is not None:
            yield made


def _runs(kind: str, compute: pd.DataFrame, columns: list[str]) -> Spans | None:
    named = compute[columns[-1]].notna().to_numpy()
    if not named.any():
        return None
    codes = np.column_stack([pd.factorize(compute[c])[0] for c in columns])
    first = np.flatnonzero(np.concatenate(([True], (codes[1:] != codes[:-1]).any(axis=1))))
    start = compute["start_ns"].to_numpy()[first]
    end = np.maximum.reduceat(compute["end_ns"].to_numpy(), first)
    end[:-1] = np.minimum(end[:-1], start[1:])
    keep = named[first] & (end > start)
    rows = compute.iloc[first[keep]]
    return Spans(kind, start[keep], end[keep], rows[columns[-1]].astype(str).tolist(),
                 rows["step"].fillna(schema.MISSING).to_numpy("int64"), rows["phase"].astype(str).tolist())


def _level(start: np.ndarray, end: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the sum of the weights of what runs changes, and the sum from there on."""
    t = np.concatenate((start, end))
    order = np.argsort(t, kind="stable")
    return t[order], np.round(np.cumsum(np.concatenate((weight, -weight))[order]), 9)


def _changes(t: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One value per time (the last), and only where it changes."""
    if not len(t):
        return t, value
    last = np.concatenate((t[1:] != t[:-1], [True]))
    t, value = t[last], value[last]
    changed = np.concatenate(([True], value[1:] != value[:-1]))
    return t[changed], value[changed]
