"""SQLite exports of Nsight Systems (`nsys export -t sqlite`) as a runtime trace, the tables of schema.Trace.

Which tables and columns exist depends on version and run: they are found by name. NVTX ranges of
torch.autograd.profiler.emit_nvtx (`aten::mm, seq = 7, op_id = 9`) become operators, the others annotations. The
table of environment variables is never read.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import kernel_names, schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers.sqlite_file import connect, table
from tb_chopper.backend.schema import Trace

_KERNELS, _RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
_PUSH_POP, _START_END = 59, 60
_COPIES = {1: "HtoD (Host -> Device)", 2: "DtoH (Device -> Host)", 8: "DtoD (Device -> Device)",
           10: "PtoP (Device -> Device)"}
_OPERATOR = re.compile(r"^(.+?), (?:seq = (-?\d+), )?op_id = \d+")
_VERSION = re.compile(r"_v\d+$")
_PROCESS = 24  # bits of a global id below the process
_CORRELATIONS = 1 << 40
"""Correlation ids count per process: each process gets a range of its own."""


def read(path: Path) -> Trace:
    """The kernels, copies, runtime calls and NVTX ranges of all processes. Raises UnreadableFile."""
    try:
        with closing(connect(path)) as database:
            return _read(database, path)
    except sqlite3.Error as error:
        raise UnreadableFile(f"{path}: the export of Nsight Systems cannot be read ({error}); export it again: "
                             "nsys export -t sqlite REPORT") from error


def _read(database: sqlite3.Connection, path: Path) -> Trace:
    strings = table(database, "StringIds", ["id", "value"]).drop_duplicates("id").set_index("id")["value"]
    session = table(database, "TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])
    zero = int(session["utcEpochNs"].iloc[0]) if session["utcEpochNs"].notna().any() else 0
    gpus = table(database, "TARGET_INFO_GPU", ["id", "name", "smCount", "totalMemory"])
    sms = dict(zip(gpus["id"], pd.to_numeric(gpus["smCount"], errors="coerce"), strict=True))
    kernels = _kernels(database, strings, sms)
    device = pd.concat([kernels, _copies(database), _fills(database)], ignore_index=True).fillna(
        {"bytes": schema.MISSING, "graph_node": schema.MISSING})
    if not len(device):
        raise UnreadableFile(f"{path}: no GPU work in this export of Nsight Systems; trace with --trace=cuda,nvtx")
    host = pd.concat([_calls(database, strings), _ranges(database, strings)], ignore_index=True)
    # Every process by one number, the lowest first, so that correlation ids of different processes stay apart.
    processes = np.unique(np.concatenate((device["global"].to_numpy(np.int64) >> _PROCESS,
                                          host["global"].to_numpy(np.int64) >> _PROCESS)))
    threads = pd.Index(host["global"].unique())
    findings = []
    if not zero:
        findings.append(Finding("no_epoch", "info", "the export does not tell when the session began: times start at 0",
                                file=path.name))
    for frame in (device, host):
        process = np.searchsorted(processes, frame["global"].to_numpy(np.int64) >> _PROCESS)
        known = frame["correlation"] >= 0
        frame["correlation"] = frame["correlation"].where(~known, frame["correlation"] + process * _CORRELATIONS)
        frame[["start_ns", "end_ns"]] += zero
    device = device.assign(raw_end_ns=device["end_ns"]).sort_values("start_ns", kind="stable", ignore_index=True)
    host = host.assign(thread=threads.get_indexer(host["global"])).sort_values(
        ["start_ns", "end_ns"], ascending=[True, False], kind="stable", ignore_index=True)
    pid, tid = (threads.to_numpy(np.int64) >> _PROCESS) & 0xFFFFFF, threads.to_numpy(np.int64) & 0xFFFFFF
    meta: dict[str, Any] = {"deviceProperties": [
        {"id": int(i), "name": str(name), "numSms": int(sms[i])}
        for i, name in zip(gpus["id"], gpus["name"], strict=True) if not pd.isna(sms[i])]}
    return Trace(path, schema.conform(host, schema.HOST),
                 schema.conform(pd.DataFrame({"pid": pid.astype(str), "tid": tid.astype(str)}), schema.THREADS),
                 schema.conform(device, schema.DEVICE), schema.empty(schema.MEMORY), meta, findings)


def _kernels(database: sqlite3.Connection, strings: pd.Series, sms: dict[Any, float]) -> pd.DataFrame:
    found = table(database, _KERNELS, [
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "mangledName", "demangledName",
        "shortName", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "graphNodeId"])
    grid = found[["gridX", "gridY", "gridZ"]].fillna(1).astype("int64")
    block = found[["blockX", "blockY", "blockZ"]].fillna(1).astype("int64")
    units = found["deviceId"].map(sms).astype("float64")
    return _activity(found, "kernel").assign(
        name=_names(found, strings).to_numpy(), grid=_shape(grid), block=_shape(block),
        blocks_per_sm=grid.prod(axis=1) / units, graph_node=_ints(found["graphNodeId"]))


def _copies(database: sqlite3.Connection) -> pd.DataFrame:
    found = table(database, "CUPTI_ACTIVITY_KIND_MEMCPY", [
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind"])
    kind = found["copyKind"].map(_COPIES).fillna("(kind " + found["copyKind"].astype(str) + ")")
    return _activity(found, "memcpy").assign(name="Memcpy " + kind, bytes=_ints(found["bytes"]))


def _fills(database: sqlite3.Connection) -> pd.DataFrame:
    found = table(database, "CUPTI_ACTIVITY_KIND_MEMSET", [
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes"])
    return _activity(found, "memset").assign(name="Memset (Device)", bytes=_ints(found["bytes"]))


def _activity(found: pd.DataFrame, activity: str) -> pd.DataFrame:
    return pd.DataFrame({
        "start_ns": _ints(found["start"]), "end_ns": _ints(found["end"]), "activity": activity,
        "device": found["deviceId"].astype(str), "stream": _ints(found["streamId"]), "external_id": schema.MISSING,
        "correlation": _ints(found["correlationId"]), "global": _ints(found["globalPid"])}, index=found.index)


def _names(found: pd.DataFrame, strings: pd.Series) -> pd.Series:
    """Kernel names as other profilers spell them: demangled here where the mangled one was kept."""
    mangled = found["mangledName"].map(strings)
    ours = {name: kernel_names.demangle(name) for name in mangled.dropna().unique() if name.startswith("_Z")}
    theirs = found["demangledName"].map(strings)
    return mangled.map(ours).fillna(theirs).fillna(mangled).fillna(found["shortName"].map(strings)).fillna(
        "<unknown kernel>")


def _calls(database: sqlite3.Connection, strings: pd.Series) -> pd.DataFrame:
    found = table(database, _RUNTIME, ["start", "end", "globalTid", "correlationId", "nameId"])
    names = {i: _VERSION.sub("", str(strings.get(i, "<unknown call>"))) for i in found["nameId"].unique()}
    return pd.DataFrame({
        "start_ns": _ints(found["start"]), "end_ns": _ints(found["end"]), "name": found["nameId"].map(names),
        "kind": "runtime", "correlation": _ints(found["correlationId"]), "global": _ints(found["globalTid"]),
        "finished": True, "seq": schema.MISSING, "external_id": schema.MISSING, "fwd_thread": schema.MISSING})


def _ranges(database: sqlite3.Connection, strings: pd.Series) -> pd.DataFrame:
    found = table(database, "NVTX_EVENTS", ["start", "end", "eventType", "text", "textId", "globalTid"])
    found = found[found["eventType"].isin([_PUSH_POP, _START_END]) & found["start"].notna()]
    text = found["text"].fillna(found["textId"].map(strings)).fillna("<unnamed range>")
    parsed = {t: _OPERATOR.match(t) for t in text.unique()}
    operators = {t: (m.group(1), int(m.group(2) or schema.MISSING)) for t, m in parsed.items() if m}
    open_until = found["end"].fillna(found[["start", "end"]].max().max())
    return pd.DataFrame({
        "start_ns": _ints(found["start"]), "end_ns": _ints(open_until),
        "name": text.map(lambda t: operators[t][0] if t in operators else t),
        # Ranges that start and end anywhere do not nest.
        "kind": np.where(found["eventType"] == _START_END, schema.ASYNC,
                         np.where(text.isin(operators.keys()), "cpu_op", "annotation")),
        "seq": text.map(lambda t: operators[t][1] if t in operators else schema.MISSING),
        "correlation": schema.MISSING, "external_id": schema.MISSING, "fwd_thread": schema.MISSING,
        "finished": found["end"].notna(), "global": _ints(found["globalTid"])})


def _shape(sizes: pd.DataFrame) -> pd.Categorical:
    """`[4, 2, 1]` of each row."""
    return pd.Categorical([f"[{x}, {y}, {z}]" for x, y, z in sizes.itertuples(index=False)])


def _ints(values: pd.Series) -> pd.Series:
    return pd.to_numeric(values, errors="coerce").fillna(schema.MISSING).astype("int64")
