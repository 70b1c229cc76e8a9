"""Kineto traces (torch.profiler) into the tables of schema.py: streamed, columnar, on all processors.

    blocks of bytes (byte_stream) -> chunks of events (event_chunks) -> columns (kineto_events, in decoders)
    -> one table each (columns) -> repairs and findings (kineto_checks)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import event_chunks, kineto_checks, kineto_damage, top_level
from tb_chopper.backend.readers.byte_stream import BLOCK_BYTES, Decompressed, Progress, is_url, open_binary
from tb_chopper.backend.readers.columns import Merged
from tb_chopper.backend.readers.decoders import MAX_PROCESSES, Decoders, processors
from tb_chopper.backend.readers.event_chunks import CHUNK_BYTES
from tb_chopper.backend.readers.kineto_events import MAX_US, Chunk, parse
from tb_chopper.backend.readers.salvage import Damage
from tb_chopper.backend.schema import Trace

INLINE_BYTES = 24 << 20
"""Smaller texts are decoded here: starting helpers takes as long."""
ABSOLUTE_NS = 10**18
"""Times since the epoch are above this (since 2001); those relative to a base (three months) far below."""


def read(path: str | Path, progress: Progress | None = None, *, chunk_bytes: int = CHUNK_BYTES,
         processes: int | None = None) -> Trace:
    """Read a trace file (`.json`, gzipped or not, told apart by content; local path or fsspec URL).

    Damage is repaired or left out and reported in `findings`; `complete` is False where events were lost.
    `processes`: decoding helpers for big files, 0 for none, by default one per processor. Raises UnreadableFile, in
    one line, for a file of which nothing can be used.
    """
    reading = _Reading(str(path))
    with open_binary(path) as file:
        stream = Decompressed(file, min(chunk_bytes, BLOCK_BYTES))
        size = _size(path)
        try:
            head, chunks = event_chunks.split(stream, chunk_bytes)
        except event_chunks.NoEvents as missing:
            raise UnreadableFile(f"{path}: {kineto_damage.no_events(missing.text, stream.cut)}") from None
        reading.start(head)
        first = list(islice(chunks, 1 + INLINE_BYTES // chunk_bytes))
        if processes is None:
            processes = min(processors(), MAX_PROCESSES)
        with Decoders(0 if first[-1][1] else processes) as decoders:
            reading.all(_reported(chain(first, chunks), stream, size, progress), decoders)
        reading.cut = stream.cut
    return reading.finish(Path(path), size)


def _size(path: str | Path) -> int:
    return 0 if is_url(path) else Path(path).stat().st_size


def _reported(chunks: Iterator[tuple[bytes, bool]], stream: Decompressed, size: int,
              progress: Progress | None) -> Iterator[tuple[bytes, bool]]:
    for chunk in chunks:
        if progress and size:
            progress(min(1.0, stream.read_bytes / size), "reading events")
        yield chunk


class _Reading:
    """The state of one pass over a file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.host, self.device, self.memory = Merged(), Merged(), Merged()
        self.thread_names: dict[tuple[str, str], str] = {}
        self.counts: Counter[str] = Counter()
        self.damage: list[Damage] = []
        self.meta: dict[str, Any] = {}
        self.cut = ""

    def start(self, head: event_chunks.Head) -> None:
        self.head = head
        self.position = head.offset
        if not head.is_list:
            keys, sound = top_level.of_head(head.text)
            self.meta |= keys
            if not sound:
                self.damage.append(Damage("damaged_metadata", 0))

    def all(self, source: Iterator[tuple[bytes, bool]], decoders: Decoders) -> None:
        """Decode chunks with a few in flight, and take their results in the order of the file."""
        pending: deque[tuple[bytes, bool, Future[Chunk]]] = deque()
        carry = b""
        while True:
            while len(pending) < 2 * decoders.processes + 1 and (item := next(source, None)) is not None:
                pending.append((*item, decoders.submit(item[0]) if not item[1] else Future()))
            if not pending:
                return
            text, last, future = pending.popleft()
            begin, text = self.position - len(carry), carry + text
            if last:
                self._last(text, begin)
                return
            chunk = parse(text) if carry else future.result()
            carry = b""
            if chunk.unfinished is not None:
                # The border was a guess, and wrong: what is left over belongs to the next chunk.
                carry = text[chunk.unfinished :]
            self._add(chunk, begin)
            self.position = begin + len(text)
            if chunk.end is not None:
                rest = [text[chunk.end :], *(p[0] for p in pending), *(t for t, _ in source)]
                self._tail(b"".join(rest), begin + chunk.end)
                return

    def _last(self, text: bytes, begin: int) -> None:
        self.position = begin + len(text)
        if (rest := top_level.of_rest(text, self.head.is_list)) is not None:
            keys, events = rest
            self.meta |= keys
            self._add(parse(events), begin)
            return
        chunk = parse(text)
        self._add(chunk, begin)
        if chunk.end is None:
            self.damage.append(Damage("truncated", self.position))
        else:
            self._tail(text[chunk.end :], begin + chunk.end)

    def _tail(self, text: bytes, begin: int) -> None:
        keys, problem = top_level.of_tail(text, self.head.is_list)
        self.position = begin + len(text)
        self.meta |= keys
        if problem:
            self.damage.append(Damage(problem, self.position if problem == "truncated" else begin))

    def _add(self, chunk: Chunk, begin: int) -> None:
        self.host.add(chunk.host)
        self.device.add(chunk.device)
        self.memory.add(chunk.memory)
        self.thread_names |= chunk.thread_names
        self.counts += chunk.counts
        self.counts["events"] += chunk.n_events
        self.counts["python_frames"] += chunk.n_python_frames
        self.damage += [d._replace(offset=begin + d.offset) for d in chunk.damage]

    def finish(self, path: Path, size: int) -> Trace:
        if self.cut and not any(d.code == "truncated" for d in self.damage):
            self.damage.append(Damage("gzip_tail", self.position, 1, self.cut))
        n_rows = self.host.n_rows + self.device.n_rows + self.memory.n_rows
        if not n_rows:
            raise UnreadableFile(f"{self.name}: {kineto_damage.nothing_left(self.damage, self.counts, self.cut)}")
        base_ns, ignored = self._base()
        findings = kineto_damage.describe(self.damage, self.name, size, self.counts, self.cut)
        if ignored:
            findings.append(Finding("base_time_ignored", "info", (
                "times are absolute although the file gives a base: the base is not added")))
        host, threads = self._host(base_ns), self._threads()
        device, strays = kineto_checks.without_strays(self._device(base_ns))
        findings += strays
        findings += kineto_checks.repair(device)
        findings += kineto_checks.check(host, device, self.meta)
        return Trace(
            path, host, threads, device, self._memory(base_ns), self.meta, [f.at(path.name) for f in findings],
            complete=not any(f.severity == "error" for f in findings))

    def _base(self) -> tuple[int, bool]:
        """The file's time base in ns, and whether it has one that must not be added."""
        try:
            base_ns = int(self.meta.get("baseTimeNanoseconds", 0))
        except (TypeError, ValueError, OverflowError):
            base_ns = 0
        starts = [part for table in (self.host, self.device) for part in table.parts.get("start_ns", [])]
        n_absolute = sum(int((part >= ABSOLUTE_NS).sum()) for part in starts)
        absolute = 2 * n_absolute > sum(map(len, starts))
        return (0, base_ns != 0) if absolute else (base_ns if abs(base_ns) < MAX_US * 1000 else 0, False)

    def _threads(self) -> pd.DataFrame:
        keys = self.host.values("thread")
        names = [self.thread_names.get(key) for key in keys]
        rows = pd.DataFrame([(pid, tid, name) for (pid, tid), name in zip(keys, names, strict=True)],
                            columns=[c.name for c in schema.THREADS], dtype=object)
        return schema.conform(rows, schema.THREADS)

    def _host(self, base_ns: int) -> pd.DataFrame:
        table = self.host
        start, duration = table.take("start_ns", np.int64), table.take("duration_ns", np.int64)
        start += base_ns
        made: dict[str, Any] = {
            "start_ns": start, "end_ns": start + np.maximum(duration, 0), "thread": table.take("thread", np.int32),
            "kind": pd.Categorical.from_codes(table.take("kind", np.int8), list(schema.ALL_HOST_KINDS)),
        }
        return _frame(table, schema.HOST, made)

    def _device(self, base_ns: int) -> pd.DataFrame:
        table = self.device
        start, duration = table.take("start_ns", np.int64), table.take("duration_ns", np.int64)
        start += base_ns
        made: dict[str, Any] = {
            "start_ns": start, "end_ns": start + np.maximum(duration, 0), "raw_end_ns": start + duration,
            "activity": pd.Categorical.from_codes(table.take("activity", np.int8), list(schema.ACTIVITIES)),
        }
        return _frame(table, schema.DEVICE, made)

    def _memory(self, base_ns: int) -> pd.DataFrame:
        t_ns = self.memory.take("t_ns", np.int64)
        return _frame(self.memory, schema.MEMORY, {"t_ns": t_ns + base_ns})


def _frame(table: Merged, columns: schema.Table, made: dict[str, Any]) -> pd.DataFrame:
    """`table` as `columns` say; `made` holds those that are ready. Nothing is copied twice."""
    data: dict[str, Any] = {}
    for column in columns:
        if column.name in made:
            data[column.name] = made[column.name]
        elif column.dtype == "category":
            codes = table.take(column.name, np.int32)
            values = pd.Index(table.values(column.name), dtype=object).astype("str")
            data[column.name] = pd.Categorical.from_codes(codes, values)
        else:
            data[column.name] = table.take(column.name, np.dtype(column.dtype))
    return pd.DataFrame(data, copy=False)
