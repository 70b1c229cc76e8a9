"""Memory: how close each GPU comes to its limit, when, for which operation, and what should fill it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics import memory as metrics
from tb_chopper.backend.views import context, figures, memory_figures, text
from tb_chopper.backend.views.memory_figures import size
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Source, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "peak": "Highest level of allocated memory.",
    "allocated": "What tensors hold, as the allocator counts.",
    "operation": "Of the next kernel launched after the peak: the one for which the block was probably allocated.",
    "floor": "Lowest level in any step: parameters, gradients and optimizer states that stay.",
    "growth": "Floor of the last step − floor of the first: what is kept and perhaps should not be.",
    "per_step": "Growth of the floor per step: the median slope over all pairs of steps.",
    "steps_left": "Headroom / growth per step, where the floor rises steadily over at least four steps. Estimated.",
    "reserved": "Largest amount that the allocator held.",
    "fragmentation": "1 − allocated / reserved at the peak.",
    "used": "Memory of the device in use, as the driver counts: all processes, and what allocators only keep.",
    "outside": "Used − reserved, median over the samples: contexts, libraries, NCCL's buffers, other processes.",
    "share": "Largest reserved / memory of the device; where nothing is known of the allocator, largest used.",
    "headroom": "Memory of the device − largest reserved. NCCL and other libraries use some of it.",
    "peers": "Peak / median of the peaks of all GPUs; in a pipeline, of those of the same stage.",
    "total": "As the trace or the sidecar tells.",
    "parameters": "Parameters that the GPU holds × bytes of each.",
    "gradients": "One per parameter. Between steps they are freed where zero_grad sets them to None.",
    "optimizer_states": "What the optimizer keeps per parameter: m and v of Adam, a float32 copy in mixed precision.",
    "activations": "Highest level while the forward is launched − level as it begins, largest of the steps: what is "
    "kept for the backward, and buffers.",
    "state": "Parameters + gradients + optimizer states, by the number of parameters, the parallel plan and the "
    "optimizer.",
    "lasting": "Parameters + optimizer states: what should stay between steps.",
    "ratio": "Measured floor / parameters and optimizer states. Near 1: as expected; 1.2 and more: gradients that "
    "stay, or something that should not.",
}
NO_EVENTS = Missing(
    "Memory over time",
    "No memory events in this run. Record them with the profiler, or lay memory snapshots beside the traces.",
    "torch.profiler.profile(profile_memory=True, ...)",
)
NO_SAMPLES = Missing(
    "Memory as the driver counts",
    "No telemetry with used memory: it shows what NCCL, libraries and other processes hold besides the allocator.",
    "chopper_trace_handler(logdir), which samples it; without it: tb-chopper sample --out logdir",
)
NO_MODULES = Missing(
    "Expected state of the model",
    "No sidecar tells how many parameters the model has and how they are divided.",
    "model = annotate(model); chopper_trace_handler(logdir, model=model, parallel={\"dp_shard\": 8})",
)


FROM_START = ("This trace has no totals of allocated memory: levels count from the start of the capture, without what "
              "was allocated before.")


def view(run: Run, selection: Selection) -> View:
    """Levels over time, peak, floor, growth and headroom by GPU and step, and the expected state of the model."""
    if context.nothing_to_show(run):
        return View("There is no device activity in this run.", missing=(context.NO_KERNELS,))
    rows, state = run.memory(), run.model_state()
    where = {k: v for k, v in selection.where().items() if k in ("gpu", "step")}
    gpus = list(selection.gpus)
    if gpus:
        rows, state = (f[f["gpu"].isin(gpus)].reset_index(drop=True) for f in (rows, state))
    sampled = len(rows) > 0 and bool((rows["source"] == metrics.TELEMETRY).all())
    missing = (*(() if len(rows) and not sampled else (NO_EVENTS,)),
               *(() if rows["used_bytes"].notna().any() or context.is_cpu_only(run) else (NO_SAMPLES,)),
               *(() if len(state) else (NO_MODULES,)))
    if not len(rows) and not len(state):
        return View("Nothing in this selection says how much memory was used.", missing=missing)
    return View(
        _headline(rows, state, sampled, context.device(run)),
        key_figures=_key_figures(rows, state, sampled),
        figures=_figures(run, rows, state, where, sampled),
        tables=_tables(run, rows, state, where, sampled),
        definitions={"Peak": DEFINITIONS["peak"] + " " + DEFINITIONS["operation"]},
        missing=missing,
        banners=(FROM_START,) if _from_start(rows, sampled) else (),
    )


def _from_start(rows: pd.DataFrame, sampled: bool) -> bool:
    """Whether levels count from the start of the capture."""
    return len(rows) > 0 and not sampled and not rows["total_known"].astype(bool).all()


def _levels(run: Run, where: dict[str, object], sampled: bool) -> pd.DataFrame:
    """The level of each step: of the allocator, or as the driver counts."""
    if not sampled:
        return grouping.select(run.step_memory(), where)
    samples = grouping.select(run.used_memory(), where)
    inside = samples[samples["step"].notna()].groupby(["gpu", "step"])["used_bytes"]
    out = inside.agg(["min", "max", "size"]).reset_index()
    return out.set_axis(["gpu", "step", "floor_bytes", "peak_bytes", "n"], axis=1)


def _figures(run: Run, rows: pd.DataFrame, state: pd.DataFrame, where: dict[str, object],
             sampled: bool) -> dict[str, object]:
    out: dict[str, object] = {}
    if len(rows):
        events, samples = (grouping.select(f, where) for f in (run.memory_events, run.used_memory()))
        out["curve"] = memory_figures.curve(events, samples, rows, DEFINITIONS)
        out["by_gpu"] = memory_figures.by_gpu(rows, DEFINITIONS)
    if len(state):
        out["model_state"] = memory_figures.model_state(state, DEFINITIONS)
    levels = _levels(run, where, sampled) if len(rows) else rows
    if len(levels) and levels["step"].nunique() > 1:
        out["floors"] = memory_figures.floors(levels, sampled, DEFINITIONS["floor"])
    return out


def _headline(rows: pd.DataFrame, state: pd.DataFrame, sampled: bool, device: str) -> str:
    whose = device[0].upper() + device[1:]
    if not len(rows):
        most = figures.largest(state, "state_bytes")
        of = most["state_bytes"] / most["total_bytes"]
        share = f", {text.share(of)} of its memory" if of == of else ""
        return (f"Parameters, gradients and optimizer states should take {size(most['state_bytes'])} of {device} "
                f"{most['gpu']}{share}; what it really held was not recorded.")
    known = rows[rows["used_share"].notna()]
    if len(known):
        full = figures.largest(known, "used_share")
        uses = "uses" if sampled else "holds"
        line = (f"{whose} {full['gpu']} {uses} {text.share(full['used_share'])} of its memory at most; "
                f"{size(full['headroom_bytes'])} are left.")
    else:
        full = figures.largest(rows, "used_bytes" if sampled else "peak_bytes")
        line = (f"{whose} {full['gpu']} uses up to {size(full['used_bytes'])}." if sampled else
                f"{whose} {full['gpu']} has up to {size(full['peak_bytes'])} allocated.")
    if isinstance(full["operation"], str):
        line += f" Its peak is in {full['phase']}, for {text.short(full['operation'], 60)}."
    steady = rows[rows["steady"].astype(bool)]
    if len(steady):
        worst = figures.largest(steady.astype({"growth_per_step_bytes": "float64"}), "growth_per_step_bytes")
        left = worst["steps_left"]
        line += (f" The floor of {device} {worst['gpu']} grows by {size(worst['growth_per_step_bytes'])} in every step"
                 + (f": full after {text.count(round(left), 'more step')}." if left == left else "."))
        return line
    grown = rows[rows["growth_bytes"].fillna(0) > 0.01 * rows["peak_bytes"].fillna(rows["used_bytes"])]
    if len(grown):
        worst = figures.largest(grown, "growth_bytes")
        line += f" The floor of {device} {worst['gpu']} grows by {size(worst['growth_bytes'])} over the steps."
    return line


def _key_figures(rows: pd.DataFrame, state: pd.DataFrame, sampled: bool) -> tuple[KeyFigure, ...]:
    source: Source = "sampled" if sampled else "estimated" if _from_start(rows, sampled) else "measured"
    shares = rows["used_share"].astype("float64")
    every = (
        _figure("Peak allocated", rows["peak_bytes"].max(), DEFINITIONS["peak"],
                "estimated" if _from_start(rows, sampled) else "measured", color=COLORS["allocated"]),
        _figure("Reserved", rows["reserved_bytes"].max(), DEFINITIONS["reserved"], color=COLORS["reserved"]),
        _figure("Used", rows["used_bytes"].max(), DEFINITIONS["used"], "sampled", color=COLORS["used"],
                note=f"{size(rows['outside_bytes'].max())} outside"
                if rows["outside_bytes"].notna().any() else ""),
        _figure("Headroom", rows["headroom_bytes"].min(), DEFINITIONS["headroom"], source,
                note=f"{text.share(shares.max())} used" if shares.notna().any() else ""),
        KeyFigure("Fragmentation", _none(rows["fragmentation"].max()), "share", DEFINITIONS["fragmentation"],
                  "measured" if rows["fragmentation"].notna().any() else "unavailable"),
        _figure("Floor", rows["floor_bytes"].max(), DEFINITIONS["floor"], source),
        _figure("Growth per step", rows["growth_per_step_bytes"].astype("float64").max(), DEFINITIONS["per_step"],
                source, note="steady" if rows["steady"].astype(bool).any() else ""),
        _figure("Model state", state["state_bytes"].max(), DEFINITIONS["state"], "estimated",
                color=COLORS["parameters"],
                note=f"{state['bytes_per_parameter'].iloc[0]:g} bytes per parameter" if len(state) else ""),
    )
    always = ("Headroom",) if sampled or not len(rows) else ("Peak allocated", "Reserved", "Headroom", "Fragmentation")
    return tuple(k for k in every if k.value is not None or k.label in always)


def _figure(label: str, value: float, definition: str, source: Source = "measured", **more: str) -> KeyFigure:
    known = _none(value)
    return KeyFigure(label, known, "bytes", definition, source if known is not None else "unavailable", **more)


def _none(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def _tables(run: Run, rows: pd.DataFrame, state: pd.DataFrame, where: dict[str, object],
            sampled: bool) -> dict[str, Table]:
    levels = _levels(run, where, sampled) if len(rows) else rows
    return {
        **({"gpus": _table(rows)} if len(rows) else {}),
        **({"model_state": _state_table(state)} if len(state) else {}),
        **({"steps": _steps_table(levels, sampled)} if len(levels) else {}),
    }


def _table(rows: pd.DataFrame) -> Table:
    columns = (
        TableColumn("gpu", "GPU"),
        TableColumn("peak_bytes", "Peak", "bytes", DEFINITIONS["peak"], bar=True),
        TableColumn("reserved_bytes", "Reserved", "bytes", DEFINITIONS["reserved"], bar=True),
        TableColumn("used_bytes", "Used", "bytes", DEFINITIONS["used"], bar=True),
        TableColumn("outside_bytes", "Outside", "bytes", DEFINITIONS["outside"]),
        TableColumn("used_share", "Of the device", "share", DEFINITIONS["share"]),
        TableColumn("headroom_bytes", "Headroom", "bytes", DEFINITIONS["headroom"]),
        TableColumn("fragmentation", "Fragmentation", "share", DEFINITIONS["fragmentation"]),
        TableColumn("floor_bytes", "Floor", "bytes", DEFINITIONS["floor"]),
        TableColumn("growth_per_step_bytes", "Growth a step", "bytes", DEFINITIONS["per_step"]),
        TableColumn("steps_left", "Steps left", "count", DEFINITIONS["steps_left"]),
        TableColumn("of_peers", "Of peers", "factor", DEFINITIONS["peers"]),
        TableColumn("step", "Peak in step"),
        TableColumn("phase", "Phase"),
        TableColumn("operation", "Operation", "", DEFINITIONS["operation"]),
        TableColumn("source", "Source", "text", "profiler: profile_memory; snapshot: a memory snapshot; telemetry: "
                    "samples of the driver's count."),
    )
    kept = ("gpu", "source", "headroom_bytes", "fragmentation", "floor_bytes")
    return Table(
        "Memory by GPU",
        tuple(c for c in columns if c.name in kept or rows[c.name].notna().any()),
        rows.assign(steps_left=rows["steps_left"].round()),
        sort="peak_bytes" if rows["peak_bytes"].notna().any() else "used_bytes",
        link={"gpu": "gpu"},
        at="at",
    )


def _state_table(rows: pd.DataFrame) -> Table:
    columns = (
        TableColumn("gpu", "GPU"),
        TableColumn("parameters", "Parameters held", "count", "Parameters of the model on this GPU."),
        *(TableColumn(c, LABELS[t], "bytes", DEFINITIONS[t]) for t, c in (
            ("parameters", "parameter_bytes"), ("optimizer_states", "optimizer_bytes"),
            ("gradients", "gradient_bytes"))),
        TableColumn("state_bytes", "State", "bytes", DEFINITIONS["state"], bar=True),
        TableColumn("lasting_bytes", "Lasting", "bytes", DEFINITIONS["lasting"]),
        TableColumn("floor_bytes", "Floor", "bytes", DEFINITIONS["floor"] + " Measured."),
        TableColumn("floor_ratio", "Floor / lasting", "factor", DEFINITIONS["ratio"]),
        TableColumn("activation_bytes", "Activations", "bytes", DEFINITIONS["activations"] + " Measured."),
        TableColumn("plan", "Divided by", "text", "Sizes of the parallel dimensions."),
        TableColumn("optimizer", "Optimizer", "text", "By its scope or its kernels."),
        TableColumn("layout", "Layout", "text", "What the bytes per parameter stand for."),
        TableColumn("assumed", "Assumed", "text", "What the data do not tell."),
    )
    return Table(
        "Expected state of the model",
        tuple(c for c in columns if rows[c.name].notna().any()),
        rows,
        sort="state_bytes",
        link={"gpu": "gpu"},
        note="Estimated from the sidecar's module table and the parallel plan; floor and activations are measured.",
    )


def _steps_table(rows: pd.DataFrame, sampled: bool) -> Table:
    return Table(
        "Memory by step",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("step", "Step"),
            TableColumn("peak_bytes", "Highest", "bytes", DEFINITIONS["used" if sampled else "peak"], bar=True),
            TableColumn("floor_bytes", "Lowest", "bytes", DEFINITIONS["floor"], bar=True),
            *(() if sampled else (
                TableColumn("reserved_bytes", "Reserved", "bytes", DEFINITIONS["reserved"]),
                TableColumn("allocated_bytes", "Asked for", "bytes", "Sum of what was allocated in the step."))),
            TableColumn("n", "Samples" if sampled else "Events", "count",
                        "Samples of used memory." if sampled else "Allocations and frees."),
        ),
        rows,
        sort="peak_bytes",
        link={"step": "step"},
    )
