"""Operations: every group of work at any granularity, and the kernels inside one of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.views import context, figures, text, trace_link
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "n": "Device activities (kernels, copies, fills) of the group.",
    "time": "Sum of the durations of the group's activities. Activities that run at the same time both count, so "
    "that shares compare work, "
    "not wall time; Overview has the wall time.",
    "median": "Median duration of one activity.",
    "share": "The group's time / the time of all groups in the selection.",
    "overlap": "Part of the time of compute and copies beside which communication of the same GPU ran.",
    "launch": "Launch overhead before the group's compute kernels: preparation + call.",
    "type": "gemm, attention or vector for computation (the type with the most time); communication; memcpy.",
    "flop": "Estimated: FLOPs counted from recorded shapes / compute time of the group. Empty without shapes.",
}
TYPES = ("gemm", "attention", "vector", "communication", "memcpy")


def view(run: Run, selection: Selection) -> View:
    """Time, count, share, overlap and launch gaps per group; with a focus, the kernels of that operation."""
    if context.nothing_to_show(run):
        return View(
            "There is no device activity in this run.",
            missing=(context.NO_KERNELS,),
        )
    kernels = _typed(context.kernels(run, selection))
    by = list(selection.by or ("operation",))
    groups = _with_flops(summary(kernels, by), run, selection, by)
    charts, tables = (
        {"top": _top_figure(kernels, groups, by, run, selection)},
        {"groups": _groups_table(run, groups, by)},
    )
    focus = selection.focus
    if focus is not None and (kernels["operation"] == focus).any():
        inside = kernels[kernels["operation"] == focus]
        tables["kernels"] = _kernels_table(summary(inside, ["kernel"]), focus)
        charts["durations"] = _durations(inside, focus)
    elif by == ["operation"]:
        tables["groups"] = _groups_table(run, groups, by, note="Choose a row to see the kernels of that operation.")
    return View(
        _headline(groups, by),
        key_figures=_key_figures(run, kernels, groups),
        figures=charts,
        tables=tables,
    )


def summary(kernels: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row per group: n, time_us, median_us, min_us, max_us, share, overlap_share, launch_us, type, at.

    Shares are 0 to 1; the type is the one with the most time; `at` is the longest activity (see trace_link).
    """
    codes, groups = grouping.number(kernels, by)
    n = len(groups)
    duration = (kernels["end_ns"] - kernels["start_ns"]).to_numpy()
    time = grouping.sums(codes, n, duration)
    by_code = pd.Series(duration).groupby(codes)
    typed = np.zeros((n, len(TYPES)), np.int64)
    np.add.at(typed, (codes, kernels["type"].cat.codes.to_numpy()), np.maximum(duration, 1))
    other = (kernels["kind"] != "communication").to_numpy()
    overlap = grouping.sums(codes, n, np.where(other, kernels["overlap_ns"].to_numpy(), 0))
    beside = grouping.sums(codes, n, np.where(other, duration, 0))
    return groups.assign(
        type=[TYPES[i] for i in typed.argmax(axis=1)],
        n=np.bincount(codes, minlength=n),
        time_us=time / 1000,
        share=time / max(time.sum(), 1),
        median_us=by_code.median().to_numpy() / 1000,
        min_us=by_code.min().to_numpy() / 1000,
        max_us=by_code.max().to_numpy() / 1000,
        overlap_share=np.divide(overlap, beside, out=np.full(n, np.nan), where=beside > 0),
        launch_us=grouping.sums(codes, n, (kernels["prep_ns"] + kernels["call_ns"]).to_numpy()) / 1000,
        at=trace_link.largest(kernels, codes),
    )


def _with_flops(groups: pd.DataFrame, run: Run, selection: Selection, by: list[str]) -> pd.DataFrame:
    """`groups` with flop_per_s: FLOPs counted from recorded shapes / compute time, where they are known."""
    if "kernel" in by:  # recorded shapes belong to a call of several kernels, not to one of them
        return groups.assign(flop_per_s=np.nan)
    rates = run.efficiency(by=by, where=selection.where())
    rates = rates.assign(flop_per_s=np.where(rates["flop"] > 0, rates["flop"] / rates["time_us"] * 1e6, np.nan))
    return groups.merge(rates[[*by, "flop_per_s"]], on=by, how="left")


