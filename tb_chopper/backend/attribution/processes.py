"""Several processes in one file: each is attributed by itself, since their ids and steps are not the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import launches
from tb_chopper.backend.attribution.tree import Index, take


def split(trace: schema.Trace) -> list[tuple[schema.Trace, Index]]:
    """The processes of a trace that launch work, each with its devices, and the HOST rows of each; one entry for
    a file of one process or one device."""
    host, devices = trace.host, trace.device["device"]
    calls = launches.calls(host)
    pid = trace.threads["pid"].cat.codes.to_numpy()
    pid_of_row = take(pid, host["thread"].to_numpy().astype(np.intp))
    launching = np.unique(pid_of_row[calls])
    if len(launching) < 2 or devices.nunique() < 2:
        return [(trace, np.arange(len(host)))]
    owner = _owners(trace, pid_of_row, launching)
    parts = []
    for process in launching:
        # What launches nothing (loaders of data) goes with the first process.
        mine = pid_of_row == process
        if process == launching[0]:
            mine |= ~np.isin(pid_of_row, launching)
        own = devices.isin([d for d, p in owner.items() if p == process]).to_numpy()
        parts.append((replace(trace, host=host[mine].reset_index(drop=True),
                              device=trace.device[own].reset_index(drop=True)), np.flatnonzero(mine)))
    return parts


def _owners(trace: schema.Trace, pid_of_row: Index, launching: Index) -> dict[str, int]:
    """Process of each device: the one whose calls, by correlation id, precede most of its rows. Processes of one
    program use the same ids at about the same time; of equals, the one that has no device yet."""
    start = trace.host["start_ns"].to_numpy()
    scores = []
    for process in launching:
        rows = np.flatnonzero(pid_of_row == process)
        call = launches.launch_rows(trace.host.iloc[rows], trace.device["correlation"].to_numpy())
        launched_ns = take(start[rows], call)
        scores.append(pd.Series((call >= 0) & (launched_ns <= trace.device["start_ns"].to_numpy())))
    votes = pd.concat(scores, axis=1).groupby(trace.device["device"].to_numpy(), observed=True).sum()
    owner: dict[str, int] = {}
    taken: set[int] = set()
    for device in votes.max(axis=1).sort_values(ascending=False, kind="stable").index:
        ranked = sorted(range(len(launching)), key=lambda i: (-int(votes.loc[device, i]), launching[i] in taken, i))
        owner[str(device)] = int(launching[ranked[0]])
        taken.add(int(launching[ranked[0]]))
    return owner
