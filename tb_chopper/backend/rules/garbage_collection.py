"""Python's garbage collector stops the host while the GPU has nothing to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.rules import stall
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("gc.collect(); gc.freeze() after the model is built, then gc.disable() and gc.collect(1) at the same step on "
          "every rank, every few hundred steps")


def rule(run: Run) -> list[Finding]:
    """One diagnosis: ranks that collect at different times hold each other up in turn."""
    found = stall.find(run, run.stalls[run.stalls["kind"] == "gc"])
    if found is None:
        return []
    longest = (found.rows["end_ns"] - found.rows["start_ns"]).max()
    return [Diagnosis(
        "garbage_collection", severity(found.gain_ms, found.step_ms),
        f"{found.said}, while Python collects garbage",
        title="Garbage collection stops the training",
        evidence=(*found.evidence(), Evidence("longest collection", int(longest) / 1000, "us")),
        cause="the collector walks all objects of the process whenever enough were made",
        remedy=REMEDY, gain_ms=found.gain_ms, gain_how=found.how, gpus=found.gpus, steps=found.steps, view="host",
        selection={"gpu": found.gpu, "by": "step"}, kernel=found.at)]
