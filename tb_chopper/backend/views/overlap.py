"""Overlap: how much communication is hidden behind compute, and what the sharing costs the computation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tb_chopper.backend.metrics import overlap as metrics
from tb_chopper.backend.views import context, figures, text, trace_link
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "communication": "Time in which at least one communication kernel runs: |comm|, summed over the selected GPUs.",
    "hidden": "Communication time under which computation runs: |comp ∩ comm|.",
    "exposed": "Communication time under which no computation runs: |comm \\ comp|. The step pays for it in full.",
    "hidden_share": "Hidden communication / communication.",
    "ratio": "|[start, end) ∩ comm| / elapsed of an operation's instances: the share of its time that communication "
    "ran beside it.",
    "elapsed": "Last end − first start of the kernels of one instance (gpu, step, phase, layer, operation), bubbles "
    "included.",
    "pearson": "Pearson correlation of overlap ratio and elapsed time over the instances. Near 1: the more "
    "communication runs "
    "beside the operation, the slower it is. Missing below three instances or where one of the two does not vary.",
    "covered": "Share of all compute time beside which communication ran: |comp ∩ comm| / |comp|.",
}
NO_COMMUNICATION = Missing(
    "Communication",
    "No communication kernel ran in this selection. With several GPUs, record the trace of every rank; a kernel of an "
    "unknown library can be named.",
    'tb_chopper.open_run(path, communication=["my_allreduce_kernel"])',
)


def view(run: Run, selection: Selection) -> View:
    """Hidden and exposed communication per GPU, overlap per operation, and what it does to an operation's duration."""
    kernels = context.kernels(run, selection)
    where, by = selection.where(), list(selection.by or ("operation",))
    by_gpu = run.timeline(by="gpu", where=where)
    communication = float(by_gpu["communication_us"].sum()) if len(by_gpu) else 0.0
    if communication == 0:
        return View(
            "No communication ran in this selection, so there is nothing to hide.",
            missing=(NO_COMMUNICATION,),
        )
    operations = run.overlap(by=by, where=where)
    each = metrics.instances(kernels)
    focus = _focus(each, selection.focus)
    charts = {"by_gpu": _by_gpu(by_gpu, run, selection), "by_operation": _by_operation(operations, by)}
    if focus is not None:
        charts["samples"] = _samples(each[each["operation"] == focus], focus)
        charts["distribution"] = _distribution(each[each["operation"] == focus], focus)
    return View(
        _headline(by_gpu),
        key_figures=_key_figures(by_gpu),
        figures=charts,
        tables={
            "operations": _operations_table(trace_link.linked(operations, _compute(kernels), by), by),
            "collectives": _collectives_table(
                trace_link.linked(
                    metrics.hidden_communication(run.kernels, by="name", where=where),
                    kernels[kernels["kind"] == "communication"],
                    ["name"],
                )
            ),
            "gpus": Table(
                "Communication by GPU",
                GPU_COLUMNS,
                by_gpu.assign(hidden_share=_ratio(by_gpu["overlap_us"], by_gpu["communication_us"])),
                sort="exposed_communication_us",
                link={"gpu": "gpu"},
            ),
        },
    )


# ---- words and numbers -----------------------------------------------------------------------------------------------


def _headline(by_gpu: pd.DataFrame) -> str:
    worst = figures.largest(by_gpu, "exposed_communication_us")
    share = worst["overlap_us"] / worst["communication_us"]
    exposed, total, unit = text.durations([worst["exposed_communication_us"], worst["total_us"]])
    line = (
        f"GPU {worst['gpu']} hides {text.share(share)} of its communication; the rest costs {exposed} of {total} {unit}"
    )
    if len(by_gpu) == 1:
        return f"{line}."
    best = figures.largest(by_gpu.assign(hidden_most=-by_gpu["exposed_communication_us"]), "hidden_most")
    return (
        f"{line}, the most of {len(by_gpu)} GPUs (the least: GPU {best['gpu']}, "
        f"{text.duration(best['exposed_communication_us'])})."
    )


