"""Fusion: which kernels could run as one, which do already, and where torch.compile leaves its graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend import hardware
from tb_chopper.backend.metrics import fusion
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "candidate": "Memory-bound kernels that follow each other on one stream, in one layer, phase and step, with less "
    "than 5 µs between them.",
    "saved": "Σ duration − what one kernel would take, per step of one GPU: its traffic / memory bandwidth, at least "
    "the shortest of the kernels. Traffic: bytes of all calls by their recorded shapes, without what one writes and "
    "the next one reads. Of attention in pieces all of the time: a fused attention kernel never writes the scores.",
    "remaining": "What the fused kernels would take, per step of one GPU.",
    "unknown": "Time of candidates whose saving is not known: no shapes, or lists of tensors.",
    "time": "Sum of the durations of the kernels over the selection.",
    "known": "Share of that time for which recorded shapes tell the saving. Lists of tensors (cat, foreach) do not.",
    "n": "Times that these kernels follow each other in the selection.",
    "fused": "Kernels whose name says that they are fused: flash, fmha, triton_, liger, apex, fused.",
    "regions": "Calls of compiled code (Torch-Compiled Region) on the host.",
    "breaks": "Regions inside another region: what follows a graph break is a region of its own.",
    "eager": "Kernels launched in a region, but in none of its compiled graphs: what the break is about.",
    "idle": "Idle time of the GPU before the kernels in a break and before the first one after it.",
    "between": "Kernels of the forward phase launched between two regions: code that is not compiled.",
    "variants": "Compiled versions of all code objects: more than one of a code object are recompilations.",
}
SHAPES = Missing(
    "What fusion would save",
    "The bytes of a kernel are those of its operator's recorded shapes, which this trace does not hold.",
    "torch.profiler.profile(record_shapes=True, ...)",
)
NAMES = LABELS | {"unknown": "Not known"}
MAX_CHAINS = 400
"""Rows of the table of chains: the rest saves little."""


def view(run: Run, selection: Selection) -> View:
    """Candidates by pattern and by their operators, kernels that are fused already, graph breaks."""
    override = hardware.parse_override(selection.options.get("hardware", ""))
    run = run.with_hardware(override) if override else run
    if context.nothing_to_show(run):
        return View("There is no device activity in this run.", missing=(context.NO_KERNELS,))
    where, by = selection.where(), list(selection.by or ("pattern",))
    kernels = context.kernels(run, selection)
    patterns = run.fusion(where=where)
    groups = patterns if by == ["pattern"] else run.fusion(by=[*by, "pattern"], where=where)
    chains = run.fusion(by=["pattern", "phase", "operations"], where=where)
    fused = run.fused(where=where)
    narrowed = {k: v for k, v in where.items() if k in ("gpu", "step")}
    breaks = run.graph_breaks(where=narrowed)
    has_breaks = len(breaks) > 0 and breaks["n_regions"].sum() > 0
    windows = fusion.windows_of(kernels)
    step_us = _step_us(run, where, windows)
    return View(
        _headline(patterns, fused, breaks, step_us, selection.compare),
        key_figures=_key_figures(patterns, fused, breaks, step_us),
        figures={"saving": _saving(groups, by, windows, selection.compare)} if len(patterns) else {},
        tables={
            **({"chains": _chains_table(chains)} if len(chains) else {}),
            **({"groups": _groups_table(groups, by)} if len(groups) else {}),
            **({"fused": _fused_table(run.fused(by=["how", "kernel"], where=where))} if len(fused) else {}),
            **(_break_tables(run, breaks, narrowed) if has_breaks else {}),
        },
        definitions={"Candidate": DEFINITIONS["candidate"], "Fused already": DEFINITIONS["fused"]},
        missing=(SHAPES,) if not run.kernels["op_args"].notna().any() else (),
    )


def _step_us(run: Run, where: dict[str, Any], windows: int) -> float:
    """Mean length of a step; of the capture where there are none."""
    steps = run.timeline(by=["gpu", "step"], where=where) if run.steps["gpu_start_ns"].notna().any() else pd.DataFrame()
    times = steps.loc[steps["total_us"] > 0, "total_us"] if len(steps) else pd.Series(dtype=float)
    if len(times):
        return float(times.mean())
    return float(run.timeline(by="gpu", where=where)["total_us"].sum()) / max(windows, 1)


def _headline(patterns: pd.DataFrame, fused: pd.DataFrame, breaks: pd.DataFrame, step_us: float,
              other: Run | None) -> str:
    saved = float(patterns["per_step_us"].sum()) if len(patterns) else 0.0
    n_breaks = int(breaks["n_breaks"].sum()) if len(breaks) else 0
    if saved > 0:
        first = patterns.iloc[0]
        line = (f"Fusing memory-bound kernels that follow each other would save about "
                f"{text.duration(saved)} ({text.share(saved / step_us if step_us else None)}) of a step; most of it is "
                f"{first['pattern']} ({text.duration(first['per_step_us'])}): "
                f"{fusion.REMEDIES[str(first['pattern'])]}.")
    elif len(patterns):
        time = text.duration(float(patterns["time_us"].sum()))
        line = (f"{text.count(int(patterns['n'].sum()), 'run')} of memory-bound kernels ({time}) could be fused; what "
                "that saves is not known without their shapes.")
    else:
        line = "No memory-bound kernels follow each other closely enough to be one."
    if len(fused):
        line += f" {text.share(float(fused['share'].sum()))} of the compute time is in fused kernels already."
    if n_breaks:
        line += f" torch.compile leaves its graphs {text.count(n_breaks, 'time')}."
    if other is not None:
        line += f" In {text.short(other.name, 40)}: {text.duration(float(other.fusion()['per_step_us'].sum()))}."
    return line


def _key_figures(patterns: pd.DataFrame, fused: pd.DataFrame, breaks: pd.DataFrame,
                 step_us: float) -> tuple[KeyFigure, ...]:
    saved = float(patterns["per_step_us"].sum()) if len(patterns) else 0.0
    time = float(patterns["time_us"].sum()) if len(patterns) else 0.0
    known = float((patterns["known_share"] * patterns["time_us"]).sum() / time) if time else 0.0
    told = known > 0 or not time
    figures_ = [
        KeyFigure("Saved by fusion", saved if told else None, "us", DEFINITIONS["saved"],
                  "estimated" if told else "unavailable",
                  f"{text.share(saved / step_us if step_us else None)} of a step" if told else "no shapes",
                  color=COLORS["saved"]),
        KeyFigure("Candidates", int(patterns["n"].sum()) if len(patterns) else 0, "count", DEFINITIONS["candidate"],
                  note=f"{text.duration(time)} in all; saving known for {text.share(known)}" if time else ""),
        KeyFigure("Fused already", float(fused["share"].sum()) if len(fused) else 0.0, "share", DEFINITIONS["fused"],
                  note="of the compute time"),
    ]
    if len(breaks) and breaks["n_regions"].sum() > 0:
        windows = max(len(breaks[breaks["n_regions"] > 0]), 1)
        figures_ += [
            KeyFigure("Graph breaks", float(breaks["n_breaks"].sum()) / windows, "", DEFINITIONS["breaks"],
                      note=f"in a step, of {breaks['n_regions'].sum() / windows:,.0f} regions"),
            KeyFigure("Idle in breaks", float(breaks["idle_us"].sum()) / windows, "us", DEFINITIONS["idle"],
                      note="in a step of one GPU"),
        ]
    return tuple(figures_)


# ---- figure ----------------------------------------------------------------------------------------------------------


def _saving(groups: pd.DataFrame, by: list[str], windows: int, other: Run | None) -> go.Figure:
    """What of the candidates' time a step would keep and what it would save; the compared run beside it."""
    key = "per_step_us" if groups["per_step_us"].sum() > 0 else "time_us"
    names = by if "pattern" in by else [*by, "pattern"]
    shown = figures.top(groups.assign(step_us=groups["time_us"] / max(windows, 1), other=False), key, 16)
    if other is not None and len(other.kernels):
        there = other.fusion(by=names)
        there = there.assign(step_us=there["time_us"] / max(fusion.windows_of(other.kernels), 1), other=True)
        shown = pd.concat([shown, shown[names].merge(there, on=names, how="inner")], ignore_index=True)
        shown["place"] = shown.groupby(names, dropna=False, sort=False, observed=True).ngroup()
        shown = shown.sort_values(["place", "other"], ignore_index=True)
    unit, divisor = text.time_unit(shown["step_us"].max())
    labels = [figures.row_label(r, names) + (f" · {text.short(other.name, 18)}" if r["other"] and other else "")
              for r in shown.to_dict("records")]
    told = shown["step_us"] * shown["known_share"]
    parts = {"saved": shown["per_step_us"], "remaining": told - shown["per_step_us"],
             "unknown": shown["step_us"] - told}
    present = {thing: values.clip(lower=0.0) for thing, values in parts.items() if (values > 1e-9).any()}
    fig = figures.figure(
        "What fusion would save in a step",
        "Time of the candidates in a step of one GPU, " + ("the largest saving first." if key == "per_step_us" else
                                                           "the longest first; their shapes are not known."),
        height=figures.height_of(len(shown)),
        wide=True,
        barmode="stack",
        legend=[figures.entry(thing, DEFINITIONS[thing], label=NAMES[thing]) for thing in present],
    )
    for thing, values in present.items():
        fig.add_trace(figures.bars(
            thing, range(len(shown)), values.tolist(), divisor, name=NAMES[thing], compared=shown["other"].tolist(),
            hover=[f"<b>{text.hover(label)}</b><br>{NAMES[thing]}: {text.duration(v)} of {text.duration(t)} in a step"
                   f"<br>{n:,} instances in the selection<br>estimated, known for {text.share(known)} of the time"
                   for label, v, t, n, known in zip(labels, values, shown["step_us"], shown["n"], shown["known_share"],
                                                    strict=True)]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 48))
    return fig


