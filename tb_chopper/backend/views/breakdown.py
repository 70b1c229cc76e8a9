"""Breakdown: what stands between an operation's theoretical and its actual duration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tb_chopper.backend import hardware
from tb_chopper.backend.alignment.counters import TRUSTED_SHARE
from tb_chopper.backend.classify import COMPUTE
from tb_chopper.backend.metrics.breakdown import MEASURED
from tb_chopper.backend.schema import BEFORE_CAPTURE
from tb_chopper.backend.views import actual_durations, breakdown_figures, context, figures, text, trace_link
from tb_chopper.backend.views.breakdown_parts import COLUMNS, OVERHEADS, PARTS, grouped, other_methods, with_parts
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Source, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

COUNTERS = Missing(
    "Hardware counters: instruction and utilization overhead, measured",
    "They come from the same program run again under rocprofv3 (AMD) or Nsight Compute (NVIDIA). Without them, padding "
    "is told by the tile in a kernel's name, and utilization is what is left.",
    "tb-chopper collect --out log/my_run -- torchrun --nproc-per-node=8 train.py",
)
CLOCK = Missing(
    "Frequency overhead",
    "It needs the clock of the training, sampled beside it. Without one, utilization and clock are one block.",
    "on_trace_ready=chopper_trace_handler(\"log/my_run\")   # samples clocks, too",
)
SHAPES = Missing(
    "Theoretical duration",
    "Of no operation with matrix products the FLOPs are known: the trace holds no shapes.",
    "torch.profiler.profile(record_shapes=True, ...)",
)


@dataclass(frozen=True)
class _Side:
    """One run's numbers: `units` by operation and phase (or finer), with parts; `rows` by what is shown."""

    run: Run
    units: pd.DataFrame
    rows: pd.DataFrame

    @property
    def measured(self) -> bool:
        return bool((self.units["source"] == MEASURED).any())


def view(run: Run, selection: Selection) -> View:
    """Time in a step by factor, per operation; roofline; how far the counters can be trusted; what would help."""
    override = hardware.parse_override(selection.options.get("hardware", ""))
    run = run.with_hardware(override) if override else run
    by = list(selection.by or ("operation",))
    shown = ["operation", "phase"] if by == ["operation"] else by
    kernels = context.kernels(run, selection)
    if not (kernels["kind"].cat.codes == COMPUTE).any():
        return View("No compute kernel ran in this selection.", missing=(COUNTERS, CLOCK))
    side = _side(run, selection, shown)
    missing = _missing(side)
    if not (side.rows["theoretical_us"] > 0).any():
        # Nothing of the breakdown is known: what the trace alone tells.
        return actual_durations.view(run, selection, missing)
    other = _side(selection.compare, selection, shown) if selection.compare is not None else None
    bars = selection.options.get("bars", "duration")
    names = (run.name, other.run.name if other else "")
    roof_by = [*shown, "op_type"] if "operation" in shown else ["operation", "phase", "op_type"]
    charts = {"stack": breakdown_figures.stack(side.rows, shown, bars, other.rows if other else None, names)}
    roof = breakdown_figures.roofline(run.roofline(roof_by, selection.where()), roof_by[:-1])
    if roof is not None:
        charts["roofline"] = roof
    tables = {"operations": _operations(side, shown, kernels[kernels["kind"] == "compute"])}
    if other is not None:
        tables["difference"] = _difference(side, other, shown)
    tables["help"] = _help(side.rows, shown)
    if len(run.counters.counters):
        tables |= {"ratios": _ratios(run, selection, shown), "coverage": _coverage(run)}
    return View(_headline(side, shown, other), key_figures=_key_figures(side), figures=charts, tables=tables,
                missing=missing, findings=tuple(run.counter_findings), banners=_untrusted(side))


def _side(run: Run, selection: Selection, shown: list[str]) -> _Side:
    method: Any = selection.options.get("overlap_method", "auto")
    # Without GPUs and steps of its own, another run is looked at as a whole.
    where = selection.where() if run is not selection.compare else {}
    unit = list(dict.fromkeys([*shown, "operation", "phase"]))
    table = run.overhead_breakdown(unit, where, method)
    kernels = context.kernels(run, selection) if where else run.kernels
    stepped = kernels[kernels["step"].notna()]
    windows = len((stepped if len(stepped) else kernels)[["gpu", "step"]].drop_duplicates())
    if len(stepped):  # the figures are those of a step; what ran before the first one is none of it
        table = table[table["operation"] != BEFORE_CAPTURE].reset_index(drop=True)
    units = with_parts(table, windows)
    return _Side(run, units, grouped(units, shown))


