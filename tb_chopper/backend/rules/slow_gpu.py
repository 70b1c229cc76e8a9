"""A GPU that the others wait for (reference: straggler analysis by leads and by what would be if it were not slow)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = {
    "cooling": ("it is hotter than the others and clocks lower", "check its cooling and the air flow of its slot"),
    "power": ("it draws more power than the others and clocks lower",
              "check the power cap of every GPU of the host, or move less work there"),
    "clock": ("its clock is lower", "compare the clock and power limits of the GPUs (amd-smi, nvidia-smi -q)"),
    "load": ("it has more to compute than the others", "spread the work evenly: sequence lengths, experts, stages"),
    "contention": ("communication runs beside its computation longer", "look at who arrives last in its collectives"),
    "unknown": ("the same kernels take longer on it", "record telemetry to see its clock; then exchange the GPU"),
}
HOW = ("largest own time of a step - what would remain the largest if this GPU were as fast as the median one; own "
       "time is the time of the step without the waiting for others that no computation hides")


def rule(run: Run) -> list[Finding]:
    """One diagnosis per GPU that holds the others up by its device work; what its host does is another rule's."""
    rows = run.stragglers()
    step = step_ms(run)
    if len(rows) < 2 or step is None:
        return []
    return [_diagnosis(row, step) for _, row in rows.iterrows()
            if row["explained_by"] in CAUSES and row["gain_us"] / 1000 >= thresholds.SMALL_GAIN * step]


def _diagnosis(row: pd.Series, step: float) -> Diagnosis:
    gpu, gain = int(row["gpu"]), float(row["gain_us"]) / 1000
    cause, remedy = CAUSES[row["explained_by"]]
    slower = float(row["slowness"]) - 1
    return Diagnosis(
        "slow_gpu", severity(gain, step),
        f"GPU {gpu} needs {slower:.1%} longer for the same kernels than the median GPU, and arrives last in "
        f"{row['last_share']:.0%} of the collectives: {cause}",
        title=f"GPU {gpu} holds the others up",
        evidence=(Evidence("slower than the median", slower, "share"),
                  Evidence("arrives last", row["last_share"], "share"),
                  Evidence("own time of a step", row["own_us"], "us")),
        cause=cause, remedy=remedy, gain_ms=gain, gain_how=HOW, gpus=(gpu,), view="stragglers",
        selection={"gpu": gpu})
