"""What tensor, context and expert parallelism exchange inside the layers: a part of the Parallelism tab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics.exchanges import INSIDE
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "exchange": "Communication of groups whose role is tensor, context or expert parallelism: it stands between the "
    "operations of a layer.",
    "share": "Exposed exchange / GPU time of the layers: computation, exposed communication and copies, and the idle "
    "time before them, on the GPUs that take part.",
    "transfer_share": "The same without waiting for late ranks: what faster links or a smaller group would change. "
    "Missing where one rank alone is here.",
    "waiting": "The part of the kernels before the last rank arrived under which the GPU computes nothing.",
    "transfer": "Exposed exchange without the waiting.",
    "hidden": "The part of the kernels under which the GPU computes.",
    "duration": "Σ duration of the communication kernels of the GPUs.",
    "median": "Duration of one kernel, median.",
    "n_per_step": "Collectives of one GPU in a step, forward and backward.",
    "busbw": "Bytes / transfer · f, median over the messages that are not bound by latency; f is 2 (n − 1) / n for an "
    "all-reduce, (n − 1) / n for all-gather, reduce-scatter and all-to-all, else 1.",
    "link": "Bus bandwidth / peak of the links to the other GPUs of the host.",
    "imbalance": "Largest / mean of what the ranks of an all-to-all receive, median: 1 where all receive the same.",
    "exposed": "The part of the kernels under which their GPU computes nothing.",
    "elapsed": "GPU time of the layer, or of the whole capture where the table names no layer, on the GPUs that take "
    "part.",
}
PARTS = ("waiting", "communication", "hidden_communication")
"""Disjoint parts of the exchanges, in drawing order."""


def sections(run: Run, selection: Selection) -> tuple[
        tuple[KeyFigure, ...], dict[str, go.Figure], dict[str, Table], tuple[Missing, ...]]:
    """Key figures, figures, tables and what is missing; nothing of all where no GPU communicates."""
    where = selection.where()
    layers = run.exchanges(("role", "layer"), where)
    inside = layers[layers["role"].isin(INSIDE)].reset_index(drop=True)
    if not len(inside):
        return (), {}, {}, _unknown(run) if (layers["role"] == "unknown").any() else ()
    groups = run.exchanges(("role", "group", "name"), where)
    groups = groups[groups["role"].isin(INSIDE)]
    no_waits = bool(inside["exposed_wait_us"].isna().all())
    alone = run.arrivals(where)["gpu"].nunique() == 1
    tables = {
        "exchanges": Table("Exchanges by layer", (*LAYER, *MEASURES), inside, sort="exposed_us"),
        "exchange_groups": Table("Exchanges by group", (*GROUP, *MEASURES), groups, sort="exposed_us"),
    }
    no_layers = inside["layer"].isna().all() and not context.is_cpu_only(run)
    missing = (*((NO_LAYERS,) if no_layers else ()), *((OTHER_RANKS if alone else HALVES,) if no_waits else ()))
    drawn = {"exchanges": _by_layer(inside, no_waits)}
    return _key_figures(inside, run.exchanges("role", where)), drawn, tables, missing


def headline(run: Run, selection: Selection) -> str:
    """What the largest of these exchanges costs, in one sentence; "" where there is none."""
    layers = run.exchanges(("role", "layer"), selection.where())
    inside = _in_layers(layers[layers["role"].isin(INSIDE)])
    if not len(inside):
        return ""
    sums = inside.groupby("role")[["exposed_us", "exposed_wait_us", "elapsed_us"]].sum(min_count=1)
    role, most = max(sums.iterrows(), key=lambda item: float(item[1]["exposed_us"]))
    if not most["elapsed_us"] > 0:
        return ""
    share, waits = most["exposed_us"] / most["elapsed_us"], most["exposed_wait_us"] / most["elapsed_us"]
    where = "their layers" if inside.loc[inside["role"] == role, "layer"].notna().any() else "the GPUs"
    line = f"Exchanges of {role} parallelism that no computation hides take {text.share(share)} of the time of {where}"
    return line + ("." if pd.isna(waits) else f": {text.share(waits)} waiting for late ranks, "
                   f"{text.share(max(share - waits, 0.0))} transfer.")


NO_LAYERS = Missing(
    "Exchanges by layer",
    "The traces name no layers, so that all exchanges stand in one row.",
    "torch_ext.annotate(model)",
)
OTHER_RANKS = Missing(
    "Waiting inside the exchanges",
    "One rank alone is here. Its kernels wait for others inside, and only the others' traces say how long.",
    "chopper_trace_handler on every rank, all writing to one directory",
)


HALVES = Missing(
    "Waiting inside the exchanges",
    "Sends and receives are one rank's half of a transfer: none of them tells how long it waited for the other.",
)


def _unknown(run: Run) -> tuple[Missing, ...]:
    groups = run.process_groups()
    names = groups.loc[groups["role"] == "unknown", "group"].astype(str).tolist()
    listed = ", ".join(text.short(n) for n in names[:3]) + (", …" if len(names) > 3 else "")
    return (Missing(
        "Exchanges of tensor, context and expert parallelism",
        f"Nothing tells what these process groups are for: {listed}. Meshes with names do (mesh_dim_names), and so do "
        "you.", f'run.exchanges(roles={{"{names[0]}": "tensor"}})'),)


def _key_figures(layers: pd.DataFrame, roles: pd.DataFrame) -> tuple[KeyFigure, ...]:
    out: list[KeyFigure] = []
    for row in roles[roles["role"].isin(INSIDE)].to_dict("records"):
        own = _in_layers(layers[layers["role"] == row["role"]])
        elapsed = own["elapsed_us"].sum()
        share = own["exposed_us"].sum() / elapsed if elapsed > 0 else None
        waits = own["exposed_wait_us"].sum(min_count=1)
        transfer = None if pd.isna(waits) or share is None else share - waits / elapsed
        per_layer = own.loc[own["layer"].notna(), "n_per_step"].median()
        note = f"{per_layer:.3g} per layer and step" if not pd.isna(per_layer) else \
            f"{row['n_per_step']:.3g} per step" if not pd.isna(row["n_per_step"]) else ""
        name = str(row["role"]).capitalize()
        out.append(KeyFigure(f"{name} exchange, exposed", share, "share", DEFINITIONS["share"], note=note,
                             source="measured" if share is not None else "unavailable", color=COLORS["communication"]))
        out.append(KeyFigure(f"{name} exchange, transfer", transfer, "share", DEFINITIONS["transfer_share"],
                             source="measured" if transfer is not None else "unavailable",
                             note=f"{text.digits(row['busbw_gbs'])} GB/s" if not pd.isna(row["busbw_gbs"]) else ""))
        if not pd.isna(row["imbalance"]):
            out.append(KeyFigure(f"{name} imbalance", row["imbalance"], "factor", DEFINITIONS["imbalance"]))
    return tuple(out)


def _in_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of layers; all, where no layer is known."""
    known = rows["layer"].notna()
    return rows[known] if known.any() else rows


