"""Every table: column, dtype, unit, meaning.

Readers fill the raw tables (HOST, DEVICE, MEMORY, THREADS), attribution makes KERNELS and STEPS of them,
metrics and views see only those. Times are absolute int64 nanoseconds since the epoch (or since the
trace's own zero, where the file has no epoch), `-1` marks a missing integer in raw tables; the public
tables use pandas' nullable `Int64`. Strings are pandas categoricals: a trace repeats few names often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from tb_chopper.backend.findings import Finding

VERSION = 3
"""Raised whenever a table changes: caches of another version are not read."""

MISSING = -1


class Column(NamedTuple):
    name: str
    dtype: str  # int64 | int32 | float64 | bool | category | Int64 (nullable)
    unit: str
    meaning: str


Table = tuple[Column, ...]

HOST_KINDS = ("cpu_op", "annotation", "runtime", "module")
"""cpu_op: a dispatched operator; annotation: record_function scope; runtime: CUDA/HIP runtime or driver call;
module: an `nn.Module: X` frame of the Python tracer. Async communication annotations (nccl:, gloo:) have
their own kind so that nobody nests them."""
ASYNC = "async"
GC = "gc"
"""A run of Python's garbage collector; like async, it is no scope."""
PROFILER = "profiler"
"""Work of the profiler itself, as CUPTI tells it; no scope either."""
ALL_HOST_KINDS = (*HOST_KINDS, ASYNC, GC, PROFILER)

HOST: Table = (
    Column("start_ns", "int64", "ns", "start"),
    Column("end_ns", "int64", "ns", "end"),
    Column("name", "category", "", "event name as written, overload included"),
    Column("kind", "category", "", f"one of {ALL_HOST_KINDS}"),
    Column("thread", "int32", "", "row of THREADS"),
    Column("correlation", "int64", "", "runtime calls: correlation id, else -1"),
    Column("external_id", "int64", "", "External id, else -1"),
    Column("seq", "int64", "", "autograd Sequence number (thread-local), else -1"),
    Column("fwd_thread", "int64", "", "Fwd thread id: 0 or -1 in forward, logical thread id in backward"),
    Column("args", "category", "", "recorded shapes as JSON text {Input Dims, Input type, Concrete Inputs}, or null"),
    Column("finished", "bool", "", "False: the scope was open when the capture stopped; its end is not its own"),
)

THREADS: Table = (
    Column("pid", "category", "", "process id as written"),
    Column("tid", "category", "", "thread id as written"),
    Column("name", "category", "", "thread_name metadata, or null"),
)

ACTIVITIES = ("kernel", "memcpy", "memset")

DEVICE: Table = (
    Column("start_ns", "int64", "ns", "start"),
    Column("end_ns", "int64", "ns", "end, after repairs"),
    Column("raw_end_ns", "int64", "ns", "end as written in the file"),
    Column("name", "category", "", "kernel or copy name"),
    Column("activity", "category", "", f"one of {ACTIVITIES}, from the event's category"),
    Column("device", "category", "", "device as written (on ROCm an HSA node id): a label, not an identity"),
    Column("stream", "int64", "", "stream"),
    Column("correlation", "int64", "", "correlation id, else -1"),
    Column("external_id", "int64", "", "External id, else -1"),
    Column("bytes", "int64", "B", "copies: bytes moved, else -1"),
    Column("grid", "category", "", "grid as JSON text, or null (ROCm: threads for hipExtModuleLaunchKernel)"),
    Column("block", "category", "", "block as JSON text, or null"),
    Column("blocks_per_sm", "float64", "", "blocks per SM (CUDA), else NaN"),
    Column("occupancy", "float64", "%", "est. achieved occupancy (CUDA), else NaN"),
    Column("graph_node", "int64", "", "graph node id, else -1"),
    Column("collective", "category", "", "Collective name, or null"),
    Column("group", "category", "", "Process Group Name, or null"),
    Column("group_desc", "category", "", "Process Group Description, or null"),
    Column("group_size", "int64", "", "Group size, else -1"),
    Column("group_seq", "int64", "", "Seq of the collective in its group, else -1"),
    Column("dtype", "category", "", "dtype of the message, or null"),
    Column("in_nelems", "int64", "", "In msg nelems of this rank, else -1"),
    Column("out_nelems", "int64", "", "Out msg nelems of this rank, else -1"),
    Column("peer", "int64", "", "messages between two: rank of the other, else -1"),
)

