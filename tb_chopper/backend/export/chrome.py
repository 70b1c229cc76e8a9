"""The augmented trace: the source, event for event, with what chopper knows written between its lines.

The text of every event is copied as it stands; only kernels and copies are opened, to put `chopper` into their
`args`. Behind them come, per GPU, counters (`ph: C`) and spans of steps, phases and layers (`cat: chopper`, on threads
of their own). Contract with other viewers: every event has a name, every `X` a category, and our key stands before
`traceEvents`, nothing of ours behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.capture import Capture, Progress
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.export import kernel_counters, tracks
from tb_chopper.backend.export.output import open_atomic
from tb_chopper.backend.export.redact import Redactor
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.logdir import Url
from tb_chopper.backend.readers import kineto_events
from tb_chopper.backend.readers.raw_events import Event, RawEvents
from tb_chopper.backend.run import Run

KEY = "chopper_augmented"
"""Top-level key of an augmented trace; `chopper` is the key of our part in the args of a kernel."""
CATEGORY = "chopper"
FIRST_TID = 900_000_000
"""Threads of our spans: above every stream and every thread id of the usual kernels."""
SORT_INDEX = {"Step": -3, "Phase": -2, "Layer": -1}
BATCH = 20_000
"""Added events per write."""

_DEVICE = re.compile(rb'"cat"\s*:\s*"(?:%s)"' % "|".join(kineto_events.DEVICE_CATEGORIES).encode())
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()
_CATEGORY = CATEGORY.encode()


@dataclass(frozen=True)
class Exported:
    """`n_events`: those of the source; `n_kernels`: device activities among them that got their attribution;
    `n_added`: events behind them."""

    path: Path
    n_events: int
    n_kernels: int
    n_added: int
    findings: tuple[Finding, ...]


class Place(msgspec.Struct, omit_defaults=True):
    """Our part of a kernel's args. Times in µs; what is unknown is left out."""

    operation: str
    kind: str
    phase: str | None = None
    layer: str | None = None
    step: int | None = None
    attributed_by: str | None = None
    recompute: bool = False
    overlap_share: float | None = None
    prep_us: float | None = None
    call_us: float | None = None
    call_under_communication_us: float | None = None
    graph_us: float | None = None
    unattributed_us: float | None = None
    clock_mhz: float | None = None
    clock_source: str | None = None
    counters: dict[str, float] | None = None


def file_name(source: str) -> str:
    """A name for the augmented trace that no scan of a log directory takes for another trace."""
    return "augmented." + re.sub(r"(?:\.pt\.trace)?\.json(?:\.gz)?$", "", source) + ".chrome.json.gz"


def export(run: Run, capture: Capture, path: Path, *, redactor: Redactor | None = None,
           progress: Progress | None = None) -> Exported:
    """Write the augmented trace of one file of `run` to `path`, gzipped where its name ends in `.gz`.

    Damaged sources give the events that are whole. Raises UnreadableFile for a source without events and for one that
    is augmented already, Unwritable.
    """
    source = capture.file.path
    if KEY in capture.meta:
        raise UnreadableFile(f"{source} is an augmented trace already; export the trace that it was made from")
    place = run.workers.loc[run.workers["file"] == source.name, "capture"]
    kernels = run.clocked_kernels[run.clocked_kernels["capture"].isin(place)]
    rows = _Rows(kernels, kernel_counters.of_kernels(run), base_ns(capture))
    redact: Callable[[bytes], bytes] = redactor.json if redactor else _same
    metadata = redactor.metadata if redactor else _same
    never = None if isinstance(source, Url) else source
    with RawEvents(source, known_keys=redactor is not None) as events, open_atomic(path, never=never) as out:
        out.write(b"{" + metadata(_head(capture) + b",\n" + events.head) + b'\n"traceEvents": [\n')
        n_events = _copy(events, rows, out, redact, progress, source.name)
        n_added = 0
        for texts in _batches(_added(run, kernels, rows)):
            out.write(b",\n" * bool(n_events or n_added) + redact(b",\n".join(texts)))
            n_added += len(texts)
        out.write(b"\n]" + metadata(events.tail) + b"}\n")
    return Exported(path, n_events, rows.n_matched, n_added, tuple(capture.findings))


def _same(text: bytes) -> bytes:
    return text


