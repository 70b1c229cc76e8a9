"""The one schema of `<host>.telemetry.csv`: what the sampler writes, and the analysis and the simulator know.

Pure Python, no torch. One file per host, append-only, one record per line, one header for all kinds of records;
a record leaves the columns of other kinds empty. Names carry the unit. No value holds a comma, a quote or a line
break, so that a line is whole exactly when it ends in a line feed and has all its commas: a file cut off at any
byte loses its last line only.

    record,before_ns,after_ns,gpu,clock_mhz,...,text
    start,918270000,918270000,,,...,node0                     once per sampler: the host's name
    gpu_info,...,gpu 0,...,pci_address 0000:05:00.0,text AMD Instinct MI300X
    cpu_info,...,cpu_cores 0:0 1:1 2:0 3:1                    physical core of each logical CPU
    clock,...,realtime_ns,boottime_ns                         clocks read together, about once per second
    gpu,...,gpu 0,clock_mhz 1873,...,throttle power:40        one sample of one GPU
    cpu,...,cpu_pct 0:97 2:12                                 one sample of the CPUs
    note,...,text                                             what a reader should know
    stop,...,text                                             the reason; missing where the sampler was killed

Lists are `key:value` pairs with blanks between them. An empty field is an unknown value, never a zero; only an empty
cpu_pct means that no CPU was busy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

SUFFIX = ".telemetry.csv"
_NOT_SAFE = re.compile(r"[^A-Za-z0-9_.-]")
_NOT_TEXT = re.compile(r'[,"\x00-\x1f\x7f]+')

Record = Literal["start", "gpu_info", "cpu_info", "clock", "gpu", "cpu", "note", "stop"]
Value = int | float | str | None


class Column(NamedTuple):
    name: str
    records: tuple[str, ...]
    """the kinds of record that fill it"""
    meaning: str


COLUMNS = (
    Column("record", (), "kind of the record"),
    Column("before_ns", (), "CLOCK_MONOTONIC just before the reading"),
    Column("after_ns", (), "CLOCK_MONOTONIC just after the reading; the value is taken for the middle"),
    Column("gpu", ("gpu", "gpu_info"), "number of the GPU on the host, as the source counts"),
    Column("clock_mhz", ("gpu",), "engine clock; several compute dies: mean of those with a valid reading"),
    Column("memory_clock_mhz", ("gpu",), "memory clock"),
    Column("power_w", ("gpu",), "power of the package, as close to instantaneous as the source gives"),
    Column("energy_j", ("gpu",), "energy counter since an arbitrary zero, never falls"),
    Column("temperature_c", ("gpu",), "hottest spot of the GPU, else its only sensor"),
    Column("memory_temperature_c", ("gpu",), "memory"),
    Column("activity_pct", ("gpu",), "share of time in which any kernel ran, as the driver counts"),
    Column("memory_activity_pct", ("gpu",), "time in which memory was used (NVML), share of its bandwidth (others)"),
    Column("sm_activity_pct", ("gpu",), "share of compute units that had work (GPM)"),
    Column("sm_occupancy_pct", ("gpu",), "occupancy of compute units (GPM)"),
    Column("tensor_activity_pct", ("gpu",), "share of time of the matrix pipes (GPM)"),
    Column("memory_used_bytes", ("gpu",), "memory of the device in use, as the driver counts: all processes"),
    Column("clock_limit_mhz", ("gpu",), "highest engine clock of the device; empty: as before"),
    Column("power_limit_w", ("gpu",), "power cap in force; empty: as before"),
    Column("throttle", ("gpu",), "reason:percent of the time since the previous sample, `none` where known to be free"),
    Column("realtime_ns", ("clock",), "CLOCK_REALTIME: nanoseconds since the epoch, the clock of traces"),
    Column("boottime_ns", ("clock",), "CLOCK_BOOTTIME, the clock of rocprofv3"),
    Column("cpu_pct", ("cpu",), "cpu:percent busy since the previous sample, logical CPUs above 0 only"),
    Column("cpu_mhz", ("cpu",), "cpu:MHz of busy logical CPUs, in some samples only"),
    Column("cpu_threads", ("cpu",), "cpu:the training's threads that ran since the previous such reading, by last CPU"),
    Column("cpu_cores", ("cpu_info",), "cpu:physical core of each logical CPU that is online"),
    Column("pci_address", ("gpu_info",), "0000:c1:00.0, the GPU's identity across tools"),
    Column("source", ("gpu_info",), "where the samples come from: amdsmi, nvml, sysfs, simulated"),
    Column("text", ("start", "gpu_info", "note", "stop"), "name or message; last, for a cut here does no harm"),
)
NAMES = tuple(c.name for c in COLUMNS)

THROTTLE_REASONS = {
    "power": "power cap (AMD PPT, NVIDIA SW power cap)",
    "thermal": "temperature of the GPU",
    "memory_thermal": "temperature of the memory (HBM)",
    "vr_thermal": "temperature of the voltage regulators",
    "prochot": "the board's overheat signal",
    "hw_slowdown": "hardware slowdown (thermal, power brake or overcurrent)",
    "power_brake": "external power brake",
    "application_clocks": "clocks set by the administrator or an application",
    "sync_boost": "held to the clock of a group of GPUs",
    "display_clocks": "held to the clock of a display",
    "other": "a reason that the driver does not name",
}
NO_THROTTLE = "none"


def file_name(host: str) -> str:
    """Name of a host's log inside the run."""
    return _NOT_SAFE.sub("_", host) + SUFFIX


def header() -> str:
    return ",".join(NAMES) + "\n"


def line(record: Record, before_ns: int, after_ns: int, **values: Value) -> str:
    """One record as text. Raises TypeError for a column that the kind of record does not have."""
    unknown = values.keys() - {c.name for c in COLUMNS if record in c.records}
    if unknown:
        raise TypeError(f"a {record} record has no {', '.join(sorted(unknown))}")
    fields: dict[str, Value] = {"record": record, "before_ns": before_ns, "after_ns": after_ns, **values}
    return ",".join(_text(fields.get(name)) for name in NAMES) + "\n"


def pairs(values: Iterable[tuple[int | str, int | float]]) -> str:
    """`[(0, 97), (2, 12.4)]` as `0:97 2:12.4`."""
    return " ".join(f"{key}:{_text(value)}" for key, value in values)


def throttle(shares: Mapping[str, int | float]) -> str:
    """Reasons (of THROTTLE_REASONS) with percent of time as text; `none` for no reason at all."""
    return pairs((reason, share) for reason, share in shares.items() if share > 0) or NO_THROTTLE


def _text(value: Value) -> str:
    """A field: numbers to six decimals at most, text without what would break a line."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".") if math.isfinite(value) else ""
    return _NOT_TEXT.sub(" ", str(value))
