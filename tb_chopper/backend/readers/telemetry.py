"""`<host>.telemetry.csv` (torch_ext.telemetry_format) into the telemetry tables of schema.py.

Lines that are not whole are left out: the last one of a sampler that was killed, one cut by a full disk, garbage.
Times are CLOCK_MONOTONIC in the file; each sampler's own clock pairs turn them into times since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import telemetry_checks
from tb_chopper.backend.schema import TelemetryLog
from torch_ext import telemetry_format

MEASURES = tuple(c.name for c in schema.TELEMETRY if c.dtype == "float64")
MARGIN_NS = 5 * 10**9
OTHER_RECORDS = (b"start", b"gpu_info", b"cpu_info", b"clock", b"note", b"stop")
"""the kinds that are no samples: few, and needed whatever the time"""
_INTEGER = r"^-?[0-8]?[0-9]{1,18}$"


def read(content: bytes, file: str, within: tuple[int, int] | None = None) -> TelemetryLog:
    """A sampler's log; `file` is its name. within: the time to read samples of, ns since the epoch, a little more is
    read: a log of days has a gigabyte, a capture seconds. Raises UnreadableFile, in one line, where no whole record is
    left."""
    records, dropped = _records(content if within is None else part_of_time(content, within), file)
    session = np.cumsum(records["record"].to_numpy() == "start") - 1
    records = records.assign(session=np.maximum(session, 0))
    host = _host(file, records)
    clocks = _clocks(records, host)
    findings = _damage(file, dropped) + _notes(file, records) + _ends(file, records)
    if len(clocks) == 0:
        raise UnreadableFile(f"{file}: no whole clock record, so its times mean nothing: the sampler was killed early")
    samples, found = telemetry_checks.check(_samples(records, clocks, host), file)
    return TelemetryLog(file, samples, _gpus(records, host), _cpu(records, clocks, host), _cores(records, host),
                        clocks, "monotonic", [f.at(file) for f in (*findings, *found)])


def _records(content: bytes, file: str) -> tuple[pd.DataFrame, int]:
    """The whole lines as strings, columns by name, and how many lines were not whole."""
    head, newline, _ = content.partition(b"\n")
    names = head.decode("utf-8", "replace").split(",")
    if not newline or names[:3] != ["record", "before_ns", "after_ns"]:
        raise UnreadableFile(f"{file}: line 1: not the header of a telemetry log")
    body, _, cut = content[len(head) + 1:].rpartition(b"\n")
    dropped = int(bool(cut))

    def skip(row: pacsv.InvalidRow) -> str:
        nonlocal dropped
        dropped += row.text.strip() != ""
        return "skip"

    if not body:
        raise UnreadableFile(f"{file}: no whole record: the sampler was killed as it began, or the disk was full")
    body = body.replace(b"\x00", b"")
    table = pacsv.read_csv(
        pa.BufferReader(body + b"\n"),
        read_options=pacsv.ReadOptions(column_names=names, encoding="latin-1", use_threads=False),
        parse_options=pacsv.ParseOptions(quote_char=False, invalid_row_handler=skip, newlines_in_values=False),
        convert_options=pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False))
    timed = pc.and_(pc.match_substring_regex(table["before_ns"], _INTEGER),
                    pc.match_substring_regex(table["after_ns"], _INTEGER))
    # A repeated header is not damage: it comes from logs put one after another.
    headers = pc.equal(table["record"], "record")
    dropped += table.num_rows - pc.sum(pc.or_(timed, headers)).as_py() if table.num_rows else 0
    whole = table.filter(timed)
    if whole.num_rows == 0:
        raise UnreadableFile(f"{file}: no whole record")
    frame = pd.DataFrame({name: whole[name].to_numpy(zero_copy_only=False) for name in names})
    return frame.assign(before_ns=_integers(frame["before_ns"]), after_ns=_integers(frame["after_ns"])), dropped


def part_of_time(content: bytes, within: tuple[int, int]) -> bytes:
    """A log without the samples that lie more than MARGIN_NS outside a time (ns since the epoch), judged by the clock
    records before and after them. Everything else stays, in its order."""
    others = sorted((at, kind) for kind in OTHER_RECORDS for at in _lines_of(content, kind))
    realtime = {at: time for at, kind in others if kind == b"clock" and (time := _realtime(content, at)) > 0}
    if not realtime:
        return content
    low, high = within[0] - MARGIN_NS, within[1] + MARGIN_NS
    marks = [0, *realtime, len(content)]
    times = [min(realtime.values()), *realtime.values(), max(realtime.values())]
    kept = [a <= high and b >= low for a, b in pairwise(times)]
    pieces = []
    lines = iter(others)
    line = next(lines, None)
    for (begin, end), keep in zip(pairwise(marks), kept, strict=True):
        if keep:
            pieces.append(content[begin:end])
        while line is not None and line[0] < end:
            if not keep:
                pieces.append(content[line[0]:content.find(b"\n", line[0]) + 1 or len(content)])
            line = next(lines, None)
        if begin == 0 and not keep:
            pieces.insert(0, content[:content.find(b"\n") + 1])
    return b"".join(pieces)


def _lines_of(content: bytes, kind: bytes) -> Iterator[int]:
    """Where the lines of a kind of record begin."""
    text = b"\n" + kind + b","
    at = content.find(text)
    while at >= 0:
        yield at + 1
        at = content.find(text, at + 1)


def _realtime(content: bytes, at: int) -> int:
    """realtime_ns of the clock record at an offset, MISSING where it is not whole."""
    fields = content[at:content.find(b"\n", at)].split(b",")
    whole = len(fields) == len(telemetry_format.NAMES)
    text = fields[telemetry_format.NAMES.index("realtime_ns")] if whole else b""
    return int(text) if text.isdigit() else schema.MISSING


def _integers(texts: pd.Series) -> np.ndarray:
    """int64 of texts that are integers; MISSING for others."""
    array = pa.array(texts, pa.string())
    clean = pc.if_else(pc.match_substring_regex(array, _INTEGER), array, str(schema.MISSING))
    return clean.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _numbers(texts: pd.Series) -> np.ndarray:
    return pd.to_numeric(texts, errors="coerce").to_numpy(np.float64)


def _kind(records: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The records of one kind, every column of the format present."""
    rows = records[records["record"] == kind].reset_index(drop=True)
    return rows.reindex(columns=[*telemetry_format.NAMES, "session"], fill_value="")


