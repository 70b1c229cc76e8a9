"""The figures of the CPU tab, all of one host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tb_chopper.backend.metrics import cpu
from tb_chopper.backend.views import figures, text, time_axis
from tb_chopper.backend.views.cores import Cores
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.time_axis import Axis

HEAT_COLUMNS = 500
MAX_BANDS = 60
SHOWN_CPUS = 16
DEFINITIONS = {
    "active": "C_active: logical CPUs with any use since the sample before, Σ [util > 0].",
    "needed": "C_min: logical CPUs that would do if each were used in full, Σ util / 100.",
    "physical": "Physical cores with at least one busy logical CPU.",
    "siblings": "Physical cores of which two or more logical CPUs were busy: they share the core's units.",
    "threads": "Threads of the training that ran since the reading before (about once per second).",
    "busy": "Mean use over the samples; a CPU that is idle in a sample counts as 0.",
}


class Band(NamedTuple):
    """A step: its number and its time on one GPU of the host."""

    step: int
    start_ns: int
    end_ns: int


def over_time(side: Cores, host: pd.Series, bands: list[Band]) -> go.Figure:
    """The paper's figure: active CPUs against the lower bound, and physical core × time below."""
    use = side.of_host(side.use, host["host"])
    time = time_axis.axis(int(host["start_ns"]), int(host["end_ns"]) + 1)
    cells = cpu.core_activity(side.of_host(side.rows, host["host"]), side.of_host(side.cores, host["host"]))
    n_cores = int(host["physical"]) if pd.notna(host["physical"]) else 0
    heat = float(np.clip(5 * n_cores, 90, 420)) if n_cores else 0.0
    fig = make_subplots(2 if heat else 1, 1, shared_xaxes=True, vertical_spacing=0.05,
                        row_heights=[210.0, heat] if heat else [210.0])
    for column, thing, dash, what in (
        ("c_active", "active_cores", "solid", "active logical CPUs"),
        ("c_min", "needed_cores", "solid", "needed at least"),
        ("active_physical", "active_cores", "dot", "active physical cores"),
    ):
        if use[column].notna().any():
            _line(fig, use, column, thing, time, what, dash)
    if heat:
        _heat(fig, cells, use, n_cores, time)
    _steps(fig, bands, time)
    rows = 2 if heat else 1
    fig.update_xaxes(range=time.x(np.array([time.start_ns, time.end_ns])).tolist(), zeroline=False)
    start = "log shown" if host["whole"] else "window"
    fig.update_xaxes(title_text=f"time since the start of the {start}, {time.unit}", row=rows, col=1)
    fig.update_yaxes(title_text="logical CPUs, cores", rangemode="tozero", row=1, col=1)
    legend = [
        figures.entry("active_cores", DEFINITIONS["active"], label="Active logical CPUs", line=True),
        figures.entry("needed_cores", DEFINITIONS["needed"], label="Needed at least", line=True),
        *([figures.entry("active_cores", DEFINITIONS["physical"], label="Dotted, and map: physical core awake"),
           figures.entry("siblings", DEFINITIONS["siblings"], label="Map: both siblings busy")] if heat else []),
    ]  # fmt: skip
    base = figures.figure(
        "Active CPUs against the lower bound" + (", and the physical cores" if heat else ""),
        f"One host{_of(host)}{_time_words(host)}. Sampled; below, the busiest moment of each column of pixels.",
        height=round(210 + heat + 110), wide=True, legend=legend, margin={"t": 26})
    fig.update_layout(**{k: v for k, v in base.layout.to_plotly_json().items() if k not in ("template", "xaxis")})
    return fig


def _of(host: pd.Series) -> str:
    return f", {text.escape(host['host'])}" if isinstance(host["host"], str) else ""


def _time_words(host: pd.Series) -> str:
    return ", over the log around the selected time" if host["whole"] else ", over the selected time"


def _line(fig: go.Figure, use: pd.DataFrame, column: str, thing: str, time: Axis, what: str, dash: str) -> None:
    x, y = time_axis.line(use["t_ns"].to_numpy(), use[column].to_numpy("float64", na_value=np.nan), time)
    fig.add_trace(go.Scatter(
        x=x, y=y, mode="lines", line={"color": COLORS[thing], "width": 1.7, "dash": dash}, showlegend=False,
        connectgaps=False, hovertemplate=f"<b>{what}</b><br>%{{y:.3~g}} at %{{x:.3f}} {time.unit}<br>sampled"
        "<extra></extra>"), row=1, col=1)


