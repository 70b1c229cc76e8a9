"""Kineto traces in the layout of torch.profiler's exporter, in the ROCm and the CUDA dialect.

A step's events are made into one format string once per program; a step of a rank is written by filling in all its
numbers at once.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tb_chopper.backend.simulate import event_args, kineto_text, memory, plan
from tb_chopper.backend.simulate.config import NS_PER_S, Config
from tb_chopper.backend.simulate.program import N_STREAMS, N_STREAMS_ALONE, Program
from tb_chopper.backend.simulate.recorded import Rank, Step

SUFFIX = ".pt.trace.json"
_BASE_UNIT_S = 7_889_238
"""The exporter counts times from a multiple of this many seconds (three months)."""
_MARK = re.compile(r"\x02([a-z_]+)(\d+)\x03")
_MAX_GPUS = 16
"""The exporter names this many GPUs, used or not."""


def write(directory: Path, rank: Rank, templates: Templates) -> Path:
    """Write one rank's trace; returns its path. A truncated one ends in the middle, as a killed job leaves it."""
    config = rank.config
    path = directory / f"{rank.stem}{SUFFIX}{'.gz' if config.compress else ''}"
    text = "".join(_document(rank, templates)).encode()
    if config.compress:
        text = gzip.compress(text, compresslevel=3, mtime=0)
    if config.faults.truncate == rank.rank:
        text = text[: len(text) * 3 // 5]
    path.write_bytes(text)
    return path


def base_ns(t_ns: int) -> int:
    """`baseTimeNanoseconds` of a trace recorded at that time."""
    return t_ns // NS_PER_S // _BASE_UNIT_S * _BASE_UNIT_S * NS_PER_S


class Templates:
    """The text of the programs' steps, made once for all ranks."""

    def __init__(self, config: Config, programs: Sequence[Program]) -> None:
        self._by_program = {id(program): _Template(program, config) for program in programs}

    def of(self, step: Step) -> _Template:
        return self._by_program[id(step.program)]


def _document(rank: Rank, templates: Templates) -> Iterator[str]:
    base = base_ns(rank.window_start)
    values = event_args.of_rank(rank.config, rank.rank) | {
        name: str(value) for name, value in zip(kineto_text.CONSTANTS, (
            rank.pid, rank.device, rank.main_thread, rank.autograd_thread, rank.rank), strict=True)}
    yield _header(rank)
    index = flow = 0
    for step in rank.steps:
        yield _fill_constants(templates.of(step).fill(step, base, index, flow), values)
        index, flow = index + len(step.program.events), flow + len(step.program.flows)
    before = _Template(rank.warm.program, rank.config, only=rank.warm_items.tolist())
    yield _fill_constants(before.fill(rank.warm, base, 0, 0), values)
    if rank.config.profile_memory:
        yield from memory.text(rank, base, index)
    yield _footer(rank, base)


def _fill_constants(text: str, values: Mapping[str, str]) -> str:
    for constant, value in values.items():
        text = text.replace(constant, value)
    return text


class _Template:
    """The text of one step; `only`: of these items without their host side (launched before the capture)."""

    def __init__(self, program: Program, config: Config, only: list[int] | None = None) -> None:
        streams = kineto_text.STREAM_IDS[config.gpu.dialect]
        self.program, (scopes, self.scope_order, self.scope_edges) = program, _scopes(program)
        self.begins = np.asarray([e.begin for e in program.events])
        self.ends = np.asarray([e.end for e in program.events])
        if only is not None:
            parts = [kineto_text.device_event(i, program.items[i], config, launched=False) for i in only]
        else:
            parts = [
                *(kineto_text.host_event(i, event) for i, event in enumerate(program.events)),
                *(kineto_text.backward_flow(i, *flow) for i, flow in enumerate(program.flows)),
                *(kineto_text.device_event(i, item, config) for i, item in enumerate(program.items)),
                *(kineto_text.scope(i, program.events[e], streams[s]) for i, (e, s) in enumerate(scopes)),
            ]
        text = "".join(parts).replace("%", "%%")
        places = _places(program, len(scopes))
        self.numbers = np.asarray([places[m[1]] + int(m[2]) for m in _MARK.finditer(text)], dtype=np.int64)
        self.format = _MARK.sub(lambda m: "%03d" if m[1].endswith("_ns") else "%d", text)

    def fill(self, step: Step, base: int, first_index: int, first_flow: int) -> str:
        program = self.program
        points, start, length = step.points - base, step.start - base, step.end - step.start
        order, edges = self.scope_order, self.scope_edges
        scope = np.minimum.reduceat(start[order], edges) if len(edges) else edges
        scope_length = np.maximum.reduceat((start + length)[order], edges) - scope if len(edges) else edges
        times = (points, points[self.ends] - points[self.begins], start, length, scope, scope_length)
        vector = np.concatenate([
            *(part for t in times for part in (t // 1000, t % 1000)),
            step.external + np.arange(program.n_external),
            step.correlation + np.arange(program.n_correlation),
            step.seq + np.arange(program.n_seq + 1),
            first_index + np.arange(len(program.events)),
            first_flow + 1 + np.arange(len(program.flows)),
            np.asarray([step.collective[c.counter] + c.seq for c in program.collectives], np.int64),
            [step.number],
        ])
        return self.format % tuple(vector[self.numbers].tolist())


def _places(program: Program, n_scopes: int) -> dict[str, int]:
    """Where the numbers of each kind begin in the vector that `fill` makes."""
    times = {"point": len(program.cost_ns), "duration": len(program.events), "start": len(program.items),
             "length": len(program.items), "scope": n_scopes, "scope_length": n_scopes}
    sizes = {f"{name}_{unit}": size for name, size in times.items() for unit in ("us", "ns")}
    sizes |= {"external": program.n_external, "correlation": program.n_correlation, "seq": program.n_seq + 1,
              "index": len(program.events), "flow": len(program.flows), "collective": len(program.collectives),
              "step": 1}
    return dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))


def _scopes(program: Program) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
    """(annotation event, stream) pairs that have kernels; items in the order of these pairs; first item of each."""
    keys = [(item.scope, item.stream) for item in program.items]
    order = sorted((i for i, key in enumerate(keys) if key[0] >= 0), key=lambda i: keys[i])
    edges = [k for k, i in enumerate(order) if k == 0 or keys[i] != keys[order[k - 1]]]
    return [keys[order[k]] for k in edges], np.asarray(order, np.int64), np.asarray(edges, np.int64)


def _header(rank: Rank) -> str:
    config, gpu = rank.config, rank.config.gpu
    rocm = gpu.dialect == "rocm"
    shared = ('"maxSharedMemoryPerMultiProcessor": 65536' if rocm else
              '"regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472')
    major, minor = (9, 4) if rocm else (9, 0)
    devices = ",\n".join(
        f'    {{\n      "id": {i}, "name": "{gpu.name}", "totalGlobalMem": {gpu.memory_bytes},\n'
        f'      "computeMajor": {major}, "computeMinor": {minor},\n'
        '      "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,\n'
        f'      "regsPerBlock": 65536, "warpSize": {64 if rocm else 32},\n'
        f'      "sharedMemPerBlock": {65536 if rocm else 49152}, "numSms": {gpu.units}\n    , {shared}\n    }}'
        for i in range(config.gpus_per_host))
    versions = {"roctracer_version": 4.1, "hip_runtime_version": 70051831, "hip_driver_version": 70051831}
    if not rocm:
        versions = {"cupti_version": 26, "cuda_runtime_version": 12080, "cuda_driver_version": 12090}
    groups = [{"pg_name": g.name, "pg_desc": g.description, "backend_config": "cuda:nccl", "pg_size": len(g.ranks),
               "ranks": list(g.ranks)} for g in dict.fromkeys(plan.groups(config, rank.rank).values())]
    keys: dict[str, Any] = {
        **versions,
        "distributedInfo": {"backend": "nccl", "rank": rank.rank, "world_size": config.ranks,
                            "pg_count": len(groups), "pg_config": groups,
                            "nccl_version": "2.26.6" if rocm else "2.27.3"},
        "record_shapes": 1,
        **({"profile_memory": 1} if config.profile_memory else {}),
        "simulated": 1,
        "host_name": rank.host,
        "trace_id": f"{config.seed:08X}{rank.rank:08X}{rank.window_start:016X}",
    }
    members = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in keys.items())
    return f'{{\n  "schemaVersion": 1,\n  "deviceProperties": [\n{devices}\n  ],\n{members}  "traceEvents": [\n'