def _key_figures(by_gpu: pd.DataFrame) -> tuple[KeyFigure, ...]:
    sums = by_gpu.drop(columns="gpu").sum(numeric_only=True)
    total = text.share(sums["exposed_communication_us"] / sums["total_us"])
    shares = _ratio(by_gpu["overlap_us"], by_gpu["communication_us"])
    low, high = text.share(np.nanmin(shares)), text.share(np.nanmax(shares))
    spread = "" if len(by_gpu) == 1 else f"{low} to {high} over the GPUs" if low != high else "the same on every GPU"
    return (
        KeyFigure(
            "Communication",
            sums["communication_us"],
            "us",
            DEFINITIONS["communication"],
            note=f"sum of {text.count(len(by_gpu), 'GPU')}",
        ),
        KeyFigure(
            "Hidden",
            sums["overlap_us"],
            "us",
            DEFINITIONS["hidden"],
            color=COLORS["hidden_communication"],
            note="behind compute",
        ),
        KeyFigure(
            "Exposed",
            sums["exposed_communication_us"],
            "us",
            DEFINITIONS["exposed"],
            color=COLORS["communication"],
            note=f"{total} of the GPU time",
        ),
        KeyFigure(
            "Hidden share",
            sums["overlap_us"] / sums["communication_us"],
            "share",
            DEFINITIONS["hidden_share"],
            note=spread,
        ),
        KeyFigure(
            "Compute beside communication",
            sums["overlap_us"] / sums["compute_us"] if sums["compute_us"] else None,
            "share",
            DEFINITIONS["covered"],
            color=COLORS["compute"],
            note="of the compute time",
        ),
    )


def _ratio(part: pd.Series, whole: pd.Series) -> np.ndarray:
    whole_ = whole.to_numpy(float)
    return np.divide(part.to_numpy(float), whole_, out=np.full(len(whole_), np.nan), where=whole_ > 0)


def _focus(each: pd.DataFrame, wanted: str | None) -> str | None:
    """The operation to look at closely: the wanted one, else the one with the most time beside communication."""
    if not len(each):
        return None
    if wanted is not None and (each["operation"] == wanted).any():
        return wanted
    groups = each.groupby("operation", observed=True)
    overlapped, instances, n_gpus = groups["overlap_ns"].sum(), groups.size(), max(each["gpu"].nunique(), 1)
    # A curve over occurrences says something from about eight of them on.
    for least in (8, 3):
        candidates = overlapped[(instances >= least * n_gpus) & (overlapped > 0)]
        if len(candidates):
            return str(candidates.idxmax())
    return None


# ---- figures ---------------------------------------------------------------------------------------------------------


def _by_gpu(by_gpu: pd.DataFrame, run: Run, selection: Selection) -> go.Figure:
    parts = [(run.name, by_gpu, False)]
    if selection.compare is not None:
        parts.append((selection.compare.name, selection.compare.timeline(by="gpu"), True))
    rows = pd.concat(
        [figures.most(f, "exposed_communication_us").assign(other=other, of=name) for name, f, other in parts],
        ignore_index=True,
    )
    unit, divisor = text.time_unit(rows["communication_us"].max())
    shares = _ratio(rows["overlap_us"], rows["communication_us"])
    labels = [
        f"GPU {g}" + (f" · {text.short(of, 18)}" if other else "")
        for g, of, other in zip(rows["gpu"], rows["of"], rows["other"], strict=True)
    ]
    fig = figures.figure(
        "Communication by GPU",
        "Hidden behind compute, and exposed. Sum over the selection.",
        height=figures.height_of(len(rows)),
        wide=True,
        barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        legend=[
            figures.entry("hidden_communication", DEFINITIONS["hidden"]),
            figures.entry("communication", DEFINITIONS["exposed"]),
        ]
        + (
            [figures.entry("idle", label=f"hatched: {selection.compare.name}", pattern=True)]
            if selection.compare is not None
            else []
        ),
    )
    for thing, column, values in (
        ("hidden_communication", "overlap_us", shares),
        ("communication", "exposed_communication_us", 1 - shares),
    ):
        fig.add_trace(
            figures.bars(
                thing,
                range(len(rows)),
                rows[column].tolist(),
                divisor,
                hover=[
                    f"<b>{text.hover(label)}</b><br>{'hidden' if column == 'overlap_us' else 'exposed'}: "
                    f"{text.duration(v)} ({text.share(s)})<br>measured"
                    for label, v, s in zip(labels, rows[column], values, strict=True)
                ],
                labels=[f"{text.duration(v)} · {text.share(s)}" for v, s in zip(rows[column], values, strict=True)],
                compared=rows["other"].tolist(),
                links=[json.dumps({"gpu": int(g)}) for g in rows["gpu"]],
            )
        )
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels))
    return fig


