"""DVFS: at which clock, power and temperature the hardware ran, why, and what that cost in time and energy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.views import dvfs_figures, equal_kernels, text, trace_link
from tb_chopper.backend.views.clocks import Clocks, clocks
from tb_chopper.backend.views.dvfs_figures import LOST, REASONS
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.telemetry_timeline import timeline
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Source, Table, TableColumn, Unit, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "clock": "Engine clock of the compute kernels: Σ duration × clock / Σ duration, each kernel's clock the "
    "time-weighted mean of the samples over it.",
    "clock_share": "Clock / clock of the GPU's peak rate (peak table, else the limit that the telemetry names).",
    "lost": LOST,
    "lost_share": "Time lost to the clock / compute time.",
    "memory_clock": "Time-weighted mean of the sampled memory clock.",
    "power": "Mean power of one GPU over the window, idle time included: energy / time.",
    "power_work": "Mean power of a GPU while any of the group's kernels ran; what ran beside them is in it.",
    "energy": "Rise of the energy counter over the window, else (`integral`) the integral of the sampled power.",
    "energy_work": "Energy of the time in which any of the group's kernels ran: groups that run at once both count it.",
    "j_per_step": "Energy of a step's window on the GPU, idle time included; mean over the steps, sum over the GPUs.",
    "j_per_token": "Energy of the steps / tokens, as told to the handler, over the same GPUs.",
    "waiting": "Energy of the time in which nothing but communication ran (waiting for others and transfer) / energy.",
    "throttled": "Share of the time in which the firmware or driver reports any reason that holds the clock down.",
    "reason_share": "Share of the time in which the reason held; several can hold at once.",
    "temperature": "Hottest spot of the GPU, else its only sensor; time-weighted mean over the window.",
    "to_median": "Clock / median of the clocks of the selected GPUs.",
    "note": "slow: clock more than 2 % below the median; hot: more than 5 °C above the median.",
    "sampled_share": "Share of the kernel time that samples cover.",
    "spread": "(Highest − lowest clock of a GPU) / median.",
    "step_time": "The step's window on the GPU, measured.",
    "source": "counter: energy counter of the GPU. integral: of sampled power, which misses what happens between "
    "samples.",
}  # fmt: skip
NO_GPU_IN_LOG = Missing(
    "Clocks, power, temperature and throttle reasons",
    "Telemetry was recorded, but no GPU of this run is in it: the host has none, or its library (amdsmi, nvidia-ml-py) "
    "is not installed. The Findings tab says which was tried.",
    "pip install nvidia-ml-py    # AMD: amdsmi comes with ROCm",
)
NOT_IN_WINDOW = Missing(
    "Samples of this window",
    "The telemetry holds this run's GPUs, but no sample within the selected time: the log ends early, or its clock is "
    "in another time zone. The Findings tab says what was assumed.",
    'with torch_ext.telemetry("log/my_run"): train()',
)


def view(run: Run, selection: Selection) -> View:
    """With sampled clocks: what they were and cost. Without: whether equal work slows down (estimated)."""
    if not len(run.telemetry.samples):
        hint = equal_kernels.hint(run, selection)
        return _replace_missing(hint, (NO_GPU_IN_LOG,)) if len(run.telemetry.cpu) else hint
    side = clocks(run, selection, selection.by or ("operation",))
    if not len(side.inside):
        return _replace_missing(equal_kernels.hint(run, selection), (NOT_IN_WINDOW,))
    sides = [side]
    if selection.compare is not None and len(selection.compare.telemetry.samples):
        other = clocks(selection.compare, Selection(), side.by)
        sides += [other] if len(other.inside) else []
    return View(
        headline(sides),
        key_figures=_key_figures(sides),
        figures=_figures(sides, selection),
        tables=_tables(sides),
        missing=_missing(side, selection),
    )


def _replace_missing(view: View, missing: tuple[Missing, ...]) -> View:
    from dataclasses import replace

    return replace(view, missing=missing)


# ---- words -----------------------------------------------------------------------------------------------------------


def headline(sides: list[Clocks]) -> str:
    """The slowest GPU's clock, what it costs at most, and why; then how the others do."""
    side, slow = sides[0], sides[0].slowest
    if slow is None:
        power = side.power_w
        drew = f"; a GPU drew {text.digits(power)} W on average" if power == power else ""
        return f"The telemetry holds no engine clock for as much as half of the compute time{drew}."
    clock = text.digits(slow["clock_mhz"])
    if slow["clock_share"] != slow["clock_share"]:
        first = f"GPU {slow['gpu']} ran at {clock} MHz; its peak clock is not known, and so neither is what that costs."
    else:
        peak, ratio = text.digits(slow["peak_mhz"]), text.share(slow["clock_share"])
        first = (
            f"GPU {slow['gpu']} ran at {clock} of {peak} MHz ({ratio}): "
            f"the clock costs up to {text.share(slow['lost_share'])} of its compute time{_because(slow)}."
        )
    return " ".join([first, *_beside(side, slow), *_against(sides)])


