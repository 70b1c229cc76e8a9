"""A run as a native Perfetto trace: all ranks in one file, on one clock (ns since the epoch, that of the first host).

    process (rank)  ▸ threads: operators, scopes, runtime calls
                    ▸ GPU ▸ counters, steps, phases, layers ▸ streams: kernels with their attribution
    flows           launch call ▸ kernel

Every track is a packet sequence of its own, with its own interned names and times relative to the packet before:
that, and packets that are compressed in blocks, is what keeps the file small.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend.capture import Capture, Progress
from tb_chopper.backend.errors import ChopperError, UnreadableFile
from tb_chopper.backend.export import kernel_counters, tracks
from tb_chopper.backend.export.output import open_atomic
from tb_chopper.backend.export.redact import Redactor
from tb_chopper.backend.export.slices import Edge, edges, lanes
from tb_chopper.backend.readers import kineto
from tb_chopper.backend.run import Run

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

BLOCK_PACKETS = 20_000
BOOTTIME, REALTIME, TRACK_CLOCK = 6, 1, 64
BEGIN, END, COUNTER = 1, 2, 4
CLEARED, NEEDED = 1, 2
"""Flags of a packet: the sequence starts anew; the packet builds on what came before it."""
EXPLICIT = 3
"""Children of a track stand in the order of their rank."""
FREE_ID = 1 << 22
"""Process and thread ids for those whose own is taken by another process of the run: above every real one."""
TEXTS = ("operation", "kind", "phase", "layer", "attributed_by", "clock_source")
NUMBERS = {"prep_us": "prep_ns", "call_us": "call_ns", "call_under_communication_us": "call_under_communication_ns",
           "graph_us": "graph_ns", "unattributed_us": "unattributed_ns"}


class Track(NamedTuple):
    """Slices with names; `texts` and `numbers` are their arguments, row by row (a code of -1 and NaN: none)."""

    name: pd.Categorical
    start_ns: np.ndarray
    end_ns: np.ndarray
    texts: Mapping[str, pd.Categorical]
    numbers: Mapping[str, np.ndarray]
    flow: np.ndarray
    """Id of the flow through each slice, 0 for none."""


def export(run: Run, path: Path, *, redactor: Redactor | None = None, progress: Progress | None = None) -> None:
    """Write every readable file of `run` to `path`.

    Raises UnreadableFile for a run without a readable file, Unwritable, and ChopperError where the extra is missing.
    """
    if not run.captures:
        raise UnreadableFile(run.findings[0].message if run.findings else f"{run.name}: nothing to export")
    counters = kernel_counters.of_kernels(run)
    with open_atomic(path) as file:
        out = _Writer(file, redactor)
        for i, capture in enumerate(run.captures):
            if progress:
                progress(i / len(run.captures), f"writing {capture.file.path.name}")
            _capture(out, run, capture, i, counters)
        out.flush()


def _capture(out: _Writer, run: Run, capture: Capture, i: int, counters: pd.DataFrame) -> None:
    trace = kineto.read(capture.file.path)
    workers = run.workers[run.workers["file"] == capture.file.path.name]
    out.shift_ns = _shift_ns(run, workers)
    label = " · ".join(filter(None, (f"rank {capture.rank}" if capture.rank is not None else "", capture.file.worker,
                                     f"span {capture.file.span}" if capture.file.span else "")))
    process = out.process(_number(trace.threads["pid"]), label, i)
    for row, thread in enumerate(trace.threads.itertuples()):
        events = trace.host[trace.host["thread"] == row]
        name = str(thread.name) if isinstance(thread.name, str) else ""
        uuid = out.thread(process, int(thread.tid) if str(thread.tid).isdigit() else 0, name or str(thread.tid))
        nested = events["kind"] != "async"
        out.slices(uuid, name, _host(events[nested], i))
        if not nested.all():
            out.slices(out.track(process.uuid, f"asynchronous, {name or thread.tid}"), "", _host(events[~nested], i))
    for worker in workers.itertuples():
        kernels = run.clocked_kernels
        kernels = kernels[(kernels["capture"] == worker.capture) & (kernels["activity"] != "cpu_op")]
        if not len(kernels):
            continue
        name = "" if pd.isna(worker.gpu_name) else f" · {worker.gpu_name}"
        gpu = out.track(process.uuid, f"GPU {worker.gpu}{name}", rank=worker.gpu)
        for k, counter in enumerate(tracks.counters(kernels, run.hardware, run.telemetry.samples)):
            out.counter(out.track(gpu, counter.name, unit=counter.unit, rank=k), counter)
        for k, spans in enumerate(tracks.spans(kernels, run.steps[run.steps["capture"] == worker.capture])):
            out.slices(out.track(gpu, spans.kind, rank=100 + k), spans.kind, _spans(spans))
        for k, (stream, rows) in enumerate(kernels.groupby("stream")):
            name = f"stream {stream}"
            out.slices(out.track(gpu, name, rank=200 + k), name, _kernels(rows, i, counters))


def _shift_ns(run: Run, workers: pd.DataFrame) -> int:
    """What brings a file's times onto the clock of the first host, as far as its collectives tell."""
    gpus = set(workers["gpu"])
    for clock in run.clock_offsets.itertuples():
        if clock.known and gpus & set(clock.gpus):  # type: ignore[arg-type]
            return -round(float(clock.offset_us) * 1000)  # type: ignore[arg-type]
    return 0