def _host(file: str, records: pd.DataFrame) -> str:
    named = _kind(records, "start")["text"]
    return str(named.iloc[0]) if len(named) and named.iloc[0] else file.removesuffix(telemetry_format.SUFFIX)


def _clocks(records: pd.DataFrame, host: str) -> pd.DataFrame:
    rows = _kind(records, "clock")
    rows = rows.assign(realtime_ns=_integers(rows["realtime_ns"]), boottime_ns=_integers(rows["boottime_ns"]))
    rows = rows[rows["realtime_ns"] > 0]
    return schema.conform(rows.assign(
        host=host, monotonic_ns=_middle(rows), uncertainty_ns=rows["after_ns"] - rows["before_ns"]), schema.CLOCKS)


def _middle(rows: pd.DataFrame) -> pd.Series:
    return rows["before_ns"] + (rows["after_ns"] - rows["before_ns"]) // 2


def _since_epoch(rows: pd.DataFrame, clocks: pd.DataFrame) -> pd.DataFrame:
    """monotonic_ns and t_ns of rows; each sampler's rows by its own clock pairs, those of one that left none by the
    nearest sampler's."""
    monotonic = _middle(rows).to_numpy()
    t = np.zeros(len(rows), np.int64)
    sessions = clocks["session"].to_numpy()
    for session in np.unique(rows["session"]):
        known = np.unique(sessions)
        if len(known):
            pairs = clocks[sessions == known[np.argmin(np.abs(known - session))]]
            mine = (rows["session"] == session).to_numpy()
            t[mine] = to_realtime(monotonic[mine], pairs["monotonic_ns"].to_numpy(), pairs["realtime_ns"].to_numpy())
    return rows.assign(monotonic_ns=monotonic, t_ns=t)


def to_realtime(monotonic_ns: np.ndarray, pair_monotonic_ns: np.ndarray, pair_realtime_ns: np.ndarray) -> np.ndarray:
    """Times on one clock as times on another, int64: linear between the pairs, at their offset beyond them."""
    order = np.argsort(pair_monotonic_ns, kind="stable")
    at = pair_monotonic_ns[order]
    offset = pair_realtime_ns[order] - at
    base = int(offset[0])  # the differences are small enough for float64, the times are not
    delta = np.interp((monotonic_ns - at[0]).astype(np.float64), (at - at[0]).astype(np.float64),
                      (offset - base).astype(np.float64))
    return monotonic_ns + base + np.rint(delta).astype(np.int64)