def _because(slow: dict[str, object]) -> str:
    reason, share = slow["reason"], slow["reason_share"]
    if not isinstance(share, float) or share != share:
        return "; the log does not say why"
    if not isinstance(reason, str) or share < 0.005:
        return ", and no throttle reason was in force"
    return f", because of the {REASONS.get(reason, reason)} {text.share(share)} of the time"


def _beside(side: Clocks, slow: dict[str, object]) -> list[str]:
    n = int(side.gpus["clock_mhz"].notna().sum())
    if n < 2:
        return []
    hot = side.gpus.loc[side.gpus["note"].str.contains("hot"), "gpu"].tolist()
    words = f" Hot: GPU {', '.join(map(str, hot))}." if hot else ""
    return [f"It is the slowest of {n}; their median is {text.digits(side.gpus['clock_mhz'].median())} MHz.{words}"]


def _against(sides: list[Clocks]) -> list[str]:
    if len(sides) < 2 or not sides[1].clock_mhz > 0 or not sides[0].clock_mhz > 0:
        return []
    mine, other = sides[0].clock_mhz, sides[1].clock_mhz
    return [f"All GPUs ran at {text.digits(mine)} MHz, {sides[1].name} at {text.digits(other)} MHz "
            f"({text.change(mine, other)})."]


def _key_figures(sides: list[Clocks]) -> tuple[KeyFigure, ...]:
    side, other = sides[0], sides[1] if len(sides) > 1 else None
    gpus = side.gpus
    share = float(np.average(gpus["clock_share"], weights=gpus["compute_us"])) if gpus["compute_us"].sum() else np.nan
    clocks_ = gpus["clock_mhz"].dropna()
    reasons = side.reasons
    limit = gpus["limit_w"].mean()
    steps = side.by_step["step"].nunique()

    def one(label: str, value: float, unit: Unit, definition: str, source: Source, note: str, before: float | None,
            color: str = "") -> KeyFigure:  # fmt: skip
        known = value == value
        if known and before is not None and before == before and before > 0:
            note = f"{text.change(value, before)} against {text.short(other.name, 24) if other else ''}"
        return KeyFigure(label, value if known else None, unit, DEFINITIONS[definition],
                         source if known else "unavailable", note if known else "", color)

    return (
        one("Core clock", side.clock_mhz, "mhz", "clock", "sampled",
            f"{text.share(share)} of the peak clock" if share == share else "peak clock unknown",
            other.clock_mhz if other else None, COLORS["frequency"]),
        one("Lost to the clock", side.lost_share, "share", "lost_share", "estimated",
            f"up to {text.duration(gpus['lost_us'].sum())}", other.lost_share if other else None,
            COLORS["frequency"]),
        one("Throttled", side.throttled_share, "share", "throttled", "sampled",
            _reason_note(reasons), other.throttled_share if other else None, COLORS["throttle"]),
        one("Power", side.power_w, "w", "power", "sampled",
            f"{text.share(side.power_w / limit)} of the limit" if limit == limit else "per GPU",
            other.power_w if other else None, COLORS["power"]),
        one("Energy per step", side.j_per_step, "j", "j_per_step", "sampled",
            f"{text.count(len(gpus), 'GPU')}, mean of {text.count(steps, 'step')}", other.j_per_step if other else None,
            COLORS["power"]),
        one("Energy per token", side.j_per_token, "j", "j_per_token", "sampled", "over all selected GPUs",
            other.j_per_token if other else None, COLORS["power"]),
        one("Energy in collectives", side.waiting_share, "share", "waiting", "sampled",
            "while nothing else ran", other.waiting_share if other else None, COLORS["communication"]),
        *(() if len(clocks_) < 2 else (one(
            "Spread of the clock", float(np.ptp(clocks_) / clocks_.median()), "share", "spread", "sampled",
            f"{text.digits(clocks_.min())} to {text.digits(clocks_.max())} MHz", None, COLORS["frequency"]),)),
    )  # fmt: skip


def _reason_note(reasons: pd.DataFrame) -> str:
    if not len(reasons):
        return "no reason was in force"
    first = reasons.iloc[0]
    return f"{REASONS.get(first['reason'], first['reason'])} {text.share(first['share'])}"