def _number(column: pd.Series) -> int:
    """The first value that is a number; 0 where none is."""
    return next((int(v) for v in column.astype(str) if v.isdigit()), 0)


def _flows(correlation: pd.Series, capture: int) -> np.ndarray:
    """One flow per launch call; ids differ between files."""
    ids = correlation.to_numpy("int64")
    return np.where(ids >= 0, (np.int64(capture + 1) << np.int64(40)) + (ids & ((1 << 40) - 1)), 0)


def _host(events: pd.DataFrame, capture: int) -> Track:
    flow = np.where(events["kind"] == "runtime", _flows(events["correlation"], capture), 0)
    return Track(_categorical(events["name"]), events["start_ns"].to_numpy(), events["end_ns"].to_numpy(), {}, {}, flow)


def _spans(spans: tracks.Spans) -> Track:
    numbers = {"step": np.where(spans.step >= 0, spans.step.astype(float), np.nan)}
    texts = {"phase": pd.Categorical([p or None for p in spans.phase])}
    return Track(pd.Categorical(spans.label), spans.start_ns, spans.end_ns, texts, numbers,
                 np.zeros(len(spans.label), np.int64))


def _kernels(rows: pd.DataFrame, capture: int, counters: pd.DataFrame) -> Track:
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    numbers = {name: rows[column].to_numpy() / 1000 for name, column in NUMBERS.items()}
    share = np.divide(rows["overlap_ns"], end - start, out=np.zeros(len(rows)), where=end > start)
    numbers |= {"step": rows["step"].astype("float64").to_numpy(), "overlap_share": np.round(share, 4),
                "clock_mhz": np.round(rows["clock_mhz"].to_numpy(), 1),
                "correlation": rows["correlation"].astype("float64").where(rows["correlation"] >= 0).to_numpy()}
    # A gap that is not there is told by its absence.
    numbers = {n: np.where(v == 0, np.nan, v) if n in NUMBERS else v for n, v in numbers.items()}
    numbers |= {str(name): values.to_numpy() for name, values in counters.reindex(rows.index).items()}
    texts = {name: _categorical(rows[name]) for name in TEXTS}
    return Track(_categorical(rows["name"]), start, end, texts, numbers,
                 np.where(rows["launch_ns"].notna(), _flows(rows["correlation"], capture), 0))


def _categorical(column: pd.Series) -> pd.Categorical:
    return pd.Categorical(column.astype("category").cat.remove_unused_categories())


class Process(NamedTuple):
    uuid: int
    pid: int


