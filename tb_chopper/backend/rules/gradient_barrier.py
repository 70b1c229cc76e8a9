"""The end of a step that waits for the last gradients: communication between backward and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("communication between the last backward kernel and the first of the optimizer while that one was launched "
       "already, without the last collective's waiting for its latest rank; mean over GPUs, median over the steps "
       "that have an optimizer, times their share of all steps")


def rule(run: Run) -> list[Finding]:
    """One diagnosis where the transfer of the last gradients, not a late rank, ends the step."""
    step, rows = step_ms(run), run.gradient_barrier()
    rows = rows[(rows["limited_by"] == "bandwidth") & rows["held_us"].notna()]
    if step is None or not len(rows):
        return []
    per_step = (rows["held_us"] - rows["skew_us"].fillna(0)).clip(lower=0).groupby(rows["step"]).max() / 1000
    gain = float(per_step.median()) * len(per_step) / run.steps["step"].nunique()
    if gain < thresholds.GRADIENT_BARRIER * step:
        return []
    last = rows.iloc[-1]
    return [Diagnosis(
        "gradient_barrier", severity(gain, step),
        f"after the last backward kernel {gain:.3g} ms of a step pass until the gradients are reduced "
        f"({last['name']} in group {last['group']})",
        title="The optimizer waits for the last gradients",
        evidence=(Evidence("exposed tail", float(rows["exposed_tail_us"].median()), "us"),
                  Evidence("transfer of the last collective", float(rows["transfer_us"].median()), "us"),
                  Evidence("bus bandwidth, GB/s", float(rows["busbw_gbs"].median()))),
        cause="too much of the gradients is reduced after the backward pass has ended",
        remedy="smaller buckets for the first layers (DDP: bucket_cap_mb; FSDP: wrap smaller units), reduce in bf16, "
               "accumulate gradients over several steps",
        gain_ms=gain, gain_how=HOW, view="collectives", selection={"by": "phase"},
        kernel=_last_of(run.kernels, int(last["step"])),
        explained_by=("slow_link", "islands"))]


def _last_of(kernels: pd.DataFrame, step: int) -> str:
    """The communication kernel of the step's backward that ends last."""
    rows = kernels[(kernels["step"] == step).fillna(False) & (kernels["kind"] == "communication")
                   & (kernels["phase"] == "backward")]
    return largest(rows, rows["end_ns"])
