"""Efficiency: a busy GPU is not an efficient one; what its time goes to, and in which precision it multiplies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend import hardware
from tb_chopper.backend.metrics.efficiency import SAMPLED, blocks_per_unit, sampled
from tb_chopper.backend.metrics.precision import TYPES
from tb_chopper.backend.views import context, figures, text, trace_link
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Source, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "gpu_utilization": "Time in which at least one activity runs / all time. One tiny kernel counts as much as a large "
    "one: this is what nvidia-smi shows as utilization.",
    "sm_efficiency": "∫ min(1, blocks of the running kernels / SMs) dt / all time: the share of SMs (CUs on AMD) that "
    "had a block. Of an operation: the mean over its kernels, weighted by their time.",
    "occupancy": "Estimated achieved occupancy of the kernels, weighted by their time: how many of the warps that an "
    "SM can hold it had. In CUDA traces only.",
    "tensor_share": "Time of GEMM and attention kernels that use tensor or matrix cores, by their names / time of all "
    "GEMM and attention kernels, with what these calls launch beside (layout changes, split-K sums).",
    "mfu": "Model FLOPs / (time · peak): those told to the handler, else counted from recorded shapes without "
    "recomputation. Each call is held to the peak of its own data type.",
    "hfu": "FLOPs counted from recorded shapes, recomputation included / (time · peak of the data type).",
    "lost": "Σ (1 − e) · duration over compute kernels, e = min(1, blocks / SMs) of each: time that SMs had no block "
    "of the kernel. Kernels that ran side by side may have filled them together: then less was lost.",
    "ideal": "What the recorded shapes need at the peaks of the hardware: the larger of FLOPs / peak of the data type "
    "and bytes / memory bandwidth.",
    "wasted": "Time lost to SMs without work + time below the peak.",
    "below": "Time of the filled SMs beyond what is needed at the peak: padding, stalls, low clock, memory traffic "
    "beyond one read and one write.",
    "unknown": "Time of kernels whose FLOPs and bytes are not known (no shapes, no formula, or no peak for this GPU).",
    "sm_active": "Sampled: share of the SMs that had work, as the hardware counts (NVML's GPM), mean over the readings "
    "from the first to the last kernel of the selection.",
    "sm_occupancy": "Sampled: share of the warps that the SMs can hold, as the hardware counts.",
    "tensor_active": "Sampled: share of the time in which the tensor pipes worked, as the hardware counts. Of all "
    "time, not of that of GEMMs.",
    "compute": "Sum of the durations of the compute kernels.",
    "dtype": "Data type of the operands as recorded; tf32 where fp32 ran on tensor cores; without shapes by the "
    "kernel's name. `other`: layout changes and sums beside the product, or type not known.",
    "rate": "Counted FLOPs / time of the kernels that have them.",
    "peak": "Dense peak of the data type on this GPU.",
}
TWINS = {"sm_active": "SMs active, sampled", "sm_occupancy": "Occupancy, sampled",
         "tensor_active": "Tensor pipes, sampled"}
RATIOS = ("gpu_utilization", "sm_efficiency", "occupancy", "tensor_share", "hfu", "mfu")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "star")
PARTS = (("ideal", "ideal_us"), ("below", "below_us"), ("unfilled", "lost_us"), ("unknown", "unknown_us"))
"""Thing of the palette and column, in drawing order."""
PART_DEFINITIONS = {"ideal": DEFINITIONS["ideal"], "below": DEFINITIONS["below"], "unfilled": DEFINITIONS["lost"],
                    "unknown": DEFINITIONS["unknown"]}
PART_LABELS = LABELS | {"unknown": "Not known"}
COVERED = 0.1
"""of the time: below, a ratio says too little about the rest to be shown on top"""
SHAPES = Missing(
    "FLOPs, HFU and MFU",
    "They are counted from the shapes of operators, which this trace does not hold.",
    "torch.profiler.profile(record_shapes=True, ...)",
)
NO_GPU = Missing(
    "How well a GPU is used",
    "Operators on the CPU have no SMs, no occupancy and no peak here. Record a run on a GPU.",
    "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True, ...)",
)


def view(run: Run, selection: Selection) -> View:
    """Utilization, SM efficiency, occupancy, MFU and HFU side by side; lost time by group; precision of GEMMs."""
    override = hardware.parse_override(selection.options.get("hardware", ""))
    run = run.with_hardware(override) if override else run
    if context.nothing_to_show(run):
        return View("There is no device activity in this run.", missing=(context.NO_KERNELS,))
    if context.is_cpu_only(run):
        return View("CPU operations have no SMs to fill and no peak to reach.", missing=(NO_GPU,))
    where, by = selection.where(), list(selection.by or ("operation",))
    kernels = context.kernels(run, selection)
    compute = kernels[kernels["kind"] == "compute"]
    by_gpu = run.efficiency(by="gpu", where=where).merge(sampled(kernels, run.telemetry.samples), on="gpu", how="left")
    if not len(compute):
        return View("No compute kernel ran in this selection.")
    whole = run.efficiency(by=[], where=where).to_dict("records")[0]
    groups = _linked(run.efficiency(by=by, where=where), compute, by, run)
    types = run.precision(where=where)
    focus = selection.focus
    inside = compute[compute["operation"] == focus] if focus is not None else compute[:0]
    by_kernel = run.efficiency(by=["kernel"], where=where | {"operation": focus}) if len(inside) else None
    return View(
        _headline(whole, groups, by, selection.compare),
        key_figures=_key_figures(whole, by_gpu),
        figures={
            "lost": _lost(groups, by, selection.compare),
            "by_gpu": _ratios(by_gpu),
            **({"precision": _precision(types)} if len(types) else {}),
        },
        tables={
            "groups": _groups_table(groups, by),
            **({"kernels": _groups_table(_linked(by_kernel, inside, ["kernel"], run), ["kernel"],
                                         f"Kernels of {text.short(str(focus), 60)}")} if by_kernel is not None else {}),
            "gpus": _gpus_table(by_gpu),
            **({"precision": _precision_table(types)} if len(types) else {}),
        },
        definitions={"SM": "Streaming multiprocessor; on AMD a compute unit (CU)."},
        missing=_missing(run, whole),
    )


def _totals(rows: pd.DataFrame) -> pd.DataFrame:
    """The groups with compute kernels, with compute_us and wasted_us (lost to SMs without work, and below the peak)."""
    rows = rows.assign(compute_us=rows[[column for _, column in PARTS]].sum(axis=1),
                       wasted_us=rows["lost_us"] + rows["below_us"])
    return rows[rows["compute_us"] > 0].reset_index(drop=True)


def _linked(rows: pd.DataFrame, kernels: pd.DataFrame, by: list[str], run: Run) -> pd.DataFrame:
    """`_totals`, and `at`: the kernel that loses most to SMs without work, else the longest one."""
    rows = _totals(rows)
    duration = (kernels["end_ns"] - kernels["start_ns"]).to_numpy().astype(float)
    empty = 1 - blocks_per_unit(kernels, run.hardware).clip(upper=1).fillna(1).to_numpy()
    return trace_link.linked(rows, kernels, by, (empty + 1e-6) * duration)


def _known(whole: dict[str, Any], ratio: str) -> float | None:
    """A ratio, None where it is unknown or known for too little of the time."""
    covered = {"sm_efficiency": "sm_known", "occupancy": "occupancy_known", "hfu": "flop_known", "mfu": "flop_known"}
    value = float(whole[ratio])
    told = ratio == "mfu" and whole["mfu_source"] == "model"
    if not np.isfinite(value) or (ratio in covered and not told and whole[covered[ratio]] < COVERED):
        return None
    return value


def _headline(whole: dict[str, Any], groups: pd.DataFrame, by: list[str], other: Run | None) -> str:
    sm, mfu, tensor = (_known(whole, r) for r in ("sm_efficiency", "mfu", "tensor_share"))
    found = [f"{text.share(sm)} of its SMs had work" if sm is not None else "",
             f"its matrix products reached {text.share(mfu)} of the peak (MFU)" if mfu is not None else ""]
    if mfu is None and tensor is not None:
        found.append(f"{text.share(tensor)} of the GEMM time ran on matrix cores")
    line = f"The GPU was busy {text.share(whole['gpu_utilization'])} of the time"
    known = " and ".join(filter(None, found))
    line += f"; over all of it {known}." if known else "; how well is not in the trace."
    part, column = ("SMs without work", "lost_us") if whole["lost_us"] >= whole["below_us"] else (
        "running below the peak", "below_us")
    total = float(whole["lost_us"] + whole["below_us"])
    if total > 0 and len(groups):
        worst = figures.largest(groups, column)
        line += (f" Of its kernels' time, {text.duration(whole[column])} are lost to {part}, the largest part of it in "
                 f"{text.short(figures.row_label(worst, by), 60)} ({text.duration(worst[column])}).")
    if other is not None and len(other.kernels):
        there = other.efficiency(by=[]).to_dict("records")[0]
        ratios = [f"{LABELS[r]} {text.share(value)}" for r in ("gpu_utilization", "sm_efficiency", "mfu")
                  if (value := _known(there, r)) is not None]
        line += f" {text.short(other.name, 40)}: {', '.join(ratios)}."
    return line


def _key_figures(whole: dict[str, Any], by_gpu: pd.DataFrame) -> tuple[KeyFigure, ...]:
    def figure(ratio: str, source: Source, note: str) -> KeyFigure:
        value = _known(whole, ratio)
        return KeyFigure(LABELS[ratio], value, "share", DEFINITIONS[ratio],
                         source if value is not None else "unavailable", note, color=COLORS[ratio])

    def covers(column: str, what: str) -> str:
        covered = whole[column]
        return f"{what}known for {text.share(covered)}" if covered else "not in the trace"

    def beside(column: str, otherwise: str) -> str:
        """The sampled twin of an estimate, where there is one."""
        twin = by_gpu[column].mean()
        return f"sampled: {text.share(twin)}" if twin == twin else otherwise

    mfu_note = {"model": "FLOPs as told", "counted": covers("flop_known", "FLOPs "),
                "unavailable": "no shapes or no peak"}[whole["mfu_source"]]
    lost, all_us = float(whole["lost_us"]), float(sum(whole[c] for _, c in PARTS))
    known = whole["sm_known"] > 0
    return (
        figure("gpu_utilization", "measured", "something runs"),
        figure("sm_efficiency", "estimated", beside("sm_active", covers("sm_known", "grids "))),
        figure("occupancy", "estimated", beside("sm_occupancy", covers("occupancy_known", ""))),
        figure("tensor_share", "estimated", "of GEMM time"),
        figure("mfu", "estimated", mfu_note),
        figure("hfu", "estimated", covers("flop_known", "FLOPs ")),
        KeyFigure("SMs without work", lost if known else None, "us", DEFINITIONS["lost"],
                  "estimated" if known else "unavailable",
                  f"{text.share(lost / all_us)} of kernel time" if known and all_us else "not in the trace",
                  color=COLORS["unfilled"]),
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _lost(groups: pd.DataFrame, by: list[str], other: Run | None) -> go.Figure:
    key = _order(groups)
    shown = figures.top(groups, key, 20 if other is None else 12).assign(other=False)
    if other is not None and len(other.kernels):
        there = shown[by].merge(_totals(other.efficiency(by=by)).assign(other=True), on=by, how="inner")
        shown = pd.concat([shown, there], ignore_index=True)
        shown["place"] = shown.groupby(by, dropna=False, sort=False, observed=True).ngroup()
        shown = shown.sort_values(["place", "other"], ignore_index=True)
    unit, divisor = text.time_unit(shown["compute_us"].max())
    labels = [figures.row_label(r, by) + (f" · {text.short(other.name, 18)}" if r["other"] and other else "")
              for r in shown.to_dict("records")]
    present = [(thing, column) for thing, column in PARTS if shown[column].sum() > 0]
    order = {"wasted_us": "most lost", "compute_us": "most time"}[key]
    fig = figures.figure(
        "What the time of kernels goes to, by " + " and ".join(by),
        f"Sum of durations of compute kernels over the selection, the {order} first.",
        height=figures.height_of(len(shown), 27),
        wide=True,
        barmode="stack",
        legend=[figures.entry(thing, PART_DEFINITIONS[thing], label=PART_LABELS[thing]) for thing, _ in present],
    )
    links = [json.dumps({"focus": str(o)}) for o in shown["operation"]] if "operation" in by else None
    if by == ["gpu"]:
        links = [json.dumps({"gpu": int(g)}) for g in shown["gpu"]]
    for thing, column in present:
        fig.add_trace(figures.bars(
            thing, range(len(shown)), shown[column].tolist(), divisor,
            hover=[f"<b>{text.hover(label)}</b><br>{PART_LABELS[thing]}: {text.duration(v)} of {text.duration(t)} "
                   f"({text.share(v / t if t else None)})<br>estimated"
                   for label, v, t in zip(labels, shown[column], shown["compute_us"], strict=True)],
            compared=shown["other"].tolist(), links=links, name=PART_LABELS[thing]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 48))
    return fig


def _recomputed(rows: pd.DataFrame) -> bool:
    """Whether HFU says something else than MFU."""
    return not np.allclose(rows["hfu"], rows["mfu"], rtol=1e-3, equal_nan=True)


def _order(groups: pd.DataFrame) -> str:
    """What groups are sorted by: the lost time, where any is known."""
    return "wasted_us" if groups["wasted_us"].sum() > 0 else "compute_us"


def _ratios(by_gpu: pd.DataFrame) -> go.Figure:
    """One row per GPU, a mark per ratio: the distance between them is the point."""
    rows = by_gpu.head(figures.MAX_ROWS).reset_index(drop=True)
    present = [r for r in RATIOS if rows[r].notna().any() and (r != "hfu" or _recomputed(rows))]
    fig = figures.figure(
        "Busy is not efficient",
        "Each GPU's ratios on one scale: the further the marks lie below its utilization, the less its time is worth.",
        height=max(230, figures.height_of(len(rows))),
        wide=len(rows) > 8,
        legend=[figures.entry(r, DEFINITIONS[r]) for r in present],
    )
    for ratio in present:
        fig.add_trace(go.Scatter(
            x=(100 * rows[ratio]).tolist(), y=list(range(len(rows))), mode="markers", showlegend=False,
            name=LABELS[ratio],
            marker={"color": COLORS[ratio], "size": 12, "symbol": SYMBOLS[RATIOS.index(ratio)]},
            hovertext=[f"<b>GPU {g}</b><br>{LABELS[ratio]}: {text.share(v)}<br>"
                       f"{'measured' if ratio == 'gpu_utilization' else 'estimated'}"
                       for g, v in zip(rows["gpu"], rows[ratio], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>",
            customdata=[[json.dumps({"gpu": int(g)})] for g in rows["gpu"]]))
    fig.update_layout(xaxis={"title": {"text": "%"}, "range": [-2, 102]},
                      yaxis=figures.rows_axis([f"GPU {g}" for g in rows["gpu"]]))
    return fig


def _types(types: pd.DataFrame) -> pd.DataFrame:
    return types.assign(dtype=types["dtype"].astype(object).where(types["dtype"].notna(), "other"))


def _precision(types: pd.DataFrame) -> go.Figure:
    rows = _types(types)
    kinds = [k for k in ("gemm", "attention") if (rows["op_type"] == k).any()]
    unit, divisor = text.time_unit(rows.groupby("op_type", observed=True)["time_us"].sum().max())
    things = [t for t in (*TYPES, "other") if (rows["dtype"] == t).any()]
    color = COLORS | {"other": COLORS["unknown"]}
    fig = figures.figure(
        "Precision of GEMMs and attention",
        "Time by the data type of the operands. fp32 without tensor cores is the slowest way to multiply.",
        height=max(230, figures.height_of(len(kinds))),
        barmode="stack",
        legend=[{"label": LABELS[t] if t != "other" else "Other", "color": color[t],
                 "definition": DEFINITIONS["dtype"]} for t in things],
    )
    for thing in things:
        mine = rows[rows["dtype"] == thing].set_index("op_type")["time_us"].reindex(kinds).fillna(0.0)
        whole = rows.groupby("op_type", observed=True)["time_us"].sum().reindex(kinds)
        fig.add_trace(figures.bars(
            "unknown" if thing == "other" else thing, range(len(kinds)), mine.tolist(), divisor, color=color[thing],
            hover=[f"<b>{LABELS[k]}: {thing}</b><br>{text.duration(v)} of {text.duration(t)} ({text.share(v / t)})<br>"
                   "by recorded types and kernel names" for k, v, t in zip(kinds, mine, whole, strict=True)]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis([LABELS[k] for k in kinds]))
    return fig


# ---- tables ----------------------------------------------------------------------------------------------------------


def _share(name: str) -> TableColumn:
    return TableColumn(name, LABELS[name], "share", DEFINITIONS[name], bar=True)


def _groups_table(rows: pd.DataFrame, by: list[str], title: str = "") -> Table:
    heads = tuple(TableColumn(c, "GPU" if c == "gpu" else c.capitalize()) for c in by)
    shares = [r for r in RATIOS[1:] if rows[r].notna().any() and (r != "hfu" or _recomputed(rows))]
    unknown = TableColumn("unknown_us", "Not known", "us", DEFINITIONS["unknown"])
    named = rows.assign(**{c: [figures.group_name(c, v) for v in rows[c]] for c in by if c not in ("gpu", "step")})
    return Table(
        title or "Lost time by " + " and ".join(by),
        (
            *heads,
            TableColumn("compute_us", "Kernel time", "us", DEFINITIONS["compute"], bar=True),
            TableColumn("wasted_us", "Lost", "us", DEFINITIONS["wasted"], bar=True),
            TableColumn("lost_us", "SMs without work", "us", DEFINITIONS["lost"], bar=True),
            TableColumn("below_us", "Below the peak", "us", DEFINITIONS["below"], bar=True),
            *([unknown] if rows["unknown_us"].any() else []),
            *map(_share, shares),
        ),
        named,
        sort=_order(rows),
        link={"focus": "operation"} if "operation" in by else {c: c for c in by if c in ("gpu", "step")},
        note="Choose a row to see the kernels of that operation." if by == ["operation"] else "",
        at="at",
    )


def _gpus_table(rows: pd.DataFrame) -> Table:
    return Table(
        "GPUs side by side",
        (
            TableColumn("gpu", "GPU"),
            *map(_share, RATIOS),
            *(TableColumn(c, TWINS[c], "share", DEFINITIONS[c], bar=True) for c in SAMPLED if rows[c].notna().any()),
            TableColumn("sm_known", "Grid known", "share", "Share of the kernel time whose grid is known."),
            TableColumn("flop_known", "FLOPs known", "share", "Share of the compute time whose FLOPs are known."),
            TableColumn("mfu_source", "MFU from", "text", "model: FLOPs told to the handler; counted: from shapes."),
            TableColumn("lost_us", "SMs without work", "us", DEFINITIONS["lost"], bar=True),
            TableColumn("below_us", "Below the peak", "us", DEFINITIONS["below"], bar=True),
        ),
        rows,
        sort="lost_us",
        link={"gpu": "gpu"},
    )


def _precision_table(types: pd.DataFrame) -> Table:
    return Table(
        "Precision",
        (
            TableColumn("op_type", "Work", "text", "GEMM (with convolutions) or attention."),
            TableColumn("dtype", "Type", "text", DEFINITIONS["dtype"]),
            TableColumn("n", "Kernels", "count", "Kernels of this kind and type."),
            TableColumn("time_us", "Time", "us", "Sum of their durations.", bar=True),
            TableColumn("share", "Share", "share", "Of the time of GEMMs and attention.", bar=True),
            _share("tensor_share"),
            TableColumn("rate_flop_per_s", "Rate", "flop_per_s", DEFINITIONS["rate"]),
            TableColumn("peak_flop_per_s", "Peak", "flop_per_s", DEFINITIONS["peak"]),
        ),
        _types(types).assign(op_type=[LABELS[str(k)] for k in types["op_type"]]),
        sort="time_us",
    )


def _missing(run: Run, whole: dict[str, Any]) -> tuple[Missing, ...]:
    missing = []
    if not run.kernels["op_args"].notna().any():
        missing.append(SHAPES)
    unknown = sorted({"" if pd.isna(n) else str(n) for n, g in zip(run.workers["gpu_name"], run.workers["gpu"],
                                                                 strict=True) if run.hardware.get(int(g)) is None})
    if unknown:
        missing.append(Missing("Peaks of this GPU", hardware.what_to_pass(unknown[0] or None) + ".",
                               "Hardware: peak_tflops=1307.4,f_peak_mhz=2100,hbm_gbs=5300"))
    if not whole["sm_known"] > 0:
        missing.append(Missing("SM efficiency", "No kernel's grid, or not the number of SMs, is in the trace: ROCm "
                               "before 7 and graph replays leave it out."))
    if not whole["occupancy_known"] > 0:
        missing.append(Missing("Occupancy", "Only CUDA traces carry it. On AMD, counters tell it: the Breakdown tab's "
                               "ratios.", "tb-chopper collect --out log/my_run -- torchrun train.py"))
    return tuple(missing)
