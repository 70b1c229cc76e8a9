"""Overview: where the time of a step goes, per phase, GPU and step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.timeline import CATEGORIES, exclusive
from tb_chopper.backend.schema import OP_TYPES, PHASES
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "gemm": "Matrix multiplications and convolutions, by operator and kernel name.",
    "attention": "Attention kernels (FlashAttention, SDPA and the like).",
    "vector": "All other computation: normalisation, activation, element-wise work, optimizer.",
    "communication": "Time in which a communication kernel runs and no computation does: |comm \\ comp|.",
    "memcpy": "Time in which only copies or fills run: |copy \\ (comp ∪ comm)|.",
    "idle": "Time in which nothing runs on the GPU: window − busy. It belongs to the phase of the activity that "
    "ended it.",
    "total": "Length of the window. Whole capture: last end − first start of all activities; step: from its first "
    "kernel to "
    "the next step's first kernel.",
    "compute": "Time in which at least one compute kernel runs: |comp|.",
    "all_communication": "Time in which at least one communication kernel runs: |comm|, hidden or not.",
    "overlap": "Time in which computation and communication run together: |comp ∩ comm|.",
    "utilization": "Share of the window in which anything runs. A busy GPU is not yet an efficient one.",
    "iteration": "From a step's first device activity to the next one's, mean over the selected steps and GPUs.",
    "tokens": "Tokens of a step, as told to the handler / iteration time / GPUs. Iteration: from a step's first device "
    "activity to the next one's, of the slowest GPU, median over the steps of the whole run.",
    "steps_per_s": "1 / iteration time. Iteration: from a step's first device activity to the next one's, of the "
    "slowest "
    "GPU, median over the steps of the whole run.",
    "sm_efficiency": "∫ min(1, blocks in flight / SMs or CUs) dt / window, over kernels whose grid is known.",
    "sm_known": "Share of the kernel time whose grid is known.",
    "occupancy": "Estimated achieved occupancy, time-weighted over the kernels that carry it (CUDA traces).",
    "flop_per_s": "FLOPs counted from recorded shapes / window. A lower bound where shapes are missing.",
    "flop_known": "Share of the compute time whose FLOPs are known from recorded shapes.",
    "hfu": "Counted FLOPs, recomputation included / (window × peak of their data type).",
    "mfu": "Model FLOPs / (time × peak): as told to the handler, else counted without recomputation.",
}
LEAST_KNOWN = 0.1
"""An efficiency of which less is known than this share of the time is not shown."""
SHORT = {"communication": "Comm.", "memcpy": "Copies", "attention": "Attn."}
TOKENS = Missing(
    "Tokens per second",
    "The trace does not say how many tokens a step trains on.",
    'chopper_trace_handler("log/my_run", tokens_per_step=batch * sequence_length)',
)
STEPS = Missing(
    "Time per step",
    "The capture marks no training step, so it is shown as one window.",
    "prof.step()  # at the end of each training step, with a schedule given to torch.profiler.profile",
)


def view(run: Run, selection: Selection) -> View:
    """Step time by phase and class of work, per GPU or step, with throughput."""
    if context.nothing_to_show(run):
        return View(
            "There is no device activity in this run.",
            missing=(context.NO_KERNELS,),
        )
    split = Split.of(run, selection)
    other = Split.of(selection.compare, Selection()) if selection.compare is not None else None
    by = selection.by or ("gpu",)
    charts = {"step_time": _main_figure(split, other, by)}
    if split.by_step and split.times["step"].nunique() > 1 and by != ("step",):
        charts["by_step"] = _step_figure(split)
    return View(
        _headline(run, split, other),
        key_figures=_key_figures(run, split, other),
        figures=charts,
        tables=_tables(run, selection),
        missing=(*(() if _knows_tokens(run) else (TOKENS,)), *(() if split.by_step else (STEPS,))),
    )


class Split:
    """The windows of a run, every ns given to one phase and one category (`metrics.timeline.exclusive`)."""

    def __init__(self, times: pd.DataFrame, by_step: bool, name: str, cpu: bool) -> None:
        self.times, self.by_step, self.name, self.cpu = times, by_step, name, cpu

    @classmethod
    def of(cls, run: Run, selection: Selection) -> Split:
        kernels = context.kernels(run, selection, steps=False)
        steps = run.steps[run.steps["capture"].isin(kernels["capture"].unique())]
        by_step = bool(steps["gpu_start_ns"].notna().any())
        times = exclusive(kernels, steps, by_step)
        if by_step and selection.steps is not None:
            times = times[times["step"].between(*selection.steps)]
            if not len(times):
                raise InvalidSelection(context.NOTHING_MATCHES)
        workers = run.workers.drop_duplicates("capture").set_index("capture")["worker"].astype(object)
        times = times.assign(worker=times["capture"].map(workers))
        return cls(times, by_step, run.name, context.is_cpu_only(run))

    @property
    def n_windows(self) -> int:
        """(GPU, step) windows, or one per capture."""
        return len(self.times[["capture", "step"]].drop_duplicates())

    @property
    def n_gpus(self) -> int:
        return self.times["gpu"].nunique()

    def mean_us(self) -> dict[str, float]:
        """Mean time of a window per category, µs."""
        sums = self.times.groupby("category")["time_us"].sum() / max(self.n_windows, 1)
        return {c: float(sums.get(c, 0.0)) for c in CATEGORIES}

    def rows(self, by: Sequence[str]) -> pd.DataFrame:
        """Mean time of a window per group of `by`, phase and category: the group, phase, category, time_us."""
        windows = self.times[list(dict.fromkeys([*by, "capture", "step"]))].drop_duplicates()
        n = windows.groupby(list(by), dropna=False).size().rename("n_windows").reset_index()
        sums = self.times.groupby([*by, "phase", "category"], dropna=False)["time_us"].sum().reset_index()
        merged = sums.merge(n, on=list(by))
        return merged.assign(time_us=merged["time_us"] / merged["n_windows"])


# ---- words and numbers -----------------------------------------------------------------------------------------------


def _headline(run: Run, split: Split, other: Split | None) -> str:
    mean = split.mean_us()
    total = sum(mean.values())
    compute = sum(mean[c] for c in OP_TYPES)
    device = "process" if split.cpu else "GPU"
    subject = f"A step takes {text.duration(total)}" if split.by_step else f"The capture lasts {text.duration(total)}"
    parts = [
        (compute, "computing"),
        (mean["communication"], "waiting for communication"),
        (mean["memcpy"], "copying"),
        (mean["idle"], "idle"),
    ]
    shown = [f"{text.share(v / total)} {what}" for v, what in parts if total and v / total >= 0.005]
    line = f"{subject}; the average {device} spends {_list(shown)}." if shown else f"{subject}."
    if other is not None:
        before = sum(other.mean_us().values())
        if before > 0:
            line += f" Against {other.name} ({text.duration(before)}) that is {text.change(total, before)}."
    return line


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _key_figures(run: Run, split: Split, other: Split | None) -> tuple[KeyFigure, ...]:
    mean, before = split.mean_us(), other.mean_us() if other is not None else None
    total = sum(mean.values())
    compute = {"compute": sum(mean[c] for c in OP_TYPES)}
    values = {**compute, **{c: mean[c] for c in ("communication", "memcpy", "idle")}}
    device = context.devices(split.n_gpus, split.cpu)
    n_steps = split.times["step"].nunique()
    scope = f"{text.count(n_steps, 'step')}, {device}" if split.by_step else f"one window, {device}"
    figures_ = [
        KeyFigure(
            "Step time" if split.by_step else "Capture",
            total,
            "us",
            DEFINITIONS["iteration" if split.by_step else "total"],
            note=_against(total, sum(before.values()) if before else None) or f"mean of {scope}",
        )
    ]
    figures_.extend(_throughput(run) if split.by_step else ())
    for thing, value in values.items():
        label = {"compute": "Compute"}.get(thing, LABELS[thing])
        old = None
        if before:
            old = sum(before[c] for c in OP_TYPES) if thing == "compute" else before[thing]
        note = f"{text.share(value / total if total else None)} of the {'step' if split.by_step else 'capture'}"
        figures_.append(
            KeyFigure(label, value, "us", DEFINITIONS[thing], note=_against(value, old) or note, color=COLORS[thing])
        )
    return tuple(figures_)


def _against(value: float, before: float | None) -> str:
    if before is None:
        return ""
    if before == 0:
        return "none in the other run"
    return f"{text.change(value, before)} against {text.duration(before)}"


def _throughput(run: Run) -> tuple[KeyFigure, ...]:
    """Tokens per second and GPU where the handler was told, else steps per second; the slowest GPU sets the pace."""
    rates = run.throughput()
    whole = rates[rates["gpu"].isna()]
    if not len(whole) or not whole["n_steps"].iloc[0]:
        return ()
    one = whole.iloc[0]
    note = f"iteration {text.duration(1000 * one['iteration_ms'])}, median"
    if one["kind"] == "tokens/s/gpu":
        return (KeyFigure("Tokens / s / GPU", one["tokens_per_s_per_gpu"], "count", DEFINITIONS["tokens"], note=note),)
    return (KeyFigure("Steps / s", one["steps_per_s"], "count", DEFINITIONS["steps_per_s"], note=note),)


def _knows_tokens(run: Run) -> bool:
    return bool((run.throughput()["kind"] == "tokens/s/gpu").any())


# ---- figures ---------------------------------------------------------------------------------------------------------


def _main_figure(split: Split, other: Split | None, by: Sequence[str]) -> go.Figure:
    rows, labels, compared = _rows_to_draw(split, other, by)
    largest = rows.groupby("row")["time_us"].sum().max()
    unit, divisor = text.time_unit(largest)
    n = len(labels)
    row_px = 76 if n <= 8 else 52
    description = (
        "Each bar is the mean window of one row: forward, backward, optimizer and other work one after the other, each "
        "split by what the GPU did. The thin strip names the phase."
    )
    n_groups = len(split.times[list(by)].drop_duplicates())
    if n_groups > figures.MAX_ROWS:
        description += f" Shown are the {figures.MAX_ROWS} of {n_groups} rows with the most time outside compute."
    fig = figures.figure(
        "Step time by phase and kind of work" if split.by_step else "Capture by phase and kind of work",
        description,
        height=figures.height_of(n, row_px),
        wide=True,
        barmode="overlay",
        uniformtext={"minsize": 10, "mode": "hide"},
        legend=[figures.entry(c, DEFINITIONS[c]) for c in CATEGORIES if (rows["category"] == c).any()]
        + [figures.entry(p, "Phase of the work above the strip.") for p in PHASES if (rows["phase"] == p).any()]
        + ([figures.entry("idle", label=f"hatched: {other.name}", pattern=True)] if other is not None else []),
    )
    per_row = rows.groupby("row")["time_us"].transform("sum")
    for c in CATEGORIES:
        mine = rows[rows["category"] == c]
        if len(mine):
            shares = mine["time_us"] / per_row[mine.index]
            fig.add_trace(
                figures.bars(
                    c,
                    (mine["row"] - 0.1).tolist(),
                    mine["time_us"].tolist(),
                    divisor,
                    starts_us=mine["start_us"].tolist(),
                    width=0.54,
                    hover=[
                        _hover(labels[r], p, c, t, s)
                        for r, p, t, s in zip(mine["row"], mine["phase"], mine["time_us"], shares, strict=True)
                    ],
                    labels=[f"{SHORT.get(c, LABELS[c])} {text.share(s)}" for s in shares],
                    compared=[compared[r] for r in mine["row"]],
                    links=_links(rows, mine, by),
                )
            )
    phases = rows.groupby(["row", "phase"], as_index=False).agg(
        start_us=("start_us", "min"), time_us=("time_us", "sum")
    )
    for p in PHASES:
        mine = phases[phases["phase"] == p]
        if len(mine):
            fig.add_trace(
                figures.bars(
                    p,
                    (mine["row"] + 0.32).tolist(),
                    mine["time_us"].tolist(),
                    divisor,
                    starts_us=mine["start_us"].tolist(),
                    width=0.25,
                    hover=[
                        f"<b>{text.hover(labels[r])}</b><br>{LABELS[p]}: {text.duration(t)}"
                        for r, t in zip(mine["row"], mine["time_us"], strict=True)
                    ],
                    labels=[f"{LABELS[p]} {text.duration(t)}" for t in mine["time_us"]],
                    compared=[compared[r] for r in mine["row"]],
                )
            )
    fig.update_layout(xaxis={"title": {"text": unit}, "zeroline": False}, yaxis=figures.rows_axis(labels))
    return fig


def _rows_to_draw(split: Split, other: Split | None, by: Sequence[str]) -> tuple[pd.DataFrame, list[str], list[bool]]:
    """Segments with their row number and start, the labels of the rows, and which rows are the compared run's."""
    parts, labels, compared = [], list[str](), list[bool]()
    for is_other, s in ((False, split), (True, other)):
        if s is None:
            continue
        rows = s.rows(by)
        codes, groups = grouping.number(rows, list(by))
        lost = np.bincount(codes, rows["time_us"].where(~rows["category"].isin(OP_TYPES), 0.0), len(groups))
        for group in sorted(np.argsort(-lost, kind="stable")[: figures.MAX_ROWS]):
            parts.append(_in_order(rows[codes == group]).assign(row=len(labels)))
            name = _row_label(groups.iloc[group], by, s.cpu)
            labels.append(f"{name} · {text.short(s.name, 18)}" if is_other else name)
            compared.append(is_other)
    return pd.concat(parts, ignore_index=True), labels, compared


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """The segments of one bar in order of phase and category, each starting where the one before ends."""
    order = rows["phase"].map(PHASES.index) * len(CATEGORIES) + rows["category"].map(CATEGORIES.index)
    rows = rows.iloc[np.argsort(order.to_numpy(), kind="stable")]
    return rows.assign(start_us=rows["time_us"].cumsum() - rows["time_us"])


