"""Runs with a telemetry log whose every value is planted: a trace of TraceBuilder, a log line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.builders import ZERO_NS, TraceBuilder
from torch_ext import telemetry_format

BOOT_NS = 1_000_000_000_000
"""CLOCK_MONOTONIC at the trace's zero"""
MS = 1000
"""traces are in µs"""


def gpu_trace(folder: Path, steps: Iterable[tuple[float, float]], gpu: int = 0, gpus: int = 1) -> Path:
    """One rank; each step, given by start and end in ms, is one kernel `gemm`, back to back where the steps are."""
    trace = TraceBuilder("rocm", rank=gpu, world_size=gpus)
    for number, (start, end) in enumerate(steps):
        trace.step(number, start * MS, (end - start) * MS)
        trace.op("aten::mm", start * MS + 1, 20)
        trace.launch("Cijk_gemm", start * MS + 2, start * MS + 10, (end - start) * MS - 10)
    return trace.write(folder / f"rank{gpu}.pt.trace.json.gz")


def log(folder: Path, until_ms: float, gpu: Mapping[int, Callable[[float], dict[str, Any]]] | None = None,
        cpu: Callable[[float], dict[int, float]] | None = None, cores: Mapping[int, int] | None = None, *,
        period_ms: float = 1.0, cpu_period_ms: float = 10.0, threads: Mapping[int, int] | None = None,
        host: str = "node0", from_ms: float = 0.0) -> Path:  # fmt: skip
    """A sampler's log. gpu: by GPU the columns of a sample at a time in ms; cpu: percent by logical CPU."""
    lines: list[tuple[float, str]] = []

    def add(at_ms: float, kind: Any, **values: Any) -> None:
        at = BOOT_NS + round(at_ms * 1e6)
        lines.append((at_ms, telemetry_format.line(kind, at, at, **values)))

    add(from_ms, "start", text=host)
    if cores:
        add(from_ms, "cpu_info", cpu_cores=telemetry_format.pairs(cores.items()))
    for number in gpu or {}:
        add(from_ms, "gpu_info", gpu=number, source="simulated", text="AMD Instinct MI300X")
    for second in range(int((until_ms - from_ms) // 1000) + 2):
        at = from_ms + 1000 * second
        add(at, "clock", realtime_ns=ZERO_NS + round(at * 1e6), boottime_ns=BOOT_NS + round(at * 1e6))
    for number, values in (gpu or {}).items():
        for i in range(int((until_ms - from_ms) / period_ms) + 1):
            add(from_ms + i * period_ms, "gpu", gpu=number, **values(from_ms + i * period_ms))
    if cpu is not None:
        for i in range(1, int((until_ms - from_ms) / cpu_period_ms) + 1):
            at = from_ms + i * cpu_period_ms
            more = {"cpu_threads": telemetry_format.pairs(threads.items())} if threads else {}
            add(at, "cpu", cpu_pct=telemetry_format.pairs(cpu(at).items()), **more)
    path = folder / telemetry_format.file_name(host)
    ordered = sorted(lines, key=lambda entry: entry[0])
    path.write_text(telemetry_format.header() + "".join(text for _, text in ordered), encoding="utf-8")
    return path
