"""A GPU that has nothing to do for a large part of the step, and what its host did meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = ("data_stall", "small_kernels", "synchronizing_calls", "allocator_calls", "garbage_collection", "late_host",
          "pipeline_bubble", "outlier_step", "profiler_overhead")
REMEDIES = {
    "sync": ("the host waits for the GPU and launches nothing meanwhile",
             "move .item(), print and copies to the host out of the step"),
    "allocation": ("the host allocates device memory", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "loader": ("the host waits for data", "more workers, pin_memory and prefetching in the DataLoader"),
    "compile": ("the host compiles", "warm up all shapes before the measured steps; mark dynamic dimensions"),
    "recompile": ("the host compiles again", "TORCH_LOGS=recompiles tells which guard fails; mark dynamic dimensions"),
    "gc": ("Python collects garbage", "gc.freeze() after the warm-up, gc.disable() and a collection of your own"),
    "profiler": ("the profiler is at work itself", "record fewer steps after a longer warm-up, without stacks"),
    "dispatch": ("the host cannot launch fast enough", "torch.compile, CUDA/HIP graphs, fused or foreach optimizers"),
    "device": ("kernels are launched in time and start late", "look at what the streams wait for in the Trace tab"),
    "unknown": ("the launches of the kernels are not in the capture", "record CPU activities as well"),
}
HOW = "idle time of a step, median over GPUs and steps: at most this, where the GPU never had to wait"


def rule(run: Run) -> list[Finding]:
    """One diagnosis where the GPUs are busy for less than the threshold."""
    step = step_ms(run)
    kernels = run.kernels
    if step is None or (kernels["device"] == "cpu").all():
        return []
    windows = run.timeline(by=["gpu", "step"]).astype({"step": "int64"}).merge(run.own_times, on=["gpu", "step"])
    busy = float((windows["busy_us"] / windows["total_us"]).median())
    if not busy < thresholds.UTILIZATION:
        return []
    gain = float(windows["idle_us"].median()) / 1000
    each = run.idle_causes(by="operation")
    causes = each.groupby("cause")["idle_us"].sum().sort_values(ascending=False)
    most = each[each["cause"] == causes.index[0]].sort_values("idle_us", ascending=False).iloc[0]
    cause, remedy = REMEDIES[str(causes.index[0])]
    shares = causes / causes.sum()
    return [Diagnosis(
        "low_utilization", severity(gain, step),
        f"the GPUs run something for {busy:.0%} of a step; for most of the rest {cause}",
        title="The GPUs are idle for much of the step",
        evidence=(Evidence("busy", busy, "share"), Evidence("idle", gain * 1000, "us"),
                  *(Evidence(f"idle: {c}", float(s), "share") for c, s in shares.head(3).items()),
                  Evidence(f"most {causes.index[0]} before", str(most["operation"]), "text"),
                  Evidence("of that", float(most["idle_us"] / causes.iloc[0]), "share")),
        cause=cause, remedy=remedy, gain_ms=gain, gain_how=HOW, view="host", explained_by=CAUSES,
        kernel=largest(kernels, kernels["prep_ns"] + kernels["call_ns"]))]
