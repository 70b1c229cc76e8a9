"""Who is who in a run: one row per (file, device), a GPU number that holds over all files, ranks missing or doubled."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.capture import Capture
from tb_chopper.backend.findings import Finding


def table(captures: Iterable[Capture]) -> pd.DataFrame:
    """WORKERS of a run."""
    rows = [row for c in captures for row in _rows(c)]
    workers = schema.conform(pd.DataFrame(rows, index=range(len(rows))), schema.WORKERS)
    return workers.assign(capture=range(len(workers)), gpu=_gpus(workers))


def _rows(capture: Capture) -> list[dict[str, Any]]:
    """WORKERS rows of one file, without gpu: one per device, or one without a device where it has no activity."""
    common = {
        "file": capture.file.path.name, "worker": capture.file.worker, "span": capture.file.span, "rank": capture.rank,
        "world_size": capture.world_size, "host": capture.host, "complete": capture.complete}
    rows = []
    for device in capture.devices or [""]:
        kernels = capture.kernels[capture.kernels["device"] == device]
        rows.append({
            **common, "device": device, "gpu_name": capture.gpu_name(device),
            "n_kernels": int(kernels["activity"].isin(["kernel", "cpu_op"]).sum()),
            "n_steps": int((capture.steps["device"] == device).sum()) if device else 0,
            "start_ns": kernels["start_ns"].min() if len(kernels) else schema.MISSING,
            "end_ns": kernels["end_ns"].max() if len(kernels) else schema.MISSING})
    return rows


def _gpus(workers: pd.DataFrame) -> list[int]:
    """One number per (worker, device): the rank where it is known and unique, else the next free one.

    Free numbers start above every rank of the job, so that nobody takes a stand-in for a missing rank.
    """
    identity = list(zip(workers["worker"], workers["device"], strict=True))
    rank = dict(zip(identity, workers["rank"], strict=True))
    free = max([0, *(int(r) + 1 for r in workers["rank"].dropna()), *(int(n) for n in workers["world_size"].dropna())])
    number: dict[tuple[str, str], int] = {}
    taken: set[int] = set()
    for key in dict.fromkeys(identity):
        own = rank[key]
        if pd.isna(own) or int(own) in taken:
            number[key], free = free, free + 1
        else:
            number[key] = int(own)
            taken.add(int(own))
    return [number[key] for key in identity]


def findings(workers: pd.DataFrame) -> list[Finding]:
    """Ranks that are missing from the run or stand in it more than once; captures that cover each other."""
    return [*_doubled(workers), *_missing(workers), *_covering(workers)]


def _doubled(workers: pd.DataFrame) -> list[Finding]:
    processes = workers.drop_duplicates(["worker"]).dropna(subset="rank").groupby("rank")["worker"].agg(list)
    if not len(processes):
        return []
    return [Finding("duplicate_rank", "warning", f"rank {rank} appears more than once: {', '.join(names)}; they are "
                    "shown apart and no statistic over ranks mixes them", len(names))
            for rank, names in processes[processes.map(len) > 1].items()]


def _missing(workers: pd.DataFrame) -> list[Finding]:
    known = np.unique(workers["rank"].dropna().to_numpy(np.int64))
    world = workers["world_size"].max()
    if not len(known) or pd.isna(world):
        return []
    # As stretches between the known ones, not one by one: a damaged file may name any world size.
    edges = [-1, *(int(r) for r in known if r < world), int(world)]
    gaps = [(a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1]
    if not gaps:
        return []
    named = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in gaps)
    return [Finding("missing_rank", "warning", f"rank {named} of world size {int(world)} is missing from this run; "
                    "statistics over ranks use those that are here", sum(b - a + 1 for a, b in gaps))]


def _covering(workers: pd.DataFrame) -> list[Finding]:
    """Captures of one worker's device that cover the same time: one file twice, most likely."""
    found = []
    for _, own in workers[workers["start_ns"] >= 0].groupby(["worker", "device"], observed=True):
        own = own.sort_values("start_ns", kind="stable")
        before = own["end_ns"].cummax().shift(fill_value=-1)
        for file in own["file"][(own["start_ns"] < before).to_numpy()]:
            found.append(Finding("capture_twice", "warning", f"{file} covers the same time as another capture of its "
                                 "worker: their times add up; remove one if it is a copy"))
    return found