def _typed(kernels: pd.DataFrame) -> pd.DataFrame:
    """`kernels` with the type of each row as a categorical of TYPES."""
    kind = kernels["kind"].astype(object).to_numpy()
    op_type = kernels["op_type"].astype(object).fillna("vector").to_numpy()
    return kernels.assign(type=pd.Categorical(np.where(kind == "compute", op_type, kind), categories=list(TYPES)))


def _headline(groups: pd.DataFrame, by: list[str]) -> str:
    first = figures.top(groups, "time_us", 3)
    names = [f"{text.short(figures.row_label(r, by), 48)} ({text.share(r['share'])})" for r in first.to_dict("records")]
    head = (
        f"The largest of {len(groups):,} groups is {names[0]}".replace(",", " ", 1)
        if len(groups) > 1
        else f"All time is in {names[0]}"
    )
    rest = f", then {' and '.join(names[1:])}" if len(names) > 1 else ""
    ten = figures.top(groups, "share", 10)["share"].sum()
    tail = f". Ten groups hold {text.share(ten)} of the work." if len(groups) > 12 else "."
    return head + rest + tail


def _key_figures(run: Run, kernels: pd.DataFrame, groups: pd.DataFrame) -> tuple[KeyFigure, ...]:
    duration = (kernels["end_ns"] - kernels["start_ns"]) / 1000
    sums = duration.groupby(kernels["type"], observed=False).sum()
    total = float(sums.sum())
    launched = (kernels["operation"] == "launched before capture") | (kernels["operation"] == "unattributed")
    attributed = 1 - float(duration[launched].sum()) / total if total else None
    parts = [
        KeyFigure(
            LABELS[t].removeprefix("Exposed ").capitalize() if t != "gemm" else "GEMM",
            float(sums[t]),
            "us",
            f"Sum of durations of all {t} activities.",
            color=COLORS[t],
            note=f"{text.share(sums[t] / total if total else None)} of the work",
        )
        for t in TYPES
        if sums[t] > 0
    ]
    return (
        KeyFigure(
            context.work(run),
            total,
            "us",
            DEFINITIONS["time"],
            note=f"{text.count(len(kernels), 'activity').replace('activitys', 'activities')}",
        ),
        *parts,
        KeyFigure(
            "Attributed",
            attributed,
            "share",
            "Share of the work that belongs to a known operation. The rest was launched before the "
            "capture or has no launch in the trace; it is shown as a group of that name.",
            note="of the work to an operation",
        ),
    )


def _top_figure(
    kernels: pd.DataFrame, groups: pd.DataFrame, by: list[str], run: Run, selection: Selection
) -> go.Figure:
    shown = figures.top(groups, "time_us", 20).assign(other=False)
    if selection.compare is not None and len(selection.compare.kernels):
        other = summary(_typed(selection.compare.kernels), by).assign(other=True)
        shown = pd.concat([shown, shown[by].merge(other, on=by, how="inner")], ignore_index=True)
        place = shown.groupby(by, dropna=False, sort=False, observed=True).ngroup()
        shown = shown.assign(place=place).sort_values(["place", "other"], ignore_index=True)
    unit, divisor = text.time_unit(shown["time_us"].max() if len(shown) else 0)
    labels = [
        figures.row_label(r, by)
        + (f" · {text.short(selection.compare.name, 18)}" if r["other"] and selection.compare else "")
        for r in shown.to_dict("records")
    ]
    fig = figures.figure(
        f"{context.work(run)} by {' and '.join(by)}",
        "Sum of durations, largest first, coloured by the type of work.",
        height=figures.height_of(len(shown), 26),
        wide=True,
        barmode="overlay",
        legend=[
            figures.entry(t, label=LABELS[t].removeprefix("Exposed ").capitalize() if t != "gemm" else "GEMM")
            for t in TYPES
            if (shown["type"] == t).any()
        ],
    )
    for t in TYPES:
        mine = shown[shown["type"] == t]
        if len(mine):
            fig.add_trace(
                figures.bars(
                    t,
                    mine.index.tolist(),
                    mine["time_us"].tolist(),
                    divisor,
                    hover=[
                        f"<b>{text.hover(labels[i])}</b><br>{t}: {text.duration(r.time_us)} "
                        f"({text.share(r.share)})<br>{r.n:,} activities, median {text.duration(r.median_us)}<br>"
                        "measured"
                        for i, r in zip(mine.index, mine.itertuples(), strict=True)
                    ],
                    compared=mine["other"].tolist(),
                    links=[json.dumps({"focus": str(o)}) for o in mine["operation"]] if "operation" in by else None,
                )
            )
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 52))
    return fig