def _by_operation(operations: pd.DataFrame, by: list[str]) -> go.Figure:
    rows = figures.top(operations[operations["overlap_us"] > 0], "overlap_us", 18)
    unit, divisor = text.time_unit(rows["elapsed_us"].max() if len(rows) else 0)
    labels = [figures.row_label(r, by) for r in rows.to_dict("records")]
    fig = figures.figure(
        "Work that shares the GPU with communication",
        "Elapsed time with and without communication beside it, most shared time first.",
        height=figures.height_of(len(rows), 26),
        barmode="stack",
        wide=True,
        legend=[
            figures.entry("hidden_communication", DEFINITIONS["ratio"], label="Beside communication"),
            figures.entry("compute", label="Alone"),
        ],
    )
    for thing, values, what in (
        ("hidden_communication", rows["overlap_us"], "beside communication"),
        ("compute", rows["elapsed_us"] - rows["overlap_us"], "alone"),
    ):
        fig.add_trace(
            figures.bars(
                thing,
                range(len(rows)),
                values.tolist(),
                divisor,
                name=what,
                hover=[
                    f"<b>{text.hover(label)}</b><br>{what}: {text.duration(v)} of {text.duration(e)}<br>{n:,} "
                    f"instances, overlap ratio {text.share(ratio)}, "
                    f"Pearson r {text.DASH if r != r else f'{r:.2f}'}"
                    for label, v, e, n, ratio, r in zip(
                        labels,
                        values,
                        rows["elapsed_us"],
                        rows["n"],
                        rows["overlap_ratio"],
                        rows["pearson_r"],
                        strict=True,
                    )
                ],
                links=[json.dumps({"focus": str(o)}) for o in rows["operation"]] if "operation" in by else None,
            )
        )
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 44))
    return fig


def _samples(each: pd.DataFrame, focus: str) -> go.Figure:
    """Overlap ratio and duration by occurrence: median, IQR and range over GPUs (the paper's figure)."""
    fastest = max(float(each["elapsed_ns"].min()), 1.0)
    values = pd.DataFrame(
        {"sample": each["sample"], "ratio": 100 * each["overlap_ratio"], "duration": each["elapsed_ns"] / fastest}
    )
    r = (
        np.corrcoef(values["ratio"], values["duration"])[0, 1]
        if values["ratio"].std() > 0 and values["duration"].std() > 0
        else np.nan
    )
    n_gpus = each["gpu"].nunique()
    words = "not defined (one of the two does not vary)" if r != r else f"{r:.2f}"
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for place, (column, thing) in enumerate((("ratio", "communication"), ("duration", "compute")), 1):
        bands = values.groupby("sample")[column].quantile([0.0, 0.25, 0.5, 0.75, 1.0]).unstack()
        x = bands.index.tolist()
        if n_gpus > 1:
            for low, high, opacity in ((0.0, 1.0, 0.16), (0.25, 0.75, 0.32)):
                fig.add_trace(
                    go.Scatter(
                        x=x + x[::-1],
                        y=bands[high].tolist() + bands[low].tolist()[::-1],
                        fill="toself",
                        mode="lines",
                        line={"width": 0},
                        fillcolor=figures.faded(COLORS[thing], opacity),
                        hoverinfo="skip",
                        showlegend=False,
                    ),
                    row=place,
                    col=1,
                )
        fig.add_trace(
            go.Scatter(
                x=x,
                y=bands[0.5].tolist(),
                mode="lines",
                line={"color": COLORS[thing], "width": 1.8},
                showlegend=False,
                hovertemplate=("overlap ratio %{y:.1f} %" if column == "ratio" else "%{y:.2f} × the fastest")
                + "<br>occurrence %{x}<extra></extra>",
            ),
            row=place,
            col=1,
        )
    base = figures.figure(
        f"{text.short(focus, 48)}: occurrence by occurrence",
        f"Overlap ratio and duration (fastest instance = 1) of every instance; Pearson r = {words}. "
        + (f"Line: median over {n_gpus} GPUs; bands: quartiles and full range." if n_gpus > 1 else "One GPU."),
        height=380,
        legend=[
            figures.entry("communication", DEFINITIONS["ratio"], label="Overlap ratio", line=True),
            figures.entry("compute", DEFINITIONS["elapsed"], label="Duration", line=True),
        ],
    )
    fig.update_layout(
        **{k: v for k, v in base.layout.to_plotly_json().items() if k != "template"},
    )
    fig.update_yaxes(title_text="overlap, %", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="duration, × fastest", row=2, col=1)
    fig.update_xaxes(title_text="occurrence", row=2, col=1)
    return fig