MEMORY: Table = (
    Column("t_ns", "int64", "ns", "time of the allocator event"),
    Column("bytes", "int64", "B", "allocated (positive) or freed (negative)"),
    Column("allocated_bytes", "int64", "B", "Total Allocated after the event, else -1"),
    Column("reserved_bytes", "int64", "B", "Total Reserved after the event, else -1"),
    Column("device_type", "int64", "", "0 CPU, 1 CUDA, 6 HIP, ..."),
    Column("device_id", "int64", "", "device index, -1 for CPU"),
)

KINDS = ("compute", "communication", "memcpy")
OP_TYPES = ("gemm", "attention", "vector")
PHASES = ("forward", "backward", "optimizer", "other")
BEFORE_CAPTURE = "launched before capture"
UNATTRIBUTED = "unattributed"

KERNELS: Table = (
    Column("name", "category", "", "kernel or copy name (CPU-only profiles: operator name)"),
    Column("kind", "category", "", f"one of {KINDS}"),
    Column("start_ns", "int64", "ns", "start"),
    Column("end_ns", "int64", "ns", "end, after repairs"),
    Column("raw_end_ns", "int64", "ns", "end as written in the file"),
    Column("activity", "category", "", "kernel, memcpy, memset, or cpu_op for the stand-in of a CPU-only profile"),
    Column("stream", "int64", "", "stream"),
    Column("device", "category", "", "device label of the trace; 'cpu' for the stand-in"),
    Column("gpu", "int64", "", "rank of the worker, or its order where no rank is known (one per run)"),
    Column("worker", "category", "", "worker name"),
    Column("span", "int64", "", "capture window of the worker, from 0"),
    Column("capture", "int64", "", "(file, device) this row comes from: row of WORKERS"),
    Column("correlation", "int64", "", "correlation id, else -1"),
    Column("launch_ns", "Int64", "ns", "start of the launch call, missing where unknown"),
    Column("launch_end_ns", "Int64", "ns", "end of the launch call, missing where unknown"),
    Column("launch_name", "category", "", "launch call, e.g. hipExtModuleLaunchKernel"),
    Column("step", "Int64", "", "training step by launch time, missing outside every step"),
    Column("phase", "category", "", f"one of {PHASES}"),
    Column("layer", "category", "", "repeated module it belongs to, e.g. layers.3, or null"),
    Column("operation", "category", "", "what the author would call it; never null"),
    Column("op_type", "category", "", f"compute rows: one of {OP_TYPES}; else null"),
    Column("cpu_op", "category", "", "innermost operator that launched it, or null"),
    Column("op_id", "int64", "", "HOST row of that operator, else -1: kernels of one call share it"),
    Column("op_args", "category", "", "recorded shapes of cpu_op (JSON text), or null"),
    Column("recompute", "bool", "", "forward work repeated inside backward (activation checkpointing)"),
    Column("attributed_by", "category", "", "how the row got its operation"),
    Column("overlap_ns", "int64", "ns", "part of the row covered by communication of its GPU (communication: 0)"),
    Column("prep_ns", "int64", "ns", "O_prep: gap before the launch call began"),
    Column("call_ns", "int64", "ns", "O_call: gap from launch call to start"),
    Column("call_under_communication_ns", "int64", "ns", "part of call_ns covered by communication"),
    Column("graph_ns", "int64", "ns", "gap inside a CUDA/HIP graph replay"),
    Column("unattributed_ns", "int64", "ns", "gap before a kernel whose launch is unknown"),
    *(c for c in DEVICE if c.name in (
        "bytes", "grid", "block", "blocks_per_sm", "occupancy", "collective", "group", "group_desc",
        "group_size", "group_seq", "dtype", "in_nelems", "out_nelems", "peer")),
)

STEPS: Table = (
    Column("capture", "int64", "", "row of WORKERS"),
    Column("gpu", "int64", "", "as in KERNELS"),
    Column("step", "int64", "", "step number as in ProfilerStep#N, or counted from 0"),
    Column("start_ns", "int64", "ns", "start of the step on the host"),
    Column("end_ns", "int64", "ns", "end of the step on the host"),
    Column("gpu_start_ns", "Int64", "ns", "first kernel launched in the step; missing where it has none"),
    Column("gpu_end_ns", "Int64", "ns", "first kernel of the next step, or last end of the last step's kernels"),
    Column("n_kernels", "int64", "", "kernels launched in the step"),
    Column("complete", "bool", "", "False: part of the step lies outside the capture or lost its kernels"),
    Column("source", "category", "", "ProfilerStep, annotation, optimizer, dataloader, or sequence"),
    Column("device", "category", "", "as in KERNELS"),
)

