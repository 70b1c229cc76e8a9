"""Text of Kineto events into numpy columns. Runs in worker processes, so it needs neither pandas nor schema.py.

A chunk is some elements of the `traceEvents` array with the commas between them. Times come out relative to
the file's `baseTimeNanoseconds`, which may stand behind the events.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tb_chopper.backend.readers.salvage import Damage, Salvaged, salvage

Number = int | float | str | bool | None
Text = str | int | float | bool | None
RAW = msgspec.Raw(b"")

OP, ANNOTATION, RUNTIME, MODULE, ASYNC, GC, PROFILER = range(7)
"""Codes of `schema.ALL_HOST_KINDS`."""
KERNEL, MEMCPY, MEMSET = range(3)
"""Codes of `schema.ACTIVITIES`."""

# Today's names and those of 2021; an event without category is an operator (the autograd profiler's own export).
HOST_CATEGORIES = {
    "cpu_op": OP, "Operator": OP, "": OP, "user_annotation": ANNOTATION,
    "cuda_runtime": RUNTIME, "cuda_driver": RUNTIME, "Runtime": RUNTIME, "xpu_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME, "mtia_runtime": RUNTIME, "overhead": PROFILER,
}
DEVICE_CATEGORIES = {
    "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": MEMCPY, "Memcpy": MEMCPY, "gpu_memset": MEMSET, "Memset": MEMSET,
}
PYTHON_FUNCTION = "python_function"
PYTHON_GC = "Python GC"
# These scopes last from issue to completion, across whatever their thread does meanwhile.
ASYNC_SCOPE = re.compile(r"(nccl|gloo|ucc|xccl|hccl|mpi):")

MISSING = -1
MAX_EXACT_US = 8.79e12
"""Up to here a double of microseconds still tells single nanoseconds apart (2**53 / 1024)."""
MAX_US = 4e15
"""Times beyond the year 2096 are nonsense, and the sum of two would not fit in int64 nanoseconds."""


def _named(name: str, default: Any = None) -> Any:
    return msgspec.field(name=name, default=default)


class Args(msgspec.Struct, gc=False):
    """The arguments that become columns; in the order in which Kineto writes them, which is the fastest to match."""

    external_id: Number = _named("External id", MISSING)
    seq: Number = _named("Sequence number", MISSING)
    fwd_thread: Number = _named("Fwd thread id", MISSING)
    concrete_inputs: msgspec.Raw = _named("Concrete Inputs", RAW)
    input_type: msgspec.Raw = _named("Input type", RAW)
    input_dims: msgspec.Raw = _named("Input Dims", RAW)
    finished: Number = None
    device: Text = None
    stream: Number = None
    correlation: Number = MISSING
    blocks_per_sm: Number = _named("blocks per SM")
    grid: msgspec.Raw = RAW
    block: msgspec.Raw = RAW
    occupancy: Number = _named("est. achieved occupancy %")
    bytes: Number = MISSING
    graph_node: Number = _named("graph node id", MISSING)
    collective: Text = _named("Collective name")
    in_nelems: Number = _named("In msg nelems", MISSING)
    out_nelems: Number = _named("Out msg nelems", MISSING)
    group_size: Number = _named("Group size", MISSING)
    dtype: Text = None
    group: Text = _named("Process Group Name")
    group_desc: Text = _named("Process Group Description")
    source: Number = _named("Src Rank", MISSING)
    destination: Number = _named("Dst Rank", MISSING)
    group_seq: Number = _named("Seq", MISSING)
    external_id_2021: Number = _named("external id", MISSING)
    name: Text = None
    memory_bytes: Number = _named("Bytes", MISSING)
    memory_allocated: Number = _named("Total Allocated", MISSING)
    memory_reserved: Number = _named("Total Reserved", MISSING)
    device_type: Number = _named("Device Type", MISSING)
    device_id: Number = _named("Device Id", MISSING)


class Event(msgspec.Struct, gc=False):
    ph: Text = ""
    cat: Text = ""
    name: Text = ""
    pid: Text = ""
    tid: Text = ""
    ts: int | float | str | None = None
    dur: int | float | str | None = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """The same with times as decimals: for absolute times in microseconds, whose digits a double cannot hold."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