class _Writer:
    """Packets into blocks of compressed packets."""

    def __init__(self, file: IO[bytes], redactor: Redactor | None) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2
        except ImportError as error:
            raise ChopperError("a .pftrace needs the perfetto package; install tb-chopper[trace]") from error
        self._pb = perfetto_trace_pb2
        self._file = file
        self._redact = redactor.text if redactor else str
        self._block = perfetto_trace_pb2.Trace()
        self._n = 0
        self._uuid = 0
        self._sequence = 0
        self._ids: set[int] = set()
        self.shift_ns = 0

    def flush(self) -> None:
        if self._n:
            block = self._pb.Trace()
            block.packet.add().compressed_packets = zlib.compress(self._block.SerializeToString(), 6)
            self._file.write(block.SerializeToString())
        self._block, self._n = self._pb.Trace(), 0

    def packet(self) -> TracePacket:
        if self._n >= BLOCK_PACKETS:
            self.flush()
        self._n += 1
        return self._block.packet.add()

    # -- tracks

    def process(self, pid: int, name: str, rank: int) -> Process:
        packet = self._descriptor()
        packet.track_descriptor.process.pid = own = self._free(pid)
        packet.track_descriptor.process.process_name = self._redact(name)
        packet.track_descriptor.child_ordering = EXPLICIT
        packet.track_descriptor.sibling_order_rank = rank
        return Process(packet.track_descriptor.uuid, own)

    def thread(self, process: Process, tid: int, name: str) -> int:
        packet = self._descriptor()
        packet.track_descriptor.parent_uuid = process.uuid
        packet.track_descriptor.thread.pid = process.pid
        packet.track_descriptor.thread.tid = process.pid if tid == process.pid else self._free(tid)
        packet.track_descriptor.thread.thread_name = self._redact(name)
        return int(packet.track_descriptor.uuid)

    def track(self, parent: int, name: str, *, unit: str | None = None, rank: int = 0) -> int:
        """A track of slices, or of a counter where it has a unit ("" for a plain number)."""
        packet = self._descriptor()
        packet.track_descriptor.parent_uuid = parent
        packet.track_descriptor.name = self._redact(name)
        packet.track_descriptor.child_ordering = EXPLICIT
        packet.track_descriptor.sibling_order_rank = rank
        if unit is not None:
            packet.track_descriptor.counter.unit_name = unit
        return int(packet.track_descriptor.uuid)

    def _descriptor(self) -> TracePacket:
        packet = self.packet()
        self._uuid += 1
        packet.track_descriptor.uuid = self._uuid
        packet.trusted_packet_sequence_id = 1
        return packet

    def _free(self, wanted: int) -> int:
        """`wanted`, or a free id where another process or thread has it."""
        free = wanted if wanted and wanted not in self._ids else FREE_ID + len(self._ids)
        self._ids.add(free)
        return free

    # -- events

    def counter(self, uuid: int, counter: tracks.Counter) -> None:
        times = counter.t_ns.tolist()
        sequence, last = self._begin(uuid, times[0])
        for t, value in zip(times, counter.value.tolist(), strict=True):
            packet = self._event(sequence, t - last, COUNTER)
            packet.track_event.double_counter_value = value
            last = t

    def slices(self, uuid: int, name: str, track: Track) -> None:
        """Slices on a track; those that would not nest go to tracks of the same name below it."""
        arguments = _Arguments(track, self._redact)
        for i, rows in enumerate(lanes(track.start_ns, track.end_ns)):
            lane = uuid if i == 0 else self.track(uuid, name or "overlapping", rank=i)
            ordered = edges(rows, track.start_ns, track.end_ns)
            self._lane(lane, int(track.start_ns[rows[0]]), ordered, track, arguments)

    def _lane(self, uuid: int, first_ns: int, ordered: Iterator[Edge], track: Track,
              arguments: _Arguments) -> None:
        sequence, last = self._begin(uuid, first_ns, arguments)
        names, flows = (track.name.codes + 1).tolist(), track.flow.tolist()
        for t, row in ordered:
            packet = self._event(sequence, t - last, END if row < 0 else BEGIN)
            last = t
            if row >= 0:
                packet.track_event.name_iid = names[row] or arguments.unnamed
                if flows[row]:
                    packet.track_event.flow_ids.append(flows[row])
                arguments.add(packet.track_event.debug_annotations, row)

    def _begin(self, uuid: int, first_ns: int, arguments: _Arguments | None = None) -> tuple[int, int]:
        """A new sequence for the events of one track, and its first time."""
        self._sequence += 1
        packet = self.packet()
        packet.trusted_packet_sequence_id = sequence = 1 + self._sequence
        packet.sequence_flags = CLEARED
        for clock, incremental in ((TRACK_CLOCK, True), (BOOTTIME, False), (REALTIME, False)):
            packet.clock_snapshot.clocks.add(
                clock_id=clock, timestamp=first_ns + self.shift_ns, is_incremental=incremental)
        packet = self.packet()
        packet.trusted_packet_sequence_id = sequence
        packet.sequence_flags = NEEDED
        packet.trace_packet_defaults.timestamp_clock_id = TRACK_CLOCK
        packet.trace_packet_defaults.track_event_defaults.track_uuid = uuid
        if arguments is not None:
            arguments.intern(packet.interned_data)
        return sequence, first_ns

    def _event(self, sequence: int, delta_ns: int, kind: int) -> TracePacket:
        packet = self.packet()
        packet.timestamp = delta_ns
        packet.trusted_packet_sequence_id = sequence
        packet.sequence_flags = NEEDED
        packet.track_event.type = kind
        return packet


class _Arguments:
    """The names and arguments of a track's slices as ids of interned texts."""

    def __init__(self, track: Track, redact: Any) -> None:
        self._redact = redact
        self._names = [str(n) for n in track.name.categories]
        self.unnamed = len(self._names) + 1
        self._keys = [*track.texts, *track.numbers]
        self._strings: list[str] = []
        self._texts: list[tuple[int, list[int]]] = []
        for key, values in enumerate(track.texts.values(), 1):
            first = len(self._strings) + 1
            self._strings += [str(v) for v in values.categories]
            self._texts.append((key, np.where(values.codes < 0, 0, values.codes + np.int64(first)).tolist()))
        self._numbers = [
            (key, values.tolist()) for key, values in enumerate(track.numbers.values(), 1 + len(track.texts))]

    def intern(self, data: Any) -> None:
        _fill(data.event_names, [self._redact(n) for n in (*self._names, "unnamed")])
        _fill(data.debug_annotation_names, self._keys)
        for iid, text in enumerate(self._strings, 1):
            data.debug_annotation_string_values.add(iid=iid, str=self._redact(text).encode())

    def add(self, annotations: Any, row: int) -> None:
        for key, ids in self._texts:
            if ids[row]:
                annotations.add(name_iid=key, string_value_iid=ids[row])
        for key, numbers in self._numbers:
            value = numbers[row]
            if value == value:
                if value == int(value):
                    annotations.add(name_iid=key, int_value=int(value))
                else:
                    annotations.add(name_iid=key, double_value=value)


def _fill(entries: Any, names: Sequence[str]) -> None:
    for iid, name in enumerate(names, 1):
        entries.add(iid=iid, name=name)
