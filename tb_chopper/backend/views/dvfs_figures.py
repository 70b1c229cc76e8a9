"""The figures of the DVFS tab beside the timeline. A run compared with is hatched, or hollow where it is a point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tb_chopper.backend.metrics import frequency
from tb_chopper.backend.views import figures, text
from tb_chopper.backend.views.clocks import Clocks
from tb_chopper.backend.views.palette import COLORS, COMPARED_PATTERN
from tb_chopper.backend.views.view import Selection

SHOWN_OPERATIONS = 16
MAX_POINTS = 4000
REASONS = {
    "power": "power limit", "thermal": "temperature", "memory_thermal": "memory temperature",
    "vr_thermal": "voltage regulator temperature", "prochot": "overheat signal of the board",
    "hw_slowdown": "hardware slowdown", "power_brake": "external power brake",
    "application_clocks": "clocks set by an application", "sync_boost": "clock of a GPU group",
    "display_clocks": "clock of a display", "other": "unnamed reason",
}  # fmt: skip
LOST = "Σ duration × max(0, 1 − clock / peak clock) over compute kernels: the time that they would save at the peak " \
       "clock. An upper bound: work that waits for memory gains less."


def compared_entry(sides: Sequence[Clocks], points: bool = False) -> list[dict[str, Any]]:
    """The legend's word on the other run."""
    if len(sides) < 2:
        return []
    return [figures.entry("idle", label=f"{'hollow' if points else 'hatched'}: {sides[1].name}", pattern=not points)]


# ---- operations ------------------------------------------------------------------------------------------------------


def operations(sides: Sequence[Clocks]) -> tuple[go.Figure, go.Figure]:
    """Ranking of time lost to the clock, and the clock of the same groups in the same order."""
    by = list(sides[0].by)
    ranked = sides[0].operations[sides[0].operations["clock_mhz"].notna()]
    has_peak = ranked["lost_to_clock_us"].notna().any()
    first = figures.top(ranked, "lost_to_clock_us" if has_peak else "time_us", SHOWN_OPERATIONS)
    names = [figures.row_label(r, by) for r in first.to_dict("records")]
    parts = [first.assign(row=range(len(first)), other=False, label=names)]
    for side in sides[1:]:
        rows = side.operations.assign(label=[figures.row_label(r, by) for r in side.operations.to_dict("records")])
        rows = rows[rows["clock_mhz"].notna() & rows["label"].isin(names)]
        parts.append(rows.assign(row=rows["label"].map({n: i for i, n in enumerate(names)}), other=True))
    rows = pd.concat(parts, ignore_index=True)
    return _lost(sides, rows, names, by), _clock(sides, rows, names)


def _lost(sides: Sequence[Clocks], rows: pd.DataFrame, names: list[str], by: list[str]) -> go.Figure:
    unit, divisor = text.time_unit(rows["time_us"].max() if len(rows) else 0)
    two = bool(rows["other"].any())
    fig = figures.figure(
        "Time lost to the clock", "Compute time, and the part of it that the peak clock would save; the most on top.",
        height=figures.height_of(len(names), 38 if two else 34), barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        legend=[figures.entry("compute", "Compute time − lost time.", label="At the peak clock"),
                figures.entry("frequency", LOST, label="Lost to the clock (estimated)"), *compared_entry(sides)])
    width = 0.36 if two else 0.62
    place = rows["row"] + (np.where(rows["other"], 0.21, -0.21) if two else 0.0)
    lost = rows["lost_to_clock_us"].fillna(0.0)
    for thing, values in (("compute", rows["time_us"] - lost), ("frequency", lost)):
        fig.add_trace(figures.bars(
            thing, place.tolist(), values.tolist(), divisor, width=width, compared=rows["other"].tolist(),
            hover=_operation_hovers(sides, rows),
            labels=[text.share(v / t if t else 0.0) for v, t in zip(values, rows["time_us"], strict=True)]
            if thing == "frequency" else None,
            links=[json.dumps({"focus": str(o)}) for o in rows["operation"]] if "operation" in by else None))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(names))
    return fig


