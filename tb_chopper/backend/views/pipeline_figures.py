"""Figures of a pipeline: the schedule as it ran, and where the time of each rank goes."""

from __future__ import annotations

import json

import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import pipeline as pipelines
from tb_chopper.backend.views import figures, text
from tb_chopper.backend.views.palette import COLORS, COMPARED_PATTERN, LABELS

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""Kind of an action -> its name in the palette."""
REASONS = {
    pipelines.PREVIOUS: "the previous stage's output", pipelines.NEXT: "the next stage's gradient",
    pipelines.OWN: "no other stage", pipelines.END: "nothing: it is done, others still run",
}
PARTS = {"busy": "compute", "gaps": "launch_gaps", "wait_previous": "wait_previous", "wait_next": "wait_next",
         "message": "message", "own": "own_bubble", "end": "end"}
"""Disjoint parts of a pass on a rank, in drawing order -> their names in the palette."""
DEFINITIONS = {
    "busy": "Work launched in the actions of the schedule, without messages between stages.",
    "gaps": "Within an action, between its kernels: the GPU waits for launches.",
    "wait_previous": "Between actions, while the previous stage has not finished the output that is needed next.",
    "wait_next": "Between actions, while the next stage has not finished the gradient that is needed next.",
    "message": "Between actions, after the neighbour finished: the message's way, collectives of the stage's own, and "
    "the launch of what follows.",
    "own": "Between actions of which the next needs nothing from other stages: host, data, other work of the rank.",
    "end": "After its last action, while other ranks still work.",
}
WIDE_ENOUGH = 0.012
"""of the width of the chart: a bar that has room for the number of its microbatch"""


def schedule(done: pd.DataFrame, gone: pd.DataFrame, noun: str, which: str = "") -> go.Figure:
    """Ranks by time. done: `metrics.pipeline.actions` of one pipeline and step; gone: its bubbles; which: pipeline."""
    gpus = done.drop_duplicates("gpu").sort_values("position")["gpu"].head(figures.MAX_ROWS).tolist()
    done, gone = (rows[rows["gpu"].isin(gpus)] for rows in (done, gone))
    row = {gpu: i for i, gpu in enumerate(gpus)}
    low, high = int(done["start_ns"].min()), int(done["end_ns"].max())
    unit, divisor = text.time_unit((high - low) / 1000)
    step = int(done["step"].iloc[0])
    used = [kind for kind in KINDS if (done["kind"] == kind).any()]
    fig = figures.figure(
        f"Schedule of step {step}{which}",
        "What each rank works on; numbers are microbatches. Hatched: bubbles.",
        height=figures.height_of(len(gpus)),
        wide=True,
        barmode="overlay",
        uniformtext={"minsize": 9, "mode": "hide"},
        legend=[*(figures.entry(KINDS[kind], "From the first to the last kernel of an action.") for kind in used),
                figures.entry("bubble", "Time between actions: waiting for what a neighbour computes, or for nothing "
                              "that others do.", pattern=COMPARED_PATTERN),
                figures.entry("message", DEFINITIONS["message"], pattern=COMPARED_PATTERN)],
    )
    several = done.groupby("gpu")["stage"].nunique().max() > 1
    for kind in used:
        own = done[done["kind"] == kind]
        us = ((own["end_ns"] - own["start_ns"]) / 1000).tolist()
        fig.add_trace(figures.bars(
            KINDS[kind], own["gpu"].map(row).tolist(), us, divisor, starts_us=((own["start_ns"] - low) / 1000).tolist(),
            labels=[str(m) if 1000 * u >= WIDE_ENOUGH * (high - low) else ""
                    for m, u in zip(own["microbatch"], us, strict=True)],
            hover=[f"<b>{LABELS[KINDS[kind]]} of microbatch {m}</b><br>stage {s} on {noun} {g}<br>{text.duration(u)}, "
                   f"of which busy {text.duration(b / 1000)}"
                   for m, s, g, u, b in zip(own["microbatch"], own["stage"], own["gpu"], us, own["busy_ns"],
                                            strict=True)],
            links=[json.dumps({"gpu": int(g)}) for g in own["gpu"]]))
    for trace in _bubbles(gone, row, low, divisor, noun):
        fig.add_trace(trace)
    labels = [f"{noun} {gpu} · {_stages(done, gpu)}" if several else f"{noun} {gpu}" for gpu in gpus]
    fig.update_layout(xaxis={"title": {"text": unit}, "range": [0, (high - low) / 1000 / divisor]},
                      yaxis=figures.rows_axis(labels))
    return fig


def _stages(done: pd.DataFrame, gpu: int) -> str:
    return "stages " + ", ".join(map(str, sorted(done.loc[done["gpu"] == gpu, "stage"].unique())))


def _bubbles(gone: pd.DataFrame, row: dict[int, int], low: int, divisor: float, noun: str) -> list[go.Bar]:
    """Waiting, and the message's part behind it."""
    hover = []
    for b in gone.itertuples(index=False):
        behind = "" if b.kind is None or b.kind != b.kind else (
            f"<br>before {LABELS[KINDS[b.kind]].lower()} of microbatch {b.microbatch}")
        waits = f", computed by {noun} {b.waits_for}" if b.waits_for is not pd.NA else ""
        rest = f"<br>{text.duration(b.wait_us)} until it was computed, then message and launch" \
            if b.waits_for is not pd.NA and b.wait_us < b.bubble_us else ""
        hover.append(f"<b>Bubble of {text.duration(b.bubble_us)}</b> ({b.phase}) on {noun} {b.gpu}<br>"
                     f"waits for {REASONS[b.reason]}{waits}{behind}{rest}")
    foreign = gone["reason"].isin((pipelines.PREVIOUS, pipelines.NEXT))
    waiting = gone["bubble_us"].where(~foreign, gone["wait_us"])
    start = (gone["start_ns"] - low) / 1000
    y = gone["gpu"].map(row)
    traces = []
    for thing, begin, size in (("bubble", start, waiting), ("message", start + waiting, gone["bubble_us"] - waiting)):
        drawn = (size > 0).to_numpy()
        told = [h for h, d in zip(hover, drawn, strict=True) if d]
        traces.append(figures.bars(thing, y[drawn].tolist(), size[drawn].tolist(), divisor, told,
                                   starts_us=begin[drawn].tolist(), compared=[True] * len(told)))
    return traces