def _row_label(group: pd.Series, by: Sequence[str], cpu: bool) -> str:
    name = figures.row_label(group, by)
    return name.replace("GPU ", "process ") if cpu else name


def _hover(row: str, phase: str, category: str, time_us: float, share: float) -> str:
    return (
        f"<b>{text.hover(row)}</b><br>{LABELS[phase]} · {LABELS[category]}<br>{text.duration(time_us)} "
        f"({text.share(share)} of the row), mean<br>measured"
    )


def _links(rows: pd.DataFrame, mine: pd.DataFrame, by: Sequence[str]) -> list[str] | None:
    keys = [c for c in by if c in ("gpu", "step")]
    if not keys:
        return None
    return [
        json.dumps({k: int(v) for k, v in zip(keys, values, strict=True) if v == v})
        for values in mine[keys].itertuples(index=False)
    ]


def _step_figure(split: Split) -> go.Figure:
    rows = split.rows(("step",)).groupby(["step", "category"], as_index=False)["time_us"].sum()
    steps = sorted(rows["step"].unique())
    unit, divisor = text.time_unit(rows.groupby("step")["time_us"].sum().max())
    fig = figures.figure(
        "Step by step",
        "Mean over the selected GPUs. The first step of a capture often pays for warm-up.",
        height=320,
        wide=True,
        barmode="stack",
        legend=[figures.entry(c, DEFINITIONS[c]) for c in CATEGORIES if (rows["category"] == c).any()],
    )
    for c in CATEGORIES:
        mine = rows[rows["category"] == c].set_index("step")["time_us"].reindex(steps, fill_value=0.0)
        if mine.sum() > 0:
            fig.add_trace(
                go.Bar(
                    x=[str(s) for s in steps],
                    y=[v / divisor for v in mine],
                    name=LABELS[c],
                    marker={"color": COLORS[c], "line": {"width": 0}},
                    width=0.5,
                    hovertext=[
                        f"<b>step {s}</b><br>{LABELS[c]}: {text.duration(v)}" for s, v in zip(steps, mine, strict=True)
                    ],
                    hovertemplate="%{hovertext}<extra></extra>",
                    customdata=[[json.dumps({"step": int(s)})] for s in steps],
                )
            )
    fig.update_layout(xaxis={"title": {"text": "step"}, "type": "category"}, yaxis={"title": {"text": unit}})
    return fig


