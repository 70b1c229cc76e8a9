"""Clocks, power, temperature and throttling over time, with the steps and phases of the training behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.metrics import frequency
from tb_chopper.backend.views import figures, text, time_axis
from tb_chopper.backend.views.clocks import Clocks
from tb_chopper.backend.views.palette import COLORS, COMPARED_PATTERN, LABELS
from tb_chopper.backend.views.time_axis import Axis

PHASES = ("forward", "backward", "optimizer")
MAX_BANDS = 60
"""Steps drawn as bands; of more nothing could be told apart."""
MAX_LABELS = 12
THROTTLE_COLUMNS = 400


class Panel(NamedTuple):
    """One quantity: its column of TELEMETRY, its thing of the palette, its axis, and the column of its limit."""

    column: str
    thing: str
    title: str
    unit: str
    limit: str = ""


PANELS = (
    Panel("clock_mhz", "frequency", "engine, MHz", "MHz", "clock_limit_mhz"),
    Panel("memory_clock_mhz", "memory_clock", "memory, MHz", "MHz"),
    Panel("power_w", "power", "power, W", "W", "power_limit_w"),
    Panel("temperature_c", "temperature", "temp., °C", "°C"),
)
DEFINITIONS = {
    "frequency": "Engine clock as sampled, mean over the compute dies of a GPU. Dotted: the highest clock of the "
    "device.",
    "memory_clock": "Memory clock as sampled.",
    "power": "Power of the package as sampled. Dotted: the power limit.",
    "temperature": "Hottest spot of the GPU, else its only sensor.",
    "throttle": "Share of the time since the sample before in which a reason held the clock down, as the firmware or "
    "the driver reports it.",
    "bands": "Every second step is shaded: the step's window on the GPU.",
}


def timeline(sides: Sequence[Clocks], around: bool) -> go.Figure:
    """The main figure: one column per run, one row per quantity that was sampled."""
    panels = [p for p in PANELS if any(s.samples[p.column].notna().any() for s in sides)]
    throttled = any(s.samples["throttle"].notna().any() for s in sides)
    spans = [_span(s, around) for s in sides]
    axes = [time_axis.axis(a, b, max(b - a for a, b in spans)) for a, b in spans]
    n_gpus = max(len(s.gpus) for s in sides)
    pixels = [14, *(112 if p.column in ("clock_mhz", "power_w") else 92 for p in panels)]
    pixels += [max(26, 10 * n_gpus)] if throttled else []
    fig = make_subplots(len(pixels), len(sides), shared_xaxes=True, row_heights=pixels, vertical_spacing=0.022,
                        horizontal_spacing=0.05)
    for col, (side, time) in enumerate(zip(sides, axes, strict=True), 1):
        _phases(fig, side, time, col)
        for row, panel in enumerate(panels, 2):
            _lines(fig, side, panel, time, row, col)
        if throttled:
            _throttling(fig, side, time, len(pixels), col)
        _steps(fig, side, time, col, len(sides) > 1)
        if around:
            _edges(fig, side, time, col)
        fig.update_xaxes(title_text=f"time since the start of the {'log shown' if around else 'window'}, {time.unit}",
                         row=len(pixels), col=col)
        fig.update_xaxes(range=time.x(np.array([time.start_ns, time.end_ns])).tolist(), zeroline=False, col=col)
    for row, panel in enumerate(panels, 2):
        fig.update_yaxes(title_text=panel.title, row=row, col=1)
        fig.update_yaxes(range=_range(sides, panel), zeroline=False, nticks=5, row=row)
    base = figures.figure("Clocks, power and temperature over time", _description(sides, around),
                          height=sum(pixels) + 12 * len(pixels) + 90, wide=True,
                          legend=_legend(sides, panels, throttled),
                          margin={"t": 44 if len(sides) > 1 else 26})
    layout = {k: v for k, v in base.layout.to_plotly_json().items() if k not in ("template", "xaxis")}
    fig.update_layout(**layout | {"bargap": 0})
    return fig


def _span(side: Clocks, around: bool) -> tuple[int, int]:
    times = (side.samples["t_ns"], side.samples["t_ns"]) if around else (
        side.windows["start_ns"], side.windows["end_ns"])
    return int(times[0].min()), int(times[1].max()) + 1


def _description(sides: Sequence[Clocks], around: bool) -> str:
    n = max(len(s.gpus) for s in sides)
    slow = sides[0].slowest
    many = (
        f"Line: median over the GPUs; area: lowest to highest sample of any GPU; "
        f"dotted: GPU {slow['gpu']}, the slowest. "
        if n > 1 and slow else ""
    )
    log = "Between the dashed lines: the selected time, of which alone the numbers of this tab are. " if around else ""
    return f"{many}{log}Long logs are drawn with the extremes of each column of pixels. Sampled."


def _legend(sides: Sequence[Clocks], panels: Sequence[Panel], throttled: bool) -> list[dict[str, Any]]:
    shown = [p for p in PHASES if any((s.kernels["phase"] == p).any() for s in sides)]
    return [
        *(figures.entry(p.thing, DEFINITIONS[p.thing], "Engine clock" if p.thing == "frequency" else "", line=True)
          for p in panels),
        *([figures.entry("throttle", DEFINITIONS["throttle"])] if throttled else []),
        *(figures.entry(p, "Time from the first to the last compute kernel of the phase in a step.") for p in shown),
    ]  # fmt: skip


def _range(sides: Sequence[Clocks], panel: Panel) -> list[float]:
    """All of the values and of the limit, which both runs share."""
    columns = [panel.column, *([panel.limit] if panel.limit else [])]
    values = np.concatenate([s.samples[c].to_numpy() for s in sides for c in columns])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = 0.06 * max(high - low, 0.02 * high, 1.0)
    return [max(0.0, low - room), high + room]


def _lines(fig: go.Figure, side: Clocks, panel: Panel, time: Axis, row: int, col: int) -> None:
    rows = side.samples[(side.samples["t_ns"] >= time.start_ns) & (side.samples["t_ns"] < time.end_ns)]
    rows = rows[rows[panel.column].notna()]
    gpus = rows["gpu"].unique()
    if not len(gpus):
        return
    color, compared = COLORS[panel.thing], col > 1
    where = f" at %{{x:.3f}} {time.unit}<br>sampled<extra></extra>"
    if len(gpus) > 1:
        band = time_axis.band(rows, panel.column, time)
        for part in _whole_parts(band):
            fig.add_trace(
                go.Scatter(
                    x=np.concatenate((part["x"], part["x"][::-1])), y=np.concatenate((part["high"], part["low"][::-1])),
                    fill="toself", mode="lines", line={"width": 0}, fillcolor=figures.faded(color, 0.22),
                    fillpattern={"shape": COMPARED_PATTERN, "fgcolor": color, "size": 6, "solidity": 0.2} if compared
                    else None, hoverinfo="skip", showlegend=False),
                row=row, col=col)  # fmt: skip
        _line(fig, band["x"].to_numpy(), band["median"].to_numpy(), color, row, col, 1.8,
              f"<b>median of {len(gpus)} GPUs</b><br>%{{y:,.0f}} {panel.unit}{where}")
        shown, dash = ([side.slowest["gpu"]] if side.slowest else []), "dot"
    else:
        shown, dash = list(gpus), "solid"
    for gpu in shown:
        own = rows[rows["gpu"] == gpu]
        x, y = time_axis.line(own["t_ns"].to_numpy(), own[panel.column].to_numpy(float), time)
        _line(fig, x, y, color, row, col, 1.0 if dash == "dot" else 1.5,
              f"<b>GPU {gpu}</b><br>%{{y:,.0f}} {panel.unit}{where}", dash)
    limit = float(rows[panel.limit].median()) if panel.limit else np.nan
    if limit == limit:
        words = "highest clock" if panel.limit == "clock_limit_mhz" else "power limit"
        _line(fig, time.x(np.array([time.start_ns, time.end_ns])), np.array([limit, limit]), color, row, col, 1.2,
              f"{words} {text.digits(limit)} {panel.unit}<extra></extra>", "2px 4px")


def _line(fig: go.Figure, x: np.ndarray, y: np.ndarray, color: str, row: int, col: int, width: float, hover: str,
          dash: str = "solid") -> None:  # fmt: skip
    fig.add_trace(go.Scatter(x=x, y=y, mode="lines", line={"color": color, "width": width, "dash": dash},
                             connectgaps=False, showlegend=False, hovertemplate=hover), row=row, col=col)


def _whole_parts(band: pd.DataFrame) -> list[dict[str, np.ndarray]]:
    """The stretches between pauses, each an area of its own."""
    known = band["low"].notna().to_numpy()
    number = np.cumsum(~known)[known]
    return [{c: part[c].to_numpy() for c in part} for _, part in band[known].groupby(number)]


def _phases(fig: go.Figure, side: Clocks, time: Axis, col: int) -> None:
    """A thin strip that names the phase, of one GPU: the slowest where there are several."""
    gpu = _reference(side)
    own = side.kernels[(side.kernels["gpu"] == gpu) & side.kernels["step"].notna()]
    spans = own.groupby(["step", "phase"], observed=True).agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    fig.update_yaxes(visible=False, range=[0, 1], fixedrange=True, row=1, col=col)
    for phase in PHASES:
        rows = spans[spans.index.get_level_values("phase") == phase].reset_index()
        if len(rows) and len(rows) <= 4 * MAX_BANDS:
            start = time.x(rows["start_ns"].to_numpy())
            length = time.x(rows["end_ns"].to_numpy()) - start
            fig.add_trace(
                go.Bar(
                    base=start, x=length, y=np.full(len(rows), 0.5), width=1.0, orientation="h", showlegend=False,
                    marker={"color": COLORS[phase], "line": {"width": 0}}, hovertext=[
                        f"<b>{LABELS[phase]}</b>, step {s}, GPU {gpu}<br>{text.duration(d)}"
                        for s, d in zip(rows["step"], (rows["end_ns"] - rows["start_ns"]) / 1000, strict=True)],
                    hovertemplate="%{hovertext}<extra></extra>"),
                row=1, col=col)  # fmt: skip
    fig.update_layout(barmode="overlay")


def _reference(side: Clocks) -> int:
    slow = side.slowest
    return int(slow["gpu"]) if slow else int(side.gpus["gpu"].min())


def _steps(fig: go.Figure, side: Clocks, time: Axis, col: int, named: bool) -> None:
    """Bands behind the steps of one GPU, with the numbers that there is room for."""
    own = side.steps[(side.steps["gpu"] == _reference(side)) & side.steps["gpu_start_ns"].notna()]
    own = own.sort_values("gpu_start_ns")
    axis = "x" if col == 1 else f"x{col}"
    bands: list[tuple[int, int]] = []
    if len(own) <= MAX_BANDS:
        bands = [(int(a), int(b)) for a, b in zip(own["gpu_start_ns"], own["gpu_end_ns"], strict=True)]
        room = max(1.0, MAX_LABELS * _length(own) / (time.end_ns - time.start_ns)) if bands else 1.0
        every = max(1, -(-len(bands) // int(room)))
        labels = [f"step {s}" for s in own["step"]]
        for (a, b), label in list(zip(bands, labels, strict=True))[::every]:
            fig.add_annotation(x=float(time.x(np.array([(a + b) // 2]))[0]), y=1.0, xref=axis, yref="paper", text=label,
                               showarrow=False, yanchor="bottom", yshift=2, font={"size": 11})
        bands = bands[1::2]
    for a, b in bands:
        x0, x1 = time.x(np.array([a, b])).tolist()
        fig.add_shape(type="rect", x0=x0, x1=x1, y0=0, y1=1, xref=axis, yref="paper", line={"width": 0},
                      fillcolor="rgba(128,134,144,0.13)", layer="below")
    if named:
        fig.add_annotation(x=0, y=1.0, xref=f"{axis} domain", yref="paper", text=f"<b>{text.label(side.name, 60)}</b>",
                           showarrow=False, xanchor="left", yanchor="bottom", yshift=18)


def _edges(fig: go.Figure, side: Clocks, time: Axis, col: int) -> None:
    """Where the selected windows begin and end, those that touch as one."""
    windows = iv.union(side.windows["start_ns"].to_numpy(), side.windows["end_ns"].to_numpy())
    edges = np.concatenate((windows.starts[:MAX_BANDS], windows.ends[:MAX_BANDS]))
    for x in time.x(edges).tolist():
        fig.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, xref="x" if col == 1 else f"x{col}", yref="paper",
                      line={"color": COLORS["idle"], "width": 1.4, "dash": "dash"})


def _length(steps: pd.DataFrame) -> int:
    return int(steps["gpu_end_ns"].max() - steps["gpu_start_ns"].min())


def _throttling(fig: go.Figure, side: Clocks, time: Axis, row: int, col: int) -> None:
    """GPU × time: how much of the time a reason held."""
    rows = side.samples[side.samples["throttle"].notna()]
    rows = rows[(rows["t_ns"] >= time.start_ns) & (rows["t_ns"] < time.end_ns)]
    if not len(rows):
        return
    gpus = sorted(rows["gpu"].unique())
    one = rows.loc[rows["gpu"] == gpus[0], "t_ns"].to_numpy()
    n = time_axis.columns_for(one, time, THROTTLE_COLUMNS)
    place = time_axis.column_of(rows["t_ns"].to_numpy(), time, n)
    share = pd.DataFrame({"gpu": rows["gpu"].to_numpy(), "place": place, "share": 100 * frequency.throttled(rows)})
    z = share.pivot_table(index="gpu", columns="place", values="share", aggfunc="mean").reindex(
        index=gpus, columns=range(n))
    reasons = rows.assign(place=place).groupby(["gpu", "place"])["throttle"].last().astype(object).unstack().reindex(
        index=gpus, columns=range(n))
    edges = time.start_ns + (np.arange(n) + 0.5) * (time.end_ns - time.start_ns) / n
    fig.add_trace(
        go.Heatmap(
            x=time.x(edges.astype(np.int64)), y=list(range(len(gpus))), z=z.to_numpy(np.float32),
            zmin=0, zmax=100, showscale=False,
            colorscale=[[0, figures.faded(COLORS["throttle"], 0.06)], [1, figures.faded(COLORS["throttle"], 0.85)]],
            text=reasons.fillna("unknown").to_numpy().tolist(), customdata=np.array([[g] * n for g in gpus], np.int32),
            hovertemplate=f"<b>GPU %{{customdata}}</b><br>throttled %{{z:.0f}} % of the time at %{{x:.3f}} {time.unit}"
            "<br>%{text} (reason:percent)<br>sampled<extra></extra>", hoverongaps=False),
        row=row, col=col)  # fmt: skip
    every = -(-len(gpus) // 8)
    names = [f"GPU {g}" for g in gpus[::every]] if len(gpus) > 1 else ["throttled"]
    fig.update_yaxes(tickvals=list(range(0, len(gpus), every)), ticktext=names,
                     showgrid=False, autorange="reversed", tickfont={"size": 9}, row=row, col=col)
