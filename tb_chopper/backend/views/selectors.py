"""What the bar on top may offer for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tb_chopper.backend.views.context import is_cpu_only

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run


def selectors(run: Run) -> dict[str, Any]:
    """Workers, spans, GPUs and steps of the run, and whether its device is the CPU."""
    return {
        "workers": sorted(map(str, run.workers["worker"].dropna().unique())),
        "spans": sorted(int(s) for s in run.workers["span"].unique()),
        "gpus": sorted(int(g) for g in run.workers["gpu"].unique()),
        "steps": sorted(int(s) for s in run.steps["step"].dropna().unique()),
        "device": "cpu" if is_cpu_only(run) else "gpu",
    }
