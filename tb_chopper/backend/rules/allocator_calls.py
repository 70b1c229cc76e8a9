"""The allocator asks the driver for memory, or gives it back, within steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tb_chopper.backend.rules import stall
from tb_chopper.backend.rules.diagnosis import Diagnosis, severity

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

PINNED = re.compile(r"Host")
REMEDY = ("{variable}=expandable_segments:True, which keeps no segments that do not fit; else fewer "
          "different shapes (pad to a few lengths), or a little less memory, so that the cache is not emptied")
REMEDY_PINNED = "reuse pinned buffers: DataLoader(pin_memory=True) does, tensor.pin_memory() in each step does not"
CAUSE = ("the caching allocator has no block of the right size, frees what it holds and asks the driver again; both "
         "wait for the device")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all of the driver's allocations and frees."""
    found = stall.find(run, run.stalls[run.stalls["kind"] == "allocation"])
    if found is None:
        return []
    amd = found.names[0].startswith("hip")
    pinned = bool(PINNED.search(found.names[0]))
    variable = "PYTORCH_HIP_ALLOC_CONF" if amd else "PYTORCH_CUDA_ALLOC_CONF"
    return [Diagnosis(
        "allocator_calls", severity(found.gain_ms, found.step_ms),
        f"{found.said}, while the host is in {' and '.join(found.names[:2])}",
        title="Memory is allocated from the driver in every step",
        evidence=found.evidence(),
        cause="pinned memory is allocated anew" if pinned else CAUSE,
        remedy=REMEDY_PINNED if pinned else REMEDY.format(variable=variable),
        gain_ms=found.gain_ms, gain_how=found.how, gpus=found.gpus, steps=found.steps, view="host",
        selection={"gpu": found.gpu, "by": "step"}, kernel=found.at)]
