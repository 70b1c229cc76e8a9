"""`pmc_perf.csv` of rocprof-compute (and the equally wide CSV of rocprofv2): one row per dispatch, all counters.

The rows are joined from many passes, so counters and times of one row need not come from the same run of the kernel:
ratios across blocks and clocks read from them can be impossible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import counter_rows
from tb_chopper.backend.readers.rocprofv3_csv import read_csv
from tb_chopper.backend.schema import CounterFile

_NEEDED = {"dispatch_id", "gpu_id", "kernel_name"}
_DESCRIPTION = {
    "dispatch_id", "gpu_id", "queue_id", "pid", "tid", "process_id", "thread_id", "grid_size", "workgroup_size",
    "lds_per_workgroup", "scratch_per_workitem", "arch_vgpr", "accum_vgpr", "sgpr", "vgpr", "wave_size", "kernel_name",
    "kernel_id", "correlation_id", "start_timestamp", "end_timestamp", "obj", "sig", "node", "index",
}
_COPY = re.compile(r"^(.+)_\d+$")


def is_header(header: Iterable[str]) -> bool:
    """Whether a CSV of these columns is a pmc_perf.csv."""
    return {h.strip().lower() for h in header} >= _NEEDED


def read(path: Path) -> CounterFile:
    """COUNTERS of the file, and AGENTS of the `sysinfo.csv` beside it. Raises UnreadableFile."""
    table, findings, complete = read_csv(path, lower=False)
    lower = {c.lower(): c for c in table.columns}
    if not set(lower) >= _NEEDED:
        raise UnreadableFile(f"{path}: not a pmc_perf.csv (it lacks {', '.join(sorted(_NEEDED - set(lower)))})")

    def ints(name: str) -> pd.Series:
        column = table[lower[name]] if name in lower else pd.Series(schema.MISSING, table.index)
        return pd.to_numeric(column, errors="coerce").fillna(schema.MISSING).astype("int64")

    rows = counter_rows.placed(pd.DataFrame({
        "process": ints("pid").where(ints("pid") >= 0, ints("process_id")), "dispatch": ints("dispatch_id"),
        "agent": ("Agent " + ints("gpu_id").astype(str)).astype("category"), "queue": ints("queue_id"),
        "name": table[lower["kernel_name"]].astype("category"), "grid": ints("grid_size"),
        "workgroup": ints("workgroup_size"), "start_ns": ints("start_timestamp"), "end_ns": ints("end_timestamp"),
    }), path)
    counters = {c: pd.to_numeric(table[c], errors="coerce").to_numpy("float64") for c in table.columns
                if c.lower() not in _DESCRIPTION and not _is_copy(c, lower)}
    findings.append(Finding("merged_passes", "info", "counters and times of a row come from several runs of the "
                            "program: no clock is read from them", len(rows)))
    agents = _system(path.with_name("sysinfo.csv"))
    return CounterFile(path, schema.with_counters(rows, counters), agents, "rocprof-compute",
                       [f.at(path.name) for f in findings], complete)


def _is_copy(column: str, lower: dict[str, str]) -> bool:
    """`GRBM_COUNT_13`, `Kernel_ID_1`: the same column of another pass."""
    match = _COPY.match(column.lower())
    return match is not None and match.group(1) in lower


def _system(path: Path) -> pd.DataFrame:
    """The GPU of sysinfo.csv. Its number of dies is left out: it says 1 for GPUs of 4."""
    if not path.is_file():
        return schema.empty(schema.AGENTS)
    table, _, _ = read_csv(path)
    first = {c: table[c].iloc[0] for c in table.columns} if len(table) else {}

    def number(*names: str) -> int:
        found = [v for n in names if not pd.isna(v := pd.to_numeric(first.get(n), errors="coerce"))]
        return int(found[0]) if found else schema.MISSING

    return schema.conform(pd.DataFrame([{
        "process": schema.MISSING, "node": schema.MISSING, "logical_node": schema.MISSING, "gpu_index": 0,
        "arch": first.get("gpu_arch"), "product": first.get("gpu_model"), "device_id": schema.MISSING,
        "units": number("cu_per_gpu", "num_cu"), "simds": schema.MISSING, "xcc": schema.MISSING,
        "shader_engines": number("se_per_gpu", "num_se"), "wave_size": number("wave_size"),
        "waves_per_unit": number("max_waves_per_cu"), "max_clock_mhz": number("max_sclk"), "kfd_id": schema.MISSING,
    }]), schema.AGENTS)
