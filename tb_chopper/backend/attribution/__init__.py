"""Attribution: kernel ▸ operation ▸ layer ▸ phase ▸ step.

A device row is followed to the runtime call that launched it, to the host scopes around that call, and from
backward nodes to the forward operators they belong to. The rules in plain words: docs/attribution.md.

    processes  several processes in one file
    launches   which call launched a row          autograd   which forward operator a backward node belongs to
    scopes     host events as a tree of meanings  layers     which layer a scope belongs to
    names      what a name means                  operations what the row's work is called
    places     phase, layer and operation of a scope, and why: reasons
    steps      training steps                     standin    CPU operators where there is no GPU
    pipeline_actions  what a pipeline schedule did
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import classify, schema
from tb_chopper.backend.attribution import (
    launches,
    operations,
    pipeline_actions,
    places,
    processes,
    reasons,
    rows,
    scopes,
    standin,
    steps,
)
from tb_chopper.backend.attribution.places import Places
from tb_chopper.backend.attribution.rows import Rows
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.steps import Windows
from tb_chopper.backend.attribution.tree import Index, Mask, take
from tb_chopper.backend.findings import Finding

METRIC_COLUMNS = ("overlap_ns", "prep_ns", "call_ns", "call_under_communication_ns", "graph_ns", "unattributed_ns")
CALLER_COLUMNS = ("gpu", "worker", "span", "capture")
KERNELS = tuple(c for c in schema.KERNELS if c.name not in (*METRIC_COLUMNS, *CALLER_COLUMNS))
"""Columns of `Attributed.kernels`: schema.KERNELS without those that metrics and the run fill in."""


@dataclass(frozen=True)
class Attributed:
    """`kernels`: KERNELS above, in order of start; `steps`: schema.STEPS, one row per (device, step); `actions`:
    schema.ACTIONS without gpu and capture."""

    kernels: pd.DataFrame
    steps: pd.DataFrame
    actions: pd.DataFrame
    findings: list[Finding]


def attribute(trace: schema.Trace, sidecar: Mapping[str, Any] | None = None,
              communication: Sequence[str] = ()) -> Attributed:
    """Attribute every device row of a trace; nothing is dropped, what is unknown is a named group.

    `sidecar`: as in torch_ext.sidecar. `communication`: regular expressions of communication kernels beyond the
    known ones.
    """
    modules = [m["fqn"] for m in (sidecar or {}).get("modules", [])]
    parts = processes.split(trace)
    if len(parts) == 1:
        return _attribute(trace, modules, communication)
    results = []
    for part, host_rows in parts:
        one = _attribute(part, modules, communication)
        results.append(replace(one, kernels=one.kernels.assign(op_id=take(host_rows, one.kernels["op_id"].to_numpy()))))
    kernels = schema.concat([r.kernels for r in results], KERNELS).sort_values("start_ns", kind="stable",
                                                                               ignore_index=True)
    table = schema.concat([r.steps for r in results], schema.STEPS)
    actions = schema.concat([r.actions for r in results], schema.ACTIONS)
    findings = [f for r in results for f in r.findings]
    findings.append(Finding("several_processes", "warning", f"{len(parts)} processes in one file: each is attributed "
                            "by itself, with the devices that its launch calls explain best", len(parts)))
    return Attributed(kernels, table, actions, findings)


def _attribute(trace: schema.Trace, modules: Sequence[str], communication: Sequence[str]) -> Attributed:
    host = trace.host
    found = scopes.build(host)
    device_rows, findings = rows.of_trace(trace, found)
    windows, step_findings = steps.find(host, found)
    if len(windows) == 0:
        windows = steps.by_repetition(device_rows.device)
    kernels = _kernels(host, found, device_rows, windows, communication, modules)
    start, calls = host["start_ns"].to_numpy(), launches.calls(host)
    lost = steps.lost_work(windows, start[calls], start[launches.lost_calls(calls, device_rows.launch)])
    table = steps.table(windows, kernels, lost)
    told = [*steps.told(windows), *steps.incomplete(table)] if len(kernels) else []
    return Attributed(kernels, table, pipeline_actions.find(host, kernels, windows), findings + step_findings + told)


def _kernels(host: pd.DataFrame, found: Scopes, row: Rows, windows: Windows,
             communication: Sequence[str], modules: Sequence[str]) -> pd.DataFrame:
    device = row.device
    cpu_op, launch_name = _take(host["name"], row.operator), _take(host["name"], row.launch)
    kinds = standin.kinds(device["name"]) if (device["activity"] == standin.ACTIVITY).any() else \
        classify.kernel_kinds(device["name"], device["activity"], device["collective"], communication)
    kind = pd.Series(pd.Categorical.from_codes(kinds, pd.Index(schema.KINDS)))
    is_compute = (kind == "compute").to_numpy()
    types = classify.op_types(device["name"], pd.Series(cpu_op))
    place = places.find(found, row.node, row.time_ns, types, modules)
    frame = pd.DataFrame({
        "name": device["name"], "kind": kind,
        "start_ns": device["start_ns"], "end_ns": device["end_ns"], "raw_end_ns": device["raw_end_ns"],
        "activity": device["activity"], "stream": device["stream"], "device": device["device"],
        "correlation": device["correlation"],
        "launch_ns": _take_times(host["start_ns"], row.launch),
        "launch_end_ns": _take_times(host["end_ns"], row.launch),
        "launch_name": launch_name,
        "step": _steps(row, windows),
        "phase": pd.Categorical.from_codes(place.phase, pd.Index(schema.PHASES)),
        "layer": place.layer,
        "operation": _operation(row, place, (kind == "communication").to_numpy(), cpu_op, launch_name),
        "op_type": pd.Categorical.from_codes(np.where(is_compute, types, -1), pd.Index(schema.OP_TYPES)),
        "cpu_op": cpu_op, "op_id": row.operator, "op_args": _take(host["args"], row.operator),
        "recompute": place.recompute,
        "attributed_by": _how(row, place, launch_name),
    })
    carried = [c.name for c in KERNELS if c.name not in frame]
    return schema.conform(pd.concat([frame, device[carried]], axis=1), KERNELS)


def _steps(row: Rows, windows: Windows) -> pd.Series:
    """Step by launch time; rows that lost their launch record go by the work around them on their device."""
    if windows.source == steps.REPETITION:
        position = windows.at(row.device["start_ns"].to_numpy())
        return pd.Series(windows.step[position], dtype="Int64").mask(position < 0)
    position = np.full(len(row.device), steps.OUTSIDE)
    position[row.is_timed] = windows.at(row.time_ns[row.is_timed])
    lost = np.flatnonzero(row.is_lost)
    if len(lost):
        position[lost] = steps.by_device_time(windows, position, row.device, lost)
    step = windows.step[position] if len(windows) else position
    return pd.Series(step, dtype="Int64").mask(position < 0)


def _operation(row: Rows, place: Places, is_communication: Mask, cpu_op: pd.Categorical,
               launch_name: pd.Categorical) -> pd.Categorical:
    operation = pd.Series(place.operation).astype(object)
    at = np.flatnonzero(is_communication)
    if len(at):
        named = operations.collectives(row.device.iloc[at], pd.Series(cpu_op).astype(object).iloc[at],
                                       pd.Series(place.fsdp_scope).astype(object).iloc[at])
        operation.iloc[at] = named
    graph = operation.isna() & _is_graph(launch_name)
    operation[graph] = pd.Series(launch_name).astype(object)[graph]
    before = ~row.is_timed & ~row.is_lost
    operation[before] = schema.BEFORE_CAPTURE
    return pd.Categorical(operation.fillna(schema.UNATTRIBUTED))


def _how(row: Rows, place: Places, launch_name: pd.Categorical) -> pd.Categorical:
    how = place.how.copy()
    how[(row.launch >= 0) & (row.node < 0)] = reasons.LAUNCH_ONLY
    how[_is_graph(launch_name)] = reasons.GRAPH
    how[row.by_external_id] = reasons.EXTERNAL_ID
    how[row.by_issue & (row.node >= 0)] = reasons.ISSUE_ORDER
    how[row.is_lost] = reasons.TIME
    how[~row.is_timed & ~row.is_lost] = reasons.BEFORE
    return pd.Categorical(how)


def _is_graph(launch_name: pd.Categorical) -> Mask:
    """Rows launched by a graph replay: many of them share one call."""
    return np.asarray([*("GraphLaunch" in str(n) for n in launch_name.categories), False], bool)[launch_name.codes]


def _take(column: pd.Series, at: Index) -> pd.Categorical:
    """Values of a categorical HOST column at rows, null for -1."""
    codes = column.cat.codes.to_numpy()
    return pd.Categorical.from_codes(take(codes, at), column.cat.categories).remove_unused_categories()


def _take_times(column: pd.Series, at: Index) -> pd.Series:
    """Times at rows, missing for -1."""
    return pd.Series(take(column.to_numpy(), at), dtype="Int64").mask(at < 0)