# ---- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    TableColumn("total_us", "Window", "us", DEFINITIONS["total"]),
    TableColumn("compute_us", "Compute", "us", DEFINITIONS["compute"], bar=True),
    TableColumn("exposed_communication_us", "Exposed comm.", "us", DEFINITIONS["communication"], bar=True),
    TableColumn("exposed_memcpy_us", "Exposed copies", "us", DEFINITIONS["memcpy"], bar=True),
    TableColumn("idle_us", "Idle", "us", DEFINITIONS["idle"], bar=True),
    TableColumn("communication_us", "Communication", "us", DEFINITIONS["all_communication"]),
    TableColumn("overlap_us", "Overlap", "us", DEFINITIONS["overlap"]),
    TableColumn("memcpy_us", "Copies", "us", "Time in which at least one copy or fill runs: |copy|."),
    TableColumn("busy_us", "Busy", "us", "Time in which anything runs: |comp ∪ comm ∪ copy|."),
    TableColumn("utilization", "Busy share", "share", DEFINITIONS["utilization"]),
)


def _tables(run: Run, selection: Selection) -> dict[str, Table]:
    where = selection.where()
    capture_where = {k: v for k, v in where.items() if k != "step"}
    noun = context.device(run).replace("process", "Process")
    device = (TableColumn("gpu_name", "Device"),) if run.workers["gpu_name"].notna().any() else ()
    tables = {
        "gpus": Table(
            f"Whole capture by {context.device(run)}",
            (TableColumn("gpu", noun), TableColumn("worker", "Worker"), *device, *COLUMNS),
            _with_names(run, _utilization(run.timeline(by=["gpu", "worker"], where=capture_where))),
            sort="idle_us",
            link={"gpu": "gpu"},
            note="All activities of the capture window count, also those outside steps.",
        )
    }
    if run.steps["gpu_start_ns"].notna().any():
        tables["steps"] = Table(
            f"Steps by {context.device(run)}",
            (TableColumn("step", "Step"), TableColumn("gpu", noun), *COLUMNS),
            _utilization(run.timeline(by=["gpu", "step"], where=where)),
            sort="total_us",
            link={"gpu": "gpu", "step": "step"},
        )
    if not context.is_cpu_only(run):
        tables["efficiency"] = _efficiency_table(run, where)
    return tables