def _missing(side: Clocks, selection: Selection) -> tuple[Missing, ...]:
    out = []
    if side.slowest is None:
        out.append(Missing("Engine clock", "The log holds none, or covers less than half of the compute time.",
                           "tb-chopper sample --out log/my_run"))  # fmt: skip
    elif side.gpus["clock_mhz"].isna().any():
        dark = ", ".join(map(str, side.gpus.loc[side.gpus["clock_mhz"].isna(), "gpu"]))
        out.append(Missing(f"Clock of GPU {dark}", "The log covers less than half of its compute time; sums over all "
                           "GPUs are left out.", "tb-chopper sample --out log/my_run"))  # fmt: skip
    if not side.throttle["known_us"].sum() > 0:
        out.append(Missing("Throttle reasons", "The log does not say why the clock changed; the sampler writes it.",
                           "tb-chopper sample --out log/my_run"))  # fmt: skip
    if side.by_step["j_per_token"].isna().all():
        out.append(Missing("Energy per token", "The trace handler was not told how many tokens a step has.",
                           "chopper_trace_handler(log_dir, tokens_per_step=batch * sequence)"))  # fmt: skip
    if selection.compare is not None and not len(selection.compare.telemetry.samples):
        out.append(Missing(f"Clocks of {selection.compare.name}", "No GPU was sampled while that run was recorded.",
                           'with torch_ext.telemetry("log/my_run"): train()'))  # fmt: skip
    return tuple(out)


# ---- figures and tables ----------------------------------------------------------------------------------------------


def _figures(sides: list[Clocks], selection: Selection) -> dict[str, go.Figure]:
    found: dict[str, go.Figure | None] = {"timeline": timeline(sides, selection.options.get("time") == "around")}
    with_clock = [s for s in sides if s.slowest is not None]
    if with_clock and with_clock[0] is sides[0]:
        found["lost"], found["clock"] = dvfs_figures.operations(with_clock)
        found["residency"] = dvfs_figures.residency(with_clock)
        found["power_clock"] = dvfs_figures.power_clock(with_clock)
    if len(sides[0].gpus) > 1:
        found["spread"] = dvfs_figures.spread(sides)
    found["throttle"] = dvfs_figures.throttle(sides)
    found["energy"] = dvfs_figures.energy(sides, selection)
    found["step_time"] = dvfs_figures.step_time(sides)
    return {name: figure for name, figure in found.items() if figure is not None}


def _tables(sides: list[Clocks]) -> dict[str, Table]:
    side = sides[0]
    tables = {
        "operations": _operations_table(side),
        "gpus": _gpus_table(side),
        "steps": _steps_table(side),
        "throttle": _throttle_table(side),
    }
    if len(sides) > 1:
        tables["runs"] = _runs_table(sides)
    return {name: table for name, table in tables.items() if len(table.rows)}


def _operations_table(side: Clocks) -> Table:
    rows = trace_link.linked(side.operations.assign(clock_source=side.operations["source"]), side.kernels,
                             list(side.by))
    names = tuple(TableColumn(c, {"kernel": "Kernel"}.get(c, c.capitalize())) for c in side.by)
    return Table(
        f"Compute work by {' and '.join(side.by)}",
        (*names,
         TableColumn("lost_to_clock_us", "Lost to clock", "us", DEFINITIONS["lost"]),
         TableColumn("lost_share", "Lost share", "share", DEFINITIONS["lost_share"], bar=True),
         TableColumn("clock_mhz", "Clock", "mhz", DEFINITIONS["clock"]),
         TableColumn("memory_clock_mhz", "Memory clock", "mhz", DEFINITIONS["memory_clock"]),
         TableColumn("time_us", "Time", "us", "Σ duration of the compute kernels, measured."),
         TableColumn("n", "Kernels", "count", "Compute kernels, measured."),
         TableColumn("power_w", "Power", "w", DEFINITIONS["power_work"]),
         TableColumn("energy_j", "Energy", "j", DEFINITIONS["energy_work"]),
         TableColumn("sampled_share", "Clock known", "share", DEFINITIONS["sampled_share"]),
         TableColumn("clock_source", "Clock source")),
        rows, sort="lost_to_clock_us" if rows["lost_to_clock_us"].notna().any() else "time_us",
        link={"focus": "operation"} if "operation" in side.by else {}, at="at",
        note="Clocks, power and energy are sampled, times measured, lost times estimated.")  # fmt: skip