# ---- tables ----------------------------------------------------------------------------------------------------------

NUMBERS = (
    TableColumn("n", "Instances", "count", DEFINITIONS["n"]),
    TableColumn("n_kernels", "Kernels", "count", "Kernels of all instances."),
    TableColumn("time_us", "Time", "us", DEFINITIONS["time"], bar=True),
    TableColumn("per_step_us", "Saved per step", "us", DEFINITIONS["saved"], bar=True),
    TableColumn("known_share", "Known", "share", DEFINITIONS["known"]),
)


def _named(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Groups as people read them; a saving of which nothing is known is missing, not 0."""
    rows = rows.assign(**{c: [figures.group_name(c, v) for v in rows[c]] for c in by if c not in ("gpu", "step")})
    return rows.assign(per_step_us=rows["per_step_us"].where(rows["known_share"] > 0))


def _chains_table(chains: pd.DataFrame) -> Table:
    rows = chains.head(MAX_CHAINS)
    return Table(
        "Candidates",
        (
            TableColumn("pattern", "Pattern", "text", "What the operators are, together."),
            TableColumn("operations", "Operators", "text", "In the order in which they run."),
            TableColumn("phase", "Phase", "text", "Phase of the step."),
            *NUMBERS,
            TableColumn("remedy", "What fuses it", "text", "What would run these kernels as one."),
        ),
        _named(rows, ["pattern", "operations", "phase"]).assign(
            remedy=[fusion.REMEDIES[str(p)] for p in rows["pattern"]]),
        sort="per_step_us" if rows["saved_us"].sum() > 0 else "time_us",
        note=f"The {MAX_CHAINS} that save most of {len(chains):,}." if len(chains) > len(rows) else "",
        at="at",
    )


def _groups_table(groups: pd.DataFrame, by: list[str]) -> Table:
    columns = by if "pattern" in by else [*by, "pattern"]
    return Table(
        "Candidates by " + " and ".join(columns),
        (*(TableColumn(c, "GPU" if c == "gpu" else c.capitalize(), "" if c in ("gpu", "step") else "text")
           for c in columns), *NUMBERS),
        _named(groups, columns),
        sort="per_step_us" if groups["saved_us"].sum() > 0 else "time_us",
        link={c: c for c in by if c in ("gpu", "step")},
        at="at",
    )


def _fused_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Fused already",
        (
            TableColumn("how", "By", "text", DEFINITIONS["fused"]),
            TableColumn("kernel", "Kernel", "text", "Name as written in the trace."),
            TableColumn("n", "Kernels", "count", "Kernels of this name."),
            TableColumn("time_us", "Time", "us", "Sum of their durations.", bar=True),
            TableColumn("share", "Share", "share", "Of the time of all compute kernels.", bar=True),
        ),
        rows,
        sort="time_us",
    )


def _break_tables(run: Run, breaks: pd.DataFrame, where: dict[str, Any]) -> dict[str, Table]:
    columns = (
        TableColumn("n_regions", "Regions", "count", DEFINITIONS["regions"]),
        TableColumn("n_breaks", "Graph breaks", "count", DEFINITIONS["breaks"], bar=True),
        TableColumn("n_codes", "Code objects", "count", "Different pieces of compiled code."),
        TableColumn("n_variants", "Variants", "count", DEFINITIONS["variants"]),
        TableColumn("eager_kernels", "Eager kernels", "count", DEFINITIONS["eager"]),
        TableColumn("eager_us", "Their time", "us", DEFINITIONS["eager"], bar=True),
        TableColumn("idle_us", "GPU idle", "us", DEFINITIONS["idle"], bar=True),
        TableColumn("between_kernels", "Not compiled", "count", DEFINITIONS["between"]),
        TableColumn("between_us", "Their time", "us", DEFINITIONS["between"]),
    )
    steps = breaks[breaks["n_regions"] > 0]
    layers = run.graph_breaks(by=["gpu", "layer"], where=where)
    layers = layers[layers["layer"].notna() & (layers["n_regions"] > 0)]
    eager = run.eager_in_breaks(where=where)
    recompiles = run.host_calls(where=where | {"kind": ["compile", "recompile"]})
    tables = {"graph_breaks": Table(
        "Graph breaks by step", (TableColumn("gpu", "GPU"), TableColumn("step", "Step"), *columns), steps,
        sort="idle_us" if steps["idle_us"].sum() > 0 else "n_breaks", link={"step": "step"})}
    if len(layers):
        tables["layer_breaks"] = Table(
            "Graph breaks by layer", (TableColumn("gpu", "GPU"), TableColumn("layer", "Layer", "text"), *columns),
            layers, sort="n_breaks", link={"gpu": "gpu"})
    if len(eager):
        tables["eager"] = Table(
            "What runs eagerly beside compiled code",
            (
                TableColumn("place", "Where", "text", f"{DEFINITIONS['eager']} {DEFINITIONS['between']}"),
                TableColumn("operation", "Operation", "text", "Operation of the kernels."),
                TableColumn("n", "Kernels", "count", "Kernels in the selection."),
                TableColumn("time_us", "Time", "us", "Sum of their durations.", bar=True),
                TableColumn("idle_us", "GPU idle before", "us", "Idle time of the GPU that they ended.", bar=True),
            ),
            eager, sort="time_us", at="at")
    if len(recompiles):
        tables["recompiles"] = Table(
            "Compilations in the capture",
            (
                TableColumn("gpu", "GPU"),
                TableColumn("kind", "Kind", "text", "compile: for the first time; recompile: a guard failed."),
                TableColumn("name", "Code", "text", "Code and the times it was compiled."),
                TableColumn("n", "Count", "count", "Compilations."),
                TableColumn("time_us", "Time", "us", "Time on the host.", bar=True),
                TableColumn("idle_us", "GPU idle", "us", "The part under which the GPU had nothing to do.", bar=True),
            ),
            recompiles, sort="time_us", link={"gpu": "gpu"})
    return tables