def _footer(rank: Rank, base: int) -> str:
    first, last, length = (
        f"{t // 1000}.{t % 1000:03d}"
        for t in (rank.window_start - base, rank.window_end - base, rank.window_end - rank.window_start))
    rows = [("process_name", rank.pid, 0, {"name": "python3"}), ("process_labels", rank.pid, 0, {"labels": "CPU"}),
            ("process_sort_index", rank.pid, 0, {"sort_index": rank.pid})]
    for i in range(_MAX_GPUS):
        rows += [("process_name", i, 0, {"name": "python3"}), ("process_labels", i, 0, {"labels": f"GPU {i}"}),
                 ("process_sort_index", i, 0, {"sort_index": i + 5_000_000})]
    used = N_STREAMS if rank.config.plan.pipeline > 1 else N_STREAMS_ALONE
    for stream in kineto_text.STREAM_IDS[rank.config.gpu.dialect][:used]:
        rows += [("thread_name", rank.device, stream, {"name": f"stream {stream} "}),
                 ("thread_sort_index", rank.device, stream, {"sort_index": stream})]
    for thread, name in ((rank.main_thread, "python3"), (rank.autograd_thread, "python3"),
                         (rank.autograd_thread, "pt_autograd_0")):
        rows += [("thread_name", rank.pid, thread, {"name": f"thread {thread} ({name})"}),
                 ("thread_sort_index", rank.pid, thread, {"sort_index": thread})]
    metadata = "".join(
        f'  {{\n    "name": "{name}", "ph": "M", "ts": {first}, "pid": {pid}, "tid": {tid},\n'
        f'    "args": {{\n      {json.dumps(args)[1:-1]}\n    }}\n  }},\n' for name, pid, tid, args in rows)
    return (
        f'{metadata}  {{\n    "ph": "X", "cat": "Trace", "ts": {first}, "dur": {length},\n'
        '    "pid": "Spans", "tid": "PyTorch Profiler",\n    "name": "PyTorch Profiler (0)",\n'
        '    "args": {\n      "Op count": 0\n    }\n  },\n'
        f'  {{\n    "name": "process_sort_index", "ph": "M", "ts": {first},\n    "pid": "Spans", "tid": 0,\n'
        '    "args": {\n      "sort_index": 536870912\n    }\n  },\n'
        '  {\n    "name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g",\n    "pid": "Traces", '
        f'"tid": "Trace PyTorch Profiler", "ts": {first}\n  }},\n'
        '  {\n    "name": "Record Window End", "ph": "i", "s": "g",\n    "pid": "", "tid": "", '
        f'"ts": {last}\n  }}\n  ],\n  "traceName": "{rank.stem}{SUFFIX}",\n  "displayTimeUnit": "ms",\n'
        f'  "baseTimeNanoseconds": {base}\n}}\n'
    )
