"""CSV of Nsight Compute, the details page (a row per metric) and the raw page (a column per metric, units below).

Values come to base units (ns, byte, hz) whatever the file's, and are read in the locale that wrote them. Nsight
Compute locks clocks, flushes caches and replays kernels unless told not to: its times and clocks are not the
training's.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import counter_rows
from tb_chopper.backend.readers.rocprofv3_csv import text_of
from tb_chopper.backend.schema import CounterFile

_START = re.compile(rb'^"?ID"?,"?Process ID"?,', re.MULTILINE)

RAW_NAMES = {
    "Duration": "gpu__time_duration.sum",
    "Elapsed Cycles": "gpc__cycles_elapsed.max",
    "SM Frequency": "gpc__cycles_elapsed.avg.per_second",
    "DRAM Frequency": "dram__cycles_elapsed.avg.per_second",
    "SM Active Cycles": "sm__cycles_active.avg",
    "Achieved Occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "Compute (SM) Throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM Throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 Hit Rate": "lts__t_sector_hit_rate.pct",
    "# SMs": "device__attribute_multiprocessor_count",
}
"""What the details page calls a metric of the raw page."""

_FACTORS = {
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
    "hz": 1.0, "cycle/second": 1.0, "khz": 1e3, "mhz": 1e6, "ghz": 1e9, "cycle/usecond": 1e6, "cycle/nsecond": 1e9,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
    "byte/s": 1.0, "kbyte/s": 1e3, "mbyte/s": 1e6, "gbyte/s": 1e9, "tbyte/s": 1e12,
    "byte/second": 1.0, "kbyte/second": 1e3, "mbyte/second": 1e6, "gbyte/second": 1e9, "tbyte/second": 1e12,
    "kinst": 1e3, "minst": 1e6,
}
_ATTRIBUTE = "device__attribute_"
_RULE_COLUMNS = 5
"""Rows without a rule end before its columns."""
_CONTEXT = ["ID", "Process ID", "Host Name", "Kernel Name", "Stream", "Block Size", "Grid Size", "Device", "CC"]


def header_of(head: bytes) -> int | None:
    """Where the table begins behind the program's output, None where there is none."""
    match = _START.search(head)
    return match.start() if match else None


def read(path: Path) -> CounterFile:
    """COUNTERS (times are not recorded, only gpu__time_duration.sum in ns) and, where the file tells, AGENTS.

    Raises UnreadableFile.
    """
    text = text_of(path)
    start = header_of(text)
    if start is None:
        raise UnreadableFile(f"{path}: no table of Nsight Compute; write one with ncu --csv --page raw")
    rows = list(csv.reader(io.StringIO(text[start:].decode("utf-8", "replace"))))
    header = [h.strip() for h in rows[0]]
    # The program's own output may stand between: rows of the table begin with a number, or are those of the units.
    body = [r[: len(header)] for r in rows[1:] if len(r) >= len(header) - _RULE_COLUMNS
            and (r[0].isdigit() or not any(r[:5]))]
    body = [r + [""] * (len(header) - len(r)) for r in body]
    table = pd.DataFrame(body, columns=header)
    if "Metric Name" in header:
        first, values = _details(table)
    else:
        first, values = _raw(table)
    if not len(first):
        raise UnreadableFile(f"{path}: the table of Nsight Compute has no kernel: no kernel matched its filters")
    finding = Finding("clocks_not_the_trainings", "info", "Nsight Compute serializes kernels and, unless told "
                      "otherwise, locks clocks and flushes caches: its durations and clocks are not the training's",
                      file=path.name)
    grid, block = (np.array([_volume(v) for v in first.get(c, pd.Series("", first.index))], np.int64)
                   for c in ("Grid Size", "Block Size"))
    dispatches = counter_rows.placed(pd.DataFrame({
        "host": pd.Categorical(first["Host Name"]), "process": first["Process ID"].astype("int64").to_numpy(),
        "agent": pd.Categorical("GPU " + first.get("Device", pd.Series("?", first.index))), "xcc": 1,
        "gpu_index": [int(d) if str(d).isdigit() else schema.MISSING for d in first.get("Device", [-1] * len(first))],
        "dispatch": first["ID"].astype("int64").to_numpy(),
        "stream": [int(s) if str(s).isdigit() else schema.MISSING for s in first["Stream"]],
        "name": pd.Categorical(first["Kernel Name"]),
        "grid": np.where((grid > 0) & (block > 0), grid * block, schema.MISSING), "workgroup": block}), path)
    metrics = {name: v for name, v in values.items() if not name.startswith(_ATTRIBUTE)}
    return CounterFile(path, schema.with_counters(dispatches, metrics), _agents(first, values), "ncu", [finding])