def _by_layer(layers: pd.DataFrame, no_waits: bool) -> go.Figure:
    rows = figures.most(layers, "duration_us")
    unit, divisor = text.time_unit(rows["duration_us"].max())
    several = rows["role"].nunique() > 1
    labels = [figures.group_name("layer", layer) + (f" · {role}" if several else "")
              for layer, role in zip(rows["layer"], rows["role"], strict=True)]
    waiting = rows["exposed_wait_us"].fillna(0)
    values = {"waiting": waiting, "communication": rows["exposed_us"] - waiting,
              "hidden_communication": rows["duration_us"] - rows["exposed_us"]}
    transfer = LABELS["communication"] if no_waits else "Exposed transfer"
    more = f" The {len(rows)} longest of {len(layers)}." if len(rows) < len(layers) else ""
    roles = " and ".join(dict.fromkeys(layers["role"]))
    fig = figures.figure(
        "Exchanges by layer", f"Communication of {roles} parallelism, all GPUs and steps of the selection.{more}",
        height=figures.height_of(len(rows)), wide=True, barmode="stack",
        legend=[*([] if no_waits else [figures.entry("waiting", DEFINITIONS["waiting"])]),
                figures.entry("communication", DEFINITIONS["exposed" if no_waits else "transfer"], label=transfer),
                figures.entry("hidden_communication", DEFINITIONS["hidden"])])
    for part in PARTS[1:] if no_waits else PARTS:
        name = transfer if part == "communication" else LABELS[part]
        fig.add_trace(figures.bars(
            part, range(len(rows)), values[part].tolist(), divisor, name=name,
            hover=[f"<b>{text.escape(label)}</b><br>{name}: {text.duration(v)} of {text.duration(d)}<br>"
                   f"exposed: {text.share(s)} of the layer's time<br>{n:,} collectives<br>measured"
                   for label, v, d, s, n in zip(labels, values[part], rows["duration_us"], rows["share"], rows["n"],
                                                strict=True)]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels))
    return fig


LAYER = (TableColumn("role", "Role", "", DEFINITIONS["exchange"]), TableColumn("layer", "Layer"))
GROUP = (TableColumn("role", "Role", "", DEFINITIONS["exchange"]), TableColumn("group", "Group"),
         TableColumn("name", "Collective"))
MEASURES = (
    TableColumn("n", "Count", "count", "Collectives."),
    TableColumn("n_per_step", "Per step", "", DEFINITIONS["n_per_step"]),
    TableColumn("duration_us", "Time", "us", DEFINITIONS["duration"], bar=True),
    TableColumn("median_us", "Median", "us", DEFINITIONS["median"]),
    TableColumn("exposed_us", "Exposed", "us", DEFINITIONS["exposed"], bar=True),
    TableColumn("exposed_wait_us", "Exposed waiting", "us", DEFINITIONS["waiting"]),
    TableColumn("elapsed_us", "GPU time", "us", DEFINITIONS["elapsed"]),
    TableColumn("share", "Share", "share", DEFINITIONS["share"]),
    TableColumn("transfer_share", "Transfer share", "share", DEFINITIONS["transfer_share"]),
    TableColumn("bytes", "Bytes", "bytes", "Sum of the messages; empty where the trace does not tell."),
    TableColumn("busbw_gbs", "Bus GB/s", "", DEFINITIONS["busbw"]),
    TableColumn("link_share", "Of links", "share", DEFINITIONS["link"]),
    TableColumn("imbalance", "Imbalance", "factor", DEFINITIONS["imbalance"]),
)