COMPILED_KINDS = ("region", "compiled")
"""region: a frame that torch.compile compiled, with what runs eagerly in its graph breaks; compiled: a graph in it."""
CALL_KINDS = ("sync", "allocation", "loader", "compile", "recompile", "gc", "profiler", *COMPILED_KINDS)

CALLS: Table = (
    Column("gpu", "int64", "", "as in KERNELS; of a file with several devices, the first"),
    Column("kind", "category", "", f"one of {CALL_KINDS}"),
    Column("name", "category", "", "runtime call or scope"),
    Column("start_ns", "int64", "ns", "start"),
    Column("end_ns", "int64", "ns", "end"),
    Column("thread", "int64", "", "thread of the file, counted from 0"),
    Column("step", "Int64", "", "training step by its start on the host, missing outside"),
)
"""What a host did that may keep its GPU waiting: waits for the device, driver allocations, data loading, compilation,
garbage collection."""

ACTION_KINDS = ("F", "B", "I", "W")

ACTIONS: Table = (
    Column("gpu", "int64", "", "as in KERNELS"),
    Column("capture", "int64", "", "row of WORKERS"),
    Column("device", "category", "", "as in KERNELS"),
    Column("step", "Int64", "", "training step by its start on the host, missing outside"),
    Column("kind", "category", "", f"one of {ACTION_KINDS}: forward, backward, its part for inputs, for weights"),
    Column("stage", "int64", "", "stage, counted over all ranks; -1: its name does not tell"),
    Column("microbatch", "int64", "", "microbatch, from 0"),
    Column("start_ns", "int64", "ns", "start on the host"),
    Column("end_ns", "int64", "ns", "end on the host"),
    Column("first_ns", "Int64", "ns", "begin of the first computation it launched"),
    Column("last_ns", "Int64", "ns", "end of the last; missing where it launched nothing"),
    Column("busy_ns", "int64", "ns", "time between the two in which its work ran, without messages between stages"),
    Column("schedule", "category", "", "class of the schedule and its size as its scope tells, or null"),
)
"""Actions of a pipeline schedule: one microbatch in one stage, forward or backward."""

WORKERS: Table = (
    Column("capture", "int64", "", "row number: one per (file, device)"),
    Column("file", "category", "", "trace file, relative to the run"),
    Column("worker", "category", "", "worker name from the file name or sidecar"),
    Column("span", "int64", "", "capture window of the worker, from 0"),
    Column("rank", "Int64", "", "rank, missing where unknown"),
    Column("world_size", "Int64", "", "world size, missing where unknown"),
    Column("host", "category", "", "host name, or null"),
    Column("gpu", "int64", "", "as in KERNELS"),
    Column("device", "category", "", "device label of the trace; 'cpu' for the stand-in"),
    Column("gpu_name", "category", "", "device name, or null"),
    Column("n_kernels", "int64", "", "device kernels (CPU-only profile: leaf operators)"),
    Column("n_steps", "int64", "", "steps"),
    Column("start_ns", "int64", "ns", "first start of a device activity, -1 if there is none"),
    Column("end_ns", "int64", "ns", "last end of a device activity, -1 if there is none"),
    Column("complete", "bool", "", "False: the file is damaged; kept out of means over ranks"),
)


TELEMETRY: Table = (
    Column("t_ns", "int64", "ns", "time of the reading since the epoch, on the clock of the log's host"),
    Column("uncertainty_ns", "int64", "ns", "the reading lies within this of t_ns"),
    Column("monotonic_ns", "int64", "ns", "the same moment on CLOCK_MONOTONIC of the host, else -1"),
    Column("host", "category", "", "host name, or null"),
    Column("gpu", "int64", "", "number of the GPU in the log; in a run: as in KERNELS"),
    Column("clock_mhz", "float64", "MHz", "engine clock, mean over compute dies"),
    Column("memory_clock_mhz", "float64", "MHz", "memory clock"),
    Column("power_w", "float64", "W", "power of the package"),
    Column("energy_j", "float64", "J", "energy since an arbitrary zero, wraps undone"),
    Column("temperature_c", "float64", "°C", "hottest spot of the GPU, else its only sensor"),
    Column("memory_temperature_c", "float64", "°C", "memory"),
    Column("activity_pct", "float64", "%", "share of time in which any kernel ran, as the driver counts"),
    Column("memory_activity_pct", "float64", "%", "use of memory, as the driver counts"),
    Column("sm_activity_pct", "float64", "%", "share of compute units that had work"),
    Column("sm_occupancy_pct", "float64", "%", "occupancy of compute units"),
    Column("tensor_activity_pct", "float64", "%", "share of time of the matrix pipes"),
    Column("memory_used_bytes", "float64", "B", "memory of the device in use, as the driver counts: all processes"),
    Column("clock_limit_mhz", "float64", "MHz", "highest engine clock of the device"),
    Column("power_limit_w", "float64", "W", "power cap in force"),
    Column("throttle", "category", "", "reason:percent of time since the previous sample; none; null: unknown"),
)

