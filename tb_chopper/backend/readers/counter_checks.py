"""Counter values that cannot be right, and what is done with them. Each kind was seen in real files."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.findings import Finding

NEVER_ZERO = ("GRBM_GUI_ACTIVE", "GRBM_COUNT", "SQ_WAVES", "SQ_BUSY_CYCLES", "SQ_BUSY_CU_CYCLES", "SQ_WAVE_CYCLES",
              "SQ_CYCLES")
"""Counters that every kernel moves."""
_DETERMINED = ("SQ_WAVES",)
"""Counters that name and grid determine. (Instructions are not: two matrix products of one kernel and grid differ in
their depth.)"""

MAX_CLOCK_GHZ = 3.0
"""Above every clock of the GPUs that have several dies."""
CLOCK_NS = 500_000
"""Starting and stopping the counters adds some 16,000 cycles per die: 2 % of a kernel of 500 µs."""
_GUESS_NS = 50_000


def check(counters: pd.DataFrame, agents: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    """The counters with impossible values set to missing, and a finding for each kind of them."""
    findings: list[Finding] = []
    if len(counters):
        for step in (_times, _zeros, _dies, _waves, _spread):
            counters, found = step(counters)
            findings += found
        findings += _clocks(counters, agents)
    return counters, findings


def cycles_per_die(counters: pd.DataFrame) -> pd.Series:
    """GRBM_GUI_ACTIVE of one die, NaN where it or the number of dies is not known."""
    if "GRBM_GUI_ACTIVE" not in counters:
        return pd.Series(np.nan, counters.index)
    return counters["GRBM_GUI_ACTIVE"] / counters["xcc"].astype("float64")


def _times(counters: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    bad = (counters["start_ns"] >= 0) & (counters["end_ns"] <= counters["start_ns"])
    if not bad.any():
        return counters, []
    times = counters[["start_ns", "end_ns"]].mask(bad, schema.MISSING)
    return counters.assign(start_ns=times["start_ns"], end_ns=times["end_ns"]), [Finding(
        "dispatch_time_bad", "warning", "dispatches that end before they start or last 0 ns: their times are left out, "
        "their counters stay", int(bad.sum()))]


def _zeros(counters: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    names = [n for n in schema.counter_names(counters) if counters[n].notna().any() and not counters[n].any()]
    missing = [n for n in names if n in NEVER_ZERO]
    # Hundreds of metrics of Nsight are rightly 0; AMD's events are few, asked for by name, and upper case.
    idle = [n for n in names if n not in NEVER_ZERO and n.removesuffix("_sum").isupper()]
    findings = []
    if missing:
        findings.append(Finding("counter_not_collected", "warning", f"{', '.join(missing)}: 0 in every dispatch, "
                                "which no kernel can be. Not collected? Left out; check the profiler's permissions and "
                                "the driver", int(counters[missing].notna().sum().sum())))
    if idle:
        findings.append(Finding("counter_all_zero", "info", f"{', '.join(idle)}: 0 in every dispatch; either nothing "
                                "of it happened or it was not collected", int(counters[idle].notna().sum().sum())))
    return counters.assign(**dict.fromkeys(missing, np.nan)), findings


def _dies(counters: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    """Dies by the clock where no agent tells them: the fewest that make it a possible one."""
    duration = (counters["end_ns"] - counters["start_ns"]).where(counters["start_ns"] >= 0)
    if "GRBM_GUI_ACTIVE" not in counters:
        return counters, []
    known = counters["xcc"].notna()
    usable = ~known & (duration >= _GUESS_NS) & (counters["GRBM_GUI_ACTIVE"] > 0)
    findings, xcc = [], counters["xcc"].copy()
    for (process, agent), rows in counters[usable].groupby(["process", "agent"], observed=True):
        clock_ghz = rows["GRBM_GUI_ACTIVE"].sum() / duration[rows.index].sum()
        dies = next((n for n in (1, 2, 4, 8) if clock_ghz / n <= MAX_CLOCK_GHZ), None)
        if dies is not None:
            mine = ~known & (counters["process"] == process) & (counters["agent"] == agent)
            xcc[mine] = dies
            findings.append(Finding("xcc_assumed", "warning", f"no agent_info file tells the dies of {agent}: its "
                                    f"cycles, {clock_ghz:.3g} per ns, are taken for the sum of {dies} at "
                                    f"{1000 * clock_ghz / dies:.0f} MHz; keep the agent_info files beside the counters",
                                    int(mine.sum())))
    return counters.assign(xcc=xcc), findings


def _waves(counters: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    if "SQ_WAVES" not in counters:
        return counters, []
    grid, group = counters["grid"].where(counters["grid"] > 0), counters["workgroup"].where(counters["workgroup"] > 0)
    known = counters["SQ_WAVES"].notna() & grid.notna() & group.notna()
    by_size = [known & ((counters["SQ_WAVES"] / (np.ceil(group / wave) * np.ceil(grid / group)) - 1).abs() > 0.01)
               for wave in (64, 32)]
    off = min(by_size, key=lambda wrong: wrong.sum())  # one GPU has waves of one size
    return counters, [Finding("waves_unexpected", "warning", "dispatches whose SQ_WAVES is not the number of waves of "
                              "their grid: their other counters may be wrong by the same factor", int(off.sum()))
                      ] if off.any() else []


def _spread(counters: pd.DataFrame) -> tuple[pd.DataFrame, list[Finding]]:
    findings = []
    groups = counters.groupby(["name", "grid", "workgroup"], observed=True, sort=False)
    for name in (n for n in _DETERMINED if n in counters):
        median, size = groups[name].transform("median"), groups[name].transform("count")
        off = (size >= 3) & ((counters[name] - median).abs() > 0.01 * median)
        if off.any():
            low, high = counters.loc[off, name].min(), counters.loc[off, name].max()
            findings.append(Finding("counter_spread", "warning", f"{name} differs between equal dispatches (from "
                                    f"{low:g} to {high:g} where it is not their median): trust medians, not means",
                                    int(off.sum())))
    return counters, findings


def _clocks(counters: pd.DataFrame, agents: pd.DataFrame) -> list[Finding]:
    duration = (counters["end_ns"] - counters["start_ns"]).where(counters["start_ns"] >= 0)
    clock_mhz = 1000 * cycles_per_die(counters) / duration
    known = agents[(agents["gpu_index"] >= 0) & (agents["max_clock_mhz"] > 0)]
    limit = counters["gpu_index"].map(known.groupby("gpu_index")["max_clock_mhz"].max()).fillna(1000 * MAX_CLOCK_GHZ)
    off = (duration >= CLOCK_NS) & (clock_mhz > 1.05 * limit)
    return [Finding("clock_impossible", "warning", "dispatches whose cycles would need a clock above the maximum: "
                    "their times or cycles are wrong", int(off.sum()))] if off.any() else []
