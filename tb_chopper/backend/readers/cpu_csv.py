"""CPU use as the paper's own tool exports it: one row per time and logical CPU (`ts`, `cpu`, `percent`). Names and
command lines of processes, which such tables may hold, are not read."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import log_times, text_table
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.readers.smi_columns import TIMES, plain

BUSY = ("percent", "busy_pct", "util", "utilization")


def recognises(head: str) -> bool:
    return any(_is_header(text_table.split(line)) for line in head.splitlines())


def read(content: bytes, file: str, base: TimeBase) -> tuple[pd.DataFrame, str, list[Finding]]:
    """The CPU table, the origin of its times, and findings. Raises UnreadableFile."""
    table = text_table.comma_separated(content, file, _is_header)
    names = {plain(h): h for h in reversed(table.rows.columns)}
    time = next(names[n] for n in TIMES if n in names)
    cpu = pd.to_numeric(table.rows[names["cpu"]], errors="coerce")
    busy = pd.to_numeric(table.rows[next(names[n] for n in BUSY if n in names)], errors="coerce")
    times = log_times.parse(table.rows[time], log_times.unit_in(time), base, file)
    good = cpu.notna().to_numpy() & busy.notna().to_numpy() & (times.t_ns >= 0)
    if not good.any():
        raise UnreadableFile(f"{file}: no row with a time, a CPU and its use")
    rows = pd.DataFrame({"t_ns": times.t_ns[good], "cpu": cpu[good].astype("int64"), "busy_pct": busy[good]})
    return schema.conform(_busy_only(rows), schema.CPU), times.origin, times.findings


def _busy_only(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of busy CPUs, and one row for each time at which there was none."""
    busy = rows[rows["busy_pct"] > 0]
    idle = np.setdiff1d(rows["t_ns"], busy["t_ns"])
    none = pd.DataFrame({"t_ns": idle, "cpu": schema.MISSING, "busy_pct": 0.0})
    return pd.concat([busy, none], ignore_index=True).sort_values(["t_ns", "cpu"], kind="stable", ignore_index=True)


def _is_header(fields: list[str] | tuple[str, ...] | object) -> bool:
    names = {plain(f) for f in fields} if isinstance(fields, (list, tuple)) else set()
    return "cpu" in names and bool(names & {*TIMES}) and bool(names & {*BUSY})