def _details(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """One row per kernel and its metrics, of a table with one row per metric."""
    metrics = table[table["Metric Name"] != ""]
    number = Numbers(metrics["Metric Value"])
    first = table.drop_duplicates("ID").reset_index(drop=True)
    place = dict(zip(first["ID"], range(len(first)), strict=True))
    values: dict[str, np.ndarray] = {}
    unit_of: dict[str, str] = {}
    for kernel, metric, unit, text in zip(
            metrics["ID"], metrics["Metric Name"], metrics["Metric Unit"], metrics["Metric Value"], strict=True):
        name, factor = RAW_NAMES.get(metric, metric), _FACTORS.get(unit.lower(), 1.0)
        # Sections share names: "Memory Throughput" is a percentage in one and a bandwidth in another.
        kind = "" if factor != 1.0 or unit.lower() in _FACTORS else unit
        if unit_of.setdefault(name, kind) != kind:
            name = f"{name} [{unit}]"
        values.setdefault(name, np.full(len(first), np.nan))[place[kernel]] = number(text) * factor
    return first, {name: column for name, column in values.items() if not np.isnan(column).all()}


def _raw(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """One row per kernel and its metrics, of a table with one column per metric and a first row of units."""
    is_unit = table["ID"] == ""
    units, kernels = table[is_unit], table[~is_unit].reset_index(drop=True)
    columns = [c for c in dict.fromkeys(table.columns) if c not in _CONTEXT]
    number = Numbers(v for c in columns for v in kernels[c])
    values = {}
    for c in columns:
        factor = _FACTORS.get(units[c].iloc[0].lower(), 1.0) if len(units) else 1.0
        column = np.array([number(v) for v in kernels[c]]) * factor
        if not np.isnan(column).all():
            values[c] = column
    return kernels, values


class Numbers:
    """Reads numbers in the locale of the file, told by all its values together: 27.595.520 and 65,77 or
    27,595,520 and 65.77."""

    def __init__(self, values: Iterable[str]) -> None:
        votes = [vote for text in values if (vote := _decimal(text))]
        self.decimal = "," if votes.count(",") > votes.count(".") else "."

    def __call__(self, text: str) -> float:
        """NaN for anything that is no number (`n/a`)."""
        thousands = "." if self.decimal == "," else ","
        plain = _BLANKS.sub("", text).replace(thousands, "").replace(self.decimal, ".")
        try:
            value = float(plain)
        except ValueError:
            return math.nan
        return value if math.isfinite(value) else math.nan


_BLANKS = re.compile("[\\s'\u00a0\u202f]")
_NUMBER = re.compile(r"-?[\d.,]+")


def _decimal(text: str) -> str | None:
    """The decimal separator that a value proves, None where it could be either."""
    if not _NUMBER.fullmatch(text):
        return None
    points, commas = text.count("."), text.count(",")
    if points and commas:
        return "." if text.rfind(".") > text.rfind(",") else ","
    if points > 1 or commas > 1:
        return "," if points else "."
    separator = "." if points else "," if commas else None
    # Three digits behind one to three others may be thousands.
    return None if separator is None or re.fullmatch(r"-?\d{1,3}[.,]\d{3}", text) else separator


def _agents(first: pd.DataFrame, values: dict[str, np.ndarray]) -> pd.DataFrame:
    """The GPUs by their attributes, where the file holds them."""
    units = values.get("device__attribute_multiprocessor_count")
    if units is None:
        return schema.empty(schema.AGENTS)
    names = first.get("device__attribute_display_name", pd.Series([None] * len(first)))
    clock = values.get("device__attribute_clock_rate", np.full(len(first), np.nan)) / 1000
    device = first.get("Device", pd.Series("0", first.index))
    table = pd.DataFrame({
        "host": first["Host Name"], "process": first["Process ID"].astype("int64"), "gpu_index": device.astype("int64"),
        "node": device.astype("int64"), "logical_node": device.astype("int64"), "product": names,
        "arch": "sm_" + first["CC"].str.replace(".", "", regex=False), "device_id": schema.MISSING,
        "units": np.nan_to_num(units, nan=schema.MISSING), "simds": schema.MISSING, "xcc": 1,
        "shader_engines": schema.MISSING, "wave_size": 32, "waves_per_unit": schema.MISSING,
        "max_clock_mhz": np.nan_to_num(clock, nan=schema.MISSING), "kfd_id": schema.MISSING})
    return schema.conform(table.drop_duplicates("gpu_index", ignore_index=True), schema.AGENTS)


def _volume(text: object) -> int:
    """`(256, 1, 1)` as 256, -1 where there is none."""
    sizes = re.findall(r"\d+", str(text))
    return math.prod(map(int, sizes)) if sizes else schema.MISSING