def _heat(fig: go.Figure, cells: pd.DataFrame, use: pd.DataFrame, n_cores: int, time: Axis) -> None:
    """Active logical CPUs per physical core; nothing where there is no sample."""
    t = use["t_ns"].to_numpy()
    n = time_axis.columns_for(t, time, HEAT_COLUMNS)
    z = np.full((n_cores, n), -1, np.int8)
    z[:, np.unique(time_axis.column_of(t, time, n))] = 0
    core = cells["core"].to_numpy()
    fits = core < n_cores
    place = time_axis.column_of(cells["t_ns"].to_numpy(), time, n)
    np.maximum.at(z, (core[fits], place[fits]), np.minimum(cells["active"].to_numpy()[fits], 2).astype(np.int8))
    colors = ("rgba(0,0,0,0)", figures.faded(COLORS["idle"], 0.13), COLORS["active_cores"], COLORS["siblings"])
    scale = [[edge, c] for i, c in enumerate(colors) for edge in (i / 4, (i + 1) / 4)]
    middles = time.start_ns + (np.arange(n) + 0.5) * (time.end_ns - time.start_ns) / n
    fig.add_trace(go.Heatmap(
        x=time.x(middles.astype(np.int64)), y=np.arange(n_cores), z=z, zmin=-1.5, zmax=2.5, colorscale=scale,
        showscale=False, hovertemplate=f"<b>physical core %{{y}}</b><br>%{{z}} busy logical CPUs at %{{x:.3f}} "
        f"{time.unit}<br>sampled<extra></extra>"), row=2, col=1)
    fig.update_yaxes(title_text="physical core", showgrid=False, zeroline=False, range=[-0.5, n_cores - 0.5],
                     tickvals=list(range(n_cores)) if n_cores <= 4 else None, row=2, col=1)


