"""Launch: how long the GPU waits for its next compute kernel, and on whom."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.schema import BEFORE_CAPTURE, UNATTRIBUTED
from tb_chopper.backend.views import context, figures, text, trace_link
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "launch": "O_launch: time from the end of all earlier compute kernels of the GPU to the start of this one, where "
    "positive; "
    "preparation + call.",
    "prep": "O_prep: the part of the gap before the launch call began. The CPU was not ready: Python, data loading, "
    "synchronisation.",
    "call": "O_call: the part of the gap from the launch call to the kernel's start. Launched in time, started late: "
    "queue, runtime, "
    "dependencies.",
    "under_communication": "The part of the call time during which communication ran: the kernel waited for data, "
    "not for its launch.",
    "call_free": "O_call without the part during which communication ran.",
    "graph": "Gaps between the kernels of one CUDA or HIP graph launch: one call started several kernels.",
    "unattributed": "Gaps before kernels whose launch call is not in the trace.",
    "gaps": "All gaps before compute kernels: preparation + call + graph + unattributed.",
    "share": "All gaps / length of the window.",
    "median": "Median gap before the kernels of the group, those without a gap included.",
}
SCOPES = {
    "across": "across: the sequence of kernels runs through step borders, as in the paper",
    "within": "within: the sequence restarts at each step, whose first kernel then has no gap",
}
SPOKEN = {
    UNATTRIBUTED: "kernels of no known operation",
    BEFORE_CAPTURE: "kernels that were launched before the capture",
}
"""Groups that are no operations, inside a sentence."""
NO_LAUNCHES = Missing(
    "Launch calls",
    "Operators on the CPU start where they are called: nothing is launched. Record a run on a GPU.",
    "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], ...)",
)
SEGMENTS = ("prep", "call", "under_communication", "graph", "unattributed")
"""Disjoint parts of the gaps, in drawing order; `call` here is without the part under communication."""


def view(run: Run, selection: Selection) -> View:
    """Preparation, call, graph and unattributed gaps before compute kernels by operation, layer, phase, step or GPU."""
    if context.is_cpu_only(run):
        return View("CPU operations are not launched, so there is no launch overhead.", missing=(NO_LAUNCHES,))
    where, by = selection.where(), list(selection.by or ("operation",))
    scope = selection.options.get("scope", "across")
    rows = _with_parts(run.launch_overhead(by=by, where=where, scope=scope))
    if not len(rows):
        return View(
            "No compute kernel ran in this selection, so there are no gaps to explain.",
        )
    by_gpu = _with_parts(run.launch_overhead(by="gpu", where=where, scope=scope))
    window_us = float(run.timeline(by="gpu", where=where)["total_us"].sum())
    return View(
        _headline(rows, by_gpu, by, window_us),
        key_figures=_key_figures(by_gpu, window_us, scope),
        figures={
            "by_group": _by_group(rows, by, selection),
            "by_gpu": _by_gpu(by_gpu),
            "gaps": _gap_sizes(context.kernels(run, selection)),
        },
        tables={"groups": _table(_linked(rows, context.kernels(run, selection), by), by)},
        definitions={"Scope": "; ".join(SCOPES.values()) + "."},
    )


def _with_parts(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(
        call_free_us=rows["call_us"] - rows["call_under_communication_us"],
        gaps_us=rows["launch_us"] + rows["graph_us"] + rows["unattributed_us"],
        mean_gap_us=np.divide(rows["launch_us"], rows["n"], out=np.full(len(rows), np.nan), where=rows["n"] > 0),
    )


def _column(segment: str) -> str:
    return {"call": "call_free_us", "under_communication": "call_under_communication_us"}.get(segment, f"{segment}_us")


def _headline(rows: pd.DataFrame, by_gpu: pd.DataFrame, by: list[str], window_us: float) -> str:
    gaps = float(by_gpu["gaps_us"].sum())
    if gaps == 0:
        return "No compute kernel waited: there are no gaps between them."
    sums = {s: float(by_gpu[_column(s)].sum()) for s in SEGMENTS}
    largest = max(sums, key=lambda s: sums[s])
    why = {
        "prep": "the CPU had not yet called the launch",
        "call": "the launch was called but the kernel started late",
        "under_communication": "the launch was called but communication was still running",
        "graph": "the gap lay inside a graph launch",
        "unattributed": "the launch call is not in the trace",
    }[largest]
    worst = figures.largest(rows, "gaps_us")
    share = text.share(gaps / window_us) if window_us else text.DASH
    line = (
        f"The GPU waits for its next compute kernel {share} of the time; in {text.share(sums[largest] / gaps)} of "
        f"that {why}."
    )
    if len(rows) > 1:
        name = SPOKEN.get(worst[by[0]], text.short(figures.row_label(worst, by), 60))
        line += f" Most of it comes before {name} ({text.duration(worst['gaps_us'])})."
    return line


def _key_figures(by_gpu: pd.DataFrame, window_us: float, scope: str) -> tuple[KeyFigure, ...]:
    sums = by_gpu.drop(columns="gpu").sum(numeric_only=True)
    gaps = sums["gaps_us"]
    gpus = text.count(len(by_gpu), "GPU")

    def part(label: str, column: str, thing: str, definition: str) -> KeyFigure:
        return KeyFigure(
            label,
            sums[column],
            "us",
            DEFINITIONS[definition],
            color=COLORS[thing],
            note=f"{text.share(sums[column] / gaps if gaps else None)} of the gaps",
        )

    return (
        KeyFigure("Launch overhead", sums["launch_us"], "us", DEFINITIONS["launch"], note=f"{gpus}, {scope} steps"),
        part("Preparation", "prep_us", "prep", "prep"),
        part("Call", "call_us", "call", "call"),
        part("Under communication", "call_under_communication_us", "under_communication", "under_communication"),
        *([part("Graph replay", "graph_us", "graph", "graph")] if sums["graph_us"] else []),
        *([part("Unattributed", "unattributed_us", "unattributed", "unattributed")] if sums["unattributed_us"] else []),
        KeyFigure(
            "Gaps of the window",
            gaps / window_us if window_us else None,
            "share",
            DEFINITIONS["share"],
            note=f"{text.duration(gaps)} of {text.duration(window_us)}",
        ),
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _legend(rows: pd.DataFrame) -> list[dict[str, object]]:
    meaning = {**DEFINITIONS, "call": DEFINITIONS["call_free"]}
    return [figures.entry(s, meaning[s]) for s in SEGMENTS if rows[_column(s)].sum() > 0]


def _stack(
    fig: go.Figure, rows: pd.DataFrame, labels: list[str], divisor: float, compared: list[bool], links: list[str] | None
) -> None:
    for s in SEGMENTS:
        values = rows[_column(s)]
        if values.sum() > 0:
            fig.add_trace(
                figures.bars(
                    s,
                    range(len(rows)),
                    values.tolist(),
                    divisor,
                    hover=[
                        f"<b>{text.hover(label)}</b><br>{LABELS[s]}: {text.duration(v)} of {text.duration(g)}<br>"
                        f"{n:,} kernels<br>measured"
                        for label, v, g, n in zip(labels, values, rows["gaps_us"], rows["n"], strict=True)
                    ],
                    compared=compared,
                    links=links,
                )
            )


def _by_group(rows: pd.DataFrame, by: list[str], selection: Selection) -> go.Figure:
    shown = figures.top(rows[rows["gaps_us"] > 0], "gaps_us", 20 if selection.compare is None else 12).assign(
        other=False
    )
    if selection.compare is not None:
        other = _with_parts(
            selection.compare.launch_overhead(by=by, scope=selection.options.get("scope", "across"))
        ).assign(other=True)
        merged = shown[by].merge(other, on=by, how="inner")
        shown = (
            pd.concat([shown, merged], ignore_index=True)
            .assign(place=lambda f: f.groupby(by, dropna=False, sort=False, observed=True).ngroup())
            .sort_values(["place", "other"], ignore_index=True)
        )
    unit, divisor = text.time_unit(shown["gaps_us"].max() if len(shown) else 0)
    labels = [
        figures.row_label(r, by)
        + (f" · {text.short(selection.compare.name, 18)}" if r["other"] and selection.compare else "")
        for r in shown.to_dict("records")
    ]
    fig = figures.figure(
        "Gaps before compute kernels by " + " and ".join(by),
        "Sum over the selection, largest first. A gap belongs to the kernel that ended it.",
        height=figures.height_of(len(shown), 27),
        wide=True,
        barmode="stack",
        legend=_legend(shown),
    )
    links = [json.dumps({"focus": str(o)}) for o in shown["operation"]] if "operation" in by else None
    _stack(fig, shown, labels, divisor, shown["other"].tolist(), links)
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 44))
    return fig


def _by_gpu(rows: pd.DataFrame) -> go.Figure:
    rows = figures.most(rows, "gaps_us")
    unit, divisor = text.time_unit(rows["gaps_us"].max())
    labels = [f"GPU {g}" for g in rows["gpu"]]
    fig = figures.figure(
        "Gaps by GPU",
        "The same parts, per GPU.",
        height=max(300, figures.height_of(len(rows), 28)),
        barmode="stack",
        legend=_legend(rows),
    )
    _stack(fig, rows, labels, divisor, [False] * len(rows), [json.dumps({"gpu": int(g)}) for g in rows["gpu"]])
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels))
    return fig


def _gap_sizes(kernels: pd.DataFrame) -> go.Figure:
    """Where the gap time lies: many short gaps or few long ones."""
    compute = kernels[kernels["kind"] == "compute"]
    edges = np.array([0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8])
    names = ["< 1 µs", "1–10 µs", "10–100 µs", "0.1–1 ms", "1–10 ms", "10–100 ms", "> 0.1 s"]
    gap = compute[["prep_ns", "call_ns", "graph_ns", "unattributed_ns"]].to_numpy().sum(axis=1)
    place = np.clip(np.searchsorted(edges, gap, side="right") - 1, 0, len(names) - 1)
    sums = {s: np.zeros(len(names)) for s in SEGMENTS}
    nanoseconds = {
        "prep": compute["prep_ns"],
        "call": compute["call_ns"] - compute["call_under_communication_ns"],
        "under_communication": compute["call_under_communication_ns"],
        "graph": compute["graph_ns"],
        "unattributed": compute["unattributed_ns"],
    }
    for s, values in nanoseconds.items():
        np.add.at(sums[s], place, values.to_numpy() / 1000)
    counts = np.bincount(place[gap > 0], minlength=len(names))
    unit, divisor = text.time_unit(float(np.sum(list(sums.values()), axis=0).max()) if len(compute) else 0)
    fig = figures.figure(
        "Short gaps or long ones",
        "Total time of the gaps by their size: many short gaps call for graphs or fusion, few long ones have a cause "
        "of their own.",
        height=300,
        barmode="stack",
        legend=[figures.entry(s) for s in SEGMENTS if sums[s].sum() > 0],
    )
    for s in SEGMENTS:
        if sums[s].sum() > 0:
            fig.add_trace(
                go.Bar(
                    x=names,
                    y=(sums[s] / divisor).tolist(),
                    marker={"color": COLORS[s], "line": {"width": 0}},
                    name=LABELS[s],
                    hovertext=[
                        f"<b>gaps of {text.escape(n)}</b><br>{LABELS[s]}: {text.duration(v)}<br>{c:,} gaps"
                        for n, v, c in zip(names, sums[s], counts, strict=True)
                    ],
                    hovertemplate="%{hovertext}<extra></extra>",
                )
            )
    fig.update_layout(
        xaxis={
            "type": "category",
            "ticktext": [text.escape(n) for n in names],
            "tickvals": names,
            "title": {"text": "size of a gap"},
        },
        yaxis={"title": {"text": unit}},
    )
    return fig


SOMETIMES = (
    TableColumn("call_under_communication_us", "Under comm.", "us", DEFINITIONS["under_communication"]),
    TableColumn("graph_us", "Graph", "us", DEFINITIONS["graph"]),
    TableColumn("unattributed_us", "Unattributed", "us", DEFINITIONS["unattributed"]),
)
"""Columns of what many runs have none of."""


def _linked(rows: pd.DataFrame, kernels: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`rows` with the kernel of each group that waited longest (see trace_link)."""
    compute = kernels[kernels["kind"] == "compute"]
    gaps = compute[["prep_ns", "call_ns", "graph_ns", "unattributed_ns"]].sum(axis=1).to_numpy()
    return trace_link.linked(rows, compute, by, gaps)


def _table(rows: pd.DataFrame, by: list[str]) -> Table:
    groups = tuple(TableColumn(c, c.capitalize() if c != "gpu" else "GPU") for c in by)
    return Table(
        "Launch by " + " and ".join(by),
        (
            *groups,
            TableColumn("n", "Kernels", "count", "Compute kernels of the group."),
            TableColumn("gaps_us", "All gaps", "us", DEFINITIONS["gaps"], bar=True),
            TableColumn("launch_us", "Launch", "us", DEFINITIONS["launch"]),
            TableColumn("prep_us", "Preparation", "us", DEFINITIONS["prep"], bar=True),
            TableColumn("call_us", "Call", "us", DEFINITIONS["call"], bar=True),
            *(c for c in SOMETIMES if rows[c.name].any()),
            TableColumn("mean_gap_us", "Launch / kernel", "us", "Launch overhead / kernels."),
        ),
        rows,
        sort="gaps_us",
        link={"focus": "operation"}
        if "operation" in by
        else {"gpu": "gpu"}
        if by == ["gpu"]
        else {"step": "step"}
        if by == ["step"]
        else {},
        at="at",
    )
