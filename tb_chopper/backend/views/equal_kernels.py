"""The DVFS tab of a run without sampled clocks: a trace shows only whether equal work slows down."""

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
    "Nothing sampled a GPU while this run was recorded.",
    'with torch_ext.telemetry("log/my_run"): train()',
)
LATER = Missing(
    "The same for a program that you cannot change",
    "The sampler can run beside any command.",
    "tb-chopper sample --out log/my_run",
)
DEFINITIONS = {
    "slowdown": "Time of compute kernels that no communication overlaps / what they would take at the median of "
    "their equals on all "
    "GPUs (same name, grid and shapes). A lower clock raises it; so do caches and memory traffic: it is a "
    "hint, not a clock.",
    "drift": "The same for the second half of the capture / for the first half.",
    "covered": "Share of the compute time that these kernels hold: at least five equals, no communication beside them, "
    "20 µs or longer.",
    "clock": "Time-weighted mean core clock while kernels ran.",
}
SHORTEST_NS = 20_000
BINS = 60


def hint(run: Run, selection: Selection) -> View:
    """Duration of equal kernels over time, relative to their median (estimated)."""
    kernels = context.kernels(run, selection)
    unavailable = (
        KeyFigure("Core clock", None, "mhz", DEFINITIONS["clock"], "unavailable"),
        KeyFigure("Power", None, "w", "Mean power of a GPU.", "unavailable"),
        KeyFigure("Energy per step", None, "j", "Energy of all GPUs per step.", "unavailable"),
    )
    equal, covered = equal_kernels(kernels)
    if not len(equal):
        return View(
            "This run holds no clock, and too few equal kernels to tell whether work slows down over time.",
            key_figures=unavailable,
            missing=(TELEMETRY, LATER),
        )
    by_gpu = equal.groupby("gpu").agg(
        duration_ns=("duration_ns", "sum"), expected_ns=("expected_ns", "sum"), n=("duration_ns", "size")
    )
    by_gpu = by_gpu.assign(slowdown=by_gpu["duration_ns"] / by_gpu["expected_ns"], time_us=by_gpu["duration_ns"] / 1000)
    drift = _drift(equal)
    slow = figures.largest(by_gpu.reset_index(), "slowdown")
    gpus = (
        f"GPU {slow['gpu']} needs {_percent(slow['slowdown'])} than the median for equal kernels; "
        if len(by_gpu) > 1
        else ""
    )
    return View(
        f"This run holds no clock. {gpus}"
        f"{'they' if gpus else 'Equal kernels'} need {_percent(drift)} in the second half of the capture than in the "
        "first.",
        key_figures=(
            KeyFigure("Second half / first half", drift, "factor", DEFINITIONS["drift"], "estimated"),
            KeyFigure("Slowest GPU / median", slow["slowdown"], "factor", DEFINITIONS["slowdown"], "estimated"),
            KeyFigure("Compared", covered, "share", DEFINITIONS["covered"], note="of the compute time"),
            *unavailable,
        ),
        figures={"slowdown": _figure(equal)},
        tables={
            "gpus": Table(
                "Equal kernels by GPU",
                (
                    TableColumn("gpu", "GPU"),
                    TableColumn("slowdown", "Against median", "factor", DEFINITIONS["slowdown"], bar=True),
                    TableColumn("n", "Kernels", "count", "Kernels compared."),
                    TableColumn("time_us", "Time", "us", "Sum of their durations."),
                ),
                by_gpu.reset_index(),
                sort="slowdown",
                link={"gpu": "gpu"},
            )
        },
        missing=(TELEMETRY, LATER),
    )


def _percent(factor: float) -> str:
    change = factor - 1
    return f"{text.share(abs(change))} {'less' if change < 0 else 'more'} time"


def _drift(equal: pd.DataFrame) -> float:
    """Slow-down of the second half of the time over that of the first."""
    middle = (equal["start_ns"].min() + equal["start_ns"].max()) // 2
    halves = equal.groupby(equal["start_ns"] > middle)[["duration_ns", "expected_ns"]].sum()
    means = halves["duration_ns"] / halves["expected_ns"]
    return float(means.iloc[-1] / means.iloc[0])


def equal_kernels(kernels: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Compute kernels that have equals, and the share of the compute time that they hold.

    Columns gpu, start_ns, duration_ns, expected_ns (the median of the equals).
    """
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
    each = each.assign(expected_ns=groups.transform("median"))[(groups.transform("size") >= 5).to_numpy()]
    covered = float(each["duration_ns"].sum()) / total if total else 0.0
    return each[["gpu", "start_ns", "duration_ns", "expected_ns"]], covered


def _figure(equal: pd.DataFrame) -> go.Figure:
    origin = equal["start_ns"].min()
    span = max(float(equal["start_ns"].max() - origin), 1.0)
    unit, divisor = text.time_unit(span / 1000)
    place = np.minimum(((equal["start_ns"] - origin) / span * BINS).astype(int), BINS - 1)
    binned = equal.assign(bin=place).groupby(["gpu", "bin"], as_index=False)[["duration_ns", "expected_ns"]].sum()
    fig = figures.figure(
        "Equal kernels over time",
        "Time against the median of equal kernels (same name, grid, shapes), one line per GPU. A rising line may "
        "mean a "
        "falling clock (estimated).",
        height=340,
        wide=True,
        legend=[figures.entry("frequency", DEFINITIONS["slowdown"], label="Time / median", line=True)],
    )
    ratio = binned["duration_ns"] / binned["expected_ns"]
    low, high = 0.98 * float(ratio.min()), 1.02 * float(ratio.max())
    for gpu, rows in binned.groupby("gpu"):
        fig.add_trace(
            go.Scatter(
                x=((rows["bin"] + 0.5) / BINS * span / 1000 / divisor).tolist(),
                y=(rows["duration_ns"] / rows["expected_ns"]).tolist(),
                mode="lines+markers",
                showlegend=False,
                marker={"size": 4, "color": COLORS["frequency"]},
                line={"color": COLORS["frequency"], "width": 1.3},
                opacity=0.8,
                name=f"GPU {gpu}",
                hovertemplate=(
                    f"<b>GPU {gpu}</b><br>%{{y:.2f}} × median at %{{x:.1f}} {unit}<br>estimated<extra></extra>"
                ),
            )
        )
    fig.update_layout(
        xaxis={"title": {"text": f"time since the start of the capture, {unit}"}},
        yaxis={"title": {"text": "time / median"}, "range": [min(0.9, low), max(1.1, high)]},
    )
    return fig