def _distribution(each: pd.DataFrame, focus: str) -> go.Figure:
    """Cumulative distributions per GPU: dotted the overlap ratio, solid the duration / the fastest."""
    fastest = max(float(each["elapsed_ns"].min()), 1.0)
    fig = figures.figure(
        f"{text.short(focus, 48)}: distribution by GPU",
        "Share of instances at or below a value, one pair of lines per GPU. GPUs that hide less "
        "run the operation faster where contention matters.",
        height=380,
        legend=[
            figures.entry("communication", DEFINITIONS["ratio"], label="Overlap ratio (0 to 1)", line=True),
            figures.entry("compute", DEFINITIONS["elapsed"], label="Duration, fastest = 1", line=True),
        ],
    )
    for gpu, rows in each.groupby("gpu"):
        for values, thing, dash, what in (
            (rows["overlap_ratio"], "communication", "dot", "overlap ratio"),
            (rows["elapsed_ns"] / fastest, "compute", "solid", "duration / fastest"),
        ):
            x = np.sort(values.to_numpy(float))
            fig.add_trace(
                go.Scatter(
                    x=x,
                    y=np.arange(1, len(x) + 1) / len(x),
                    mode="lines",
                    line={"shape": "hv", "width": 1.4, "color": COLORS[thing], "dash": dash},
                    name=f"GPU {gpu}",
                    showlegend=False,
                    hovertemplate=(
                        f"<b>GPU {gpu}</b><br>{what} ≤ %{{x:.2f}}<br>%{{y:.0%}} of {len(x)} instances<extra></extra>"
                    ),
                )
            )
    high = float(np.quantile((each["elapsed_ns"] / fastest).to_numpy(), 0.99))
    fig.update_layout(
        xaxis={"title": {"text": "overlap ratio · duration / fastest"}, "range": [0, max(2.0, min(high * 1.1, 10.0))]},
        yaxis={"title": {"text": "share of instances"}, "tickformat": ".0%", "range": [0, 1.02]},
    )
    return fig


# ---- tables ----------------------------------------------------------------------------------------------------------

GPU_COLUMNS = (
    TableColumn("gpu", "GPU"),
    TableColumn("communication_us", "Communication", "us", DEFINITIONS["communication"], bar=True),
    TableColumn("overlap_us", "Hidden", "us", DEFINITIONS["hidden"], bar=True),
    TableColumn("exposed_communication_us", "Exposed", "us", DEFINITIONS["exposed"], bar=True),
    TableColumn("hidden_share", "Hidden share", "share", DEFINITIONS["hidden_share"], bar=True),
    TableColumn("total_us", "Window", "us", "Length of the window: the capture, or the selected steps."),
)


def _operations_table(operations: pd.DataFrame, by: list[str]) -> Table:
    groups = tuple(TableColumn(c, c.capitalize() if c != "gpu" else "GPU") for c in by)
    return Table(
        "Overlap by " + " and ".join(by),
        (
            *groups,
            TableColumn("n", "Instances", "count", "Instances: one per gpu, step, phase, layer and operation."),
            TableColumn("elapsed_us", "Elapsed", "us", DEFINITIONS["elapsed"], bar=True),
            TableColumn(
                "overlap_us",
                "Beside comm.",
                "us",
                "Part of the elapsed time covered by communication of the same GPU.",
                bar=True,
            ),
            TableColumn("overlap_ratio", "Overlap ratio", "share", DEFINITIONS["ratio"], bar=True),
            TableColumn("pearson_r", "Pearson r", "", DEFINITIONS["pearson"]),
        ),
        operations,
        sort="overlap_us",
        link={"focus": "operation"} if "operation" in by else {},
        at="at",
    )


def _compute(kernels: pd.DataFrame) -> pd.DataFrame:
    return kernels[kernels["kind"] == "compute"]


def _collectives_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Communication kernels",
        (
            TableColumn("name", "Kernel", "text"),
            TableColumn("n", "Count", "count", "Kernels of this name in the selection."),
            TableColumn(
                "communication_us", "Time", "us", "Time in which a kernel of this name runs (union per GPU).", bar=True
            ),
            TableColumn("hidden_us", "Hidden", "us", DEFINITIONS["hidden"]),
            TableColumn(
                "exposed_us", "Not under compute", "us", "The part of it under which no computation runs.", bar=True
            ),
            TableColumn("hidden_share", "Hidden share", "share", DEFINITIONS["hidden_share"], bar=True),
        ),
        rows,
        sort="exposed_us",
        at="at",
    )
