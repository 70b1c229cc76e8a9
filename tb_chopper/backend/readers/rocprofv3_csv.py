"""CSV files of rocprofv3: counter_collection, kernel_trace and agent_info of ROCm 6.2 to 7.x, by their columns.

Columns were added over the years, their case changed, other programs write every field in quotes: columns are found
by name whatever the case, and those a version lacks stay null.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import counter_rows
from tb_chopper.backend.readers.byte_stream import GZIP, open_binary
from tb_chopper.backend.schema import CounterFile

_COUNTERS = {"kernel_name", "counter_name", "counter_value"}
_TRACE = {"kernel_name", "kind", "start_timestamp", "end_timestamp"}
_AGENTS = {"node_id", "agent_type"}
_TEXT = {"kernel_name", "counter_name", "agent_id", "kind", "agent_type", "name", "product_name"}


def kind(header: Iterable[str]) -> str | None:
    """counters, trace, agents or v1 (a tool of the past), by the names of the columns; None for any other CSV."""
    names = {h.strip().lower() for h in header}
    for wanted, what in ((_COUNTERS, "counters"), (_TRACE, "trace"), (_AGENTS, "agents")):
        if wanted <= names:
            return what
    return "v1" if "kernelname" in names and names & {"gpu-id", "durationns", "queue-id"} else None


def read(path: Path) -> CounterFile:
    """One CSV as COUNTERS (a kernel trace: without counters) or AGENTS.

    Raises UnreadableFile for anything else: another CSV, a file of rocprof v1, an empty file.
    """
    table, findings, complete = read_csv(path)
    what = kind(table.columns)
    if what == "v1":
        raise UnreadableFile(f"{path}: written by rocprof (v1), whose rows cannot be matched to kernels safely; "
                             "collect again with rocprofv3, for example through `tb-chopper collect`")
    if what is None:
        raise UnreadableFile(f"{path}: not a counter_collection, kernel_trace or agent_info file of rocprofv3 "
                             f"(columns {', '.join(map(str, table.columns[:6]))}, ...)")
    counters, agents = schema.empty(schema.COUNTERS), schema.empty(schema.AGENTS)
    if what == "agents":
        at = counter_rows.place(path)
        agents = counter_rows.amd_agents(table).assign(host=pd.Categorical([at.host] * len(table)), process=at.pid)
    elif what == "trace":
        counters = schema.with_counters(_rows(table, path), {})
    else:
        counters, more = _counted(table, path)
        findings += more
    return CounterFile(path, counters, agents, "rocprofv3", [f.at(path.name) for f in findings], complete)


def _counted(table: pd.DataFrame, path: Path) -> tuple[pd.DataFrame, list[Finding]]:
    """One row per dispatch of a long table of (dispatch, counter, value)."""
    findings = []
    value = pd.to_numeric(table["counter_value"], errors="coerce")
    bad = value.isna() | table["counter_name"].isna() | table["kernel_name"].isna()
    if bad.any():
        findings.append(Finding("counter_value_unreadable", "warning", "rows without a kernel, a counter or a number "
                                "as its value are left out", int(bad.sum())))
        table, value = table[~bad], value[~bad]
    keys = pd.DataFrame({c: _ints(table, c) for c in ("process_id", "dispatch_id")})
    number = keys.groupby(["process_id", "dispatch_id"], sort=True).ngroup().to_numpy(np.int64)
    first = np.unique(number, return_index=True)[1]
    name = table["counter_name"].astype("category")
    counters, more = counter_rows.combine(number, name, value.to_numpy("float64"), _ints(table, "start_timestamp"))
    rows = _rows(table.iloc[first], path)
    dies = counter_rows.instances(number, name)
    if dies > 1:
        # One row per die: the rows themselves tell over how many the sum goes.
        rows["xcc"] = pd.array([dies] * len(rows), dtype="Int64")
    return schema.with_counters(rows, counters), [*findings, *more]


def _rows(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """What a COUNTERS row tells of its dispatch, one per row of the file."""
    agent = table.get("agent_id", pd.Series("", table.index)).astype(str)
    process = _ints(table, "process_id")
    rows = pd.DataFrame({
        "process": np.where(process < 0, counter_rows.place(path).pid, process),
        "dispatch": _ints(table, "dispatch_id"),
        "agent": ("Agent " + agent).where(agent.str.isdigit(), agent).to_numpy(),
        "queue": _ints(table, "queue_id"), "stream": _ints(table, "stream_id"),
        "name": pd.Categorical(table["kernel_name"]),
        "grid": _volume(table, "grid_size"), "workgroup": _volume(table, "workgroup_size"),
        "start_ns": _ints(table, "start_timestamp"), "end_ns": _ints(table, "end_timestamp")})
    return counter_rows.placed(rows, path)


def _ints(table: pd.DataFrame, column: str) -> np.ndarray:
    if column not in table:
        return np.full(len(table), schema.MISSING, np.int64)
    return pd.to_numeric(table[column], errors="coerce").fillna(schema.MISSING).to_numpy("int64")


def _volume(table: pd.DataFrame, column: str) -> np.ndarray:
    """grid_size, or the product of grid_size_x, _y and _z."""
    if column in table:
        return _ints(table, column)
    return np.prod([_ints(table, f"{column}_{axis}") for axis in "xyz"], axis=0)


def read_csv(path: Path, lower: bool = True) -> tuple[pd.DataFrame, list[Finding], bool]:
    """A CSV, its columns in lower case unless told otherwise: (table, findings, whether all of it could be read).

    Compressed or not, whatever its name. A file cut in the middle loses its last row. Raises UnreadableFile.
    """
    raw, findings = text_of(path), []
    end_of_header = raw.find(b"\n") if b"\n" in raw else len(raw)
    header = fields(raw[:end_of_header])
    last = raw[raw.rfind(b"\n") + 1:]
    if last.strip() and len(fields(last)) != len(header):
        raw = raw[: len(raw) - len(last)]
        findings.append(Finding("file_cut", "warning", "the last line is cut off: the profiled process did not "
                                "finish, later dispatches are missing"))
    try:
        table = pd.read_csv(io.BytesIO(raw), encoding_errors="replace", low_memory=False, on_bad_lines="skip",
                            dtype={h: "category" for h in header if h.strip().lower() in _TEXT})
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError) as error:
        raise UnreadableFile(f"{path}: not a CSV file ({str(error).splitlines()[0]})") from error
    names = [str(c).strip() for c in table.columns]
    table.columns = [n.lower() for n in names] if lower else names
    return table, findings, not findings


def text_of(path: Path) -> bytes:
    """The bytes of a text file, decompressed where it is. Raises UnreadableFile, also where it is empty."""
    with open_binary(path) as stream:
        raw = stream.read()
    if raw[:2] == GZIP:
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as error:
            raise UnreadableFile(f"{path}: the compressed file is damaged ({error}); `gzip -dc` may save the part "
                                 "before the damage") from error
    if not raw.strip():
        raise UnreadableFile(f"{path}: is empty: the profiled process wrote nothing")
    return raw


def fields(line: bytes) -> list[str]:
    """The fields of one line of CSV."""
    csv.field_size_limit(1 << 24)  # names of 5,000 characters are real
    return next(csv.reader([line.decode(errors="replace")]), [])
