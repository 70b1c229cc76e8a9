"""The device rows of a trace, each with the host scope that asked for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import launches, standin
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Int, Mask, take
from tb_chopper.backend.findings import Finding


@dataclass(frozen=True)
class Rows:
    """Device rows in order of start. All arrays are indexed by row of `device`.

    `launch`: HOST row of the launch call, -1 unknown. `node`: innermost host scope around it, -1 none. `operator`:
    HOST row of the innermost operator, -1 none. `time_ns`: when the host asked for the row; only valid where
    `is_timed`. `by_external_id`: found by External id. `is_lost`: no launch record although launched in the capture.
    `by_issue`: asynchronous collective of a CPU profile, found by the order of issue.
    """

    device: pd.DataFrame
    launch: Index
    node: Index
    operator: Index
    time_ns: Int
    is_timed: Mask
    by_external_id: Mask
    is_lost: Mask
    by_issue: Mask


def of_trace(trace: schema.Trace, scopes: Scopes) -> tuple[Rows, list[Finding]]:
    """Device activities; CPU operators in their place where the profile has neither them nor launch calls."""
    if len(trace.device) or len(launches.calls(trace.host)):
        return _of_device(trace.device, trace.host, scopes), []
    device, host_rows = standin.leaves(trace.host, scopes)
    finding = Finding("cpu_operations", "info", "CPU operations stand in for the GPU work that this trace lacks",
                      len(device))
    return _of_host(device, host_rows, trace.host, scopes), [finding] if len(device) else []


def _of_device(device: pd.DataFrame, host: pd.DataFrame, scopes: Scopes) -> Rows:
    device = device.iloc[np.argsort(device["start_ns"].to_numpy(), kind="stable")].reset_index(drop=True)
    launch = launches.launch_rows(host, device["correlation"].to_numpy())
    launched = np.flatnonzero(launch >= 0)
    time = np.zeros(len(device), np.int64)
    time[launched] = host["start_ns"].to_numpy()[launch[launched]]
    node = np.full(len(device), -1, np.intp)
    node[launched] = scopes.tree.locate(host["thread"].to_numpy()[launch[launched]].astype(np.int64), time[launched])
    operator = _innermost_operator(scopes, node)
    other = launches.by_external_id(host, scopes, device["external_id"].to_numpy(), operator)
    by_external_id = (operator < 0) & (other >= 0)
    node = np.where(by_external_id, other, node)
    unknown = by_external_id & (launch < 0)
    time[unknown] = scopes.tree.start_ns[node[unknown]]
    is_timed = (launch >= 0) | by_external_id
    return Rows(device, launch, node, _innermost_operator(scopes, node), time, is_timed, by_external_id,
                launches.lost_launch(device, is_timed), np.zeros(len(device), bool))


def _of_host(device: pd.DataFrame, host_rows: Index, host: pd.DataFrame, scopes: Scopes) -> Rows:
    start = host["start_ns"].to_numpy()
    issued = standin.issued_by(host, host_rows)
    node, time = take(scopes.node_of_row, issued), np.where(issued >= 0, start[issued], start[host_rows])
    none = np.zeros(len(device), bool)
    return Rows(device, np.full(len(device), -1, np.intp), node, _innermost_operator(scopes, node), time,
                ~none, none, none, issued != host_rows)


def _innermost_operator(scopes: Scopes, node: Index) -> Index:
    """HOST row of the innermost operator around each node, -1 where none."""
    found = scopes.tree.nearest(node, scopes.is_operator)
    return take(scopes.host_row, found)


