"""A GPU that is always busy and yet far from what it could do: few SMs have work, or it stays far below its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.metrics.efficiency import blocks_per_unit
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = ("exposed_communication", "low_precision", "small_kernels", "fusion")
HOW = ("Σ (1 − e) · duration of the compute kernels of a step, e = min(1, blocks / SMs), mean over GPUs: at most this, "
       "if the blocks that are missing existed; kernels beside each other may fill the SMs together")
N_NAMED = 3


def rule(run: Run) -> list[Finding]:
    """One diagnosis where the GPUs are busy, not with communication, and MFU or SM efficiency is low."""
    step = step_ms(run)
    if step is None or (run.kernels["device"] == "cpu").all():
        return []
    steps = run.own_times["step"].unique().tolist()
    windows = run.efficiency(by=["gpu", "step"], where={"step": steps})
    times = run.timeline(by=["gpu", "step"], where={"step": steps})
    exposed = float((times["exposed_communication_us"] / times["total_us"]).median())
    busy, sm, mfu = (_median(windows, *of) for of in (
        ("gpu_utilization", None), ("sm_efficiency", "sm_known"), ("mfu", "flop_known")))
    if busy is None or not busy > thresholds.BUSY or exposed >= thresholds.EXPOSED_COMMUNICATION:
        return []
    few, low = sm is not None and sm < thresholds.LOW_SM, mfu is not None and mfu < thresholds.LOW_MFU
    lost, below = (float(windows[c].mean()) / 1000 for c in ("lost_us", "below_us"))
    gain = lost if lost >= thresholds.SMALL_GAIN * step else None
    # Few SMs with work although the compute kernels fill them: that is communication, and not for this rule.
    if not low and not (few and gain is not None):
        return []
    return [_diagnosis(run, steps, len(windows), busy, sm, mfu, lost, below, gain, step)]


def _median(windows: pd.DataFrame, column: str, known: str | None) -> float | None:
    """Over the windows, None where too little of the time is known."""
    told = windows["mfu_source"] == "model" if column == "mfu" else pd.Series(False, windows.index)
    rows = windows if known is None else windows[(windows[known] >= thresholds.COVERED) | told]
    values = rows[column].dropna()
    return float(values.median()) if len(values) else None


def _diagnosis(run: Run, steps: list[int], n: int, busy: float, sm: float | None, mfu: float | None, lost: float,
               below: float, gain: float | None, step: float) -> Diagnosis:
    of_lost = gain is not None and lost >= below
    column = "lost_us" if of_lost else "below_us"
    groups = run.efficiency(by="operation", where={"step": steps}).nlargest(N_NAMED, column)
    named = [Evidence(f"lost in {operation}", float(us) / n, "us")
             for operation, us in zip(groups["operation"], groups[column], strict=True) if us > 0]
    worst = str(groups["operation"].iloc[0])
    ratios = [("SMs with work", sm), ("MFU", mfu)]
    known = "; ".join(f"{name} {value:.0%}" for name, value in ratios if value is not None)
    kernels = run.kernels[(run.kernels["operation"] == worst) & run.kernels["step"].isin(steps)
                          & (run.kernels["kind"] == "compute")]
    duration = kernels["end_ns"] - kernels["start_ns"]
    empty = 1 - blocks_per_unit(kernels, run.hardware).clip(upper=1)
    return Diagnosis(
        "busy_not_efficient", severity(gain, step),
        f"the GPUs are busy for {busy:.0%} of a step, but: {known}; most is lost in {worst}",
        title="Busy, but not efficient",
        evidence=(Evidence("GPU utilization", busy, "share"),
                  *(Evidence(name, value, "share") for name, value in ratios if value is not None),
                  Evidence("lost to SMs without work", lost * 1000, "us"),
                  Evidence("lost below the peak", below * 1000, "us"), *named),
        cause="kernels with fewer blocks than the GPU has SMs" if of_lost else
        "kernels that fill the SMs and stay below the peak: memory traffic, small or unaligned products, padding",
        remedy="larger batches or sequences, grouped or batched small products, sizes that are multiples of the tile"
        if of_lost else "look at these operations in the Efficiency and Fusion tabs: dimensions that are multiples of "
        "8 (bf16) or 16 (fp8), fused attention, fused memory-bound kernels",
        gain_ms=gain, gain_how=HOW if gain is not None else "", view="efficiency",
        selection={"by": "operation", "focus": worst},
        kernel=largest(kernels, (empty.fillna(0) + 1e-6) * duration), explained_by=CAUSES)
