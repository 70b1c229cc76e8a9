"""Stragglers: which GPU the others wait for, what it costs, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "lead": "How much earlier a GPU starts a kernel than the GPU that starts it last. The straggler's is near 0.",
    "own": "Time of a step without the waiting for other GPUs that no computation hides.",
    "gain": "Step time saved if this GPU were as fast as the median of the others: largest own time − what would "
    "remain the largest, without what waiting collectives add to the kernels beside them; at a power cap the "
    "middle of two estimates.",
    "most": "The same if the others keep their clocks: at their power cap they slow down once they wait less.",
    "slowness": "Time of its kernels / median time of the same kernels on all GPUs, without those that communication "
    "overlaps.",
    "last": "Share of the collectives in which it arrived last.",
    "why": "host: it idles longer; load: it computes more; contention: communication runs beside it; cooling, power, "
    "clock: a lower clock; unknown: the same kernels take longer, and no sample says why.",
    "outlier": "Robust z above 3.5 and 1.2 times the median: 0.6745 (x − median) / median distance from the median.",
    "exposed_wait": "Waiting in collectives that no computation hides.",
}
SMALL = 0.02
"""share of a step that is not worth a headline"""
WORDS = {
    "host": "its host keeps it idle", "load": "it has more to compute", "cooling": "it is hot and clocks lower",
    "contention": "communication runs beside its computation", "power": "it draws more power and clocks lower",
    "clock": "its clock is lower", "unknown": "its kernels take longer, and no sample says why",
}
OTHER_RANKS = Missing(
    "Comparison of GPUs",
    "One GPU alone is here.",
    "chopper_trace_handler on every rank, all writing to one directory",
)
STAGES = ("The GPUs run different stages of a pipeline: their work differs. The Parallelism tab tells unequal stages "
          "from slow GPUs.")
TELEMETRY = Missing(
    "Clock, power and temperature",
    "No telemetry in this run: a slow GPU cannot be told from a hot one.",
    "with torch_ext.telemetry('log/my_run'): train()",
)


def view(run: Run, selection: Selection) -> View:
    """Leads, what-if, imbalance and outlier steps. Comparisons are over all GPUs and steps of the run."""
    outliers = run.outlier_steps()
    tables = {"steps": _steps_table(outliers)} if len(outliers) else {}
    rows = run.stragglers()
    if len(rows) < 2:
        line = "One GPU alone cannot be compared with others." if len(rows) else "No GPU ran anything here."
        line += _outlier_words(outliers)
        return View(line, figures={"steps": _steps(outliers)} if len(outliers) else {}, tables=tables,
                    missing=(OTHER_RANKS,) if not context.nothing_to_show(run) else (context.NO_KERNELS,))
    cost, leads = run.what_if(), run.step_leads()
    imbalance = run.imbalance()
    chosen = selection.where()
    shown = grouping.select(leads, {k: v for k, v in chosen.items() if k in ("gpu", "step")})
    return View(
        _headline(rows, cost) + _outlier_words(outliers),
        key_figures=_key_figures(rows, cost, outliers),
        figures={"own": _own(run, rows), **({"leads": _leads(shown)} if len(shown) else {}),
                 **({"steps": _steps(outliers)} if len(outliers) else {})},
        tables={"gpus": _table(rows), "imbalance": _imbalance_table(imbalance), **tables},
        definitions={"What if": DEFINITIONS["gain"] + " " + DEFINITIONS["most"], "Why": DEFINITIONS["why"]},
        missing=(TELEMETRY,) if imbalance["clock_mhz"].isna().all() else (),
        banners=(STAGES,) if run.pipeline_actions()["position"].nunique() > 1 else (),
    )


def _headline(rows: pd.DataFrame, cost: pd.DataFrame) -> str:
    worst = rows.iloc[0].to_dict()
    gain = worst["gain_us"]
    if not len(cost):
        last = figures.largest(rows, "n_last")
        if not last["n_last"]:
            return "The GPUs share no collective and no two whole steps: nothing says who is late."
        together = text.count(int(last["n_collectives"]), "collective")
        return f"GPU {last['gpu']} arrives last in {last['n_last']} of {together}."
    step = float(cost["step_us"].iloc[0])
    all_gain = float(cost["gain_us"].iloc[-1])
    if not all_gain > SMALL * step:
        return "No GPU holds the others up by more than 2 % of a step."
    if not gain > all_gain / 2:
        late = rows.sort_values("own_us", ascending=False)
        slow = late[late["explained_by"].notna() & (late["own_us"] > late["own_us"].median())]
        slow = slow if len(slow) else late.head(2)
        return (f"Several GPUs hold the others up together, none alone: as fast as the median, a step would be "
                f"{text.duration(all_gain)} shorter ({text.share(all_gain / step)}). The slowest: "
                f"{', '.join(f'GPU {g}' for g in slow['gpu'].head(4))}.")
    why = WORDS.get(worst["explained_by"], "")
    return (f"GPU {worst['gpu']} costs {text.duration(gain)} of each step of {text.duration(step)}"
            f"{': ' + why if why else ''}.")


def _outlier_words(outliers: pd.DataFrame) -> str:
    odd = outliers[outliers["outlier"].astype(bool)] if len(outliers) else outliers
    if not len(odd):
        return ""
    worst = figures.largest(odd, "time_us")
    grew = str(worst["grew"]).replace("_", " ")
    where = ""
    if isinstance(worst["operation"], str):
        late = grew == "idle" and worst["at_step"] != worst["step"]
        where = (f" {'before' if grew == 'idle' else 'in'} {text.short(worst['operation'], 50)}"
                 f"{' of step ' + str(worst['at_step']) if late else ''}")
    return f" Step {worst['step']} takes {text.duration(worst['time_us'])}, far above the others: {grew}{where}."


def _key_figures(rows: pd.DataFrame, cost: pd.DataFrame, outliers: pd.DataFrame) -> tuple[KeyFigure, ...]:
    if not len(cost):
        return ()
    every = cost.iloc[-1]
    return (
        KeyFigure("Step", every["step_us"], "us", "Time of a step on its slowest GPU, median over steps."),
        KeyFigure("All as fast as the median", every["what_if_us"], "us", DEFINITIONS["gain"], "estimated",
                  note=f"saves {text.share(every['gain_share'])}"),
        KeyFigure("Slowest GPU", f"GPU {rows['gpu'].iloc[0]}", "text", DEFINITIONS["gain"],
                  note=str(why) if pd.notna(why := rows["explained_by"].iloc[0]) else ""),
        KeyFigure("Slowness, largest", rows["slowness"].max(), "factor", DEFINITIONS["slowness"]),
        KeyFigure("Outlier steps", int(outliers["outlier"].sum()) if len(outliers) else 0, "count",
                  DEFINITIONS["outlier"], note=f"of {len(outliers)}"),
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _own(run: Run, rows: pd.DataFrame) -> go.Figure:
    imbalance = run.imbalance().set_index("gpu")
    shown = figures.most(rows.sort_values("gpu"), "exposed_wait_us" if rows["own_us"].isna().all() else "own_us")
    values = {
        "compute": [float(imbalance["compute_us"].get(g, np.nan)) for g in shown["gpu"]],
        "idle": [float(imbalance["idle_us"].get(g, np.nan)) for g in shown["gpu"]],
    }
    unit, divisor = text.time_unit(max(np.nansum([v[i] for v in values.values()]) for i in range(len(shown))))
    fig = figures.figure(
        "A step's own work by GPU",
        "Computation and idle time of a step, medians over steps. The longest bar keeps the others waiting.",
        height=figures.height_of(len(shown)),
        wide=True,
        barmode="stack",
        legend=[figures.entry("compute", "Σ duration of the compute kernels of a step."),
                figures.entry("idle", "Time of a step without any activity on the GPU.")],
    )
    for thing, each in values.items():
        fig.add_trace(figures.bars(
            thing, range(len(shown)), [0 if np.isnan(v) else v for v in each], divisor,
            hover=[f"<b>GPU {g}</b><br>{thing}: {text.duration(v)}<br>slowness {s:.3f}<br>{why or ''}"
                   for g, v, s, why in zip(shown["gpu"], each, shown["slowness"], shown["explained_by"], strict=True)],
            links=[json.dumps({"gpu": int(g)}) for g in shown["gpu"]]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis([f"GPU {g}" for g in shown["gpu"]]))
    return fig


def _leads(leads: pd.DataFrame) -> go.Figure:
    unit, divisor = text.time_unit(leads["mean_lead_us"].max())
    fig = figures.figure(
        "Lead by step",
        "Mean over the kernels of a step: how far each GPU is ahead of the last one. The straggler lies at the bottom.",
        height=320,
        legend=[figures.entry("compute", DEFINITIONS["lead"], label="One line per GPU", line=True)],
    )
    low = leads.groupby("gpu")["mean_lead_us"].mean().idxmin()
    for gpu, own in leads.groupby("gpu"):
        fig.add_trace(go.Scatter(
            x=own["step"].astype("int64"), y=own["mean_lead_us"] / divisor, mode="lines+markers", showlegend=False,
            name=f"GPU {gpu}", line={"width": 2.2 if gpu == low else 1.2,
                                     "color": COLORS["waiting"] if gpu == low else COLORS["compute"]},
            hovertext=[f"<b>GPU {gpu}</b>, step {s}<br>mean lead {text.duration(v)}<br>over {n:,} kernels"
                       for s, v, n in zip(own["step"], own["mean_lead_us"], own["n"], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>"))
    fig.update_layout(xaxis={"title": {"text": "step"}, "rangemode": "normal"},
                      yaxis={"title": {"text": unit}, "rangemode": "tozero"})
    return fig


def _steps(outliers: pd.DataFrame) -> go.Figure:
    unit, divisor = text.time_unit(outliers["time_us"].max())
    odd = outliers["outlier"].astype(bool)
    fig = figures.figure(
        "Step times",
        "Time of each step on the GPU that took longest, without its waiting for others.",
        height=280,
        legend=[figures.entry("compute", label="Step"),
                figures.entry("waiting", DEFINITIONS["outlier"], label="Outlier")],
    )
    fig.add_trace(go.Bar(
        x=outliers["step"], y=outliers["time_us"] / divisor, showlegend=False,
        marker={"color": [COLORS["waiting" if o else "compute"] for o in odd], "line": {"width": 0}},
        customdata=[[json.dumps({"step": int(s)})] for s in outliers["step"]],
        hovertext=[f"<b>step {s}</b><br>{text.duration(t)} on GPU {g}<br>grew most: {str(w).replace('_', ' ')}"
                   for s, t, g, w in zip(outliers["step"], outliers["time_us"], outliers["gpu"], outliers["grew"],
                                         strict=True)],
        hovertemplate="%{hovertext}<extra></extra>"))
    fig.update_layout(xaxis={"title": {"text": "step"}, "rangemode": "normal"}, yaxis={"title": {"text": unit}})
    return fig


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(rows: pd.DataFrame) -> Table:
    return Table(
        "What each GPU costs",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("gain_us", "Costs a step", "us", DEFINITIONS["gain"], bar=True),
            TableColumn("gain_at_most_us", "At most", "us", DEFINITIONS["most"]),
            TableColumn("explained_by", "Because", "text", DEFINITIONS["why"]),
            TableColumn("own_us", "Own time", "us", DEFINITIONS["own"], bar=True),
            TableColumn("slowness", "Slowness", "factor", DEFINITIONS["slowness"]),
            TableColumn("last_share", "Last", "share", DEFINITIONS["last"]),
            TableColumn("exposed_wait_us", "Waits", "us", DEFINITIONS["exposed_wait"]),
            TableColumn("mean_lead_us", "Mean lead", "us", DEFINITIONS["lead"]),
        ),
        rows,
        sort="gain_us",
        link={"gpu": "gpu"},
    )


def _imbalance_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Why they differ: a step of each GPU against the median one",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("compute_us", "Compute", "us", "Σ duration of the compute kernels of a step."),
            TableColumn("idle_us", "Idle", "us", "Time of a step without any activity."),
            TableColumn("host_excess_us", "Idles more", "us", "Idle time above the median GPU's."),
            TableColumn("load_excess_us", "Computes more", "us", "Time of computation that the others do not have."),
            TableColumn("contention_excess_us", "Contention", "us", "The same kernels, longer beside communication."),
            TableColumn("slow_excess_us", "Slower", "us", "The same kernels, longer also without communication."),
            TableColumn("clock_mhz", "Clock", "mhz", "Mean over its compute kernels: sampled."),
            TableColumn("power_w", "Power", "w", "Mean over its compute kernels: sampled."),
            TableColumn("temperature_c", "°C", "", "Mean temperature: sampled."),
            TableColumn("explained_by", "Because", "text", DEFINITIONS["why"]),
        ),
        rows,
        sort="compute_us",
        link={"gpu": "gpu"},
    )


def _steps_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Steps",
        (
            TableColumn("step", "Step"),
            TableColumn("time_us", "Time", "us", "Time of the step on this GPU, without its waiting for others.",
                        bar=True),
            TableColumn("gpu", "On GPU", "", "The one that took longest, waiting left out."),
            TableColumn("z", "z", "", DEFINITIONS["outlier"]),
            TableColumn("grew", "Grew most", "text", "Class of time with the largest difference to the median step."),
            TableColumn("compute_delta_us", "Compute", "us", "Against the median over the GPU's steps."),
            TableColumn("exposed_communication_delta_us", "Exposed comm.", "us", "Against the median over steps."),
            TableColumn("exposed_memcpy_delta_us", "Exposed copies", "us", "Against the median over steps."),
            TableColumn("idle_delta_us", "Idle", "us", "Against the median over steps."),
            TableColumn("operation", "Operation", "text", "Of an outlier: the operation that grew most."),
        ),
        rows,
        sort="time_us",
        link={"step": "step"},
    )
