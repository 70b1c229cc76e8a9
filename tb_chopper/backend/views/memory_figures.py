"""The figures of the Memory tab: levels over time and by step, peaks by GPU, the expected state of the model."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import memory as metrics
from tb_chopper.backend.views import figures, text
from tb_chopper.backend.views.palette import COLORS, LABELS

CURVES = 8
GIB = 2**30
STATE = ("parameters", "optimizer_states", "gradients", "activations")
MARKS = (("floor", "diamond", "floor_bytes"), ("peak", "circle", "peak_bytes"))
"""What was measured, by the shape of its mark."""


def size(value: float) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    if not np.isfinite(value):
        return text.DASH
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{text.digits(value)} {unit}"
        value /= 1024
    raise AssertionError


def curve(events: pd.DataFrame, samples: pd.DataFrame, rows: pd.DataFrame, definitions: dict[str, str]) -> go.Figure:
    """The GPUs with the highest peaks; the very highest with its reserved and used memory too."""
    level = rows["peak_bytes"].fillna(rows["used_bytes"])
    order = rows.assign(level=level).sort_values("level", ascending=False, kind="stable")["gpu"].head(CURVES).tolist()
    measured = len(events) > 0
    present = [*(("allocated", "reserved") if measured else ()), *(("used",) if len(samples) else ())]
    what = "Allocated memory, one line per GPU; the one with the highest peak with what its allocator holds"
    fig = figures.figure(
        "Memory over time",
        (what + (" and what the driver counts." if len(samples) else ".") if measured else
         "Memory in use as the driver counts, one line per GPU: with what the allocator only keeps.")
        + (f" The {CURVES} highest of {len(rows)}." if len(rows) > CURVES else ""),
        height=340,
        wide=True,
        legend=[figures.entry(thing, definitions[thing], line=True) for thing in present],
    )
    times = [int(f["t_ns"].agg(edge)) for f in (events, samples) for edge in ("min", "max") if len(f)]
    if times:
        start = int(events["t_ns"].min()) if measured else min(times)
        end = int(events["t_ns"].max()) if measured else max(times)
        unit, divisor = text.time_unit((end - start) / 1000)
        for i, gpu in enumerate(order):
            for thing, t_ns, value in _lines(events[events["gpu"] == gpu], samples[samples["gpu"] == gpu], i == 0):
                fig.add_trace(go.Scattergl(
                    x=(t_ns - start) / 1000 / divisor, y=value / GIB, mode="lines", showlegend=False,
                    name=f"GPU {gpu} {thing}",
                    line={"shape": "hv", "width": 1.6 if i == 0 else 1, "color": COLORS[thing]},
                    hovertemplate=f"<b>GPU {gpu}</b> {thing}<br>%{{y:.3f}} GiB at %{{x:.3f}} {unit}<extra></extra>"))
        fig.update_layout(xaxis={"title": {"text": unit}, "range": [0, max((end - start) / 1000 / divisor, 1e-3)]})
    fig.update_layout(yaxis={"title": {"text": "GiB"}, "rangemode": "tozero"})
    return fig


def _lines(events: pd.DataFrame, samples: pd.DataFrame, first: bool) -> list[tuple[str, pd.Series, pd.Series]]:
    """(thing, times, values) of one GPU."""
    lines = []
    if (first or not len(events)) and len(samples):
        lines.append(("used", samples["t_ns"], samples["used_bytes"]))
    if len(events):
        points = metrics.curve(events)
        if first and (points["reserved_bytes"] >= 0).all():
            lines.append(("reserved", points["t_ns"], points["reserved_bytes"]))
        lines.append(("allocated", points["t_ns"], points["allocated_bytes"]))
    return lines


def by_gpu(rows: pd.DataFrame, definitions: dict[str, str]) -> go.Figure:
    """Allocated before reserved before used memory of each GPU."""
    level = rows[["peak_bytes", "reserved_bytes", "used_bytes"]].max(axis=1)
    shown = figures.most(rows.assign(level=level), "level")
    things = [t for t in (("used", "used_bytes"), ("reserved", "reserved_bytes"), ("allocated", "peak_bytes"))
              if shown[t[1]].notna().any()]
    fig = figures.figure(
        "Largest amounts by GPU",
        "As the driver counts: all processes, and what allocators only keep." if len(things) == 1 else
        "Reserved beyond allocated is held by the allocator: blocks of the wrong size, or kept for later."
        + (" Used beyond reserved is held by contexts, libraries and other processes." if things[0][0] == "used"
           else ""),
        height=figures.height_of(len(shown)),
        barmode="overlay",
        legend=[figures.entry(thing, definitions[thing]) for thing, _ in reversed(things)],
    )
    for thing, column in things:
        fig.add_trace(figures.bars(
            thing, range(len(shown)), shown[column].fillna(0).tolist(), GIB,
            hover=[f"<b>GPU {g}</b><br>{LABELS[thing]}: {size(v)}<br>{text.share(v / t)} of the device"
                   for g, v, t in zip(shown["gpu"], shown[column].astype("float64"),
                                      shown["total_bytes"].astype("float64"), strict=True)],
            links=[json.dumps({"gpu": int(g)}) for g in shown["gpu"]]))
    fig.update_layout(xaxis={"title": {"text": "GiB"}}, yaxis=figures.rows_axis([f"GPU {g}" for g in shown["gpu"]]))
    return fig


def floors(levels: pd.DataFrame, sampled: bool, definition: str) -> go.Figure:
    """The floor of each step, one line per GPU."""
    fig = figures.figure(
        "Lowest level, step by step",
        "What stays allocated from step to step. A line that rises steadily ends in an out-of-memory error."
        + (" As the driver counts." if sampled else ""),
        height=300,
        legend=[figures.entry("used" if sampled else "allocated", definition, label="One line per GPU", line=True)],
    )
    for gpu, own in levels.sort_values("step").groupby("gpu"):
        fig.add_trace(go.Scatter(
            x=own["step"].astype("int64"), y=own["floor_bytes"].astype("float64") / GIB, mode="lines+markers",
            showlegend=False, name=f"GPU {gpu}",
            line={"width": 1.4, "color": COLORS["used" if sampled else "allocated"]},
            hovertext=[f"<b>GPU {gpu}</b>, step {s}<br>{size(float(v))}"
                       for s, v in zip(own["step"], own["floor_bytes"], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>"))
    fig.update_layout(xaxis=figures.steps_axis(levels["step"]), yaxis={"title": {"text": "GiB"}})
    return fig


def model_state(rows: pd.DataFrame, definitions: dict[str, str]) -> go.Figure:
    """What parameters, gradients and optimizer states should take, and what activations took, against the device."""
    shown = figures.most(rows, "state_bytes").reset_index(drop=True)
    columns = {"parameters": "parameter_bytes", "optimizer_states": "optimizer_bytes", "gradients": "gradient_bytes",
               "activations": "activation_bytes"}
    present = [t for t in STATE if shown[columns[t]].notna().any()]
    marks = [m for m in MARKS if shown[m[2]].notna().any()]
    fig = figures.figure(
        "Expected state of the model by GPU",
        "Bars: estimated from the number of parameters and the parallel plan"
        + ("; activations are measured" if "activations" in present else "") + ". "
        + ("Diamond: measured floor; circle: measured peak. " if marks else "") + "Line: memory of the device.",
        height=figures.height_of(len(shown)),
        barmode="stack",
        legend=[figures.entry(t, definitions[t]) for t in present] + [figures.entry("capacity", definitions["total"])],
    )
    gpus, links = range(len(shown)), [json.dumps({"gpu": int(g)}) for g in shown["gpu"]]
    for thing in present:
        source = "measured" if thing == "activations" else "estimated"
        fig.add_trace(figures.bars(
            thing, gpus, shown[columns[thing]].fillna(0).tolist(), GIB, links=links,
            hover=[f"<b>GPU {g}</b><br>{LABELS[thing]}: {size(v)}<br>{source}"
                   for g, v in zip(shown["gpu"], shown[columns[thing]], strict=True)]))
    for name, symbol, column in marks:
        fig.add_trace(_marks(shown, column, name, symbol, "measured", "activations" if name == "peak" else "used"))
    if shown["total_bytes"].notna().any():
        fig.add_trace(_marks(shown, "total_bytes", LABELS["capacity"], "line-ns-open", "device", "capacity"))
    fig.update_layout(xaxis={"title": {"text": "GiB"}}, yaxis=figures.rows_axis([f"GPU {g}" for g in shown["gpu"]]))
    return fig


def _marks(shown: pd.DataFrame, column: str, name: str, symbol: str, source: str, thing: str) -> go.Scatter:
    is_line = symbol.startswith("line")
    return go.Scatter(
        x=(shown[column].astype("float64") / GIB).tolist(), y=list(range(len(shown))), mode="markers", showlegend=False,
        name=name, hovertemplate="%{hovertext}<extra></extra>",
        hovertext=[f"<b>GPU {g}</b><br>{name}: {size(float(v))}<br>{source}"
                   for g, v in zip(shown["gpu"], shown[column], strict=True)],
        marker={"symbol": symbol, "size": 22 if is_line else 10, "color": COLORS["capacity"] if is_line else "#FFFFFF",
                "line": {"width": 3 if is_line else 1.5, "color": COLORS["capacity"] if is_line else "#222222"}})
