"""The numbers of every run under a path: for machines (JSON, layout in docs/api.md) and as a text report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tb_chopper.backend import logdir
from tb_chopper.backend.capture import Progress
from tb_chopper.backend.errors import NotFound
from tb_chopper.backend.findings import SEVERITIES, Finding
from tb_chopper.backend.rules import RULES
from tb_chopper.backend.rules.diagnosis import Diagnosis, step_ms
from tb_chopper.backend.run import Run

SCHEMA_VERSION = 1
GPU_TIME = ("compute", "communication", "memcpy", "overlap", "exposed_communication", "exposed_memcpy", "busy", "idle",
            "total")
TOP = 3
"""Diagnoses of the text report; the JSON has all."""
FAIL_ON = ("warning", "info", *RULES)
"""What may be asked of `failing`."""
LAUNCH = ("prep", "call", "call_under_communication", "launch", "graph", "unattributed")


def analyze(path: str | Path, communication: Sequence[str] = (), progress: Progress | None = None) -> dict[str, Any]:
    """Every run under `path` as plain JSON values; times in µs. Raises NotFound where there is no trace."""
    files = logdir.find_runs(path)
    if not files:
        raise NotFound(logdir.why_no_run(path))
    return {"schema_version": SCHEMA_VERSION, "runs": [of_run(Run(f, communication, progress)) for f in files]}


def of_run(run: Run) -> dict[str, Any]:
    """One entry of `runs`."""
    window = _by_capture(run.timeline(by="capture"))
    steps = run.timeline(by=["capture", "step"])
    overhead = _by_capture(run.launch_overhead(by="capture"))
    workers = []
    for worker in _records(run.workers):
        capture = worker["capture"]
        own_steps = steps[steps["capture"] == capture]
        workers.append({
            "file": worker["file"], "rank": _int(worker["rank"]), "host": _text(worker["host"]),
            "gpu_name": _text(worker["gpu_name"]), "device": worker["device"],
            "n_kernels": worker["n_kernels"], "n_steps": worker["n_steps"],
            "gpu_time_us": _times(window.get(capture, {}), GPU_TIME),
            "launch_us": _times(overhead.get(capture, {}), LAUNCH),
            "steps": [{"step": int(s["step"]), "gpu_time_us": _times(s, GPU_TIME)} for s in _records(own_steps)],
            "findings": [_finding(f) for f in run.findings if f.file == worker["file"]],
        })
    files = {w["file"] for w in workers}
    return {"run": run.name, "workers": workers, "step_ms": _rounded(step_ms(run)),
            "diagnosis": [_diagnosis(f) for f in run.diagnosis if isinstance(f, Diagnosis)],
            "findings": [_finding(f) for f in (*run.findings, *run.diagnosis)
                         if f.file not in files and not isinstance(f, Diagnosis)]}


def failing(result: dict[str, Any], fail_on: Sequence[str]) -> list[str]:
    """The codes of the diagnoses that `fail_on` names: by code, or by severity (that one and worse); see FAIL_ON."""
    severities = {s for name in fail_on if name in SEVERITIES for s in SEVERITIES[: SEVERITIES.index(name) + 1]}
    return sorted({d["code"] for run in result["runs"] for d in run["diagnosis"]
                   if d["code"] in fail_on or d["severity"] in severities})


def _diagnosis(found: Diagnosis) -> dict[str, Any]:
    return {"code": found.code, "severity": found.severity, "title": found.title, "message": found.message,
            "evidence": [{"label": e.label, "value": e.value if isinstance(e.value, str) else _rounded(e.value),
                          "unit": e.unit} for e in found.evidence],
            "cause": found.cause, "remedy": found.remedy, "gain_ms": _rounded(found.gain_ms),
            "gain_how": found.gain_how, "gpus": list(found.gpus), "steps": list(found.steps), "view": found.view}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 6)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _by_capture(frame: pd.DataFrame) -> dict[int, dict[str, Any]]:
    return {row["capture"]: row for row in _records(frame)}


def _times(row: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {name: round(float(row.get(f"{name}_us", 0.0)), 3) for name in names}


def _finding(finding: Finding) -> dict[str, Any]:
    named = not finding.file or finding.file in finding.message
    message = finding.message if named else f"{finding.file}: {finding.message}"
    return {"code": finding.code, "severity": finding.severity, "count": finding.count, "message": message}


def _int(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def _text(value: Any) -> str | None:
    return None if pd.isna(value) else str(value)


def why_nothing(result: dict[str, Any]) -> str:
    """One line for a result without a single worker: the first error, and how many more there are."""
    errors = [f["message"] for run in result["runs"] for f in run["findings"] if f["severity"] == "error"]
    more = f" (and {len(errors) - 1} more files)" if len(errors) > 1 else ""
    return (errors[0] if errors else "nothing to analyze") + more


def text(result: dict[str, Any]) -> str:
    """The same numbers for a person."""
    return "\n\n".join(_run_text(run) for run in result["runs"])


def _diagnosis_text(run: dict[str, Any]) -> list[str]:
    """The diagnoses with the largest gains, a line and its remedy each."""
    found, step = run["diagnosis"], run["step_ms"]
    if not found:
        return []
    lines = [f"  What costs time{f' in a step of {_duration(step * 1e3)}' if step else ''}"]
    for place, d in enumerate(found[:TOP], 1):
        gain = d["gain_ms"]
        share = f" ({gain / step:.1%})" if gain is not None and step else ""
        gains = f": about {_duration(gain * 1e3)} per step{share}" if gain is not None else ""
        lines += [f"  {place}. {d['title']}{gains} [{d['code']}]", f"     {d['message']}",
                  f"     Remedy: {d['remedy']}"]
    if len(found) > TOP:
        lines.append(f"  and {len(found) - TOP} more in the Diagnosis tab")
    return lines


def _run_text(run: dict[str, Any]) -> str:
    lines = [f"Run {run['run']}"]
    workers = run["workers"]
    if workers:
        lines += _table(
            ["GPU time", "kernels", "steps", "total", "compute", "exposed comm.", "exposed copies", "idle",
             "comm. hidden"],
            [[_label(w), str(w["n_kernels"]), str(w["n_steps"]), _duration(t["total"]),
              *(_share(t[c], t["total"]) for c in ("compute", "exposed_communication", "exposed_memcpy", "idle")),
              _share(t["overlap"], t["communication"])] for w in workers for t in [w["gpu_time_us"]]])
        lines += _table(
            ["Gaps between compute kernels", "launch", "prep", "call", "under comm.", "graph", "unattributed"],
            [[_label(w), *(_duration(w["launch_us"][c]) for c in (
                "launch", "prep", "call", "call_under_communication", "graph", "unattributed"))] for w in workers])
    lines += _diagnosis_text(run)
    files: dict[tuple[str, str], set[str]] = {}
    for file, found in [*((w["file"], w["findings"]) for w in workers), ("", run["findings"])]:
        for f in found:
            files.setdefault((f["severity"], f["message"].removeprefix(f"{file}: ")), set()).add(file)
    for (severity, message), where in sorted(files.items()):
        named = f"{len(where)} files: " if len(where) > 1 else f"{file}: " if (file := min(where)) else ""
        lines.append(f"  {severity}: {named}{message}")
    return "\n".join(map(_printable, lines))


def _label(worker: dict[str, Any]) -> str:
    rank = f"rank {worker['rank']}" if worker["rank"] is not None else worker["file"]
    device = "CPU operations" if worker["device"] == "cpu" else worker["gpu_name"] or f"device {worker['device']}"
    damaged = any(f["severity"] == "error" for f in worker["findings"])
    return f"{rank}, {device}" + (" (incomplete)" if damaged else "")


def _printable(name: str) -> str:
    """A name that cannot move the cursor or start a line of its own on a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return ["  " + "  ".join(
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in [header, *rows]]


def _duration(us: float) -> str:
    unit, size = ("s", 1e6) if us >= 1e6 else ("ms", 1e3) if us >= 1e3 else ("µs", 1.0)
    return f"{us / size:.3f} {unit}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 and math.isfinite(part) else "n/a"
