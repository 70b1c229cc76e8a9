"""Kernel dispatches of rocprofv3's own Perfetto traces (`-f pftrace`).

Each dispatch is a slice whose debug annotations hold its exact times, agent, queue, sizes and, where counters were
collected, their values summed over the hardware's instances. rocprofv3 moves the border of dispatches that overlap on
a queue to the middle of the overlap before it writes them, so times of such dispatches are not those of its CSV.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import counter_rows
from tb_chopper.backend.readers.byte_stream import open_binary
from tb_chopper.backend.schema import CounterFile

_DISPATCH = {"kernel_id", "grid_size", "begin_ns"}
_COUNTER = re.compile(r"[A-Z]\w*")
"""Counters are annotations with names of their own; those of the format are in lower case."""
_BEGIN = 1
_CLEARED = 1
_PACKET = 0x0A
"""First byte of a packet: field 1 of the trace, with a length."""


@dataclass
class _Interned:
    """Texts that packets of one sequence refer to by number."""

    names: dict[int, str] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    strings: dict[int, str] = field(default_factory=dict)


def is_trace(path: Path, head: bytes) -> bool:
    """Whether a file may be one: by its name too, for a first byte is little to go by."""
    return path.suffix.lower() == ".pftrace" and head.startswith(bytes([_PACKET]))


def read(path: Path) -> CounterFile:
    """The dispatches of one file as COUNTERS, `dispatch` being the correlation id (a .pftrace has no other). A file
    that holds none gives an empty table; one that is cut off gives those before the cut, with a finding.

    Raises UnreadableFile for what is no Perfetto trace and where the `perfetto` package is missing.
    """
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
    except ImportError as error:
        raise UnreadableFile(f"{path}: reading a .pftrace needs the perfetto package; install tb-chopper[trace], or "
                             "collect with `-f csv`") from error
    with open_binary(path) as stream:
        data = stream.read()
    rows: list[dict[str, Any]] = []
    interned: dict[int, _Interned] = {}
    end = 0
    for start, end in _packets(data):
        try:
            packet = TracePacket.FromString(data[start:end])
        except Exception as error:  # DecodeError has no common home over the versions of protobuf
            raise UnreadableFile(f"{path}: no Perfetto trace: {error} at byte {start}") from error
        row = _dispatch(packet, interned)
        if row is not None:
            rows.append(row)
    if not end:
        raise UnreadableFile(f"{path}: no Perfetto trace; a .pftrace of rocprofv3 is expected")
    findings = [] if end == len(data) else [Finding(
        "file_cut", "warning", f"{path.name} is cut off at byte {end} of {len(data)}: the profiled process did not "
        "finish, later dispatches are missing", file=path.name)]
    return CounterFile(path, _table(rows, path), schema.empty(schema.AGENTS), "rocprofv3", findings, not findings)


def _packets(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each whole packet begins and ends."""
    position = 0
    while position < len(data) and data[position] == _PACKET:
        length, shift, byte, position = 0, 0, 0x80, position + 1
        while byte & 0x80 and position < len(data):
            byte = data[position]
            length |= (byte & 0x7F) << shift
            shift, position = shift + 7, position + 1
        if byte & 0x80 or position + length > len(data):
            return
        yield position, position + length
        position += length


def _dispatch(packet: Any, interned: dict[int, _Interned]) -> dict[str, Any] | None:
    """The annotations of a packet that begins a dispatch, and its `name`."""
    if packet.sequence_flags & _CLEARED:
        interned.pop(packet.trusted_packet_sequence_id, None)
    own = interned.setdefault(packet.trusted_packet_sequence_id, _Interned())
    if packet.HasField("interned_data"):
        texts = packet.interned_data
        own.names.update((n.iid, n.name) for n in texts.event_names)
        own.keys.update((n.iid, n.name) for n in texts.debug_annotation_names)
        own.strings.update((n.iid, n.str.decode("utf-8", "replace")) for n in texts.debug_annotation_string_values)
    event = packet.track_event
    if not packet.HasField("track_event") or event.type != _BEGIN or len(event.debug_annotations) < len(_DISPATCH):
        return None
    row = {a.name or own.keys.get(a.name_iid, ""): _value(a, own) for a in event.debug_annotations}
    return {**row, "name": event.name or own.names.get(event.name_iid)} if row.keys() >= _DISPATCH else None


def _value(annotation: Any, own: _Interned) -> Any:
    kind = annotation.WhichOneof("value")
    if kind == "string_value_iid":
        return own.strings.get(annotation.string_value_iid)
    return getattr(annotation, kind) if kind else None


def _table(rows: list[dict[str, Any]], path: Path) -> pd.DataFrame:
    if not rows:
        return schema.empty(schema.COUNTERS)
    found = pd.DataFrame(rows).sort_values("begin_ns", kind="stable", ignore_index=True)
    agent = found["agent"].astype(object) if "agent" in found else pd.Series(None, found.index, dtype=object)
    dispatches = pd.DataFrame({
        "agent": agent.map(lambda a: str(a).replace("-", " "), na_action="ignore"),
        "dispatch": _integers(found, "corr_id"), "queue": _integers(found, "queue"), "name": found["name"],
        "grid": _integers(found, "grid_size"), "workgroup": _integers(found, "workgroup_size"),
        "start_ns": _integers(found, "begin_ns"), "end_ns": _integers(found, "end_ns")})
    counters = {str(c): pd.to_numeric(found[c], errors="coerce").to_numpy("float64")
                for c in found if _COUNTER.fullmatch(str(c))}
    return schema.with_counters(counter_rows.placed(dispatches, path), counters)


def _integers(found: pd.DataFrame, column: str) -> np.ndarray:
    """int64 without a detour over float64, which would round times; -1 for what is missing."""
    if column not in found:
        return np.full(len(found), schema.MISSING, np.int64)
    return np.array([schema.MISSING if v is None or v != v else int(v) for v in found[column].astype(object)], np.int64)