TELEMETRY_GPUS: Table = (
    Column("host", "category", "", "host name, or null"),
    Column("gpu", "int64", "", "number of the GPU in the log"),
    Column("name", "category", "", "device name, or null"),
    Column("pci_address", "category", "", "0000:c1:00.0, or null"),
    Column("source", "category", "", "amdsmi, nvml, sysfs, simulated, or the format of a foreign log"),
    Column("power_of", "int64", "", "another GPU whose power reading includes this one (dies of one module), else -1"),
)

CPU: Table = (
    Column("t_ns", "int64", "ns", "end of the interval, since the epoch"),
    Column("monotonic_ns", "int64", "ns", "the same on CLOCK_MONOTONIC of the host, else -1"),
    Column("host", "category", "", "host name, or null"),
    Column("cpu", "int64", "", "logical CPU; only busy ones have rows, -1 stands for a sample in which none was busy"),
    Column("busy_pct", "float64", "%", "share of the time since the previous sample"),
    Column("clock_mhz", "float64", "MHz", "clock, where it was read"),
    Column("threads", "float64", "", "threads of the training that ran there last, where they were counted"),
)

CPU_CORES: Table = (
    Column("host", "category", "", "host name, or null"),
    Column("cpu", "int64", "", "logical CPU"),
    Column("core", "int64", "", "physical core, numbered from 0; SMT siblings share one"),
)

CLOCKS: Table = (
    Column("host", "category", "", "host name, or null"),
    Column("session", "int64", "", "sampler that wrote it, from 0 within a log; -1: a sidecar"),
    Column("realtime_ns", "int64", "ns", "CLOCK_REALTIME"),
    Column("monotonic_ns", "int64", "ns", "CLOCK_MONOTONIC at the same moment"),
    Column("boottime_ns", "int64", "ns", "CLOCK_BOOTTIME at the same moment, else -1"),
    Column("uncertainty_ns", "int64", "ns", "the readings lie within this of each other"),
)


@dataclass
class Trace:
    """One trace file as tables: what a reader yields.

    `meta` holds the file's other top-level keys that are of use (deviceProperties, distributedInfo, host_name,
    versions, profiler flags, chopper); never the environment. `complete` is False when part of the file was lost.
    """

    path: Path
    host: pd.DataFrame
    threads: pd.DataFrame
    device: pd.DataFrame
    memory: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    complete: bool = True


@dataclass
class TelemetryLog:
    """One log of clocks, power and CPU use as tables: what a telemetry reader yields. `name` is the file's; `times`
    says where its times come from: monotonic (with clock pairs), epoch, local (a time zone was applied), anchored."""

    name: str
    samples: pd.DataFrame
    gpus: pd.DataFrame
    cpu: pd.DataFrame
    cores: pd.DataFrame
    clocks: pd.DataFrame
    times: str
    findings: list[Finding] = field(default_factory=list)


COUNTERS: Table = (
    Column("pass", "int64", "", "number of the pass by the folder's name, else 0: one run of the program each"),
    Column("file", "category", "", "file it was read from"),
    Column("host", "category", "", "host name, or null"),
    Column("process", "int64", "", "process id, else -1"),
    Column("rank", "Int64", "", "rank by the file's name, missing where it does not tell"),
    Column("agent", "category", "", "device as the profiler names it (Agent 2, GPU 0): a label, not an identity"),
    Column("gpu_index", "int64", "", "place among the GPU agents of the process, else -1: Agent 2 may be GPU 0"),
    Column("xcc", "Int64", "", "compute dies over which counters are summed, missing where unknown"),
    Column("dispatch", "int64", "", "dispatch id: counts over all queues and agents of the process"),
    Column("queue", "int64", "", "queue, else -1"),
    Column("stream", "int64", "", "stream of the profiler (no stream of torch), else -1"),
    Column("name", "category", "", "kernel name as written"),
    Column("grid", "int64", "", "work-items (threads) of the whole grid, else -1"),
    Column("workgroup", "int64", "", "work-items of a workgroup, else -1"),
    Column("start_ns", "int64", "ns", "start in the clock of the profiler, else -1"),
    Column("end_ns", "int64", "ns", "end, else -1"),
)
"""One row per dispatch of a counter run, in order of process and dispatch. Behind these columns stands one float64
column per counter, named as the profiler names it and summed over all hardware instances; NaN: not collected for
this dispatch. Counters of clocks (GRBM_GUI_ACTIVE, GRBM_COUNT) are sums over `xcc` dies too. A kernel trace has
the same rows and no counters."""

