"""DVFS: clocks, power and what they cost. A trace holds no clock: it shows only whether equal work slows down over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

TELEMETRY = Missing(
    "Clocks, power, temperature and throttle reasons",
    "Nothing sampled the hardware while this run was recorded.",
    'chopper_trace_handler("log/my_run", telemetry=True)',
)
LATER = Missing(
    "The same for a program that you cannot change",
    "The sampler can run beside any command.",
    "tb-chopper collect --telemetry --out log/my_run -- python train.py",
)
DEFINITIONS = {
    "slowdown": "Duration of a compute kernel that no communication overlaps / the shortest one of the same name and grid. Time-weighted mean per GPU. "
    "A falling clock raises it; so do caches, other input and memory traffic: it is a hint, no clock.",
    "covered": "Share of the compute time these kernels hold: same name and grid at least five times, no communication beside them, 20 µs or longer.",
    "clock": "Time-weighted mean core clock while kernels ran.",
}
SHORTEST_NS = 20_000
BINS = 60


def view(run: Run, selection: Selection) -> View:
    """Without telemetry: duration of equal kernels over time, relative to the fastest (estimated)."""
    kernels = context.kernels(run, selection)
    common = {"findings": context.findings(run), "banners": context.banners(run), "missing": (TELEMETRY, LATER)}
    unavailable = (
        KeyFigure("Core clock", None, "mhz", DEFINITIONS["clock"], "unavailable"),
        KeyFigure("Power", None, "w", "Mean power of a GPU.", "unavailable"),
        KeyFigure("Energy per step", None, "j", "Energy of all GPUs per step.", "unavailable"),
    )
    equal, covered = equal_kernels(kernels)
    if not len(equal):
        return View(
            "dvfs",
            "DVFS",
            "This run holds no clock, and too few equal kernels to tell whether work slows down over time.",
            key_figures=unavailable,
            **common,
        )
    by_gpu = equal.groupby("gpu").apply(
        lambda f: float(np.average(f["slowdown"], weights=f["duration_ns"])), include_groups=False
    )
    mean = float(np.average(equal["slowdown"], weights=equal["duration_ns"]))
    slow = by_gpu.idxmax()
    tail = f"; GPU {slow} is slowest ({by_gpu[slow]:.2f} ×)" if len(by_gpu) > 1 else ""
    return View(
        "dvfs",
        "DVFS",
        f"This run holds no clock. Equal kernels take {mean:.2f} × their fastest time on average{tail}.",
        key_figures=(
            KeyFigure(
                "Equal work against its fastest",
                mean,
                "factor",
                DEFINITIONS["slowdown"],
                "estimated",
                note=f"{text.share(covered)} of the compute time",
            ),
            *unavailable,
        ),
        figures={"slowdown": _figure(equal)},
        tables={
            "gpus": Table(
                "Equal work by GPU",
                (
                    TableColumn("gpu", "GPU"),
                    TableColumn("slowdown", "× fastest", "factor", DEFINITIONS["slowdown"], bar=True),
                    TableColumn("n", "Kernels", "count", "Kernels compared."),
                    TableColumn("time_us", "Time", "us", "Their time."),
                ),
                pd.DataFrame(
                    {
                        "gpu": by_gpu.index,
                        "slowdown": by_gpu.to_numpy(),
                        "n": equal.groupby("gpu").size().to_numpy(),
                        "time_us": equal.groupby("gpu")["duration_ns"].sum().to_numpy() / 1000,
                    }
                ),
                sort="slowdown",
                link={"gpu": "gpu"},
            )
        },
        **common,
    )


def equal_kernels(kernels: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Compute kernels that can be compared with each other (gpu, start_ns, duration_ns, slowdown), and the share of the compute time they hold."""
    compute = kernels[kernels["kind"] == "compute"]
    duration = (compute["end_ns"] - compute["start_ns"]).astype("int64")
    total = float(duration.sum())
    each = pd.DataFrame(
        {
            "gpu": compute["gpu"],
            "start_ns": compute["start_ns"],
            "duration_ns": duration,
            "name": compute["name"],
            "grid": compute["grid"],
            "args": compute["op_args"],
        }
    )[((compute["overlap_ns"] == 0) & (duration >= SHORTEST_NS)).to_numpy()]
    groups = each.groupby(["name", "grid", "args"], observed=True, dropna=False)["duration_ns"]
    each = each.assign(slowdown=each["duration_ns"] / groups.transform("min"))[
        (groups.transform("size") >= 5).to_numpy()
    ]
    return each[["gpu", "start_ns", "duration_ns", "slowdown"]], float(
        each["duration_ns"].sum()
    ) / total if total else 0.0


def _figure(equal: pd.DataFrame) -> go.Figure:
    origin = equal["start_ns"].min()
    span = max(float(equal["start_ns"].max() - origin), 1.0)
    unit, divisor = text.time_unit(span / 1000)
    place = np.minimum(((equal["start_ns"] - origin) / span * BINS).astype(int), BINS - 1)
    weighted = (
        equal.assign(bin=place, weight=equal["slowdown"] * equal["duration_ns"])
        .groupby(["gpu", "bin"], as_index=False)[["weight", "duration_ns"]]
        .sum()
    )
    fig = figures.figure(
        "Equal kernels over time",
        "Duration relative to the fastest one of the same name, grid and shapes, one line per GPU. Rising lines may mean a falling clock (estimated).",
        height=340,
        wide=True,
        legend=[figures.entry("frequency", DEFINITIONS["slowdown"], label="Duration / fastest", line=True)],
    )
    for gpu, rows in weighted.groupby("gpu"):
        fig.add_trace(
            go.Scatter(
                x=((rows["bin"] + 0.5) / BINS * span / 1000 / divisor).tolist(),
                y=(rows["weight"] / rows["duration_ns"]).tolist(),
                mode="lines+markers",
                showlegend=False,
                marker={"size": 4, "color": COLORS["frequency"]},
                line={"color": COLORS["frequency"], "width": 1.3},
                opacity=0.8,
                name=f"GPU {gpu}",
                hovertemplate=f"<b>GPU {gpu}</b><br>%{{y:.2f}} × fastest at %{{x:.1f}} {unit}<br>estimated<extra></extra>",
            )
        )
    fig.update_layout(
        xaxis={"title": {"text": f"time since the start of the capture, {unit}"}},
        yaxis={"title": {"text": "× fastest"}, "rangemode": "tozero"},
    )
    return fig
