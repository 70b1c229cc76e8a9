"""CPU: how many of the hosts' cores are awake, how few would do, and what that could mean for the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tb_chopper.backend.views import cpu_figures, text
from tb_chopper.backend.views.cores import Cores, cores
from tb_chopper.backend.views.cpu_figures import Band
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Source, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    **cpu_figures.DEFINITIONS,
    "spare": "Active physical cores − ⌈C_min⌉, not below 0: cores that could sleep if the same work ran on as few "
    "cores as would do. Median over the samples.",
    "movable": "w × median over the samples of max(0, active physical cores − ⌈C_min⌉). w, the power that an awake "
    "core draws beyond a sleeping one, is not measured: it is chosen above (server CPUs: 350 to 500 W for 56 to 192 "
    "cores, so 2 to 8 W). Only where CPUs and GPUs share a limit (node, rack) can it move; packing threads onto "
    "fewer cores can slow them down.",
    "physical_share": "Active physical cores / physical cores of the host, median over the samples.",
    "siblings_share": "Cores with two or more busy logical CPUs / active cores, over all samples.",
    "limit_share": "That power / the power limits of the host's sampled GPUs together.",
}
NOT_SAMPLED = Missing(
    "Use of the host's CPUs, and the training's threads",
    "Nothing sampled the CPUs while this run was recorded.",
    'with torch_ext.telemetry("log/my_run"): train()',
)
BESIDE = Missing(
    "The same for a program that you cannot change",
    "The sampler can run beside any command; --pid counts the threads of a process.",
    "tb-chopper sample --out log/my_run",
)
CORE_DRAWS = ("4 W", "2 W", "6 W", "8 W")


def view(run: Run, selection: Selection) -> View:
    """Active CPUs against the lower bound, physical cores over time, siblings, threads, power that could move."""
    side = cores(run, selection)
    if side is None:
        return View("Nothing sampled the CPUs of this run's hosts.", missing=(NOT_SAMPLED, BESIDE))
    other = cores(selection.compare, Selection()) if selection.compare is not None else None
    watts = float(selection.options.get("core_draws", CORE_DRAWS[0]).removesuffix(" W"))
    main = side.main
    figures = {
        "over_time": cpu_figures.over_time(side, main, _steps(run, selection, main)),
        "siblings": cpu_figures.siblings(side, main),
        "threads": cpu_figures.threads(side, main),
        "by_cpu": cpu_figures.by_cpu(side, main),
    }
    return View(
        _headline(side, other),
        key_figures=_key_figures(side, other, watts),
        figures={name: figure for name, figure in figures.items() if figure is not None},
        tables=_tables(side, other, watts),
        missing=_missing(side, main),
    )


def _steps(run: Run, selection: Selection, host: pd.Series) -> list[Band]:
    """The selected steps on one GPU of the host."""
    on = run.workers.loc[run.workers["host"].astype(object) == host["host"], "gpu"]
    gpus = [g for g in selection.gpus if g in set(on)] or sorted(on) or sorted(run.workers["gpu"])
    rows = run.steps[(run.steps["gpu"] == gpus[0]) & run.steps["gpu_start_ns"].notna()].sort_values("gpu_start_ns")
    return [Band(int(r["step"]), int(r["gpu_start_ns"]), int(r["gpu_end_ns"])) for r in rows.to_dict("records")]


# ---- words -----------------------------------------------------------------------------------------------------------


def _headline(side: Cores, other: Cores | None) -> str:
    host = side.main
    who = f"On {host['host']}, " if len(side.hosts) > 1 else ""
    enough = int(np.ceil(round(host["c_min"], 6)))
    would_do = f"where {enough} would do" if host["c_active"] > enough else "and as many are needed"
    active = f"{_count(host['c_active'])} logical {'CPU was' if host['c_active'] == 1 else 'CPUs were'} active"
    line = f"{who}{active} {would_do} (C_min {host['c_min']:.2f}, medians)"
    if pd.notna(host["active_physical_share"]):
        line += (
            f"; {_count(host['active_physical'])} of {int(host['physical'])} physical cores were awake "
            f"({text.share(float(host['active_physical_share']))})"
        )
        both = float(host["both_siblings_share"])
        if side.has_siblings(host["host"]) and both == both:
            line += f", {text.share(both)} of them with both siblings busy"
    line += "."
    if host["logical"] == host["logical"] and host["c_min"] >= 0.9 * host["logical"]:
        line += " The host has hardly any CPU time left: the training may wait for it."
    if len(side.hosts) > 1:
        line += f" It has the most to spare of {len(side.hosts)} hosts."
    if other is not None:
        there = other.main
        line += f" {other.name}: {_count(there['c_active'])} active, C_min {there['c_min']:.2f}."
    return line


def _count(value: float) -> str:
    """A median of counts: 25, or 25.5 between two samples."""
    return f"{value:,.0f}".replace(",", " ") if float(value).is_integer() else f"{value:.1f}"


def _key_figures(side: Cores, other: Cores | None, watts: float) -> tuple[KeyFigure, ...]:
    host, there = side.main, other.main if other is not None else None

    def one(label: str, column: str, unit: str, definition: str, note: str, source: Source = "sampled",
            color: str = "", scale: float = 1.0) -> KeyFigure:  # fmt: skip
        value = float(host[column]) * scale if pd.notna(host[column]) else np.nan
        if there is not None and pd.notna(there[column]) and there[column] > 0 and value == value:
            note = f"{text.change(value, float(there[column]) * scale)} against {text.short(other.name, 24)}"  # type: ignore[union-attr]
        known = value == value
        return KeyFigure(label, value if known else None, unit, DEFINITIONS[definition],  # type: ignore[arg-type]
                         source if known else "unavailable", note if known else "", COLORS[color] if color else "")

    samples = text.count(int(host["n"]), "sample")
    of = f"of {int(host['logical'])} logical CPUs" if host["logical"] == host["logical"] else "logical CPUs"
    limit = host["limit_w"]
    movable = float(host["spare"]) * watts
    return (
        one("Active CPUs", "c_active", "count", "active", of, color="active_cores"),
        one("Needed at least", "c_min", "count", "needed", f"median of {samples}", color="needed_cores"),
        one("Awake cores", "active_physical_share", "share", "physical_share",
            f"{_count(host['active_physical'])} of {host['physical']} physical" if pd.notna(host["physical"]) else "",
            color="active_cores"),
        one("Both siblings busy", "both_siblings_share", "share", "siblings_share",
            "of the awake cores" if side.has_siblings(host["host"]) else "no core has two logical CPUs",
            color="siblings"),
        _threads(side, host),
        one("Cores to spare", "spare", "count", "spare", "awake, but not needed", "estimated", "active_cores"),
        one("Could move to GPUs", "spare", "w", "movable",
            f"{text.share(movable / limit)} of the GPUs' limits" if limit == limit and limit > 0
            else f"at {watts:.0f} W per core", "estimated", "power", watts),
    )  # fmt: skip


def _threads(side: Cores, host: pd.Series) -> KeyFigure:
    counted = side.of_host(side.use, host["host"])["threads"].dropna()
    value = float(counted.median()) if len(counted) else None
    note = f"median of {text.count(len(counted), 'reading')}" if len(counted) else ""
    return KeyFigure("Threads of the training", value, "count", DEFINITIONS["threads"],
                     "sampled" if len(counted) else "unavailable", note, COLORS["threads"])


def _missing(side: Cores, host: pd.Series) -> tuple[Missing, ...]:
    out = []
    if pd.isna(host["physical"]):
        out.append(Missing("Physical cores and siblings", "The log does not say which logical CPUs share a core; the "
                           "sampler's own logs do.", BESIDE.command))  # fmt: skip
    if not side.of_host(side.use, host["host"])["threads"].notna().any():
        out.append(Missing("Threads of the training", "They are counted where the training itself starts the sampler, "
                           "or is named to it.", "tb-chopper sample --out log/my_run --pid PID"))  # fmt: skip
    return tuple(out)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(side: Cores, other: Cores | None, watts: float) -> dict[str, Table]:
    host = side.main["host"]
    name = f" of {host}" if isinstance(host, str) else ""
    tables = {
        "hosts": _hosts_table(side, other, watts),
        "cpus": Table(
            f"Logical CPUs{name}",
            (TableColumn("cpu", "CPU"), TableColumn("core", "Core", "", "Physical core, as the log numbers them."),
             TableColumn("busy_share", "Use", "share", DEFINITIONS["busy"], bar=True),
             TableColumn("active_share", "Any use", "share", "Share of the samples in which it had any use.", bar=True),
             TableColumn("clock_mhz", "Clock", "mhz", "Mean of the readings while it was busy."),
             TableColumn("threads", "Threads", "count", "Threads of the training that ran there last, mean over the "
                         "readings.")),
            side.by_cpu(host), sort="busy_share", note="Those that were ever busy. Sampled."),
    }  # fmt: skip
    return {key: table for key, table in tables.items() if len(table.rows)}


def _hosts_table(side: Cores, other: Cores | None, watts: float) -> Table:
    parts = [side.hosts.assign(run=side.name), *([other.hosts.assign(run=other.name)] if other is not None else [])]
    rows = pd.concat(parts, ignore_index=True)
    rows["movable_w"] = rows["spare"] * watts
    rows["limit_share"] = rows["movable_w"] / rows["limit_w"]
    rows["span_us"] = (rows["end_ns"] - rows["start_ns"]) / 1000
    rows["over"] = np.where(rows["whole"], "log around it", "selected time")
    return Table(
        "Hosts, and the power that could move",
        (*((TableColumn("run", "Run"),) if other is not None else ()), TableColumn("host", "Host"),
         TableColumn("c_active", "C_active", "count", DEFINITIONS["active"]),
         TableColumn("c_min", "C_min", "count", DEFINITIONS["needed"]),
         TableColumn("active_physical", "Awake cores", "count", DEFINITIONS["physical"]),
         TableColumn("physical", "Cores", "count", "Physical cores of the host."),
         TableColumn("active_physical_share", "Awake", "share", DEFINITIONS["physical_share"], bar=True),
         TableColumn("both_siblings_share", "Both siblings", "share", DEFINITIONS["siblings_share"], bar=True),
         TableColumn("spare", "To spare", "count", DEFINITIONS["spare"]),
         TableColumn("movable_w", "Could move", "w", DEFINITIONS["movable"]),
         TableColumn("limit_share", "Of GPU limits", "share", DEFINITIONS["limit_share"]),
         TableColumn("n", "Samples", "count", "Samples in that time."),
         TableColumn("span_us", "Time", "us", "Time that was looked at."),
         TableColumn("over", "Over")),
        rows, sort="spare",
        note=f"Medians over samples. Could move = {watts:.0f} W × max(0, awake cores − ⌈C_min⌉): estimated; the "
        f"{watts:.0f} W that an awake core draws beyond a sleeping one are an assumption.")  # fmt: skip