AGENTS: Table = (
    Column("host", "category", "", "host name, or null"),
    Column("process", "int64", "", "process id, else -1"),
    Column("node", "int64", "", "node id of the driver, CPUs included"),
    Column("logical_node", "int64", "", "node id among those visible, CPUs included"),
    Column("gpu_index", "int64", "", "place among the GPUs, -1 for a CPU"),
    Column("arch", "category", "", "gfx942, sm_90, ..., or the CPU's name"),
    Column("product", "category", "", "product name; not always the marketing name"),
    Column("device_id", "int64", "", "PCI device id, else -1"),
    Column("units", "int64", "", "CUs or SMs, else -1"),
    Column("simds", "int64", "", "SIMDs, else -1"),
    Column("xcc", "int64", "", "compute dies, else -1"),
    Column("shader_engines", "int64", "", "shader engines, else -1"),
    Column("wave_size", "int64", "", "threads of a wave, else -1"),
    Column("waves_per_unit", "int64", "", "waves that a unit can hold, else -1"),
    Column("max_clock_mhz", "int64", "MHz", "highest clock of the compute units, else -1"),
    Column("pci_address", "category", "", "0000:c1:00.0, or null"),
    Column("kfd_id", "int64", "", "id of the kernel driver, as AMD SMI reports it, else -1"),
)


@dataclass
class CounterFile:
    """One file of a profiler that counts hardware events: `counters` and `agents`, either of which may be empty.

    `tool`: rocprofv3, rocprof-compute or ncu. `complete` is False when part of the file was lost.
    """

    path: Path
    counters: pd.DataFrame
    agents: pd.DataFrame
    tool: str
    findings: list[Finding] = field(default_factory=list)
    complete: bool = True


def counter_names(counters: pd.DataFrame) -> list[str]:
    """The columns of a COUNTERS table that are counters."""
    fixed = {c.name for c in COUNTERS}
    return [c for c in counters.columns if c not in fixed]


def with_counters(rows: pd.DataFrame, counters: dict[str, np.ndarray]) -> pd.DataFrame:
    """A COUNTERS table of rows that may lack columns, and the counters of each row."""
    fixed = conform(rows, COUNTERS)
    return pd.concat([fixed, pd.DataFrame(counters, index=fixed.index, dtype="float64")], axis=1)


def empty(table: Table) -> pd.DataFrame:
    """A table of no rows with the right columns."""
    return pd.DataFrame({c.name: _series(c, []) for c in table})


def conform(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """`frame` with exactly the columns of `table`, in order and dtype; missing columns are filled with the null."""
    data = {}
    for c in table:
        if c.name in frame:
            column = frame[c.name]
            data[c.name] = column if str(column.dtype) == c.dtype else column.astype(c.dtype)
        else:
            data[c.name] = _series(c, [_NULL[c.dtype]] * len(frame)).set_axis(frame.index)
    return pd.DataFrame(data, index=frame.index)


def concat(frames: Sequence[pd.DataFrame], table: Table) -> pd.DataFrame:
    """One frame of all, categoricals kept categorical."""
    if not frames:
        return empty(table)
    data: dict[str, Any] = {}
    for c in table:
        columns = [f[c.name] for f in frames]
        if c.dtype == "category":
            data[c.name] = union_categoricals([_with_object_categories(s) for s in columns], ignore_order=True)
        else:
            data[c.name] = pd.concat(columns, ignore_index=True)
    return pd.DataFrame(data)


def codes(column: pd.Series, values: Sequence[str]) -> np.ndarray:
    """Place of each value of a categorical in `values`, -1 where it is none of them.

    The codes of the categorical itself say nothing: its categories stand in any order.
    """
    return column.cat.set_categories(list(values)).cat.codes.to_numpy()


def _with_object_categories(column: pd.Series) -> pd.Series:
    """Empty and all-null categoricals have categories of another dtype, which pandas will not unite."""
    return column.cat.rename_categories(column.cat.categories.astype(object))


_NULL: dict[str, Any] = {
    "int64": MISSING, "int32": MISSING, "float64": np.nan, "bool": False, "category": None, "Int64": pd.NA,
}


def _series(column: Column, values: list[Any]) -> pd.Series:
    return pd.Series(values, dtype=column.dtype)