def _durations(inside: pd.DataFrame, focus: str) -> go.Figure:
    """How the durations of an operation's kernels spread, the largest six kernels by name."""
    duration = (inside["end_ns"] - inside["start_ns"]).to_numpy() / 1000
    names = inside["name"].astype(object).to_numpy()
    largest = pd.Series(duration).groupby(names).sum().nlargest(6).index.tolist()
    unit, divisor = text.time_unit(float(duration.max()))
    fig = figures.figure(
        f"Durations inside {text.short(focus, 48)}",
        "Each point is one kernel, one row per kernel name; the line is the median.",
        height=figures.height_of(len(largest), 44),
        wide=True,
    )
    for i, name in enumerate(largest):
        mine = duration[names == name]
        drawn = mine if len(mine) <= 2000 else np.quantile(mine, np.linspace(0, 1, 2000))
        kind = str(inside["type"].to_numpy()[np.flatnonzero(names == name)[0]])
        fig.add_trace(
            go.Box(
                x=drawn / divisor,
                y=[i] * len(drawn),
                orientation="h",
                boxpoints="all",
                jitter=0.7,
                pointpos=0,
                width=0.6,
                showlegend=False,
                marker={"color": COLORS[kind], "size": 4, "opacity": 0.55},
                line={"color": COLORS[kind], "width": 1.4},
                fillcolor="rgba(0,0,0,0)",
                name=text.label(name, 60),
                hovertemplate=f"{text.hover(name)}<br>%{{x:.2f}} {unit}<extra></extra>",
                hoveron="points",
            )
        )
    fig.update_layout(xaxis={"title": {"text": unit}, "rangemode": "tozero"}, yaxis=figures.rows_axis(largest, 60))
    return fig


NUMBERS = (
    TableColumn("n", "Count", "count", DEFINITIONS["n"]),
    TableColumn("time_us", "Time", "us", DEFINITIONS["time"], bar=True),
    TableColumn("share", "Share", "share", DEFINITIONS["share"], bar=True),
    TableColumn("median_us", "Median", "us", DEFINITIONS["median"]),
)
SOMETIMES = (
    TableColumn("flop_per_s", "Counted", "flop_per_s", DEFINITIONS["flop"], bar=True),
    TableColumn("overlap_share", "Beside comm.", "share", DEFINITIONS["overlap"], bar=True),
    TableColumn("launch_us", "Launch gaps", "us", DEFINITIONS["launch"], bar=True),
)
"""Columns that many runs have nothing in."""


def _sometimes(rows: pd.DataFrame) -> list[TableColumn]:
    return [c for c in SOMETIMES if c.name in rows and (rows[c.name].fillna(0) != 0).any()]


def _groups_table(run: Run, groups: pd.DataFrame, by: list[str], note: str = "") -> Table:
    heads = tuple(
        TableColumn(
            c, c.capitalize() if c != "gpu" else "GPU", "text" if c in ("operation", "kernel", "layer", "phase") else ""
        )
        for c in by
    )
    link = {"focus": "operation"} if "operation" in by else {c: c for c in by if c in ("gpu", "step")}
    rows = groups.assign(**{c: [figures.group_name(c, v) for v in groups[c]] for c in by if c not in ("gpu", "step")})
    return Table(
        f"{context.work(run)} by {' and '.join(by)}",
        (
            *heads,
            TableColumn("type", "Type", "text", DEFINITIONS["type"]),
            *NUMBERS,
            *_sometimes(groups),
        ),
        rows,
        sort="time_us",
        link=link,
        note=note,
        at="at",
    )


def _kernels_table(kernels: pd.DataFrame, focus: str) -> Table:
    return Table(
        f"Kernels of {text.short(focus, 60)}",
        (
            TableColumn("kernel", "Kernel", "text", "Name as written in the trace."),
            TableColumn("type", "Type", "text", DEFINITIONS["type"]),
            *NUMBERS,
            TableColumn("min_us", "Min", "us", "Shortest duration."),
            TableColumn("max_us", "Max", "us", "Longest duration."),
            *_sometimes(kernels),
        ),
        kernels,
        sort="time_us",
        at="at",
    )