def times(rows: pd.DataFrame, theory_us: float, noun: str) -> go.Figure:
    """Where the time of each rank goes. rows: of `metrics.pipeline.pipeline` by gpu, times of one step."""
    shown = rows.head(figures.MAX_ROWS)
    unit, divisor = text.time_unit(shown["total_us"].max())
    fig = figures.figure(
        "Where the time of a rank goes",
        "Mean over the steps. The line is the length of the perfect schedule with the same work.",
        height=figures.height_of(len(shown)),
        wide=True,
        barmode="stack",
        legend=[*(figures.entry(thing, DEFINITIONS[part]) for part, thing in PARTS.items()
                  if shown[f"{part}_us"].sum() > 0),
                *([figures.entry("theoretical", "Equal stages, messages that cost nothing.", "Perfect schedule",
                                 line=True)] if theory_us == theory_us else [])],
    )
    for part, thing in PARTS.items():
        values = shown[f"{part}_us"]
        if values.sum() > 0:
            fig.add_trace(figures.bars(
                thing, range(len(shown)), values.tolist(), divisor,
                hover=[f"<b>{noun} {g}</b><br>{LABELS[thing]}: {text.duration(v)} ({text.share(v / t)})"
                       for g, v, t in zip(shown["gpu"], values, shown["total_us"], strict=True)],
                links=[json.dumps({"gpu": int(g)}) for g in shown["gpu"]]))
    if theory_us == theory_us:
        fig.add_trace(go.Scatter(
            x=[theory_us / divisor] * 2, y=[-0.5, len(shown) - 0.5], mode="lines", showlegend=False, name="theory",
            line={"color": COLORS["theoretical"], "width": 2, "dash": "dash"},
            hovertemplate=f"perfect schedule: {text.duration(theory_us)}<extra></extra>"))
    fig.update_layout(xaxis={"title": {"text": unit}},
                      yaxis=figures.rows_axis([f"{noun} {g}" for g in shown["gpu"]]))
    return fig
