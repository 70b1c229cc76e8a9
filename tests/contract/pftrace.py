"""A small reader of Perfetto traces for tests: slices and counters by track, from the protobuf classes alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOOTTIME = 6


@dataclass
class Slice:
    track: str
    name: str
    start_ns: int
    end_ns: int = -1
    args: dict[str, Any] = field(default_factory=dict)
    flows: tuple[int, ...] = ()


@dataclass
class Sequence:
    clocks: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    strings: dict[int, str] = field(default_factory=dict)
    clock: int = BOOTTIME
    track: int = 0


@dataclass
class Content:
    """`slices` and `counters` by track path, e.g. `rank 0/GPU 0/stream 7`; a lane has the path of its track."""

    slices: dict[str, list[Slice]] = field(default_factory=dict)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    processes: list[tuple[int, str]] = field(default_factory=list)


def packets(data: bytes) -> Iterator[Any]:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    for packet in Trace.FromString(data).packet:
        if packet.HasField("compressed_packets"):
            yield from packets(zlib.decompress(packet.compressed_packets))
        else:
            yield packet


def read(path: Path) -> Content:
    found = Content()
    paths: dict[int, str] = {}
    open_slices: dict[int, list[Slice]] = {}
    sequences: dict[int, Sequence] = {}
    for p in packets(path.read_bytes()):
        if p.HasField("track_descriptor"):
            d = p.track_descriptor
            own = d.process.process_name or d.thread.thread_name or d.name
            parent = paths.get(d.parent_uuid, "")
            is_lane = parent.rsplit("/", 1)[-1] == own or own == "overlapping"
            paths[d.uuid] = parent if is_lane else f"{parent}/{own}".lstrip("/")
            if d.HasField("process"):
                found.processes.append((d.process.pid, own))
            continue
        if p.sequence_flags & 1:
            sequences[p.trusted_packet_sequence_id] = Sequence()
        s = sequences[p.trusted_packet_sequence_id]
        for clock in p.clock_snapshot.clocks:
            s.clocks[clock.clock_id] = clock.timestamp
        if p.HasField("trace_packet_defaults"):
            s.clock = p.trace_packet_defaults.timestamp_clock_id
            s.track = p.trace_packet_defaults.track_event_defaults.track_uuid
        s.names |= {n.iid: n.name for n in p.interned_data.event_names}
        s.keys |= {n.iid: n.name for n in p.interned_data.debug_annotation_names}
        s.strings |= {n.iid: n.str.decode() for n in p.interned_data.debug_annotation_string_values}
        if not p.HasField("track_event"):
            continue
        s.clocks[s.clock] += p.timestamp
        t, e, path_ = s.clocks[s.clock], p.track_event, paths[s.track]
        if e.type == 1:
            args = {s.keys[a.name_iid]: s.strings[a.string_value_iid] if a.string_value_iid else
                    a.double_value if a.HasField("double_value") else a.int_value for a in e.debug_annotations}
            made = Slice(path_, s.names[e.name_iid], t, args=args, flows=tuple(e.flow_ids))
            open_slices.setdefault(s.track, []).append(made)
            found.slices.setdefault(path_, []).append(made)
        elif e.type == 2:
            open_slices[s.track].pop().end_ns = t
        else:
            found.counters.setdefault(path_, []).append((t, e.double_counter_value))
    assert not any(open_slices.values())
    return found
