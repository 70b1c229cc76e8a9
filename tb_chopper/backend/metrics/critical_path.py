"""The critical path of a step: what its end waited for, and what that waited for, back to its beginning, across
streams, ranks and hosts (docs/host.md).

From the kernel that ends last, backwards: the time in which it ran is its own; a collective that waited for a late rank
continues on that rank from its arrival; before it stands the kernel of its GPU that ended last by then; the time
between is `host` until the launch call and `launch` after it. Dependencies between streams are not recorded, so the
kernel that ended last is taken for the one that was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where

KINDS = ("compute", "communication", "memcpy", "launch", "host", "unknown")
COLUMNS = ("step", "gpu", "kind", "phase", "layer", "operation", "start_ns", "end_ns")


class _Gpu(NamedTuple):
    """One GPU's kernels in order of end, on the first host's clock; `late`: row and gpu of the last rank to arrive in a
    collective (−1: not one, or this one is it)."""

    start: np.ndarray
    end: np.ndarray
    launch: np.ndarray
    kind: np.ndarray
    row: np.ndarray
    late_gpu: np.ndarray
    late_at: np.ndarray


def critical_path(kernels: pd.DataFrame, steps: pd.DataFrame, arrived: pd.DataFrame,
                  offset_ns: Mapping[int, int] | None = None) -> pd.DataFrame:
    """The path of every step, one row per piece in order of time; COLUMNS. The pieces of a step tile it: from the first
    start of its kernels on any GPU to the last end. kind: one of KINDS (launch: from the launch call to the start of
    the kernel; host: nothing was launched; unknown: the launch is not in the capture). phase, layer and operation: of
    the kernel, or of the one that had to wait. Times on the first host's clock.

    arrived: of `collectives.arrivals`; offset_ns: how far each gpu's clock runs ahead.
    """
    offsets = dict(offset_ns or {})
    kernels = kernels.reset_index(drop=True)
    gpus = {int(g): _gpu(rows, arrived, offsets.get(int(g), 0)) for g, rows in kernels.groupby("gpu")}
    parts = [piece for step in sorted(map(int, steps["step"].unique()))
             for piece in _of_step(step, kernels, gpus, offsets)]
    out = pd.DataFrame(parts, columns=["step", "gpu", "kind", "row", "start_ns", "end_ns"])
    for column in ("phase", "layer", "operation"):
        out[column] = kernels[column].astype(object).to_numpy()[out["row"].to_numpy(np.intp)]
    return out[list(COLUMNS)]


def path_shares(path: pd.DataFrame, by: By = "kind", where: Where = None) -> pd.DataFrame:
    """One row per group of pieces: time_us, share (0–1, of all pieces chosen), n (pieces)."""
    by = grouping.columns(by)
    chosen = grouping.select(path, where)
    codes, groups = grouping.number(chosen, by)
    time = grouping.sums(codes, len(groups), (chosen["end_ns"] - chosen["start_ns"]).to_numpy(np.int64))
    out = groups.assign(time_us=time / 1000, share=time / max(int(time.sum()), 1),
                        n=np.bincount(codes, minlength=len(groups)))
    return out.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)


def _gpu(rows: pd.DataFrame, arrived: pd.DataFrame, offset: int) -> _Gpu:
    start, end = rows["start_ns"].to_numpy() - offset, rows["end_ns"].to_numpy() - offset
    order = np.lexsort((start, end))
    launch = rows["launch_ns"].astype("Int64").fillna(-1).to_numpy(np.int64)
    last = arrived.loc[arrived["is_last"], ["instance", "gpu", "start_ns"]]
    mine = arrived.loc[(arrived["gpu"] == rows["gpu"].iloc[0]) & ~arrived["is_last"], ["instance", "start_ns"]]
    waits = mine.merge(last, on="instance", suffixes=("", "_last")).drop_duplicates("start_ns")
    # By position: a column with gaps would become float64, which cannot hold nanoseconds since the epoch.
    place = pd.Index(waits["start_ns"]).get_indexer(start)
    found = (place >= 0) & (rows["kind"] == "communication").to_numpy()
    late_gpu, late_at = (np.where(found, np.append(waits[c].to_numpy(np.int64), 0)[place], otherwise)
                         for c, otherwise in (("gpu", -1), ("start_ns_last", 0)))
    return _Gpu(*(a[order] for a in (start, end, np.where(launch < 0, launch, launch - offset),
                                     rows["kind"].astype(object).to_numpy(), rows.index.to_numpy(), late_gpu, late_at)))


def _of_step(step: int, kernels: pd.DataFrame, gpus: Mapping[int, _Gpu],
             offsets: Mapping[int, int]) -> list[tuple[int, int, str, int, int, int]]:
    own = kernels[(kernels["step"] == step).fillna(False).to_numpy(bool)]
    if not len(own):
        return []
    shift = own["gpu"].map(dict(offsets)).fillna(0).to_numpy(np.int64)
    begin = int((own["start_ns"] - shift).min())
    ends = own["end_ns"] - shift
    row, t = int(ends.idxmax()), int(ends.max())
    gpu = int(kernels["gpu"].iloc[row])
    at = int(np.flatnonzero(gpus[gpu].row == row)[0])
    limit = {g: len(k.row) for g, k in gpus.items()}
    pieces: list[tuple[int, int, str, int, int, int]] = []

    def add(kind: str, which: int, low: int, high: int) -> None:
        if high > max(low, begin):
            pieces.append((step, gpu, kind, which, max(low, begin), high))

    while t > begin:
        k = gpus[gpu]
        limit[gpu] = at
        row, start = int(k.row[at]), int(k.start[at])
        late = int(k.late_gpu[at])
        if late >= 0 and start < k.late_at[at] < t:
            # It waited for another rank: go on there, from the moment that one arrived.
            arrival = int(k.late_at[at])
            add("communication", row, arrival, t)
            gpu, t, k = late, arrival, gpus[late]
            found = np.flatnonzero((k.start == arrival) & (k.kind == "communication"))
            at = int(found[0])
            row, start = int(k.row[at]), arrival
        else:
            add(str(k.kind[at]), row, start, t)
            t = min(t, start)
        before = min(int(np.searchsorted(k.end, t, side="right")), limit[gpu]) - 1
        free = int(k.end[before]) if before >= 0 else begin
        launch = int(k.launch[at])
        if launch < 0:
            add("unknown", row, free, t)
        else:
            add("launch", row, max(free, min(launch, t)), t)
            add("host", row, free, max(free, min(launch, t)))
        if before < 0:
            break
        t, at = min(t, free), before
    return pieces[::-1]