def _operation_hovers(sides: Sequence[Clocks], rows: pd.DataFrame) -> list[str]:
    return [
        f"<b>{text.hover(r['label'])}</b>{' · ' + text.hover(sides[1].name) if r['other'] else ''}<br>"
        f"{r['clock_mhz']:,.0f} MHz, memory {_number(r['memory_clock_mhz'])} MHz, {_number(r['power_w'])} W "
        f"(sampled)<br>"
        f"lost {text.duration(r['lost_to_clock_us'])} of {text.duration(r['time_us'])} "
        f"({text.share(r['lost_share'])}, estimated)<br>{r['n']:,} kernels, clock known for "
        f"{text.share(r['sampled_share'])} of their time"
        for r in rows.to_dict("records")
    ]


def _number(value: float) -> str:
    return text.DASH if value != value else text.digits(value)


def _clock(sides: Sequence[Clocks], rows: pd.DataFrame, names: list[str]) -> go.Figure:
    fig = figures.figure(
        "Clock by operation", "Time-weighted mean over the same work, in the order of the ranking. Sampled: work that "
        "alternates faster than the samples shares their clock.",
        height=figures.height_of(len(names), 38 if rows["other"].any() else 34),
        legend=[figures.entry("frequency", "Σ duration × clock / Σ duration.", label="Engine clock"),
                *compared_entry(sides, points=True)])
    hovers = np.array(_operation_hovers(sides, rows), object)
    for other in (False, True):
        mine = (rows["other"] == other).to_numpy()
        if mine.any():
            _points(fig, rows.loc[mine, "clock_mhz"], rows.loc[mine, "row"], "frequency", hovers[mine], other)
    _peak_line(fig, sides[0])
    fig.update_layout(xaxis={"title": {"text": "MHz"}, "rangemode": "normal"}, yaxis=figures.rows_axis(names) | {
        "showgrid": True})
    return fig


def _points(fig: go.Figure, x: pd.Series, y: pd.Series, thing: str, hover: Sequence[str], other: bool,
            size: int = 10, **where: Any) -> None:  # fmt: skip
    fig.add_trace(go.Scatter(
        x=x.tolist(), y=y.tolist(), mode="markers", showlegend=False, hovertext=list(hover),
        marker={"color": COLORS[thing], "size": size, "symbol": "diamond-open" if other else "circle",
                "line": {"width": 2 if other else 0}}, hovertemplate="%{hovertext}<extra></extra>"), **where)


def _peak_line(fig: go.Figure, side: Clocks) -> None:
    peaks = side.gpus["peak_mhz"].dropna().unique()
    for peak in peaks:
        fig.add_vline(x=float(peak), line={"color": COLORS["idle"], "dash": "dot", "width": 1.3},
                      annotation={"text": f"peak {text.digits(float(peak))} ", "yanchor": "top", "textangle": 0,
                                  "xanchor": "right", "font": {"size": 10.5}})


# ---- distribution and relations --------------------------------------------------------------------------------------