def _samples(records: pd.DataFrame, clocks: pd.DataFrame, host: str) -> pd.DataFrame:
    rows = _since_epoch(_kind(records, "gpu"), clocks)
    gpu = _integers(rows["gpu"])
    values = {name: _numbers(rows[name]) for name in MEASURES}
    rows = rows.assign(**values, gpu=gpu, host=host, uncertainty_ns=(rows["after_ns"] - rows["before_ns"] + 1) // 2,
                       throttle=rows["throttle"].where(rows["throttle"] != "", None))[gpu >= 0]
    rows = rows.sort_values(["gpu", "t_ns"], kind="stable").reset_index(drop=True)
    # Limits are written when they were asked for: the last one stands.
    limits = ["clock_limit_mhz", "power_limit_w"]
    rows[limits] = rows.groupby("gpu")[limits].ffill()
    rows[limits] = rows.groupby("gpu")[limits].bfill()
    return schema.conform(rows, schema.TELEMETRY)


def _gpus(records: pd.DataFrame, host: str) -> pd.DataFrame:
    rows = _kind(records, "gpu_info").drop_duplicates("gpu", keep="last")
    text = {c: rows[c].where(rows[c] != "", None) for c in ("pci_address", "source")}
    rows = rows.assign(host=host, gpu=_integers(rows["gpu"]), name=rows["text"].where(rows["text"] != "", None), **text)
    return schema.conform(rows[rows["gpu"] >= 0].reset_index(drop=True), schema.TELEMETRY_GPUS)


def _cpu(records: pd.DataFrame, clocks: pd.DataFrame, host: str) -> pd.DataFrame:
    rows = _since_epoch(_kind(records, "cpu"), clocks)
    busy = _pairs(rows["cpu_pct"], "busy_pct")
    idle = np.setdiff1d(np.arange(len(rows)), busy["row"])
    cpu = pd.concat([busy, pd.DataFrame({"row": idle, "cpu": schema.MISSING, "busy_pct": 0.0})], ignore_index=True)
    for column, value in (("cpu_mhz", "clock_mhz"), ("cpu_threads", "threads")):
        cpu = cpu.merge(_pairs(rows[column], value), on=["row", "cpu"], how="left")
    cpu = cpu.sort_values(["row", "cpu"], kind="stable")
    times = rows[["t_ns", "monotonic_ns"]].iloc[cpu["row"]].reset_index(drop=True)
    return schema.conform(pd.concat([times, cpu.reset_index(drop=True)], axis=1).assign(host=host), schema.CPU)


def _cores(records: pd.DataFrame, host: str) -> pd.DataFrame:
    last = _kind(records, "cpu_info").tail(1)
    cores = _pairs(last["cpu_cores"], "core")
    return schema.conform(cores.assign(core=cores["core"].astype("int64"), host=host), schema.CPU_CORES)


def _pairs(texts: pd.Series, value: str) -> pd.DataFrame:
    """`0:97 2:12` of each text as rows (row, cpu, value); what is no pair of numbers is left out."""
    parts = texts.reset_index(drop=True).str.split(" ").explode()
    split = parts.astype(str).str.extract(r"^([0-9]+):([0-9.]+)$")
    found = pd.DataFrame({"row": parts.index, "cpu": _numbers(split[0]), value: _numbers(split[1])}).dropna()
    return found.astype({"row": "int64", "cpu": "int64"}).drop_duplicates(["row", "cpu"])


def _damage(file: str, dropped: int) -> list[Finding]:
    if not dropped:
        return []
    return [Finding("telemetry_cut", "info", f"{file}: {dropped} incomplete {_plural('line', dropped)} left out: "
                    "the sampler was killed or the disk was full", dropped)]


def _notes(file: str, records: pd.DataFrame) -> list[Finding]:
    notes: Iterable[str] = dict.fromkeys(_kind(records, "note")["text"])
    return [Finding("telemetry_note", "info", f"{file}: {text}") for text in notes if text]


def _ends(file: str, records: pd.DataFrame) -> list[Finding]:
    """A sampler that did not write its `stop` was killed, or still runs."""
    starts, stops = (int((records["record"] == kind).sum()) for kind in ("start", "stop"))
    if stops >= starts:
        return []
    return [Finding("telemetry_no_end", "info", f"{file}: the sampler was killed or still runs: the log may end "
                    "before the training does")]


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"