# ---- words and numbers ----------------------------------------------------------------------------------------------


def _headline(side: _Side, shown: list[str], other: _Side | None) -> str:
    sums = side.rows[COLUMNS].sum()
    worst_part = max(OVERHEADS, key=lambda p: sums[p.column])
    worst = figures.largest(side.rows, worst_part.column)
    parts = [f"{text.duration(sums[c])} ({text.share(sums[c] / sums['act_us'])}) {what}" for c, what in (
        ("theoretical_us", "matrix work at the peak"), ("vector_us", "vector work")) if sums[c] > 0]
    line = (
        f"Of {text.duration(sums['act_us'])} of compute in a step of one GPU, {' and '.join(parts)} "
        f"{'is' if len(parts) == 1 else 'are'} the work itself; {_words(worst_part.thing, side)} costs most on top: "
        f"{text.duration(sums[worst_part.column])} ({text.share(sums[worst_part.column] / sums['act_us'])}), the "
        f"largest part of it in {text.short(figures.row_label(worst, shown), 60)} "
        f"({text.duration(worst[worst_part.column])})."
    )
    if other is None:
        return line
    there = other.rows[COLUMNS].sum()
    gain = max((*PARTS,), key=lambda p: abs(there[p.column] - sums[p.column]))
    change = there[gain.column] - sums[gain.column]
    return (f"{line} {other.run.name} needs {text.duration(there['act_us'])}; most of the difference is "
            f"{_words(gain.thing, side)}: {'+' if change > 0 else '−'}{text.duration(abs(change))}.")


def _words(thing: str, side: _Side) -> str:
    words = {"theoretical": "theoretical work", "vector": "vector work", "instruction": "padding",
             "utilization": "utilization of the matrix cores", "overlap": "communication beside it",
             "frequency": "the clock"}
    if thing == "utilization" and side.units["ovr_freq"].isna().any():
        return "utilization and clock together"
    return words[thing]


def _key_figures(side: _Side) -> tuple[KeyFigure, ...]:
    sums, units = side.rows[COLUMNS].sum(), side.units
    known = units[units["lost_us"].notna()]
    measured = known.loc[known["source"] == MEASURED, "act_us"].sum() / max(known["act_us"].sum(), 1e-9)
    source: Source = "measured" if measured > 0.99 else "estimated"
    methods = known.groupby("overlap_method")["act_us"].sum().sort_values(ascending=False)
    clockless = bool(known["ovr_freq"].isna().all())
    unknown = side.rows["unknown_us"].sum()
    sources: dict[str, Source] = {
        "theoretical": "estimated", "vector": source, "instruction": source,
        "utilization": source, "overlap": "estimated" if clockless or source == "estimated" else "sampled",
        "frequency": "unavailable" if clockless else "sampled"}
    out = [KeyFigure("Compute in a step", sums["act_us"], "us", "Kernel time of the operations below / (GPUs × "
                     "steps). Each operation's is divided by the factors of its median instance.", "measured",
                     f"{text.duration(unknown)} more without FLOPs or peak" if unknown > 0.5 else "")]
    for part in PARTS:
        if part.thing == "frequency" and clockless:
            out.append(KeyFigure("Frequency", None, "us", part.definition, "unavailable", color=COLORS[part.thing]))
        elif sums[part.column] > 0 or part.thing != "vector":
            out.append(KeyFigure(
                LABELS[part.thing], sums[part.column], "us",
                part.definition, sources[part.thing],
                f"{text.share(sums[part.column] / sums['act_us'])} of it", COLORS[part.thing]))
    out.append(KeyFigure(
        "Overlap method", str(methods.index[0]) if len(methods) else "", "text",
        "clock: the sampled clock tells the frequency overhead, contention is what remains. percentile: D_50% / D_0% "
        "of the instances in order of overlap ratio (as in the paper). regression: D = D_0 (1 + c · ratio). By itself: "
        "clock where samples cover half of the time, else percentile.",
        "sampled" if len(methods) and methods.index[0] == "clock" else "measured",
        _note_of_methods(known)))
    alignment = side.run.counter_alignment
    if len(side.run.counters.counters):
        out.append(KeyFigure("Compute with counters", alignment.matched_share, "share", "Share of the compute time "
                             "whose kernels have a dispatch in every pass.", "measured",
                             f"passes differ by {text.share(alignment.pass_spread)}"
                             if np.isfinite(alignment.pass_spread) else "one pass"))
    return tuple(out)


def _note_of_methods(known: pd.DataFrame) -> str:
    differing = sum(bool(other_methods(row)) for row in known[known["theoretical_us"] > 0].to_dict("records"))
    return f"others differ by more than 5 % for {text.count(differing, 'row')}: see the table" if differing else ""