def _head(capture: Capture) -> bytes:
    about = {
        "schema_version": schema.VERSION, "file": capture.file.path.name, "complete": capture.complete,
        "findings": [f"{f.severity}: {f.message}" for f in capture.findings]}
    return b'"%s": %s' % (KEY.encode(), msgspec.json.encode(about))


def base_ns(capture: Capture) -> int:
    """What is added to the file's times; the reader does not add it to times that are absolute already."""
    if any(f.code == "base_time_ignored" for f in capture.findings):
        return 0
    try:
        return int(capture.meta.get("baseTimeNanoseconds", 0))
    except (TypeError, ValueError):
        return 0


def _copy(events: RawEvents, rows: _Rows, out: IO[bytes], redact: Callable[[bytes], bytes],
          progress: Progress | None, name: str) -> int:
    n = 0
    for chunk in events:
        if not chunk:
            continue
        hits = [i for i, e in enumerate(chunk) if _DEVICE.search(e)]
        for i, text in zip(hits, rows.annotated([chunk[i] for i in hits]), strict=True):
            chunk[i] = text
        out.write(b",\n" * bool(n) + redact(b",\n".join(chunk)))
        n += len(chunk)
        if progress:
            progress(events.share, f"writing {name}")
    return n


class _Rows:
    """The kernels of one file, found again by the place of their events.

    The reader keeps the order of the file and attribution sorts by start without changing the order of equals: so the
    k-th event with a start is the k-th row with that start.
    """

    def __init__(self, kernels: pd.DataFrame, counters: pd.DataFrame, base_ns: int) -> None:
        self.base_ns = base_ns
        self.pids: dict[str, bytes] = {}
        """Device label -> `pid` of its events, as written."""
        self.n_matched = 0
        self._kernels = kernels.sort_values("start_ns", kind="stable")
        self._counters = counters
        self._start = self._kernels["start_ns"].to_numpy() - base_ns
        self._seen = np.zeros(len(kernels) + 1, np.int64)

    def annotated(self, events: list[Event]) -> list[Event]:
        """The events, those that are rows with our part in their args."""
        if not events or not len(self._start):
            return events
        fields = [_FIELDS.decode(e) for e in events]
        starts, at = _starts(fields, events)
        out = list(events)
        row, found = self._row(starts)
        places = _places(self._kernels.iloc[row[found]], self._counters)
        for i, place, label in zip(at[found], places, self._kernels["device"].iloc[row[found]], strict=True):
            text = _with_place(fields[i], place)
            if text is not None:
                out[i] = text
                self.pids.setdefault(label, bytes(fields[i].get("pid", b"0")))
                self.n_matched += 1
        return out

    def _row(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = np.searchsorted(self._start, starts, side="left")
        behind = np.searchsorted(self._start, starts, side="right")
        row = first + self._seen[first] + pd.Series(first).groupby(first).cumcount().to_numpy()
        np.add.at(self._seen, first, 1)
        return row, row < behind


def _starts(fields: list[dict[str, msgspec.Raw]], events: list[Event]) -> tuple[np.ndarray, np.ndarray]:
    """Start in ns (in the file's time) of the events that the reader makes rows of, and which events these are."""
    chunk = kineto_events.parse(b",".join(events)).device
    at = np.arange(len(events))
    if not chunk or len(chunk["start_ns"]) < len(events):  # type: ignore[arg-type]
        # Some are no rows (a name that only mentions a kernel, an event without time): one by one.
        parsed = [kineto_events.parse(bytes(e)).device for e in events]
        at = np.flatnonzero([bool(p) and len(p["start_ns"]) > 0 for p in parsed])  # type: ignore[arg-type]
        return np.array([parsed[i]["start_ns"][0] for i in at], np.int64), at  # type: ignore[index]
    return chunk["start_ns"], at  # type: ignore[return-value]


def _with_place(fields: dict[str, msgspec.Raw], place: bytes) -> bytes | None:
    """The event with our part in its args; None where its args are no object."""
    args = bytes(fields.get("args", b"{}"))
    if not args.startswith(b"{"):
        return None
    inner = args[1:-1].strip()
    fields["args"] = msgspec.Raw(b"{" + inner + (b"," if inner else b"") + b'"chopper":' + place + b"}")
    return msgspec.json.encode(fields)


def _places(kernels: pd.DataFrame, counters: pd.DataFrame) -> list[bytes]:
    """Place of each row as JSON text."""
    columns: dict[str, list[Any]] = {
        name: _texts(kernels[name])
        for name in ("operation", "kind", "phase", "layer", "attributed_by", "clock_source")}
    columns["step"] = [None if pd.isna(s) else int(s) for s in kernels["step"]]
    columns["recompute"] = kernels["recompute"].tolist()
    duration = (kernels["end_ns"] - kernels["start_ns"]).to_numpy()
    share = np.divide(kernels["overlap_ns"], duration, out=np.zeros(len(kernels)), where=duration > 0)
    columns["overlap_share"] = np.round(share, 4).tolist()
    for name in ("prep", "call", "call_under_communication", "graph", "unattributed"):
        columns[f"{name}_us"] = (kernels[f"{name}_ns"] / 1000).tolist()
    columns["clock_mhz"] = [None if np.isnan(v) else round(v, 1) for v in kernels["clock_mhz"]]
    if len(counters):
        columns["counters"] = [
            {str(k): v for k, v in row.items() if v == v} or None
            for row in counters.reindex(kernels.index).to_dict("records")]
    names = list(columns)
    return [_ENCODER.encode(Place(**dict(zip(names, row, strict=True))))
            for row in zip(*columns.values(), strict=True)]


def _texts(column: pd.Series) -> list[str | None]:
    return [None if pd.isna(v) else str(v) for v in column.astype(object)]


# -- what is added ----------------------------------------------------------------------------------------------------


def _added(run: Run, kernels: pd.DataFrame, rows: _Rows) -> Iterator[bytes]:
    for worker in run.workers.itertuples():
        pid = rows.pids.get(str(worker.device))
        mine = kernels[kernels["capture"] == worker.capture]
        if pid is None or not len(mine):
            continue
        steps = run.steps[run.steps["capture"] == worker.capture]
        for counter in tracks.counters(mine, run.hardware, run.telemetry.samples):
            yield from _counter(counter, pid, rows.base_ns)
        for i, spans in enumerate(tracks.spans(mine, steps)):
            yield from _spans(spans, pid, FIRST_TID + i, rows.base_ns)


def _counter(counter: tracks.Counter, pid: bytes, base_ns: int) -> Iterator[bytes]:
    begin = b'{"ph":"C","cat":"%s","name":%s,"pid":%s,"tid":0,"ts":' % (_CATEGORY, _json(counter.name), pid)
    middle = b',"args":{%s:' % _json(counter.unit or "value")
    for ts, value in zip(_us(counter.t_ns - base_ns), counter.value.tolist(), strict=True):
        yield b"%s%s%s%.6g}}" % (begin, ts, middle, value)


def _spans(spans: tracks.Spans, pid: bytes, tid: int, base_ns: int) -> Iterator[bytes]:
    for key, name, value in (("name", "thread_name", f"chopper: {spans.kind}"),
                             ("sort_index", "thread_sort_index", SORT_INDEX[spans.kind])):
        yield b'{"ph":"M","name":%s,"pid":%s,"tid":%d,"ts":0.000,"args":{%s:%s}}' % (
            _json(name), pid, tid, _json(key), _json(value))
    begin = b'{"ph":"X","cat":"%s","pid":%s,"tid":%d,"name":' % (_CATEGORY, pid, tid)
    starts, durations = _us(spans.start_ns - base_ns), _us(spans.end_ns - spans.start_ns)
    rows = zip(spans.label, starts, durations, spans.step.tolist(), spans.phase, strict=True)
    for label, ts, dur, step, phase in rows:
        known: dict[str, Any] = {**({"step": step} if step >= 0 else {}), **({"phase": phase} if phase else {})}
        yield b'%s%s,"ts":%s,"dur":%s,"args":%s}' % (begin, _json(label), ts, dur, _json(known))


def _json(value: Any) -> bytes:
    return _ENCODER.encode(value)


def _us(ns: np.ndarray) -> list[bytes]:
    """Microseconds with all their digits: 1234 as 1.234."""
    whole, rest = np.divmod(np.abs(ns), 1000)
    signs = [b"-" if n < 0 else b"" for n in ns.tolist()]
    return [b"%s%d.%03d" % parts for parts in zip(signs, whole.tolist(), rest.tolist(), strict=True)]


def _batches(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