NO_ARGS = Args()


class Coded(NamedTuple):
    """A column of few values: row -> position in `values`, -1 for null."""

    codes: np.ndarray
    values: list[Any]


Column = np.ndarray | Coded
Columns = dict[str, Column]


@dataclass
class Chunk:
    """What a chunk of events holds; `end` and `unfinished` as in `Salvaged`."""

    host: Columns
    device: Columns
    memory: Columns
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)
    n_events: int = 0
    n_python_frames: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    damage: list[Damage] = field(default_factory=list)
    end: int | None = None
    unfinished: int | None = None


def parse(text: bytes) -> Chunk:
    """Decode a chunk. Damaged elements are repaired or left out, and reported in `damage`; bad text never raises."""
    found = decode(text, Event)
    if _loses_digits(found.events):
        found = decode(text, ExactEvent)
    chunk = _columns(found.events)
    chunk.damage, chunk.end, chunk.unfinished = found.damage, found.end, found.unfinished
    return chunk


def decode(text: bytes, kind: type[Event]) -> Salvaged[Event]:
    """All events of a chunk that can be had."""
    body = b"".join((b"[", memoryview(text)[:-1] if text.endswith(b",") else text, b"]"))
    try:
        return Salvaged(msgspec.json.decode(body, type=list[kind]))  # type: ignore[valid-type]
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        elements = msgspec.json.decode(body, type=list[msgspec.Raw])
        events = [e for e in (_tolerant(bytes(raw), kind) for raw in elements) if e is not None]
    except (msgspec.DecodeError, RecursionError):
        return salvage(text, lambda element: _tolerant(element, kind))
    ignored = len(elements) - len(events)
    return Salvaged(events, [Damage("ignored_entries", 0, ignored)] if ignored else [])


def _tolerant(element: bytes, kind: type[Event]) -> Event | None:
    """One element, fields of an unexpected type left out; None for what is no object. Raises on malformed text."""
    try:
        return msgspec.json.decode(element, type=kind)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(element)
    if not isinstance(fields, dict):
        return None
    args = fields.get("args")
    event = _usable(kind, fields)
    event.args = _usable(Args, args) if isinstance(args, dict) else None
    return event


def _usable(kind: type[Any], fields: dict[str, Any]) -> Any:
    made = kind()
    for f in msgspec.structs.fields(kind):
        if f.encode_name in fields and f.name != "args":
            value = fields[f.encode_name]
            try:
                setattr(made, f.name, msgspec.Raw(msgspec.json.encode(value)) if f.type is msgspec.Raw
                        else msgspec.convert(value, f.type))
            except msgspec.ValidationError:
                continue
    return made


def _loses_digits(events: list[Event]) -> bool:
    ts = [e.ts for e in events]
    large = np.abs(_floats(ts, np.float64)) > MAX_EXACT_US
    return bool(large.any()) and any(type(ts[i]) is not int for i in np.flatnonzero(large))


def _columns(events: list[Event]) -> Chunk:
    host: list[Event] = []
    device: list[Event] = []
    kinds: list[int] = []
    activities: list[int] = []
    memory: list[Event] = []
    chunk = Chunk({}, {}, {}, n_events=len(events))
    for e in events:
        ph = e.ph
        if ph == "X":
            kind = HOST_CATEGORIES.get(e.cat)  # type: ignore[arg-type]
            if kind is not None:
                host.append(e)
                kinds.append(kind)
            elif (activity := DEVICE_CATEGORIES.get(e.cat)) is not None:  # type: ignore[arg-type]
                device.append(e)
                activities.append(activity)
            elif e.cat == PYTHON_FUNCTION:
                if str(e.name).startswith("nn.Module:"):
                    host.append(e)
                    kinds.append(MODULE)
                elif e.name == PYTHON_GC:
                    host.append(e)
                    kinds.append(GC)
                else:
                    chunk.n_python_frames += 1
        elif ph == "i":
            if e.name == "[memory]":
                memory.append(e)
        elif ph == "M" and e.name == "thread_name" and e.args is not None:
            chunk.thread_names[str(e.pid), str(e.tid)] = str(e.args.name)
    if host:
        chunk.host = _host(host, np.array(kinds, np.int8), chunk.counts)
    if device:
        chunk.device = _device(device, np.array(activities, np.int8), chunk.counts)
    if memory:
        chunk.memory = _memory(memory)
    return chunk


