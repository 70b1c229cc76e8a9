"""Two runs beside each other as numbers: per part of a step, per GPU and per operation."""

from __future__ import annotations

import math

import pandas as pd

from tb_chopper.backend.run import Run
from tb_chopper.backend.views import text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Table, TableColumn, View

PARTS = {
    "total_us": ("Step", "A step on the GPU: from its first kernel to the next step's first kernel."),
    "compute_us": ("Compute", "At least one compute kernel runs."),
    "exposed_communication_us": ("Exposed communication", "Communication runs and no computation does."),
    "exposed_memcpy_us": ("Exposed copies", "Only copies or fills run."),
    "idle_us": ("Idle", "Nothing runs."),
    "communication_us": ("Communication", "Communication runs, hidden or not."),
    "overlap_us": ("Overlap", "Computation and communication run together."),
    "prep_us": ("Preparation", "Gaps before the launch call of the next compute kernel."),
    "call_us": ("Call", "Gaps from a launch call to the start of its kernel."),
    "graph_us": ("Graph replay", "Gaps inside a CUDA or HIP graph."),
    "unattributed_us": ("Unattributed gaps", "Gaps before kernels whose launch is unknown."),
}
FACTORS = {
    "d_thr_us": "Theoretical duration, µs", "ovr_inst": "Instructions, ×", "ovr_util": "Utilization, ×",
    "ovr_overlap": "Overlap, ×", "ovr_freq": "Frequency, ×", "d_act_us": "Actual duration, µs",
}
"""Of the overhead breakdown: theoretical × the four factors = actual, median over an operation's instances."""
COLOR_OF = {"compute_us": "compute", "exposed_communication_us": "communication", "idle_us": "idle"}


def view(run: Run, other: Run) -> View:
    """`run` against `other`: mean time of a step (of the whole capture where either has no steps) per part, GPU and
    operation; difference = run − other, change = difference / other. Rows come in order of their difference."""
    by_step = _has_steps(run) and _has_steps(other)
    window = "step" if by_step else "capture"
    names = _names(run, other)
    parts = [_parts(r, by_step) for r in (run, other)]
    means = [p.drop(columns="gpu").mean().rename_axis("part").reset_index(name="us") for p in parts]
    by_gpu = [p.melt("gpu", var_name="part", value_name="us") for p in parts]
    per_part = _compared(means[0], means[1], ["part"])
    per_gpu = _compared(by_gpu[0], by_gpu[1], ["part", "gpu"])
    operations = _compared(_operations(run, by_step), _operations(other, by_step), ["operation"])
    factors = _factors(run, other)
    part = TableColumn("part", "Part", "text", "Part of the time of a GPU; the same definitions as in the other views.")
    return View(
        _headline(per_part, names, window), name="differences", title="Differences",
        key_figures=tuple(_key_figure(row, names) for row in _rows(per_part, ("total_us", *COLOR_OF))),
        tables={
            "parts": Table(f"Per part, mean of a {window} and GPU", (part, *_columns(names)), _labelled(per_part)),
            "gpus": Table(f"Per GPU and part, mean of a {window}",
                          (TableColumn("gpu", "GPU", "", "Rank, or order where no rank is known."), part,
                           *_columns(names)), _labelled(per_gpu)),
            "operations": Table(
                f"Per operation, kernel time in a {window} of a GPU",
                (TableColumn("operation", "Operation", "text", "What the model's author would call it."),
                 *_columns(names)), operations),
            **({"factors": _factor_table(factors, names)} if len(factors) else {}),
        },
        definitions=dict(PARTS.values()))


def _has_steps(run: Run) -> bool:
    return len(run.kernels) > 0 and bool(run.kernels["step"].notna().any())


def _names(run: Run, other: Run) -> tuple[str, str]:
    return (run.name, other.name) if run.name != other.name else ("this run", "other run")


def _parts(run: Run, by_step: bool) -> pd.DataFrame:
    """One row per GPU: gpu and the parts, in µs, mean over its steps."""
    by = ["gpu", "step"] if by_step else ["gpu"]
    tables = []
    for table in (run.timeline(by=by), run.launch_overhead(by=by)):
        known = table[table["step"].notna()] if by_step else table
        tables.append(known[["gpu", *(c for c in PARTS if c in known)]].groupby("gpu").mean())
    return tables[0].join(tables[1], how="left").fillna(0.0).reset_index()


