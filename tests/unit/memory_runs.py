"""Runs of four GPUs of 80 GiB whose memory and stalls are known, for tests of views and of the page.

Floor 12 GiB, peaks 62, 66, 70 and 74 GiB, 3 GiB more reserved, 2 GiB more as the driver counts; GPU 1 keeps 200 MiB of
every step. The loader of GPU 2 takes 400 µs of each step of 2000, that of the others 30; GPU k collects garbage for
120 µs in the steps n with n mod 3 = k mod 3.
"""

from __future__ import annotations

from pathlib import Path

from tests.builders import ZERO_NS, TraceBuilder
from torch_ext import sidecar
from torch_ext import telemetry_format as log

GIB, MIB = 2**30, 2**20
RANKS, STEPS, STEP_US = 4, 8, 2000
LATE, GROWS = 2, 1
GROWTH = 200 * MIB
PARAMETERS = 8_030_261_248
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def floor(rank: int, number: int) -> int:
    return 12 * GIB + (GROWTH * number if rank == GROWS else 0)


def peak(rank: int, number: int) -> int:
    return floor(rank, number) + (50 + 4 * rank) * GIB


def write(folder: Path, *, events: bool = True, telemetry: bool = True, modules: bool = True) -> Path:
    """The files of a run: traces with or without memory events, a log of used memory, sidecars with modules."""
    for rank in range(RANKS):
        trace = TraceBuilder(rank=rank, world_size=RANKS)
        trace.head["deviceProperties"][0]["totalGlobalMem"] = 80 * GIB
        for number in range(STEPS):
            _step(trace, rank, number, events)
        path = trace.write(folder / f"rank{rank}.pt.trace.json.gz")
        if modules:
            content = sidecar.empty()
            content["modules"] = [{"fqn": "", "cls": "Llama", "params": PARAMETERS, "order": 0}]
            content["training"]["parallel"] = {"dp_shard": 8}
            sidecar.write(sidecar.path_for(path), content)
    if telemetry:
        _log(folder)
    return folder


def _step(trace: TraceBuilder, rank: int, number: int, events: bool) -> None:
    at = STEP_US * number
    trace.training_step(number, at)
    trace.annotation(LOADER, at + 1010, 400 if rank == LATE else 30)
    if number % 3 == rank % 3:
        trace.module("Python GC", at + 1500, 120)
    if events:
        low, high = floor(rank, number), peak(rank, number)
        kept = low - (floor(rank, number - 1) if number else 0)
        for time, size, level in ((1, kept, low), (70, high - low, high), (650, low - high, low)):
            trace.memory(at + time, size, level, high + 3 * GIB)


def _log(folder: Path) -> None:
    lines = [log.line("start", 0, 0, text="node0"), log.line("clock", 0, 0, realtime_ns=ZERO_NS, boottime_ns=0)]
    lines += [log.line("gpu_info", 0, 0, gpu=rank, source="nvml", text="NVIDIA H100") for rank in range(RANKS)]
    for t in range(100_000, STEPS * STEP_US * 1000, 250_000):
        for rank in range(RANKS):
            used = peak(rank, t // (STEP_US * 1000)) + 5 * GIB
            lines.append(log.line("gpu", t, t, gpu=rank, memory_used_bytes=used))
    (folder / log.file_name("node0")).write_text(log.header() + "".join(lines))
