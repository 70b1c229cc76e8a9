"""Diagnosis: what costs time in this training, what to do about it, and what that would gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import RULES
from tb_chopper.backend.rules.diagnosis import Diagnosis, step_ms
from tb_chopper.backend.views import context, text
from tb_chopper.backend.views.view import KeyFigure, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "gain": "Time of a step that the remedy would save, as each diagnosis says how. Gains overlap: they do not add up.",
    "step": "Time of a step on its slowest GPU, median over the steps.",
    "severity": "warning: the gain is a large part of the step, or there is a risk; info: smaller.",
}


def view(run: Run, selection: Selection) -> View:
    """What every rule finds in the whole run, whatever is selected."""
    if context.nothing_to_show(run):
        return View("There is no device activity in this run.", missing=(context.NO_KERNELS,))
    found = tuple(f for f in run.diagnosis if isinstance(f, Diagnosis))
    step = step_ms(run)
    return View(
        _headline(found, step, context.is_cpu_only(run)),
        key_figures=_key_figures(found, step),
        tables={"diagnoses": _table(found, step)} if found else {},
        definitions={"Gain": DEFINITIONS["gain"], "Severity": DEFINITIONS["severity"]},
        findings=tuple(f for f in run.diagnosis if not isinstance(f, Diagnosis)),
        diagnoses=found,
    )


def _headline(found: tuple[Diagnosis, ...], step: float | None, cpu_only: bool) -> str:
    if not found and cpu_only:
        return "Nothing to say: most rules are about GPUs, and this run has none. The other tabs show its times."
    if not found:
        return f"No rule found anything worth changing in this run: {text.count(len(RULES), 'rule')} looked."
    first = found[0]
    of = f" of a step of {text.duration(step * 1000)}" if step else " per step"
    gain = f": about {text.duration(first.gain_ms * 1000)}{of}" if first.gain_ms else ""
    more = f" {text.count(len(found) - 1, 'more finding')} below." if len(found) > 1 else ""
    return f"{first.title}{gain}.{more}"


def _key_figures(found: tuple[Diagnosis, ...], step: float | None) -> tuple[KeyFigure, ...]:
    gains = [f.gain_ms for f in found if f.gain_ms is not None]
    best = max(gains, default=None)
    return (
        KeyFigure("Diagnoses", len(found), "count", f"What {len(RULES)} rules found.",
                  note=f"{sum(f.severity == 'warning' for f in found)} of them large"),
        KeyFigure("Largest gain", None if best is None else best * 1000, "us", DEFINITIONS["gain"],
                  "estimated" if gains else "unavailable",
                  f"{text.share(best / step)} of a step" if best is not None and step else ""),
        KeyFigure("Step time", None if step is None else step * 1000, "us", DEFINITIONS["step"],
                  "unavailable" if step is None else "measured"),
    )


def _table(found: tuple[Diagnosis, ...], step: float | None) -> Table:
    rows = pd.DataFrame({
        "title": [f.title for f in found],
        "gain_us": [None if f.gain_ms is None else f.gain_ms * 1000 for f in found],
        "share": [None if f.gain_ms is None or not step else f.gain_ms / step for f in found],
        "severity": [f.severity for f in found],
        "gpus": [", ".join(map(str, f.gpus)) for f in found],
        "steps": [", ".join(map(str, f.steps)) for f in found],
        "evidence": [f.message for f in found], "remedy": [f.remedy for f in found], "code": [f.code for f in found],
    }).astype({"gain_us": "float64", "share": "float64"})
    return Table(
        "Diagnoses as a table",
        (
            TableColumn("title", "What costs time", "text"),
            TableColumn("gain_us", "Gain a step", "us", DEFINITIONS["gain"], bar=True),
            TableColumn("share", "Of the step", "share", DEFINITIONS["gain"]),
            TableColumn("severity", "Severity", "text", DEFINITIONS["severity"]),
            TableColumn("gpus", "GPUs", "text"),
            TableColumn("steps", "Steps", "text"),
            TableColumn("evidence", "Evidence", "text"),
            TableColumn("remedy", "Remedy", "text"),
            TableColumn("code", "Code", "text", "Stable name, for --fail-on and scripts."),
        ),
        rows,
    )
