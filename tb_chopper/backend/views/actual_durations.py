"""The part of the breakdown that a trace without FLOPs or known peaks gives: actual durations and their spread."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import overlap as metrics
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "d_act": "D_act: kernel time of the operation's instances in the trace, kernels summed.",
    "n": "Instances: one per gpu, step, phase, layer and operation.",
    "median": "Median over instances of their kernel time.",
    "fastest": "Kernel time of the fastest instance.",
    "spread": "Sum over instances of kernel time − that of the fastest instance with the same number of kernels: "
    "what would be saved if all ran as fast as the best.",
}
def view(run: Run, selection: Selection, missing: tuple[Missing, ...]) -> View:
    """Actual kernel time per operation and its spread over instances. `missing`: why there are no factors."""
    by = list(selection.by or ("operation",))
    rows = actual(metrics.instances(context.kernels(run, selection)), by)
    if not len(rows):
        return View(
            "No compute kernel ran in this selection.",
            missing=missing,
        )
    worst = figures.largest(rows, "spread_us")
    total = float(rows["d_act_us"].sum())
    return View(
        f"Compute kernels take {text.duration(total)}; "
        f"{text.share(rows['spread_us'].sum() / total if total else None)} of that is above what the fastest instance "
        f"of the same operation needed, most of it in {text.short(figures.row_label(worst, by), 60)} "
        f"({text.duration(worst['spread_us'])}).",
        key_figures=(
            KeyFigure(
                "Actual duration",
                total,
                "us",
                DEFINITIONS["d_act"],
                note=f"{text.count(int(rows['n'].sum()), 'instance')}",
            ),
            KeyFigure("Above the fastest", float(rows["spread_us"].sum()), "us", DEFINITIONS["spread"], "estimated"),
            KeyFigure(
                "Theoretical duration",
                None,
                "us",
                "D_thr = theoretical FLOPs / peak.",
                "unavailable",
                color=COLORS["theoretical"],
            ),
            KeyFigure(
                "Utilization overhead",
                None,
                "factor",
                "1 / matrix-unit utilization.",
                "unavailable",
                color=COLORS["utilization"],
            ),
            KeyFigure(
                "Frequency overhead",
                None,
                "factor",
                "Peak clock / clock while it ran.",
                "unavailable",
                color=COLORS["frequency"],
            ),
        ),
        figures={"actual": _figure(rows, by)},
        tables={
            "operations": Table(
                "Actual duration by " + " and ".join(by),
                (
                    *(TableColumn(c, c.capitalize()) for c in by),
                    TableColumn("n", "Instances", "count", DEFINITIONS["n"]),
                    TableColumn("d_act_us", "Actual", "us", DEFINITIONS["d_act"], bar=True),
                    TableColumn("median_us", "Median", "us", DEFINITIONS["median"]),
                    TableColumn("fastest_us", "Fastest", "us", DEFINITIONS["fastest"]),
                    TableColumn("spread_us", "Above fastest", "us", DEFINITIONS["spread"], bar=True),
                ),
                rows,
                sort="spread_us",
                link={"focus": "operation"} if "operation" in by else {},
            )
        },
        missing=missing,
    )


def actual(instances: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row per group: n (instances), d_act_us, median_us, fastest_us, spread_us."""
    each = instances.assign(us=instances["kernel_ns"] / 1000)
    # Only instances with the same kernels are comparable: an optimizer step of many tensors is not one of few.
    alike = each.groupby(["phase", "operation", "n_kernels"], observed=True, dropna=False)["us"].transform("min")
    each = each.assign(above=each["us"] - alike)
    out = each.groupby(by, observed=True, dropna=False).agg(
        n=("us", "size"),
        d_act_us=("us", "sum"),
        median_us=("us", "median"),
        fastest_us=("us", "min"),
        spread_us=("above", "sum"),
    )
    return out.reset_index()


def _figure(rows: pd.DataFrame, by: list[str]) -> go.Figure:
    shown = figures.top(rows, "d_act_us", 20)
    unit, divisor = text.time_unit(float(shown["d_act_us"].max()))
    labels = [figures.row_label(r, by) for r in shown.to_dict("records")]
    fig = figures.figure(
        "Actual duration by " + " and ".join(by),
        "What the fastest instances would take, and what lies above. The five factors of the paper need counters and "
        "a clock.",
        height=figures.height_of(len(shown), 27),
        wide=True,
        barmode="stack",
        legend=[
            figures.entry("compute", DEFINITIONS["fastest"], label="As fast as the fastest (estimated)"),
            figures.entry("idle", DEFINITIONS["spread"], label="Above the fastest (estimated)"),
        ],
    )
    for thing, values, what in (
        ("compute", shown["d_act_us"] - shown["spread_us"], "as fast as the fastest"),
        ("idle", shown["spread_us"], "above the fastest"),
    ):
        fig.add_trace(
            figures.bars(
                thing,
                range(len(shown)),
                values.tolist(),
                divisor,
                name=what,
                hover=[
                    f"<b>{text.hover(label)}</b><br>{what}: {text.duration(v)} of {text.duration(d)}<br>{n:,} "
                    "instances<br>estimated"
                    for label, v, d, n in zip(labels, values, shown["d_act_us"], shown["n"], strict=True)
                ],
                links=[json.dumps({"focus": str(o)}) for o in shown["operation"]] if "operation" in by else None,
            )
        )
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 44))
    return fig