def _untrusted(side: _Side) -> tuple[str, ...]:
    """What must be known before any number is read."""
    run, units = side.run, side.units
    out = []
    above = units[units["d_thr_us"] > 1.02 * units["d_act_us"]]
    if len(above):
        out.append(f"{text.count(len(above), 'row')} would be faster than the peak allows, first of all "
                   f"{text.short(figures.row_label(above.iloc[0].to_dict(), ['operation', 'phase']), 60)}: the peak of "
                   "this GPU or the FLOPs of its operators are not right.")
    if len(run.counters.counters) and run.counter_alignment.matched_share < TRUSTED_SHARE:
        names = run.counter_alignment.names
        missing = names[names["n_exact"] + names["n_approximate"] < names["n_kernels"]]["name"].head(2)
        out.append(f"Only {text.share(run.counter_alignment.matched_share)} of the compute time has counters, so that "
                   "what is called measured here stands on part of the kernels. The largest without: "
                   + ", ".join(text.short(str(n), 60) for n in missing) + ".")
    return tuple(out)


def _missing(side: _Side) -> tuple[Missing, ...]:
    run = side.run
    out: list[Missing] = []
    if any(h is None for h in run.hardware.values()):
        name = next((n for n in run.workers["gpu_name"].dropna().astype(str)), None)
        out.append(Missing("Peak rates of this GPU", hardware.what_to_pass(name) + " (Hardware in the bar above).",
                           'tb_chopper.open_run(path, hardware={"peak_tflops": 1307.4, "f_peak_mhz": 2100})'))
    elif not (side.units["flop_theoretical"] > 0).any():
        out.append(SHAPES)
    if not side.measured:
        out.append(COUNTERS)
    if not len(run.telemetry.samples):
        out.append(CLOCK)
    return tuple(out)


# ---- tables ---------------------------------------------------------------------------------------------------------

FACTOR_COLUMNS = (
    TableColumn("n_instances", "Instances", "count", "One per gpu, step, phase, layer and operation."),
    TableColumn("d_thr_us", "D_thr", "us", PARTS[0].definition + " Of one instance."),
    TableColumn("d_peak_us", "D_peak", "us", "Cycles while it ran alone / clock of the peak. Of one instance."),
    TableColumn("d_act_us", "D_act", "us", "Kernel time of one instance in the trace, median."),
    *(TableColumn(p.factor, p.factor.replace("ovr_", "Ovr_"), "factor", p.definition) for p in OVERHEADS),
    TableColumn("residual", "Residual", "share", "D_thr · Ovr_inst · Ovr_util · Ovr_overlap · Ovr_freq / D_act − 1."),
    TableColumn("overlap_method", "Method", "text", "How the overlap overhead was told."),
    TableColumn("others", "Other methods", "text", "Ovr_overlap by the other methods, where more than 5 % apart."),
    TableColumn("matched_share", "Counted", "share", "Share of the operation's time with counters.", bar=True),
    TableColumn("source", "Source", "text", "measured: by counters. estimated: padding by the tile in the kernel's "
                "name, utilization is what is left. unavailable: FLOPs or peak unknown."),
)


def _groups(by: list[str]) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(c, c.capitalize()) for c in by)


def _times(rows: pd.DataFrame) -> tuple[TableColumn, ...]:
    """Lost and actual time and the parts that any row has."""
    labels = {"vector": "Vector work"}
    return (
        TableColumn("lost_us", "Lost", "us", "Actual − theoretical time (of vector work: − its cycles at the peak's "
                    "clock), in a step of one GPU.", bar=True),
        TableColumn("act_us", "Actual", "us", "In a step of one GPU.", bar=True),
        *(TableColumn(p.column, labels.get(p.thing, p.thing.capitalize()), "us", p.definition)
          for p in PARTS if rows[p.column].fillna(0).sum() > 0),
    )


def _operations(side: _Side, shown: list[str], kernels: pd.DataFrame) -> Table:
    """Factors by operation, or the time they cost by anything else, each with the longest of its `kernels`."""
    if "operation" not in shown:
        columns = (*_groups(shown), *_times(side.rows),
                   TableColumn("unknown_us", "Not known", "us", "Time of operations without FLOPs or peak."))
        return Table("Time by factor", columns, trace_link.linked(side.rows, kernels, shown), sort="lost_us", at="at")
    rows = side.units.assign(others=[other_methods(r) for r in side.units.to_dict("records")])
    return Table("Factors by operation", (*_groups(shown), *_times(rows), *FACTOR_COLUMNS),
                 trace_link.linked(rows, kernels, shown), sort="lost_us", link={"focus": "operation"}, at="at")


