"""Collectives: who waits for whom, for how long, and how fast the links are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.views import context, figures, text, topology, trace_link
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "duration": "Σ duration of the communication kernels; of several that run at once each counts.",
    "exposed": "The part of the kernels under which their GPU computes nothing.",
    "waiting": "The part of the kernels before the last rank arrived under which the GPU computes nothing: what "
    "waiting for others costs.",
    "rest": "Exposed communication without the waiting: transfer.",
    "hidden": "The part of the kernels under which the GPU computes.",
    "wait": "Last start on any rank − start on this one.",
    "skew": "Last start − first start of a collective.",
    "transfer": "First end − last start: what is left when all ranks are there. Missing where a rank arrives after "
    "another has left.",
    "busbw": "Bytes / transfer · f; f is 2 (n − 1) / n for an all-reduce, (n − 1) / n for all-gather, reduce-scatter "
    "and all-to-all, else 1.",
    "link": "Bus bandwidth / peak of the links to the other GPUs of the host.",
    "last": "Collectives in which this GPU arrived last.",
    "latency": "Collectives whose message the links could carry in under 20 µs: many small ones should be one.",
    "role": "What the group is for: by its description, its callers, or which collectives it has in which phase.",
    "barrier": "The last reduction of gradients of a step; limited by imbalance where its skew is longer than its "
    "transfer.",
    "offset": "How far the clock runs ahead of the first one: median difference of the ends of collectives.",
    "residual": "Nine of ten collectives end within this of each other after correction.",
}
PARTS = ("waiting", "communication", "hidden_communication")
"""Disjoint parts of the communication kernels, in drawing order."""
OTHER_RANKS = Missing(
    "Waiting for other ranks",
    "One rank alone is here. Its kernels wait for others inside, and only the others' traces say how long.",
    "chopper_trace_handler on every rank, all writing to one directory",
)
UNMATCHED = Missing(
    "Waiting for other ranks",
    "The ranks' traces do not tell which of their communication belongs together: no sequence numbers, and different "
    "numbers of calls, or messages between pairs.",
)
NO_SIZES = Missing(
    "Bandwidth",
    "The trace tells no message sizes. PyTorch 2.2 and later record them for NCCL and RCCL.",
)


def view(run: Run, selection: Selection) -> View:
    """Waiting, transfer and bandwidth by group and collective."""
    where = selection.where()
    by = list(selection.by or ("role", "name"))
    by_gpu = run.collectives(by="gpu", where=where)
    if not len(by_gpu):
        missing = (context.NO_KERNELS,) if context.nothing_to_show(run) else ()
        return View("No communication in this selection.", missing=missing)
    each = _chosen(run, where)
    rows = run.collectives(by=by, where=where)
    alone = not (each["n_ranks"] > 1).any()
    sized = each[each["busbw_gbs"].notna() & (each["bytes"] > 0)]
    apart = UNMATCHED if run.kernels["gpu"].nunique() > 1 else OTHER_RANKS
    drawn, listed, unknown = topology.sections(run, selection)
    return View(
        _headline(by_gpu, each, alone, apart),
        key_figures=_key_figures(by_gpu, each),
        figures={"by_gpu": _by_gpu(by_gpu), "over_time": _over_time(each),
                 **({"bandwidth": _bandwidth(sized)} if len(sized) else {}), **drawn},
        tables={**_tables(run, rows, by, by_gpu, where), **listed},
        definitions={"Exposed waiting": DEFINITIONS["waiting"], "Bus bandwidth": DEFINITIONS["busbw"]},
        missing=(*((apart,) if alone else ()), *((NO_SIZES,) if each["bytes"].isna().all() else ()),
                 *unknown),
    )


def _chosen(run: Run, where: dict[str, object]) -> pd.DataFrame:
    """The collectives in which the selection takes part, with all their ranks."""
    mine = run.arrivals(where)["instance"].unique()
    return grouping.select(run.collectives(), {"instance": mine})


def _headline(by_gpu: pd.DataFrame, each: pd.DataFrame, alone: bool, apart: Missing) -> str:
    total, exposed = by_gpu["duration_us"].sum(), by_gpu["exposed_us"].sum()
    if alone:
        who = "these traces do not tell" if apart is UNMATCHED else "the traces of the others would tell"
        return (f"{text.duration(exposed)} of {text.duration(total)} of communication is exposed; how much of it is "
                f"waiting for other ranks, {who}.")
    waiting = by_gpu["exposed_wait_us"].sum()
    together = int((each["n_ranks"] > 1).sum())
    last = figures.largest(by_gpu, "n_last")
    line = (
        f"{text.share(waiting / exposed if exposed else None)} of the exposed communication is waiting for a late rank "
        f"({text.duration(waiting)} of {text.duration(exposed)})."
    )
    if last["n_last"] > 2 * together / max(len(by_gpu), 2):
        line += f" GPU {last['gpu']} arrives last in {last['n_last']} of {text.count(together, 'collective')}."
    return line


def _key_figures(by_gpu: pd.DataFrame, each: pd.DataFrame) -> tuple[KeyFigure, ...]:
    sums = by_gpu.drop(columns="gpu").sum(numeric_only=True)
    gpus = text.count(len(by_gpu), "GPU")
    fastest = each["busbw_gbs"].max()
    small = int(each["latency_bound"].fillna(False).sum())
    return (
        KeyFigure("Communication", sums["duration_us"], "us", DEFINITIONS["duration"], note=f"{gpus}"),
        KeyFigure("Exposed", sums["exposed_us"], "us", DEFINITIONS["exposed"], color=COLORS["communication"]),
        KeyFigure(
            "Exposed waiting", sums["exposed_wait_us"] if (each["n_ranks"] > 1).any() else None, "us",
            DEFINITIONS["waiting"], color=COLORS["waiting"],
        ),
        KeyFigure("Skew, median", each["skew_us"].median(), "us", DEFINITIONS["skew"]),
        KeyFigure("Transfer, median", each["transfer_us"].median(), "us", DEFINITIONS["transfer"]),
        KeyFigure(
            "Best bus bandwidth", None if np.isnan(fastest) else f"{text.digits(fastest)} GB/s", "text",
            DEFINITIONS["busbw"],
            "unavailable" if np.isnan(fastest) else "measured",
            note=f"{text.share(each['link_share'].max())} of the links" if each["link_share"].notna().any() else "",
        ),
        *([KeyFigure("Small messages", small, "count", DEFINITIONS["latency"])] if small else []),
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _by_gpu(by_gpu: pd.DataFrame) -> go.Figure:
    rows = figures.most(by_gpu, "duration_us")
    unit, divisor = text.time_unit(rows["duration_us"].max())
    labels = [f"GPU {g}" for g in rows["gpu"]]
    values = {
        "waiting": rows["exposed_wait_us"],
        "communication": rows["exposed_us"] - rows["exposed_wait_us"],
        "hidden_communication": rows["duration_us"] - rows["exposed_us"],
    }
    fig = figures.figure(
        "Communication kernels by GPU",
        "A GPU that waits little keeps the others waiting.",
        height=figures.height_of(len(rows)),
        wide=True,
        barmode="stack",
        legend=[figures.entry("waiting", DEFINITIONS["waiting"]), figures.entry("communication", DEFINITIONS["rest"],
                label="Exposed transfer"), figures.entry("hidden_communication", DEFINITIONS["hidden"])],
    )
    for part in PARTS:
        fig.add_trace(figures.bars(
            part, range(len(rows)), values[part].tolist(), divisor,
            hover=[f"<b>GPU {g}</b><br>{LABELS[part]}: {text.duration(v)} of {text.duration(d)}<br>{n:,} collectives, "
                   f"last in {k:,}<br>measured"
                   for g, v, d, n, k in zip(rows["gpu"], values[part], rows["duration_us"], rows["n"], rows["n_last"],
                                            strict=True)],
            links=[json.dumps({"gpu": int(g)}) for g in rows["gpu"]]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels))
    return fig


def _over_time(each: pd.DataFrame) -> go.Figure:
    shown = each[each["n_ranks"] > 1]
    unit, divisor = text.time_unit(float(shown[["skew_us", "transfer_us"]].max().max()) if len(shown) else 0)
    fig = figures.figure(
        "Skew and transfer, collective by collective",
        "Skew above transfer: the ranks are out of step, and faster links would not help.",
        height=300,
        legend=[figures.entry("waiting", DEFINITIONS["skew"], label="Skew"),
                figures.entry("communication", DEFINITIONS["transfer"], label="Transfer")],
    )
    for thing, column, name in (("waiting", "skew_us", "skew"), ("communication", "transfer_us", "transfer")):
        fig.add_trace(go.Scattergl(
            x=shown["instance"], y=shown[column] / divisor, mode="markers", name=name, showlegend=False,
            marker={"size": 5, "color": COLORS[thing]},
            hovertext=[f"<b>{text.escape(n)}</b> ({text.label(str(g))}) {figures.group_name('step', s)}<br>{name}: "
                       f"{text.duration(v)}<br>last: GPU {last}"
                       for n, g, s, v, last in zip(shown["name"], shown["group"], shown["step"], shown[column],
                                                   shown["last_rank"], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>"))
    fig.update_layout(xaxis={"title": {"text": "collective"}}, yaxis={"title": {"text": unit}, "rangemode": "tozero"})
    return fig


def _bandwidth(shown: pd.DataFrame) -> go.Figure:
    fig = figures.figure(
        "Bus bandwidth by message size",
        "One point per collective. Small messages cannot reach the links' peak.",
        height=300,
        legend=[figures.entry("communication", DEFINITIONS["busbw"], label="Collective")],
    )
    fig.add_trace(go.Scattergl(
        x=shown["bytes"], y=shown["busbw_gbs"], mode="markers", showlegend=False,
        marker={"size": 6, "color": COLORS["communication"], "opacity": 0.6},
        hovertext=[f"<b>{text.escape(n)}</b> ({text.label(str(g))})<br>{b:,.0f} bytes in {text.duration(t)}<br>"
                   f"{text.digits(bw)} GB/s<br>{source}"
                   for n, g, b, t, bw, source in zip(shown["name"], shown["group"], shown["bytes"],
                                                     shown["transfer_us"], shown["busbw_gbs"], shown["source"],
                                                     strict=True)],
        hovertemplate="%{hovertext}<extra></extra>"))
    fig.update_layout(xaxis={"type": "log", "title": {"text": "bytes"}, "rangemode": "normal"},
                      yaxis={"title": {"text": "GB/s"}, "rangemode": "tozero"})
    return fig


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(run: Run, rows: pd.DataFrame, by: list[str], by_gpu: pd.DataFrame,
            where: dict[str, object]) -> dict[str, Table]:
    groups = run.process_groups()
    groups = groups.assign(gpus=[", ".join(map(str, g)) for g in groups["gpus"]],
                           names=[", ".join(n) for n in groups["names"]])
    barrier = run.gradient_barrier()
    if "step" in where:
        barrier = grouping.select(barrier, {"step": where["step"]})
    clocks = run.clock_offsets
    clocks = clocks.assign(gpus=[", ".join(map(str, g)) for g in clocks["gpus"]])
    each = _kernels(run, where)
    return {
        "groups": Table("Collectives by " + " and ".join(by), (*_names(by), *MEASURES),
                        trace_link.linked(rows, each, by), sort="exposed_wait_us",
                        link={"step": "step"} if by == ["step"] else {}, at="at"),
        "gpus": Table("By GPU", (TableColumn("gpu", "GPU"), TableColumn("n_last", "Last", "count", DEFINITIONS["last"],
                                                                         bar=True), *MEASURES),
                      trace_link.linked(by_gpu, each, ["gpu"]), sort="exposed_wait_us", link={"gpu": "gpu"}, at="at"),
        **({"barrier": Table("Gradient barrier", BARRIER, barrier, sort="skew_us", link={"step": "step"})}
           if len(barrier) else {}),
        "process_groups": Table("Process groups", GROUPS, groups, sort="n_collectives"),
        **({"clocks": Table("Clocks of the hosts", CLOCKS, clocks)} if len(clocks) > 1 else {}),
    }


def _kernels(run: Run, where: dict[str, object]) -> pd.DataFrame:
    """The rows of collectives with the role of their group, at the times of their kernels."""
    rows = run.arrivals(where)
    role = run.collectives().set_index("instance")["role"]
    return rows.assign(role=rows["instance"].map(role), start_ns=rows["kernel_start_ns"],
                       end_ns=rows["kernel_start_ns"] + rows["end_ns"] - rows["start_ns"])


def _names(by: list[str]) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(c, c.capitalize(), "", DEFINITIONS["role"] if c == "role" else "") for c in by)


MEASURES = (
    TableColumn("n", "Count", "count", "Collectives."),
    TableColumn("bytes", "Bytes", "bytes", "Sum of the messages; empty where the trace does not tell."),
    TableColumn("duration_us", "Time", "us", DEFINITIONS["duration"], bar=True),
    TableColumn("exposed_us", "Exposed", "us", DEFINITIONS["exposed"], bar=True),
    TableColumn("exposed_wait_us", "Exposed waiting", "us", DEFINITIONS["waiting"], bar=True),
    TableColumn("skew_us", "Skew", "us", DEFINITIONS["skew"] + " Median."),
    TableColumn("transfer_us", "Transfer", "us", DEFINITIONS["transfer"] + " Median."),
    TableColumn("busbw_gbs", "Bus GB/s", "", DEFINITIONS["busbw"] + " Median."),
    TableColumn("link_share", "Of links", "share", DEFINITIONS["link"]),
    TableColumn("n_latency_bound", "Small", "count", DEFINITIONS["latency"]),
)
BARRIER = (
    TableColumn("step", "Step"),
    TableColumn("group", "Group"),
    TableColumn("late_gpu", "Late GPU", "", DEFINITIONS["last"]),
    TableColumn("skew_us", "Skew", "us", DEFINITIONS["skew"], bar=True),
    TableColumn("transfer_us", "Transfer", "us", DEFINITIONS["transfer"], bar=True),
    TableColumn("exposed_tail_us", "Exposed tail", "us", "Communication between the last backward kernel and the first "
                "of the optimizer, mean over GPUs."),
    TableColumn("limited_by", "Limited by", "text", DEFINITIONS["barrier"]),
)
GROUPS = (
    TableColumn("group", "Group"),
    TableColumn("description", "Description"),
    TableColumn("role", "Role", "", DEFINITIONS["role"]),
    TableColumn("role_source", "Known by"),
    TableColumn("size", "Ranks", "count", "Ranks of the group, by the trace, else those seen together."),
    TableColumn("gpus", "GPUs here", "text"),
    TableColumn("n_collectives", "Collectives", "count", "Collectives in the capture."),
    TableColumn("names", "Which", "text"),
)
CLOCKS = (
    TableColumn("clock", "Clock of"),
    TableColumn("gpus", "GPUs", "text"),
    TableColumn("offset_us", "Ahead by", "us", DEFINITIONS["offset"]),
    TableColumn("residual_us", "Residual", "us", DEFINITIONS["residual"]),
    TableColumn("n_collectives", "Collectives", "count", "Those that tell the offset."),
)