def _steps(fig: go.Figure, bands: list[Band], time: Axis) -> None:
    shown = [b for b in bands if b.end_ns > time.start_ns and b.start_ns < time.end_ns]
    if not shown or len(shown) > MAX_BANDS:
        return
    length = shown[-1].end_ns - shown[0].start_ns
    every = max(1, -(-len(shown) // max(1, round(12 * length / (time.end_ns - time.start_ns)))))
    for i, band in enumerate(shown):
        x0, x1 = time.x(np.clip([band.start_ns, band.end_ns], time.start_ns, time.end_ns)).tolist()
        if i % 2 == 0:
            fig.add_shape(type="rect", x0=x0, x1=x1, y0=0, y1=1, xref="x", yref="paper", line={"width": 0},
                          fillcolor="rgba(128,134,144,0.13)", layer="below")
        if i % every == 0:
            fig.add_annotation(x=(x0 + x1) / 2, y=1.0, xref="x", yref="paper", text=f"step {band.step}",
                               showarrow=False, yanchor="bottom", yshift=2, font={"size": 11})


def siblings(side: Cores, host: pd.Series) -> go.Figure | None:
    """Awake physical cores: one sibling busy, both busy."""
    use = side.of_host(side.use, host["host"])
    if not side.has_siblings(host["host"]) or not use["both_siblings"].notna().any():
        return None
    time = time_axis.axis(int(host["start_ns"]), int(host["end_ns"]) + 1)
    share = use["both_siblings"].sum() / max(use["active_physical"].sum(), 1)
    fig = figures.figure(
        "Two logical CPUs on one core", f"{text.share(float(share))} of the awake cores had both siblings busy. Two "
        "busy siblings share one core's units; cores with one busy sibling are awake for it alone. Sampled.",
        height=320,
        legend=[figures.entry("active_cores", DEFINITIONS["physical"], label="Awake", line=True),
                figures.entry("siblings", DEFINITIONS["siblings"], line=True)])
    for column, thing, what in (("active_physical", "active_cores", "awake physical cores"),
                                ("both_siblings", "siblings", "with both siblings busy")):
        x, y = time_axis.line(use["t_ns"].to_numpy(), use[column].to_numpy("float64", na_value=np.nan), time)
        fig.add_trace(go.Scatter(
            x=x, y=y, mode="lines", fill="tozeroy", fillcolor=figures.faded(COLORS[thing], 0.25), showlegend=False,
            line={"color": COLORS[thing], "width": 1.6}, connectgaps=False,
            hovertemplate=f"<b>{what}</b><br>%{{y:.0f}} at %{{x:.3f}} {time.unit}<br>sampled<extra></extra>"))
    fig.update_layout(xaxis={"title": {"text": f"time, {time.unit}"}},
                      yaxis={"title": {"text": "physical cores"}, "rangemode": "tozero"})
    return fig


def threads(side: Cores, host: pd.Series) -> go.Figure | None:
    """Threads of the training that ran, against the active CPUs."""
    use = side.of_host(side.use, host["host"])
    counted = use[use["threads"].notna()]
    if not len(counted):
        return None
    time = time_axis.axis(int(host["start_ns"]), int(host["end_ns"]) + 1)
    fig = figures.figure(
        "Threads of the training", f"{text.count(len(counted), 'reading')}, median {counted['threads'].median():.3g} "
        "threads that ran since the reading before, beside the logical CPUs that were active. Sampled.", height=320,
        legend=[figures.entry("threads", DEFINITIONS["threads"]),
                figures.entry("active_cores", DEFINITIONS["active"], label="Active logical CPUs", line=True)])
    for column, thing, mode, rows in (("c_active", "active_cores", "lines", use),
                                      ("threads", "threads", "lines+markers", counted)):
        x, y = time_axis.line(rows["t_ns"].to_numpy(), rows[column].to_numpy("float64", na_value=np.nan), time)
        fig.add_trace(go.Scatter(
            x=x, y=y, mode=mode, showlegend=False, connectgaps=False, marker={"size": 6},
            line={"color": COLORS[thing], "width": 1.5},
            hovertemplate=f"%{{y:.0f}} {'threads' if column == 'threads' else 'active logical CPUs'} at %{{x:.3f}} "
            f"{time.unit}<br>sampled<extra></extra>"))
    fig.update_layout(xaxis={"title": {"text": f"time, {time.unit}"}},
                      yaxis={"title": {"text": "threads, logical CPUs"}, "rangemode": "tozero"})
    return fig


def by_cpu(side: Cores, host: pd.Series) -> go.Figure | None:
    """The busiest logical CPUs."""
    rows = side.by_cpu(host["host"])
    shown = rows.head(SHOWN_CPUS)
    if not len(shown):
        return None
    pale = figures.faded(COLORS["active_cores"], 0.38)
    left = f" Shown are the busiest {len(shown)} of {len(rows)}." if len(rows) > len(shown) else ""
    fig = figures.figure(
        "Use of the logical CPUs", f"Mean over the samples, and the part of the samples with any use.{left} Sampled.",
        height=figures.height_of(len(shown), 22), barmode="overlay",
        legend=[figures.entry("needed_cores", DEFINITIONS["busy"], label="Mean use"),
                figures.entry("active_cores", "Share of the samples in which the CPU had any use.",
                              label="Samples with any use") | {"color": pale}])
    hover = [
        f"<b>CPU {r['cpu']}</b>{'' if pd.isna(r['core']) else ', core ' + str(r['core'])}<br>mean use "
        f"{text.share(r['busy_share'])}, any use in {text.share(r['active_share'])} of the samples<br>"
        f"clock {_number(r['clock_mhz'])} MHz, threads {_number(r['threads'])}<br>sampled"
        for r in shown.to_dict("records")
    ]  # fmt: skip
    for thing, column, width, color in (("active_cores", "active_share", 0.76, pale),
                                        ("needed_cores", "busy_share", 0.36, "")):
        fig.add_trace(figures.bars(thing, range(len(shown)), (100 * shown[column]).tolist(), 1.0, hover, width=width,
                                   color=color))
    fig.update_layout(xaxis={"title": {"text": "share, %"}, "range": [0, 100]},
                      yaxis=figures.rows_axis([f"CPU {c}" for c in shown["cpu"]]))
    return fig


def _number(value: float) -> str:
    return text.DASH if value != value else text.digits(value)
