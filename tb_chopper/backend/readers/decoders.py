"""Decode chunks of events in helper processes: parsing holds the interpreter lock, so threads would not help.

The helpers are plain child processes that talk over pipes. `multiprocessing` is not used on purpose: TensorBoard
is full of threads (no fork), and its spawn runs the user's main script again.
"""

from __future__ import annotations

import gc
import os
import pickle
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

from tb_chopper.backend.readers.kineto_events import Chunk, parse

_PIPE_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from tb_chopper.backend.readers.decoders import serve; serve()"
MAX_PROCESSES = 4
"""More do not help: one process reads (and decompresses) for them all."""


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Decoders:
    """`submit(text)` gives a future of `parse(text)`; `processes=0` decodes at once, in this thread."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._own = threading.local()
        self._children: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(processes) if processes else None

    def submit(self, text: bytes) -> Future[Chunk]:
        if self._threads:
            return self._threads.submit(self._remote, text)
        done: Future[Chunk] = Future()
        done.set_result(parse(text))
        return done

    def _remote(self, text: bytes) -> Chunk:
        try:
            child = self._child()
            assert child.stdin is not None and child.stdout is not None
            _send(child.stdin, text)
            answer = _receive(child.stdout)
        except (OSError, EOFError):
            # No child can be had here, or it was killed for memory: the result is the same without it.
            return parse(text)
        chunk: Chunk = pickle.loads(answer)
        return chunk

    def _child(self) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] | None = getattr(self._own, "child", None)
        if child is None:
            # One thread each is enough: the helpers do no linear algebra.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            child = self._own.child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=[p or os.getcwd() for p in sys.path])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                pipesize=_PIPE_BYTES)
            self._children.append(child)
        return child

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                if pipe:
                    try:
                        pipe.close()
                    except OSError:
                        continue
            child.wait()


def _send(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(_LENGTH.pack(len(payload)))
    pipe.write(payload)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    return _read(pipe, _LENGTH.unpack(_read(pipe, _LENGTH.size))[0])


def _read(pipe: IO[bytes], length: int) -> bytes:
    payload = pipe.read(length)
    if len(payload) < length:
        raise EOFError
    return payload


def serve() -> None:
    """The helper's loop: text in, columns out, until the pipe is closed."""
    gc.disable()  # events are freed by reference count; there are no cycles to look for
    while True:
        try:
            text = _receive(sys.stdin.buffer)
        except EOFError:
            return
        _send(sys.stdout.buffer, pickle.dumps(parse(text), protocol=5))