def _host(events: list[Event], kinds: np.ndarray, counts: Counter[str]) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    start, duration, usable = _times(events, counts)
    name = _names(events)
    is_async = np.array([bool(ASYNC_SCOPE.match(str(n))) for n in name.values])[name.codes]
    kinds[is_async & (kinds <= ANNOTATION)] = ASYNC
    columns: Columns = {
        "start_ns": start, "duration_ns": duration, "name": name, "kind": kinds,
        "thread": _threads(events),
        "correlation": _integers([a.correlation for a in args]),
        "external_id": _external_ids(args),
        "seq": _integers([a.seq for a in args]),
        "fwd_thread": _integers([a.fwd_thread for a in args]),
        "args": _shapes(args),
        "finished": np.array([a.finished not in (False, "false", 0) for a in args]),
    }
    return _rows(columns, usable)


def _device(events: list[Event], activities: np.ndarray, counts: Counter[str]) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    start, duration, usable = _times(events, counts)
    # Records that CUPTI delivered without times (profiler ranges) would drag the window to the epoch.
    untimed = usable & (start == 0) & (duration <= 0)
    counts["kernel_without_time"] += int(untimed.sum())
    columns: Columns = {
        "start_ns": start, "duration_ns": duration, "activity": activities,
        "name": _names(events),
        "device": _texts(e.pid if a.device is None else a.device for e, a in zip(events, args, strict=True)),
        "stream": _integers([_last_word(e.tid) if a.stream is None else _last_word(a.stream)
                             for e, a in zip(events, args, strict=True)]),
        "correlation": _integers([a.correlation for a in args]),
        "external_id": _external_ids(args),
        "grid": _raws(map(attrgetter("grid"), args)),
        "block": _raws(map(attrgetter("block"), args)),
        "blocks_per_sm": _floats([a.blocks_per_sm for a in args], np.float32),
        "occupancy": _floats([a.occupancy for a in args], np.float32),
    }
    for column in ("bytes", "graph_node", "group_size", "group_seq", "in_nelems", "out_nelems"):
        columns[column] = _integers(list(map(attrgetter(column), args)))
    for column in ("collective", "group", "group_desc", "dtype"):
        columns[column] = _texts(map(attrgetter(column), args))
    source, destination = (_integers(list(map(attrgetter(name), args))) for name in ("source", "destination"))
    columns["peer"] = np.where(source >= 0, source, destination)  # a message received names one, a sent one the other
    return _rows(columns, usable & ~untimed)


def _memory(events: list[Event]) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    start, _, usable = _times(events, Counter())
    return _rows({
        "t_ns": start,
        "bytes": _integers([a.memory_bytes for a in args]),
        "allocated_bytes": _integers([a.memory_allocated for a in args]),
        "reserved_bytes": _integers([a.memory_reserved for a in args]),
        "device_type": _integers([a.device_type for a in args]),
        "device_id": _integers([a.device_id for a in args]),
    }, usable)


def _rows(columns: Columns, keep: np.ndarray) -> Columns:
    if keep.all():
        return columns
    return {name: Coded(c.codes[keep], c.values) if isinstance(c, Coded) else c[keep] for name, c in columns.items()}


