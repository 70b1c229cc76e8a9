"""Memory: how close each GPU comes to its limit, when, and for which operation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics import memory as metrics
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "peak": "Highest level of allocated memory.",
    "operation": "Of the next kernel launched after the peak: the one for which the block was probably allocated.",
    "floor": "Lowest level in any step: parameters, gradients and optimizer states that stay.",
    "growth": "Floor of the last step − floor of the first: what is kept and perhaps should not be.",
    "reserved": "Largest amount that the allocator held.",
    "fragmentation": "1 − allocated / reserved at the peak.",
    "used": "Largest reserved / memory of the device.",
    "headroom": "Memory of the device − largest reserved. NCCL and other libraries use some of it.",
    "peers": "Peak / median of the peaks of all GPUs.",
}
NO_EVENTS = Missing(
    "Memory over time",
    "No memory events in this run. Record them with the profiler, or lay memory snapshots beside the traces.",
    "torch.profiler.profile(profile_memory=True, ...)",
)
CURVES = 8


def view(run: Run, selection: Selection) -> View:
    """Allocated and reserved memory over time, peak, floor and headroom by GPU and step."""
    rows = run.memory()
    gpus = selection.gpus or tuple(rows["gpu"])
    rows = rows[rows["gpu"].isin(gpus)].reset_index(drop=True)
    if not len(rows):
        missing = (context.NO_KERNELS,) if context.nothing_to_show(run) else (NO_EVENTS,)
        return View("Nothing in this selection says how much memory was used.", missing=missing)
    where = {k: v for k, v in selection.where().items() if k in ("gpu", "step")}
    steps = grouping.select(run.step_memory(), where)
    events = grouping.select(run.memory_events, where)
    return View(
        _headline(rows),
        key_figures=_key_figures(rows),
        figures={"curve": _curve(events, rows), "by_gpu": _by_gpu(rows)},
        tables={"gpus": _table(rows), **({"steps": _steps_table(steps)} if len(steps) else {})},
        definitions={"Peak": DEFINITIONS["peak"] + " " + DEFINITIONS["operation"]},
    )


def _size(value: float) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{text.digits(value)} {unit}"
        value /= 1024
    raise AssertionError


def _headline(rows: pd.DataFrame) -> str:
    known = rows[rows["used_share"].notna()]
    if len(known):
        full = figures.largest(known, "used_share")
        line = (f"GPU {full['gpu']} holds {text.share(full['used_share'])} of its memory at most; "
                f"{_size(full['headroom_bytes'])} are left.")
    else:
        full = figures.largest(rows, "peak_bytes")
        line = f"GPU {full['gpu']} has up to {_size(full['peak_bytes'])} allocated."
    if isinstance(full["operation"], str):
        line += f" Its peak is in {full['phase']}, for {text.short(full['operation'], 60)}."
    grown = rows[rows["growth_bytes"].fillna(0) > 0.01 * rows["peak_bytes"]]
    if len(grown):
        worst = figures.largest(grown, "growth_bytes")
        line += f" The floor of GPU {worst['gpu']} grows by {_size(worst['growth_bytes'])} over the steps."
    return line


def _key_figures(rows: pd.DataFrame) -> tuple[KeyFigure, ...]:
    return (
        KeyFigure("Peak allocated", rows["peak_bytes"].max(), "bytes", DEFINITIONS["peak"], color=COLORS["allocated"]),
        KeyFigure("Reserved", _none(rows["reserved_bytes"].max()), "bytes", DEFINITIONS["reserved"],
                  color=COLORS["reserved"]),
        KeyFigure("Headroom", _none(rows["headroom_bytes"].min()), "bytes", DEFINITIONS["headroom"],
                  note=f"{text.share(rows['used_share'].max())} used" if rows["used_share"].notna().any() else ""),
        KeyFigure("Fragmentation", _none(rows["fragmentation"].max()), "share", DEFINITIONS["fragmentation"]),
        KeyFigure("Floor", rows["floor_bytes"].max(), "bytes", DEFINITIONS["floor"]),
        KeyFigure("Growth", _none(rows["growth_bytes"].max()), "bytes", DEFINITIONS["growth"]),
    )


def _none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _curve(events: pd.DataFrame, rows: pd.DataFrame) -> go.Figure:
    """The GPUs with the highest peaks; the very highest with its reserved memory."""
    order = rows.sort_values("peak_bytes", ascending=False, kind="stable")["gpu"].head(CURVES).tolist()
    fig = figures.figure(
        "Memory over time",
        "Allocated memory, one line per GPU; reserved memory of the one with the highest peak."
        + (f" The {CURVES} highest of {len(rows)}." if len(rows) > CURVES else ""),
        height=340,
        wide=True,
        legend=[figures.entry("allocated", DEFINITIONS["peak"], line=True),
                figures.entry("reserved", DEFINITIONS["reserved"], line=True)],
    )
    if len(events):
        start = int(events["t_ns"].min())
        unit, divisor = text.time_unit((int(events["t_ns"].max()) - start) / 1000)
        for i, gpu in enumerate(order):
            points = metrics.curve(events[events["gpu"] == gpu])
            t = (points["t_ns"] - start) / 1000 / divisor
            lines = [("allocated", "allocated_bytes")]
            if i == 0 and (points["reserved_bytes"] >= 0).all():
                lines.insert(0, ("reserved", "reserved_bytes"))
            for thing, column in lines:
                fig.add_trace(go.Scattergl(
                    x=t, y=points[column] / 2**30, mode="lines", showlegend=False, name=f"GPU {gpu} {thing}",
                    line={"shape": "hv", "width": 1.6 if i == 0 else 1, "color": COLORS[thing]},
                    hovertemplate=f"<b>GPU {gpu}</b> {thing}<br>%{{y:.3f}} GiB at %{{x:.3f}} {unit}<extra></extra>"))
        fig.update_layout(xaxis={"title": {"text": unit}})
    fig.update_layout(yaxis={"title": {"text": "GiB"}, "rangemode": "tozero"})
    return fig


def _by_gpu(rows: pd.DataFrame) -> go.Figure:
    shown = figures.most(rows, "peak_bytes")
    fig = figures.figure(
        "Peak and reserved memory by GPU",
        "Reserved beyond allocated is held by the allocator: blocks of the wrong size, or kept for later.",
        height=figures.height_of(len(shown)),
        barmode="overlay",
        legend=[figures.entry("allocated", DEFINITIONS["peak"]), figures.entry("reserved", DEFINITIONS["reserved"])],
    )
    for thing, column in (("reserved", "reserved_bytes"), ("allocated", "peak_bytes")):
        fig.add_trace(figures.bars(
            thing, range(len(shown)), shown[column].fillna(0).tolist(), 2**30,
            hover=[f"<b>GPU {g}</b><br>{thing}: {_size(v) if v == v else text.DASH}<br>{text.share(u)} of the device"
                   for g, v, u in zip(shown["gpu"], shown[column], shown["used_share"], strict=True)],
            links=[json.dumps({"gpu": int(g)}) for g in shown["gpu"]]))
    fig.update_layout(xaxis={"title": {"text": "GiB"}}, yaxis=figures.rows_axis([f"GPU {g}" for g in shown["gpu"]]))
    return fig


def _table(rows: pd.DataFrame) -> Table:
    return Table(
        "Memory by GPU",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("peak_bytes", "Peak", "bytes", DEFINITIONS["peak"], bar=True),
            TableColumn("reserved_bytes", "Reserved", "bytes", DEFINITIONS["reserved"], bar=True),
            TableColumn("used_share", "Of the device", "share", DEFINITIONS["used"]),
            TableColumn("headroom_bytes", "Headroom", "bytes", DEFINITIONS["headroom"]),
            TableColumn("fragmentation", "Fragmentation", "share", DEFINITIONS["fragmentation"]),
            TableColumn("floor_bytes", "Floor", "bytes", DEFINITIONS["floor"]),
            TableColumn("growth_bytes", "Growth", "bytes", DEFINITIONS["growth"]),
            TableColumn("of_peers", "Of peers", "factor", DEFINITIONS["peers"]),
            TableColumn("step", "Peak in step"),
            TableColumn("phase", "Phase"),
            TableColumn("operation", "Operation", "", DEFINITIONS["operation"]),
            TableColumn("source", "Source", "text", "profiler: profile_memory; snapshot: a memory snapshot."),
        ),
        rows,
        sort="peak_bytes",
        link={"gpu": "gpu"},
    )


def _steps_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Memory by step",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("step", "Step"),
            TableColumn("peak_bytes", "Peak", "bytes", DEFINITIONS["peak"], bar=True),
            TableColumn("floor_bytes", "Floor", "bytes", DEFINITIONS["floor"], bar=True),
            TableColumn("reserved_bytes", "Reserved", "bytes", DEFINITIONS["reserved"]),
            TableColumn("allocated_bytes", "Asked for", "bytes", "Sum of what was allocated in the step."),
            TableColumn("n", "Events", "count", "Allocations and frees."),
        ),
        rows,
        sort="peak_bytes",
        link={"step": "step"},
    )