def residency(sides: Sequence[Clocks]) -> go.Figure:
    """Share of the windows' time at each clock, all GPUs together."""
    clock = pd.concat([s.inside["clock_mhz"] for s in sides])
    width = _bin(float(clock.max() - clock.min()))
    fig = figures.figure(
        "Time at each clock", f"Share of the time of all selected GPUs, idle time included, in steps of {width:.0f} "
        "MHz. Sampled.", height=320, barmode="overlay",
        legend=[figures.entry("frequency", "Time that a sample stands for: half way to its neighbours.",
                              label="Engine clock"), *compared_entry(sides)])
    for side, other in zip(sides, (False, True), strict=False):
        rows = frequency.residency(side.samples, width, side.windows)
        rows = rows.groupby("clock_mhz", as_index=False)["time_us"].sum()
        share = 100 * rows["time_us"] / rows["time_us"].sum()
        n = len(sides)
        fig.add_trace(go.Bar(
            x=rows["clock_mhz"] + width * (0.5 if n == 1 else 0.75 if other else 0.25), y=share, width=0.94 * width / n,
            showlegend=False, marker={
                "color": COLORS["frequency"], "line": {"width": 0}, "pattern": {
                    "shape": COMPARED_PATTERN if other else "", "bgcolor": COLORS["frequency"], "fgcolor": "white",
                    "size": 6, "solidity": 0.35}},
            hovertext=[f"<b>{low:,.0f} to {low + width:,.0f} MHz</b><br>{s:.1f} % of the time"
                       f" ({text.duration(t)} over all GPUs)<br>{text.hover(side.name)}, sampled"
                       for low, s, t in zip(rows["clock_mhz"], share, rows["time_us"], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>"))
    _peak_line(fig, sides[0])
    fig.update_layout(xaxis={"title": {"text": "engine clock, MHz"}, "rangemode": "normal"},
                      yaxis={"title": {"text": "share of the time, %"}, "rangemode": "tozero"})
    return fig


def _bin(span_mhz: float) -> float:
    """A round width that makes some 20 to 40 bars."""
    return next((w for w in (5.0, 10.0, 25.0, 50.0, 100.0) if span_mhz / w <= 40), 200.0)


def power_clock(sides: Sequence[Clocks]) -> go.Figure | None:
    """One point per sample of the windows."""
    rows = [s.inside[["gpu", "clock_mhz", "power_w"]].dropna() for s in sides]
    if not len(rows[0]):
        return None
    r = [np.corrcoef(f["clock_mhz"], f["power_w"])[0, 1] if f.std()[["clock_mhz", "power_w"]].min() > 0 else np.nan
         for f in rows]  # fmt: skip
    every = [-(-len(f) // MAX_POINTS) for f in rows]
    shown = f"every {every[0]}th of {len(rows[0]):,} samples" if every[0] > 1 else f"{len(rows[0]):,} samples"
    words = "not defined" if r[0] != r[0] else f"{r[0]:.2f}"
    fig = figures.figure(
        "Power and clock", f"{shown[0].upper()}{shown[1:]} of all selected GPUs; Pearson r = {words} over all of them. "
        "A falling clock at constant power: the power limit holds it.".replace(",", " ", 1), height=320,
        legend=[figures.entry("power", "One sample: its clock and its power.", label="Sample"),
                *compared_entry(sides, points=True)])
    for f, step, other in zip(rows, every, (False, True), strict=False):
        some = f.iloc[::step]
        fig.add_trace(go.Scatter(
            x=some["clock_mhz"].to_numpy(), y=some["power_w"].to_numpy(), mode="markers", showlegend=False,
            customdata=some["gpu"].to_numpy(np.int32), opacity=0.45,
            marker={"color": COLORS["power"], "size": 5, "symbol": "diamond-open" if other else "circle"},
            hovertemplate="<b>GPU %{customdata}</b><br>%{y:,.0f} W at %{x:,.0f} MHz<br>sampled<extra></extra>"))
    for limit in sides[0].gpus["limit_w"].dropna().unique():
        fig.add_hline(y=float(limit), line={"color": COLORS["idle"], "dash": "dot", "width": 1.3},
                      annotation={"text": f"limit {text.digits(float(limit))} W", "yanchor": "bottom",
                                  "font": {"size": 10.5}})
    fig.update_layout(xaxis={"title": {"text": "engine clock, MHz"}, "rangemode": "normal"},
                      yaxis={"title": {"text": "power, W"}, "rangemode": "normal"})
    return fig


def step_time(sides: Sequence[Clocks]) -> go.Figure | None:
    """Mean over the GPUs, one point per step, and the line through them."""
    steps = sides[0].mean_steps().dropna()
    if len(steps) < 2:
        return None
    found = sides[0].step_time()
    parts = [steps, *(s.mean_steps().dropna() for s in sides[1:])]
    unit, divisor = text.time_unit(max(p["time_us"].max() for p in parts if len(p)))
    fig = figures.figure(
        "Step time and clock", _regression_words(found, steps), height=320,
        legend=[figures.entry("frequency", "Step time and clock of compute time, means over the GPUs.", label="Step"),
                *compared_entry(sides, points=True)])
    for part, other in zip(parts, (False, True), strict=False):
        hover = [f"<b>step {s}</b><br>{text.duration(t)} at {c:,.0f} MHz<br>clock sampled, time measured"
                 for s, t, c in zip(part["step"], part["time_us"], part["clock_mhz"], strict=True)]
        _points(fig, part["clock_mhz"], part["time_us"] / divisor, "frequency", hover, other)
    if found is not None and found.low > 0:
        x = np.linspace(steps["clock_mhz"].min(), steps["clock_mhz"].max(), 40)
        fig.add_trace(go.Scatter(
            x=x, y=(found.intercept + found.slope * 1000 / x) / divisor, mode="lines", showlegend=False,
            line={"color": COLORS["frequency"], "width": 1.6, "dash": "dash"}, hoverinfo="skip"))
    fig.update_layout(xaxis={"title": {"text": "engine clock, MHz"}, "rangemode": "normal"},
                      yaxis={"title": {"text": f"step time, {unit}"}, "rangemode": "normal"})
    return fig


def _regression_words(found: frequency.Regression | None, steps: pd.DataFrame) -> str:
    if found is None:
        return f"{len(steps)} steps with a clock: a line through them needs four and a clock that changes."
    mean, per = float(steps["time_us"].mean()), 1000 / float(steps["clock_mhz"].mean())
    low, high = found.low * per / mean, found.high * per / mean
    interval = f"95 % interval {text.share(low)} to {text.share(high)}, r = {found.r:.2f}"
    if low <= 0:
        return f"{found.n} steps do not tell how much of a step scales with the clock ({interval})."
    return (f"{text.share(found.slope * per / mean)} of a step scales with the clock ({interval}): least squares of "
            f"step time over 1 / clock, {found.n} steps. Estimated.")


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def spread(sides: Sequence[Clocks]) -> go.Figure:
    """Clock, power and temperature of each GPU, the slowest on top."""
    order = sides[0].gpus.sort_values("clock_mhz", kind="stable").head(figures.MAX_ROWS)
    row = {g: i for i, g in enumerate(order["gpu"])}
    names = [f"GPU {g}{' · ' + note if note else ''}" for g, note in zip(order["gpu"], order["note"], strict=True)]
    columns = (("clock_mhz", "frequency", "MHz"), ("power_w", "power", "W"), ("temperature_c", "temperature", "°C"))
    fig = make_subplots(1, 3, shared_yaxes=True, horizontal_spacing=0.05)
    for col, (column, thing, unit) in enumerate(columns, 1):
        for side, other in zip(sides, (False, True), strict=False):
            rows = side.gpus[side.gpus["gpu"].isin(row) & side.gpus[column].notna()]
            hover = [f"<b>GPU {g}</b> · {text.hover(side.name)}<br>{v:,.0f} {unit}, sampled"
                     f"{'<br>' + note if note else ''}"
                     for g, v, note in zip(rows["gpu"], rows[column], rows["note"], strict=True)]
            _points(fig, rows[column], rows["gpu"].map(row), thing, hover, other, row=1, col=col)
        median = sides[0].gpus[column].median()
        if median == median:
            fig.add_vline(x=float(median), line={"color": COLORS["idle"], "dash": "dot", "width": 1.3}, row=1, col=col)
        fig.update_xaxes(title_text=unit, rangemode="normal", nticks=4, tickangle=0, row=1, col=col)
        fig.update_yaxes(**figures.rows_axis(names) | {"showgrid": True, "showticklabels": col == 1}, row=1, col=col)
    base = figures.figure(
        "Spread between GPUs", "Clock of compute time, power and temperature over the window. Dotted: the median. "
        "Slow: clock more than 2 % below it; hot: more than 5 °C above it.", height=figures.height_of(len(names), 27),
        legend=[figures.entry("frequency", label="Engine clock"), figures.entry("power"), figures.entry("temperature"),
                *compared_entry(sides, points=True)])
    fig.update_layout(**{k: v for k, v in base.layout.to_plotly_json().items() if k not in ("template", "xaxis")})
    return fig


def throttle(sides: Sequence[Clocks]) -> go.Figure | None:
    """Share of the time per reason."""
    parts = [s.reasons for s in sides]
    names = list(dict.fromkeys(r for p in parts for r in p["reason"]))
    if not names:
        return None
    fig = figures.figure(
        "Why the clock was held down", "Share of the time in which a reason held, mean over the selected GPUs. Several "
        "can hold at once.", height=figures.height_of(len(names), 38), barmode="overlay",
        legend=[figures.entry("throttle", "A sample speaks for the time since the one before it."),
                *compared_entry(sides)])
    two = len(sides) > 1
    for side, part, other in zip(sides, parts, (False, True), strict=False):
        fig.add_trace(figures.bars(
            "throttle", [names.index(r) + (0.0 if not two else 0.21 if other else -0.21) for r in part["reason"]],
            (100 * part["share"]).tolist(), 1.0, width=0.36 if two else 0.6, compared=other,
            labels=[text.share(s) for s in part["share"]], hover=[
                f"<b>{REASONS.get(r, text.hover(r))}</b> · {text.hover(side.name)}<br>{text.share(s)} of the time, "
                f"{text.share(a)} to {text.share(b)} over the GPUs<br>sampled"
                for r, s, a, b in part[["reason", "share", "low", "high"]].itertuples(index=False)]))
    fig.update_layout(xaxis={"title": {"text": "share of the time, %"}, "range": [0, 100]},
                      yaxis=figures.rows_axis([REASONS.get(r, r) for r in names]))
    return fig


def energy(sides: Sequence[Clocks], selection: Selection) -> go.Figure | None:
    """Energy of each GPU, and the part spent while nothing but communication ran."""
    parts = [s.gpus[s.gpus["energy_j"].notna()].assign(other=o) for s, o in zip(sides, (False, True), strict=False)]
    gpus = sorted({int(g) for p in parts for g in figures.most(p, "energy_j")["gpu"]})[: figures.MAX_ROWS]
    rows = pd.concat(parts, ignore_index=True)
    rows = rows[rows["gpu"].isin(gpus)]
    if not len(rows):
        return None
    two = len(sides) > 1
    unit, divisor = ("kJ", 1000.0) if rows["energy_j"].max() >= 2000 else ("J", 1.0)
    fig = figures.figure(
        "Energy by GPU", f"Over the {'selected steps' if selection.steps else 'capture'}, idle time included.",
        height=figures.height_of(len(gpus), 38 if two else 34), barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        legend=[figures.entry("power", "The rest of the energy of the window.", label="Compute and idle"),
                figures.entry("communication", "Energy while nothing but communication ran: waiting for others and "
                              "transfer.", label="Exposed communication"), *compared_entry(sides)])
    place = rows["gpu"].map(gpus.index) + (np.where(rows["other"], 0.21, -0.21) if two else 0.0)
    waiting = rows["waiting_j"].fillna(0.0)
    for thing, values in (("power", rows["energy_j"] - waiting), ("communication", waiting)):
        fig.add_trace(figures.bars(
            thing, place.tolist(), values.tolist(), divisor, width=0.36 if two else 0.62,
            compared=rows["other"].tolist(), links=[json.dumps({"gpu": int(g)}) for g in rows["gpu"]],
            labels=[f"{text.share(v / e)}" for v, e in zip(values, rows["energy_j"], strict=True)],
            hover=[f"<b>GPU {r['gpu']}</b>{' · ' + text.hover(sides[1].name) if r['other'] else ''}<br>"
                   f"{text.digits(v)} of {text.digits(r['energy_j'])} J ({text.share(v / r['energy_j'])})<br>sampled: "
                   f"{r['energy_source']}" for v, r in zip(values, rows.to_dict("records"), strict=True)]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis([f"GPU {g}" for g in gpus]))
    return fig
