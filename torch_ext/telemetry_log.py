"""The file that a sampler writes: append-only, whole lines, and patient with a full disk."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch_ext import telemetry_format

FLUSH_NS = 500_000_000
RETRY_NS = 5_000_000_000


class Log:
    """Collects lines and appends them twice per second: a killed sampler loses half a second.

    A write that fails is told once on stderr; what could not be written is lost, and counted in a note as soon as
    there is room again. The file stays readable: after half a line the next write begins a new one.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened for appending."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._pending: list[str] = []
        self._lost = 0
        self._warned = False
        self._written_ns = self._retry_ns = 0
        size = os.fstat(self._file).st_size
        self._cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        if size == 0:
            self._pending.append(telemetry_format.header())

    def add(self, line: str) -> None:
        self._pending.append(line)

    def flush(self, now_ns: int, always: bool = False) -> None:
        """Write what is due."""
        due = now_ns - self._written_ns >= FLUSH_NS and now_ns >= self._retry_ns
        if not self._pending or not (due or always):
            return
        self._written_ns = now_ns
        lines, self._pending = self._pending, []
        if self._lost:
            text = f"{self._lost} records were lost: the file could not be written"
            lines.append(telemetry_format.line("note", now_ns, now_ns, text=text))
        data = ("\n" * self._cut + "".join(lines)).encode()
        try:
            self._write(data)
            self._lost = 0
        except OSError as error:
            self._lost += len(lines)
            self._retry_ns = now_ns + RETRY_NS
            self._warn(error)

    def close(self) -> None:
        self.flush(time.monotonic_ns(), always=True)
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        while data:
            n = os.write(self._file, data)
            self._cut = data[n - 1:n] != b"\n"
            data = data[n:]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            print(f"tb-chopper: telemetry cannot be written to {self.path}: {error.strerror or error}; "
                  "the training goes on", file=sys.stderr, flush=True)