def _times(events: list[Event], counts: Counter[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and duration in ns (-1: none given; other negatives as written), and which rows have a start."""
    start, timed = _nanoseconds([e.ts for e in events])
    duration, measured = _nanoseconds([e.dur for e in events])
    counts["missing_timestamp"] += int((~timed).sum())
    counts["missing_duration"] += int((timed & ~measured).sum())
    counts["negative_duration"] += int((timed & measured & (duration < 0)).sum())
    duration[~measured] = 0
    return start, duration, timed


def _nanoseconds(values: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds as int64 ns, exact to the last digit, and which are there at all."""
    us = _floats(values, np.float64)
    known = np.abs(us) < MAX_US
    if isinstance(next((v for v in values if v is not None), None), Decimal):
        exact = [int((v * 1000).to_integral_value()) if k else 0 for v, k in zip(values, known, strict=True)]
        ns = np.array(exact, np.int64)
    elif known.any() and np.abs(us[known]).max() > MAX_EXACT_US:
        ns = np.array([round(v * 1000) if k else 0 for v, k in zip(values, known, strict=True)], np.int64)
    else:
        ns = np.rint(np.where(known, us, 0) * 1000).astype(np.int64)
    return ns, known


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan


def _floats(values: list[Any], dtype: type[np.floating[Any]]) -> np.ndarray:
    """Numbers, NaN for what is none (missing, `N/A`, `inf` of a device without SMs)."""
    with np.errstate(over="ignore"):
        try:
            numbers = np.array(values, dtype)
        except (TypeError, ValueError, OverflowError):
            numbers = np.array([_float(v) for v in values], dtype)
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def _integers(values: list[Any]) -> np.ndarray:
    """int64, or int32 where it suffices; -1 for what is missing or no integer. uint64 wraps around, so that
    an id keeps its identity and the profiler's (uint64)-1 becomes -1."""
    try:
        numbers = np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        numbers = np.array([_integer(v) for v in values], np.int64)
    narrow = numbers.astype(np.int32)
    return narrow if (narrow == numbers).all() else numbers


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return MISSING
    return (number + 2**63) % 2**64 - 2**63 if -(2**63) <= number < 2**64 else MISSING


def _last_word(value: Number) -> Number:
    return value.rsplit(" ", 1)[-1] if isinstance(value, str) else value


def _external_ids(args: list[Args]) -> np.ndarray:
    ids = _integers([a.external_id for a in args])
    return _integers([a.external_id_2021 for a in args]) if (ids == MISSING).all() else ids


def _coded(values: Iterable[Hashable]) -> Coded:
    index: dict[Hashable, int] = defaultdict(count().__next__)
    codes = np.array(list(map(index.__getitem__, values)), np.int32)
    if None not in index:
        return Coded(codes, list(index))
    null = index[None]
    codes[codes == null] = -1
    codes[codes > null] -= 1
    return Coded(codes, [v for v in index if v is not None])


def _threads(events: list[Event]) -> Coded:
    coded = _coded(map(attrgetter("pid", "tid"), events))
    return _recoded(coded, [(str(pid), str(tid)) for pid, tid in coded.values])


def _names(events: list[Event]) -> Coded:
    """Never null: a name that is missing is empty."""
    names = _texts(map(attrgetter("name"), events))
    return names if (names.codes >= 0).all() else _texts("" if e.name is None else e.name for e in events)


def _texts(values: Iterable[Text]) -> Coded:
    coded = _coded(values)
    texts = [v if isinstance(v, str) else str(v) for v in coded.values]
    return Coded(coded.codes, texts) if len(set(texts)) == len(texts) else _recoded(coded, texts)


def _recoded(coded: Coded, values: list[Any]) -> Coded:
    """The same rows with other values, of which some may be equal (device 0 and "0")."""
    merged = _coded(values)
    return Coded(np.append(merged.codes, np.int32(-1))[coded.codes], merged.values)


def _raws(values: Iterable[msgspec.Raw]) -> Coded:
    coded = _coded(map(bytes, values))
    return _recoded(coded, [_plain(v) if v else None for v in coded.values])


def _shapes(args: list[Args]) -> Coded:
    """The recorded shapes as one JSON text per row: {Input Dims, Input type, Concrete Inputs}."""
    columns = [map(bytes, map(attrgetter(name), args)) for name in ("input_dims", "input_type", "concrete_inputs")]
    coded = _coded(zip(*columns, strict=True))
    return _recoded(coded, [_shape_text(*raws) for raws in coded.values])


def _shape_text(dims: bytes, types: bytes, concrete: bytes) -> str | None:
    recorded = {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete}
    fields = [f'"{key}":{_plain(raw)}' for key, raw in recorded.items() if raw]
    return "{" + ",".join(fields) + "}" if fields else None


def _plain(raw: bytes) -> str:
    """JSON text without white space, so that equal values are equal text in every layout."""
    return msgspec.json.format(raw, indent=-1).decode(errors="replace")