def _utilization(timeline: pd.DataFrame) -> pd.DataFrame:
    total = timeline["total_us"].to_numpy(float)
    return timeline.assign(
        utilization=np.divide(timeline["busy_us"], total, out=np.full(len(total), np.nan), where=total > 0)
    )


def _with_names(run: Run, timeline: pd.DataFrame) -> pd.DataFrame:
    names = run.workers.drop_duplicates("gpu").set_index("gpu")["gpu_name"].astype(object)
    return timeline.assign(gpu_name=timeline["gpu"].map(names))


def _efficiency_table(run: Run, where: dict[str, Any]) -> Table:
    rows = run.efficiency(by="gpu", where=where)
    has_peak = rows["gpu"].isin([gpu for gpu, hardware in run.hardware.items() if hardware is not None])
    counted = rows["flop_known"] >= LEAST_KNOWN
    rows = rows.assign(
        sm_efficiency=rows["sm_efficiency"].where(rows["sm_known"] >= LEAST_KNOWN),
        occupancy=rows["occupancy"].where(rows["occupancy_known"] >= LEAST_KNOWN),
        flop_per_s=(rows["flop"] / rows["time_us"] * 1e6).where(counted & (rows["flop"] > 0)),
        hfu=rows["hfu"].where(has_peak & counted),
        mfu=rows["mfu"].where(has_peak & (counted | (rows["mfu_source"] == "model"))),
    )
    return Table(
        "Busy is not efficient",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("gpu_utilization", "Busy share", "share", DEFINITIONS["utilization"], bar=True),
            TableColumn("sm_efficiency", "SM efficiency", "share", DEFINITIONS["sm_efficiency"], bar=True),
            TableColumn("sm_known", "Grid known", "share", DEFINITIONS["sm_known"]),
            TableColumn("occupancy", "Occupancy", "share", DEFINITIONS["occupancy"], bar=True),
            TableColumn("flop_per_s", "Counted", "flop_per_s", DEFINITIONS["flop_per_s"]),
            TableColumn("flop_known", "FLOPs known", "share", DEFINITIONS["flop_known"]),
            TableColumn("hfu", "HFU", "share", DEFINITIONS["hfu"], bar=True),
            TableColumn("mfu", "MFU", "share", DEFINITIONS["mfu"], bar=True),
        ),
        rows,
        link={"gpu": "gpu"},
        note="Estimated from grids and recorded shapes: whether anything runs, how much of the GPU has work, what of "
        "its peak is used.",
    )
