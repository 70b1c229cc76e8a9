"""Findings: what is damaged, repaired, missing or assumed, and how far the numbers can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.findings import SEVERITIES, Finding, by_severity
from tb_chopper.backend.schema import BEFORE_CAPTURE, UNATTRIBUTED
from tb_chopper.backend.views import text
from tb_chopper.backend.views.view import KeyFigure, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

ATTRIBUTED = "Share of the device time whose operation is known."


def view(run: Run, selection: Selection) -> View:
    """Findings by severity, the files read, and how device time got its operation."""
    found = by_severity([*run.findings, *run.counter_findings])
    coverage = _coverage(run.kernels)
    known = _known_share(run.kernels)
    return View(
        _headline(run, found, known),
        key_figures=_key_figures(run, found, known),
        findings=tuple(run.counter_findings),
        tables={
            "findings": Table(
                "Findings as a table",
                (
                    TableColumn(
                        "severity",
                        "Severity",
                        "text",
                        "error: data is missing or wrong; warning: a repair or an assumption; info: good to know.",
                    ),
                    TableColumn("count", "Events", "count", "Events concerned."),
                    TableColumn("file", "File", "text"),
                    TableColumn("message", "What, where, and what to do", "text"),
                    TableColumn("code", "Code", "text", "Stable name for scripts."),
                ),
                pd.DataFrame([f.as_dict() for f in found], columns=["severity", "count", "file", "message", "code"]),
            ),
            "files": Table(
                "Files",
                (
                    TableColumn("file", "File", "text"),
                    TableColumn("worker", "Worker", "text"),
                    TableColumn("span", "Span", ""),
                    TableColumn("rank", "Rank", ""),
                    TableColumn("host", "Host", "text"),
                    TableColumn("gpu", "GPU", ""),
                    TableColumn("gpu_name", "Device", "text"),
                    TableColumn(
                        "n_kernels", "Kernels", "count", "Device kernels; for a CPU-only profile its leaf operators."
                    ),
                    TableColumn("n_steps", "Steps", "count"),
                    TableColumn(
                        "complete", "Complete", "text", "no: the file is damaged; it is kept out of means over ranks."
                    ),
                ),
                run.workers,
                sort="",
                link={"gpu": "gpu"},
            ),
            "attribution": Table(
                "How device time got its operation",
                (
                    TableColumn("attributed_by", "By", "text"),
                    TableColumn("n", "Kernels", "count"),
                    TableColumn("time_us", "Time", "us", "Sum of durations.", bar=True),
                    TableColumn("share", "Share", "share", "Of the device time of the run.", bar=True),
                ),
                coverage,
                sort="time_us",
            ),
        },
    )


def _headline(run: Run, found: list[Finding], known: float | None) -> str:
    counts = {s: sum(f.severity == s for f in found) for s in SEVERITIES}
    n_files = run.workers["file"].nunique() if len(run.workers) else 0
    attributed = f"; {text.share(known)} of the GPU time belongs to a known operation" if known is not None else ""
    files = text.count(n_files, "file")
    if counts["error"]:
        return (
            f"{text.count(counts['error'], 'error')} and {text.count(counts['warning'], 'warning')}: part of the "
            f"data is missing or wrong. {files} could be read{attributed}."
        )
    if counts["warning"]:
        return (
            f"{text.count(counts['warning'], 'warning')} in {files}: repairs or assumptions you should "
            f"know{attributed}."
        )
    return f"{files} read without damage{attributed}."


def _key_figures(run: Run, found: list[Finding], known: float | None) -> tuple[KeyFigure, ...]:
    counts = {s: sum(f.severity == s for f in found) for s in SEVERITIES}
    steps = run.steps["step"].nunique()
    incomplete = int((~run.workers["complete"].astype(bool)).sum()) if len(run.workers) else 0
    return (
        KeyFigure("Errors", counts["error"], "count", "Findings that say data is missing or wrong."),
        KeyFigure("Warnings", counts["warning"], "count", "Findings that say something was repaired or assumed."),
        KeyFigure(
            "Damaged files", incomplete, "count", "Captures of which part was lost; kept out of means over ranks."
        ),
        KeyFigure("Kernels", len(run.kernels), "count", "Device activities of all files: kernels, copies and fills."),
        KeyFigure(
            "Steps",
            steps,
            "count",
            "Distinct training steps.",
            note=", ".join(sorted(map(str, run.steps["source"].dropna().unique()))) or "none marked",
        ),
        KeyFigure("Attributed", known, "share", ATTRIBUTED),
    )


def _coverage(kernels: pd.DataFrame) -> pd.DataFrame:
    rows = pd.DataFrame(
        {
            "attributed_by": kernels["attributed_by"].astype(object).fillna(UNATTRIBUTED),
            "time_us": (kernels["end_ns"] - kernels["start_ns"]) / 1000,
        }
    )
    out = rows.groupby("attributed_by", as_index=False).agg(n=("time_us", "size"), time_us=("time_us", "sum"))
    return out.assign(share=out["time_us"] / max(float(out["time_us"].sum()), 1e-9))


def _known_share(kernels: pd.DataFrame) -> float | None:
    duration = (kernels["end_ns"] - kernels["start_ns"]).to_numpy(float)
    unknown = kernels["operation"].isin([BEFORE_CAPTURE, UNATTRIBUTED]).to_numpy()
    return 1 - float(duration[unknown].sum() / duration.sum()) if duration.sum() > 0 else None
