"""All counter files below a folder, each by its content whatever its name, as one table."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import (
    counter_checks,
    counter_rows,
    ncu_csv,
    rocpd,
    rocprof_compute,
    rocprof_pftrace,
    rocprofv3_csv,
    rocprofv3_json,
)
from tb_chopper.backend.readers.byte_stream import GZIP, open_binary
from tb_chopper.backend.readers.sqlite_file import connect
from tb_chopper.backend.schema import CounterFile

ENDINGS = (".csv", ".csv.gz", ".json", ".json.gz", ".db", ".sqlite", ".pftrace")
_HEAD_BYTES = 1 << 16
_AGENT_FILE = "_agent_info"
_IDENTITY = ".identity.json"


@dataclass
class CounterRun:
    """`counters`: COUNTERS of every dispatch with counters; `dispatches`: the kernel traces of the same runs, without
    counters; AGENTS; what is wrong with them; `ranks`: by pass, host and process id, where the processes told it."""

    counters: pd.DataFrame
    dispatches: pd.DataFrame
    agents: pd.DataFrame
    findings: list[Finding] = field(default_factory=list)
    ranks: dict[tuple[int, str, int], int] = field(default_factory=dict)


def nothing() -> CounterRun:
    """A run without counters."""
    return CounterRun(schema.empty(schema.COUNTERS), schema.empty(schema.COUNTERS), schema.empty(schema.AGENTS))


def read(folder: Path) -> CounterRun:
    """Every counter file in the folder and below. Files of other kinds are passed over; a counter file that cannot
    be read is an error among the findings, never the end of the others."""
    files: list[CounterFile] = []
    findings = []
    found = (p for p in folder.rglob("*") if p.name.lower().endswith(ENDINGS) and p.is_file())
    for path in sorted(found, key=lambda p: (p.suffix.lower() == ".pftrace", p)):
        try:
            reader = reader_of(path)
            # The profiler writes the same dispatches in every format asked for; a .pftrace tells least of them.
            twice = reader is rocprof_pftrace.read and any(f.path.parent == path.parent for f in files)
            if reader and not twice:
                files.append(reader(path))
        except UnreadableFile as error:
            findings.append(Finding("unreadable_file", "error", str(error), file=path.name))
    left = [p for p in folder.rglob("*.dat") if p.parent.name == ".rocprofv3"]
    if left:
        findings.append(Finding("profiler_leftovers", "warning", "buffers of a profiled process that did not finish: "
                                "its counters are missing or incomplete", len(left)))
    files = _with_agents(files)
    counted = [f for f in files if schema.counter_names(f.counters)]
    traced = [f for f in files if not schema.counter_names(f.counters) and len(f.counters)]
    agents = schema.concat([f.agents for f in files if len(f.agents)], schema.AGENTS).drop_duplicates(ignore_index=True)
    counters, wrong = counter_checks.check(join(f.counters for f in counted), agents)
    findings += [f for file in files for f in file.findings]
    return CounterRun(counters, join(f.counters for f in traced), agents, findings + wrong, _ranks(folder))


def _ranks(folder: Path) -> dict[tuple[int, str, int], int]:
    """What torch_ext.counter_pass wrote, one file per process."""
    out = {}
    for path in folder.rglob(f"*{_IDENTITY}"):
        try:
            told = json.loads(path.read_bytes())
            out[counter_rows.place(path).number, str(told["host"]), int(told["pid"])] = int(told["rank"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return out


def reader_of(path: Path) -> Callable[[Path], CounterFile] | None:
    """The reader that fits the file's first bytes, None for a file of another kind."""
    head = _head(path)
    if head.startswith(b"SQLite format 3\0"):
        return rocpd.read if _has_table(path, "rocpd_") else None
    if rocprof_pftrace.is_trace(path, head):
        return rocprof_pftrace.read
    if head.lstrip()[:1] in (b"{", b"["):
        return rocprofv3_json.read if rocprofv3_json.KEY in head else None
    if ncu_csv.header_of(head) is not None:
        return ncu_csv.read
    header = rocprofv3_csv.fields(head.split(b"\n", 1)[0])
    if rocprofv3_csv.kind(header):
        return rocprofv3_csv.read
    return rocprof_compute.read if rocprof_compute.is_header(header) else None


def join(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """COUNTERS tables as one; a counter that a table lacks is missing there."""
    tables = list(tables)
    fixed = schema.concat(tables, schema.COUNTERS)
    counters = pd.concat([t[schema.counter_names(t)] for t in tables], ignore_index=True) if tables else fixed[[]]
    return pd.concat([fixed, counters], axis=1)


def _head(path: Path) -> bytes:
    with open_binary(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if head[:2] == GZIP:
        try:
            return zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return b""
    return head


def _has_table(path: Path, prefix: str) -> bool:
    try:
        with closing(connect(path)) as database:
            return any(str(name).startswith(prefix) for name, in database.execute("SELECT name FROM sqlite_master"))
    except sqlite3.Error:
        return True  # damaged: its reader says so


def _with_agents(files: list[CounterFile]) -> list[CounterFile]:
    """Each file's counters with the GPU and dies of its agents.

    The agents are its own, those of the agent_info file with the same beginning (`<pid>_`, `-o NAME`), or those of
    its folder; else the only ones there are.
    """
    named = {(f.path.parent, _stem(f.path)): f.agents for f in files if _AGENT_FILE in f.path.name and len(f.agents)}
    by_folder: dict[Path, pd.DataFrame] = {folder: agents for (folder, _), agents in named.items()}
    same = [a.drop(columns=["host", "process"]) for a in named.values()]
    only = same[0] if same and all(s.equals(same[0]) for s in same) else None
    for file in files:
        if len(file.counters) and not len(file.agents):
            agents = named.get((file.path.parent, _stem(file.path)), by_folder.get(file.path.parent, only))
            if agents is not None:
                file.counters = counter_rows.with_agents(file.counters, agents)
    return files


def _stem(path: Path) -> str:
    """`4711` of 4711_agent_info.csv and 4711_counter_collection.csv."""
    name = path.name.split(".")[0]
    for ending in (_AGENT_FILE, "_counter_collection", "_kernel_trace"):
        name = name.removesuffix(ending)
    return name
