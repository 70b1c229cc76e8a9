"""Compute time lost because the engine clock stays below its peak (arXiv:2512.08242: the largest gap of all)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("Σ duration · (1 − clock / peak clock) of the compute kernels of a step, mean over GPUs: at most this, since "
       "kernels that wait for memory gain less")
REMEDIES = {
    "power": ("the GPUs draw their power cap", "raise the cap where the site allows (amd-smi set --power-cap, "
              "nvidia-smi -pl); else fewer memory spikes and less padding leave more power for the clock"),
    "thermal": ("the GPUs are hot", "check cooling and inlet temperature"),
    "limit": ("the clock stays below its peak though power is left",
              "check clock limits and the performance level (amd-smi metric, nvidia-smi -q -d CLOCK)"),
}


def rule(run: Run) -> list[Finding]:
    """One diagnosis over all GPUs, where clocks were sampled and a peak is known."""
    step = step_ms(run)
    if step is None:
        return []
    rows = run.frequency(by=["gpu", "step"], where={"kind": "compute"})
    rows = rows[rows["step"].notna() & rows["lost_to_clock_us"].notna() & (rows["source"] == "sampled")]
    if not len(rows):
        return []
    lost = float(rows["lost_to_clock_us"].mean()) / 1000
    if lost < thresholds.LOST_TO_CLOCK * step:
        return []
    clock = float(rows["clock_mhz"].mean())
    peak = float(pd.Series(run.f_peak_mhz).reindex(rows["gpu"].unique()).mean())
    why, power = _why(run.telemetry.samples)
    cause, remedy = REMEDIES[why]
    return [Diagnosis(
        "clock", severity(lost, step),
        f"the compute kernels run at {clock:.0f} of {peak:.0f} MHz, which costs {lost:.3g} ms of a step of "
        f"{step:.3g} ms",
        title="The clock stays below its peak",
        evidence=(Evidence("mean clock", clock, "mhz"), Evidence("peak clock", peak, "mhz"),
                  Evidence("lost to the clock", lost * 1000, "us"), *power),
        cause=cause, remedy=remedy, gain_ms=lost, gain_how=HOW, view="dvfs", kernel=largest(
            run.kernels[run.kernels["kind"] == "compute"]), explained_by=("slow_gpu",))]


def _why(samples: pd.DataFrame) -> tuple[str, tuple[Evidence, ...]]:
    """What holds the clock down by the samples, and the power beside its cap where both were recorded."""
    reasons = " ".join(map(str, samples["throttle"].dropna().unique())).lower()
    if "thermal" in reasons or "temp" in reasons:
        return "thermal", ()
    cap = samples["power_limit_w"]
    known = samples[cap.notna() & samples["power_w"].notna()]
    near = known["power_w"] / known["power_limit_w"]
    # Half of the samples: a training's power swings around its cap.
    if len(known) and float(near.quantile(0.75)) >= thresholds.AT_POWER_CAP:
        power = float(known["power_w"].quantile(0.75))
        return "power", (Evidence("power, upper quartile", power, "w"),
                         Evidence("power cap", float(known["power_limit_w"].median()), "w"))
    return ("power" if "power" in reasons or "ppt" in reasons else "limit"), ()