def _difference(side: _Side, other: _Side, shown: list[str]) -> Table:
    """What each part costs more (or less) in the other run."""
    both = side.rows.merge(other.rows, on=shown, how="outer", suffixes=("", "_other"))
    columns = [c for c in COLUMNS if c != "lost_us"]
    for column in columns:
        both[f"{column}_more"] = both[f"{column}_other"].fillna(0) - both[column].fillna(0)
    rows = both.assign(size=both["act_us_more"].abs()).sort_values("size", ascending=False, ignore_index=True)
    names = {"act_us": "Actual", **{p.column: p.thing.capitalize() for p in PARTS}}
    return Table(
        f"{other.run.name} against this run",
        (*_groups(shown), TableColumn("act_us", "Actual here", "us", "In a step of one GPU."),
         TableColumn("act_us_other", "Actual there", "us", "The same in the run compared with."),
         *(TableColumn(f"{c}_more", f"{names[c]}, more", "us", "There − here: positive, the other run takes longer.")
           for c in columns)), rows, sort="")


def _help(rows: pd.DataFrame, shown: list[str]) -> Table:
    words = {p.thing: p.thing.capitalize() for p in PARTS}
    known = rows[rows["act_us"] > 0]
    cost = [row[f"{thing}_us"] for thing, row in zip(known["dominant"], known.to_dict("records"), strict=True)]
    table = known.assign(what=known["dominant"].map(words), cost_us=cost)
    return Table(
        "What would help",
        (*_groups(shown),
         TableColumn("what", "Costs most", "text", "The factor that costs most; the work itself where no overhead is "
                     "more than a tenth of the time."),
         TableColumn("cost_us", "Costs", "us", "What that factor adds, in a step of one GPU.", bar=True),
         TableColumn("help", "Usual remedies", "text", "What usually helps against that factor.")),
        table, sort="cost_us", link={"focus": "operation"} if "operation" in shown else {})


def _ratios(run: Run, selection: Selection, shown: list[str]) -> Table:
    where = {**selection.where(), "kind": "compute"}
    rows = run.counter_ratios(shown, where)
    definitions = {
        "matrix_utilization": ("Matrix cores", "share", "Busy cycles of the matrix cores / cycles."),
        "cu_active": ("Units active", "share", "Share of compute units with a wave, over the cycles of the kernel."),
        "wave_occupancy": ("Occupancy", "share", "Waves in flight / waves that fit."),
        "valu_busy": ("Vector units", "share", "Cycles in which the vector units issue / cycles."),
        "l2_hit": ("L2 hits", "share", "Hits / requests of the L2 cache."),
        "fabric_read_gbs": ("Fabric read, GB/s", "", "Bytes from the fabric into L2 (Infinity Cache and peers "
                            "included; NVIDIA: DRAM) / time in the trace."),
        "fabric_write_gbs": ("Fabric written, GB/s", "", "Bytes from L2 to the fabric / time in the trace."),
    }
    known = {n: d for n, d in definitions.items() if rows[n].notna().any()}
    return Table("Utilizations by counters", (
        *_groups(shown), *(TableColumn(n, label, unit, meaning) for n, (label, unit, meaning) in known.items()),  # type: ignore[arg-type]
        TableColumn("matched_share", "Counted", "share", "Share of the kernel time with counters.", bar=True)),
        rows, note="Measured while each kernel ran alone." if known else "None of their counters was collected.")


def _coverage(run: Run) -> Table:
    names = run.counter_alignment.names
    rows = names.assign(n_missing=names["n_kernels"] - names["n_exact"] - names["n_approximate"])
    rows = rows.assign(uncounted_us=rows["time_us"] * (1 - rows["matched_share"].fillna(0)))
    return Table(
        "Which kernels have counters",
        (TableColumn("name", "Kernel", "text"), TableColumn("n_kernels", "Kernels", "count", "In the trace."),
         TableColumn("n_exact", "Exact", "count", "The very launch was counted, in every pass."),
         TableColumn("n_approximate", "Approximate", "count", "Another launch of the kernel and grid stands for it."),
         TableColumn("n_missing", "Missing", "count", "No dispatch of the counter run is this kernel, in some pass."),
         TableColumn("time_us", "Time", "us", "In the trace, all GPUs and steps.", bar=True),
         TableColumn("matched_share", "Counted", "share", "Share of its time with counters.", bar=True)),
        rows.sort_values(["uncounted_us", "time_us"], ascending=False, ignore_index=True), sort="",
        note="Not counted first. Impossible values and what was done with them are on the Findings tab.")