def _gpus_table(side: Clocks) -> Table:
    rows = side.gpus.assign(reason=[REASONS.get(r, r) if isinstance(r, str) else None for r in side.gpus["reason"]])
    return Table(
        "GPUs",
        (TableColumn("gpu", "GPU"),
         TableColumn("note", "Note", "", DEFINITIONS["note"]),
         TableColumn("clock_mhz", "Clock", "mhz", DEFINITIONS["clock"]),
         TableColumn("clock_share", "Of the peak", "share", DEFINITIONS["clock_share"], bar=True),
         TableColumn("clock_to_median", "To median", "share", DEFINITIONS["to_median"]),
         TableColumn("lost_share", "Lost share", "share", DEFINITIONS["lost_share"], bar=True),
         TableColumn("temperature_c", "Temperature", "celsius", DEFINITIONS["temperature"]),
         TableColumn("power_w", "Power", "w", DEFINITIONS["power"]),
         TableColumn("energy_j", "Energy", "j", DEFINITIONS["energy"]),
         TableColumn("j_per_step", "Per step", "j", DEFINITIONS["j_per_step"]),
         TableColumn("j_per_token", "Per token", "j", DEFINITIONS["j_per_token"]),
         TableColumn("waiting_share", "In collectives", "share", DEFINITIONS["waiting"]),
         TableColumn("reason", "Held by"),
         TableColumn("reason_share", "Held", "share", DEFINITIONS["reason_share"], bar=True),
         TableColumn("energy_source", "Energy source", "", DEFINITIONS["source"])),
        rows.assign(energy_source=rows["energy_source"].astype(object)), sort="lost_share", link={"gpu": "gpu"},
        note="Sampled; lost shares are estimated.")  # fmt: skip


def _steps_table(side: Clocks) -> Table:
    return Table(
        "Steps",
        (TableColumn("step", "Step"), TableColumn("gpu", "GPU"),
         TableColumn("time_us", "Window", "us", DEFINITIONS["step_time"]),
         TableColumn("clock_mhz", "Clock", "mhz", DEFINITIONS["clock"]),
         TableColumn("power_w", "Power", "w", DEFINITIONS["power"]),
         TableColumn("energy_j", "Energy", "j", DEFINITIONS["energy"]),
         TableColumn("j_per_token", "Per token", "j", DEFINITIONS["j_per_token"]),
         TableColumn("energy_source", "Energy source", "", DEFINITIONS["source"])),
        side.by_step.assign(energy_source=side.by_step["energy_source"].astype(object)), sort="time_us",
        link={"gpu": "gpu", "step": "step"})  # fmt: skip


def _throttle_table(side: Clocks) -> Table:
    words = {**REASONS, "none": "no reason"}
    rows = side.throttle.assign(reason=[words.get(r, r) for r in side.throttle["reason"]])
    return Table(
        "Throttle reasons by GPU",
        (TableColumn("gpu", "GPU"), TableColumn("reason", "Reason"),
         TableColumn("share", "Share", "share", DEFINITIONS["reason_share"], bar=True),
         TableColumn("time_us", "Time", "us", "Share × time with a known state."),
         TableColumn("known_us", "State known", "us", "Time of the window for which the log says whether a reason "
                     "held.")),
        rows, sort="share", link={"gpu": "gpu"})  # fmt: skip


def _runs_table(sides: list[Clocks]) -> Table:
    """Run against run: one row per number."""
    numbers = (
        ("Core clock, MHz", lambda s: s.clock_mhz, "sampled"),
        ("Lost to the clock, %", lambda s: 100 * s.lost_share, "estimated"),
        ("Throttled, %", lambda s: 100 * s.throttled_share, "sampled"),
        ("Power of a GPU, W", lambda s: s.power_w, "sampled"),
        ("Temperature, °C", lambda s: s.gpus["temperature_c"].mean(), "sampled"),
        ("Energy per step, J", lambda s: s.j_per_step, "sampled"),
        ("Energy per token, J", lambda s: s.j_per_token, "sampled"),
        ("Energy in collectives, %", lambda s: 100 * s.waiting_share, "sampled"),
        ("Step time, ms", lambda s: s.mean_steps()["time_us"].mean() / 1000, "measured"),
    )
    rows = [(label, *(float(value(s)) for s in sides[:2]), source) for label, value, source in numbers]
    frame = pd.DataFrame(rows, columns=["number", "this", "other", "source"])
    frame["change"] = [text.change(a, b) if a == a and b == b and b > 0 else text.DASH
                       for a, b in zip(frame["this"], frame["other"], strict=True)]
    return Table(
        "Run against run",
        (TableColumn("number", "Number"), TableColumn("this", text.short(sides[0].name, 28), "count"),
         TableColumn("other", text.short(sides[1].name, 28), "count"), TableColumn("change", "Change"),
         TableColumn("source", "Source")), frame,
        note="The selection of GPUs and steps holds for this run; the other one is taken as a whole.")  # fmt: skip