def _operations(run: Run, by_step: bool) -> pd.DataFrame:
    """operation, us: time of its kernels per window and GPU."""
    kernels = run.kernels[run.kernels["step"].notna()] if by_step else run.kernels
    windows = len(kernels[["capture", "step"] if by_step else ["capture"]].drop_duplicates())
    us = (kernels["end_ns"] - kernels["start_ns"]).clip(lower=0).groupby(kernels["operation"].astype(str)).sum()
    return (us / 1000 / max(windows, 1)).rename_axis("operation").reset_index(name="us")


def _factors(run: Run, other: Run) -> pd.DataFrame:
    """operation, factor, value, value_other, ratio: operations whose breakdown both runs know, the longest first."""
    tables = []
    for r in (run, other):
        table = r.overhead_breakdown(by="operation")
        known = table[table["source"] != "unavailable"].sort_values("d_act_us", ascending=False, kind="stable")
        named = known.assign(operation=known["operation"].astype(str))
        tables.append(named.melt("operation", list(FACTORS), "factor", "value").dropna(subset="value"))
    out = tables[0].merge(tables[1], on=["operation", "factor"], suffixes=("", "_other"))
    out["ratio"] = out["value"] / out["value_other"].where(out["value_other"] != 0)
    order = {operation: i for i, operation in enumerate(tables[0]["operation"].unique())}
    out = out.sort_values("operation", key=lambda c: c.map(order), kind="stable", ignore_index=True)
    return out.assign(factor=out["factor"].map(FACTORS))


def _factor_table(factors: pd.DataFrame, names: tuple[str, str]) -> Table:
    mine, other = (text.short(n, 24) for n in names)
    return Table("Per operation and factor, from theoretical to actual duration", (
        TableColumn("operation", "Operation", "text", "What the model's author would call it."),
        TableColumn("factor", "Factor", "text", "Theoretical duration × the four factors = actual duration."),
        TableColumn("value", mine, "", f"In {names[0]}."), TableColumn("value_other", other, "", f"In {names[1]}."),
        TableColumn("ratio", "Ratio", "", f"{names[0]} / {names[1]}.")), factors)


def _compared(mine: pd.DataFrame, other: pd.DataFrame, on: list[str]) -> pd.DataFrame:
    out = mine.merge(other, on=on, how="outer", suffixes=("", "_other"))
    out["difference_us"] = out["us"].fillna(0.0) - out["us_other"].fillna(0.0)
    out["change"] = (out["difference_us"] / out["us_other"]).where(out["us_other"] > 0)
    return out.sort_values("difference_us", key=abs, ascending=False, kind="stable", ignore_index=True)


def _columns(names: tuple[str, str]) -> tuple[TableColumn, ...]:
    mine, other = (text.short(n, 24) for n in names)
    return (TableColumn("us", mine, "us", f"Mean in {names[0]}."),
            TableColumn("us_other", other, "us", f"Mean in {names[1]}."),
            TableColumn("difference_us", "Difference", "us", f"{names[0]} − {names[1]}."),
            TableColumn("change", "Change", "share", f"Difference as a share of {names[1]}."))


def _labelled(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(part=frame["part"].map({name: label for name, (label, _) in PARTS.items()}))


def _rows(per_part: pd.DataFrame, parts: tuple[str, ...]) -> list[pd.Series]:
    indexed = per_part.set_index("part", drop=False)
    return [indexed.loc[p] for p in parts if p in indexed.index]


def _key_figure(row: pd.Series, names: tuple[str, str]) -> KeyFigure:
    label, meaning = PARTS[row["part"]]
    note = f"{names[1]}: {text.duration(row['us_other'])}{_change(row)}"
    color = COLORS.get(COLOR_OF.get(row["part"], ""), "")
    return KeyFigure(label, float(row["us"]), "us", meaning, note=note, color=color)


def _change(row: pd.Series) -> str:
    known = row["us_other"] > 0 and math.isfinite(row["us"])
    return f" ({text.change(row['us'], row['us_other'])})" if known else ""


def _headline(per_part: pd.DataFrame, names: tuple[str, str], window: str) -> str:
    (total,) = _rows(per_part, ("total_us",))
    exclusive = per_part[per_part["part"].isin(
        ["compute_us", "exposed_communication_us", "exposed_memcpy_us", "idle_us"])].iloc[0]
    label, _ = PARTS[exclusive["part"]]
    return (f"A {window} takes {text.duration(total['us'])} in {names[0]} and {text.duration(total['us_other'])} in "
            f"{names[1]}{_change(total)}; the largest difference is {label.lower()}: {text.duration(exclusive['us'])} "
            f"against {text.duration(exclusive['us_other'])}.")
