"""CPU use (paper equations 4 and 5; docs/telemetry.md): how many cores are awake, and how few would do.

    C_active = Σ [util_i > 0]        C_min = Σ util_i / 100        over logical CPUs, per sample
"""

from __future__ import annotations

import numpy as np
import pandas as pd


def cpu_utilization(cpu: pd.DataFrame, cores: pd.DataFrame) -> pd.DataFrame:
    """One row per sample: t_ns, host, c_active, c_min, active_physical (cores with a busy logical CPU), physical
    (cores of the host), both_siblings (cores with two or more busy logical CPUs), threads (of the training that ran,
    where they were counted, else NaN).

    cpu: CPU, cores: CPU_CORES. Without the cores of a host its physical columns are missing.
    """
    busy = _with_cores(cpu, cores)
    n_physical = cores.groupby("host", observed=True, dropna=False)["core"].nunique()
    keys = ["host", "t_ns"]
    awake = busy[busy["cpu"] >= 0]
    per_core = awake[awake["core"].notna()].groupby([*keys, "core"], observed=True, dropna=False).size()
    grouped = per_core.groupby(level=[0, 1], dropna=False)
    samples = busy.assign(c_active=(busy["cpu"] >= 0).astype("int64")).groupby(keys, observed=True, dropna=False)
    out = samples.agg(c_active=("c_active", "sum"), c_min=("busy_pct", "sum")).assign(
        threads=samples["threads"].sum(min_count=1))
    out = out.assign(c_min=out["c_min"] / 100, active_physical=grouped.size(),
                     both_siblings=(per_core >= 2).groupby(level=[0, 1], dropna=False).sum()).reset_index()
    out["physical"] = out["host"].map(n_physical).astype("Int64")
    for column in ("active_physical", "both_siblings"):
        out[column] = out[column].fillna(0).astype("Int64").where(out["physical"].notna())
    names = ["t_ns", "host", "c_active", "c_min", "active_physical", "physical", "both_siblings", "threads"]
    return out[names].sort_values(keys[::-1], ignore_index=True)


def summary(utilization: pd.DataFrame) -> pd.DataFrame:
    """One row per host, medians over samples as in the paper: host, n, c_active, c_min, active_physical, physical,
    active_physical_share, both_siblings_share (of the active cores)."""
    median = utilization.groupby("host", observed=True, dropna=False).agg(
        n=("t_ns", "size"), c_active=("c_active", "median"), c_min=("c_min", "median"),
        active_physical=("active_physical", "median"), physical=("physical", "max"),
        both=("both_siblings", "sum"), active=("active_physical", "sum")).reset_index()
    physical = median["physical"].astype("Float64")
    return median.assign(
        active_physical_share=median["active_physical"] / physical,
        both_siblings_share=median["both"] / median["active"].where(median["active"] > 0),
    ).drop(columns=["both", "active"])


def spare_cores(utilization: pd.DataFrame) -> pd.Series:
    """Physical cores that could sleep, by sample, if the same work ran on as few cores as would do: max(0, active
    physical cores − ⌈C_min⌉). Missing without the cores of the host."""
    needed = np.ceil(utilization["c_min"].round(6)).astype("int64")
    return (utilization["active_physical"] - needed).clip(lower=0)


def core_activity(cpu: pd.DataFrame, cores: pd.DataFrame) -> pd.DataFrame:
    """One row per sample and active physical core (the heat map's cells): t_ns, host, core, active (busy logical
    CPUs), busy_pct (their sum)."""
    busy = _with_cores(cpu, cores)
    busy = busy[(busy["cpu"] >= 0) & busy["core"].notna()].astype({"core": "int64"})
    out = busy.groupby(["host", "t_ns", "core"], observed=True, dropna=False, as_index=False).agg(
        active=("cpu", "size"), busy_pct=("busy_pct", "sum"))
    return out[["t_ns", "host", "core", "active", "busy_pct"]]


def _with_cores(cpu: pd.DataFrame, cores: pd.DataFrame) -> pd.DataFrame:
    known = cores.astype({"host": object})
    return cpu.astype({"host": object}).merge(known, on=["host", "cpu"], how="left")


def busy_by_cpu(cpu: pd.DataFrame) -> pd.DataFrame:
    """Mean use of each logical CPU over all samples of its host: host, cpu, busy_pct, active_share (of the samples)."""
    samples = cpu.groupby("host", observed=True, dropna=False)["t_ns"].nunique()
    busy = cpu[cpu["cpu"] >= 0].groupby(["host", "cpu"], observed=True, dropna=False, as_index=False).agg(
        busy=("busy_pct", "sum"), active=("t_ns", "nunique"))
    n = busy["host"].map(samples).to_numpy(np.float64) if busy["host"].notna().all() else float(samples.sum())
    return busy.assign(busy_pct=busy["busy"] / n, active_share=busy["active"] / n).drop(columns=["busy", "active"])
