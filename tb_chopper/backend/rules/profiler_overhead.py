"""The profiler itself keeps the GPU idle: what is measured is slower than the training alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.rules import stall
from tb_chopper.backend.rules.diagnosis import Diagnosis

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("nothing in the training; for numbers nearer to it record fewer steps after a longer warm-up, without "
          "with_stack and profile_memory")


def rule(run: Run) -> list[Finding]:
    """One diagnosis, where the trace tells the profiler's own work (CUPTI's overhead events)."""
    found = stall.find(run, run.stalls[run.stalls["kind"] == "profiler"])
    if found is None:
        return []
    return [Diagnosis(
        "profiler_overhead", "info", f"{found.said}, while the profiler is at work itself",
        title="The profiler slows down what it measures", evidence=found.evidence(),
        cause="it flushes its buffers and instruments kernels while the training runs",
        remedy=REMEDY, gain_ms=found.gain_ms, gain_how=found.how, gpus=found.gpus, steps=found.steps, view="host",
        selection={"gpu": found.gpu, "by": "step"}, kernel=found.at)]
