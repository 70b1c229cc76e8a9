"""The host waits for the device in the middle of a step and launches nothing meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.metrics import host
from tb_chopper.backend.rules import stall
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("find the call in the Trace tab: .item(), .cpu(), print of a tensor, nonzero and boolean masks; keep the "
          "value on the device until the end of the step; copy inputs from pinned memory with non_blocking=True "
          "(torch.cuda.set_sync_debug_mode(\"warn\") names the lines)")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all waits before kernels of the same step's forward or backward; what ends a step is normal.

    Without a wait the host would be ahead by its length: so much of the idle time after it would be saved, not more.
    """
    middle = run.stalls[host.in_the_middle(run.stalls)] if len(run.stalls) else run.stalls
    saved = middle[["idle_ns"]].assign(wait=middle["end_ns"] - middle["start_ns"]).min(axis=1)
    found = stall.find(run, middle.assign(idle_ns=saved))
    if found is None:
        return []
    before = found.rows.groupby(found.rows["next_operation"].astype(str))["idle_ns"].sum().idxmax()
    return [Diagnosis(
        "synchronizing_calls", severity(found.gain_ms, found.step_ms),
        f"{found.said}, because the host waits for the device in the middle of a step "
        f"({found.names[0]}), mostly before {before}",
        title="The host waits for the GPU in the middle of a step",
        evidence=(*found.evidence(), Evidence("mostly before", str(before), "text")),
        cause="the queue is empty when the wait returns, and the GPU idles until the next launch",
        remedy=REMEDY, gain_ms=found.gain_ms, gain_how=found.how + "; of each call at most its own length",
        gpus=found.gpus, steps=found.steps, view="host", selection={"gpu": found.gpu, "by": "operation"},
        kernel=found.at)]
