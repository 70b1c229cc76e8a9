"""JSON of rocprofiler-sdk (`*_results.json`): the one text format that keeps a value per hardware instance."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import counter_rows
from tb_chopper.backend.readers.byte_stream import GZIP, open_binary
from tb_chopper.backend.schema import CounterFile

KEY = b'"rocprofiler-sdk-tool"'


# What is read of the file. Everything else (API calls, command line, configuration) is skipped while parsing and
# never held in memory.

class _Handle(msgspec.Struct, frozen=True):
    handle: int = schema.MISSING


class _Size(msgspec.Struct, frozen=True):
    x: int = 1
    y: int = 1
    z: int = 1

    @property
    def volume(self) -> int:
        return self.x * self.y * self.z


class _Dispatch(msgspec.Struct, frozen=True):
    agent_id: _Handle
    kernel_id: int
    dispatch_id: int
    queue_id: _Handle = _Handle()
    grid_size: _Size = _Size()
    workgroup_size: _Size = _Size()


class _DispatchData(msgspec.Struct, frozen=True):
    dispatch_info: _Dispatch
    start_timestamp: int = schema.MISSING
    end_timestamp: int = schema.MISSING


class _Record(msgspec.Struct, frozen=True):
    counter_id: _Handle
    value: float


class _Counted(msgspec.Struct, frozen=True):
    dispatch_data: _DispatchData
    records: list[_Record] = []
    stream_id: _Handle = _Handle()


class _Callbacks(msgspec.Struct, frozen=True):
    counter_collection: list[_Counted] = []


class _Symbol(msgspec.Struct, frozen=True):
    kernel_id: int
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


class _Counter(msgspec.Struct, frozen=True):
    id: _Handle
    name: str


class _Node(msgspec.Struct, frozen=True):
    hostname: str | None = None


class _Metadata(msgspec.Struct, frozen=True):
    pid: int = schema.MISSING
    node: _Node = _Node()


class _Tool(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    agents: list[dict[str, Any]] = []
    counters: list[_Counter] = []
    kernel_symbols: list[_Symbol] = []
    callback_records: _Callbacks = _Callbacks()


class _File(msgspec.Struct, frozen=True, rename={"tools": "rocprofiler-sdk-tool"}):
    tools: list[_Tool] | _Tool


def read(path: Path) -> CounterFile:
    """The counters and agents of one file, of all its processes. Raises UnreadableFile."""
    with open_binary(path) as stream:
        text = stream.read()
    try:
        if text[:2] == GZIP:
            text = gzip.decompress(text)
        tools = msgspec.json.decode(text, type=_File, strict=False).tools
    except (msgspec.MsgspecError, OSError, EOFError) as error:
        raise UnreadableFile(f"{path}: not a whole JSON file of rocprofv3 ({error}); collect with `-f csv`, whose rows "
                             "survive when a process dies") from error
    parts = [_process(tool, path) for tool in (tools if isinstance(tools, list) else [tools])]
    counters, agents = (pd.concat([p[i] for p in parts], ignore_index=True) if parts else schema.empty(table)
                        for i, table in enumerate((schema.COUNTERS, schema.AGENTS)))
    names = schema.counter_names(counters)
    counters = schema.with_counters(counters, {n: counters[n].to_numpy() for n in names})
    findings = [f.at(path.name) for p in parts for f in p[2]]
    return CounterFile(path, counters, schema.conform(agents, schema.AGENTS), "rocprofv3", findings)


def _process(tool: _Tool, path: Path) -> tuple[pd.DataFrame, pd.DataFrame, list[Any]]:
    at = counter_rows.place(path)
    host, pid = tool.metadata.node.hostname or at.host, tool.metadata.pid if tool.metadata.pid >= 0 else at.pid
    agents, index_of = _agents(tool.agents)
    agents = agents.assign(host=pd.Categorical([host] * len(agents)), process=pid)
    symbols = {s.kernel_id: s.formatted_kernel_name or s.demangled_kernel_name or s.kernel_name
               for s in tool.kernel_symbols}
    counted = sorted(tool.callback_records.counter_collection, key=lambda c: c.dispatch_data.dispatch_info.dispatch_id)
    infos = [c.dispatch_data.dispatch_info for c in counted]
    counter_name = {c.id.handle: c.name for c in tool.counters}
    n_records = [len(c.records) for c in counted]
    number = np.repeat(np.arange(len(counted)), n_records)
    handles = [r.counter_id.handle for c in counted for r in c.records]
    names = pd.Series([counter_name.get(h, str(h)) for h in handles], dtype="category")
    values = np.array([r.value for c in counted for r in c.records], "float64")
    start = np.array([c.dispatch_data.start_timestamp for c in counted], np.int64)
    counters, findings = counter_rows.combine(number, names, values, np.repeat(start, n_records))
    rows = counter_rows.placed(pd.DataFrame({
        "host": pd.Categorical([host] * len(counted)), "process": pid,
        "agent": pd.Categorical([f"Agent {index_of.get(i.agent_id.handle, '?')}" for i in infos]),
        "dispatch": [i.dispatch_id for i in infos], "queue": [i.queue_id.handle for i in infos],
        "stream": [c.stream_id.handle for c in counted],
        "name": pd.Categorical([symbols.get(i.kernel_id, f"kernel {i.kernel_id}") for i in infos]),
        "grid": [i.grid_size.volume for i in infos], "workgroup": [i.workgroup_size.volume for i in infos],
        "start_ns": start, "end_ns": [c.dispatch_data.end_timestamp for c in counted],
    }), path)
    return counter_rows.with_agents(schema.with_counters(rows, counters), agents), agents, findings


def _agents(agents: list[dict[str, Any]]) -> tuple[pd.DataFrame, dict[int, int]]:
    """AGENTS, and the logical node of each handle."""
    if not agents:
        return schema.empty(schema.AGENTS), {}
    fields = pd.DataFrame([{k: v for k, v in a.items() if not isinstance(v, (dict, list))} for a in agents])
    table = counter_rows.amd_agents(fields.rename(columns={"type": "agent_type"}))
    handles = [a.get("id", {}).get("handle", schema.MISSING) for a in agents]
    return table, dict(zip(handles, table["logical_node"], strict=True))
