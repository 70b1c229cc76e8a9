"""A storm of small kernels: the GPU waits for the launch of kernels that take no longer than it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.metrics import host
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

LAUNCH_CAUSES = ("dispatch", "device")
HOW = ("idle time of the GPU before compute kernels below 10 µs, in gaps up to 100 µs in which the host did nothing "
       "but launch, in a step, mean over GPUs: graphs would take nearly all of it, fused kernels their number, too")


def rule(run: Run) -> list[Finding]:
    """One diagnosis where most kernels are short and the GPU waits for their launches; it names the operation that has
    most of that."""
    step = step_ms(run)
    kernels = run.kernels
    if step is None or (kernels["device"] == "cpu").all():
        return []
    steps = run.own_times["step"].unique().tolist()
    counts = run.launches(by=["gpu", "step"], where={"step": steps})
    windows = len(counts)
    if not windows or counts["n_short"].sum() < thresholds.SHORT_KERNELS * counts["n"].sum():
        return []
    duration = kernels["end_ns"] - kernels["start_ns"]
    storm = (kernels["kind"] == "compute") & (duration < host.SHORT_NS) & (
        kernels["prep_ns"] + kernels["call_ns"] <= thresholds.LAUNCH_NS)
    waits = host.idle_causes(kernels.assign(storm=storm), run.calls, ["operation", "storm"], {"step": steps})
    waits = waits[waits["storm"] & waits["cause"].isin(LAUNCH_CAUSES)].groupby("operation")["idle_us"].sum()
    gain = float(waits.sum()) / windows / 1000
    if not gain >= thresholds.STORM * step:
        return []
    worst = str(waits.idxmax())
    return [_diagnosis(run, kernels[storm & kernels["step"].isin(steps)], counts, worst, float(waits.max()) / windows,
                       gain, step)]


def _diagnosis(run: Run, storm: pd.DataFrame, counts: pd.DataFrame, worst: str, of_worst_us: float, gain: float,
               step: float) -> Diagnosis:
    windows, n = len(counts), int(counts["n"].sum())
    there = storm[storm["operation"] == worst]
    busiest = run.queues().sort_values("n").drop_duplicates(["gpu", "step"], keep="last")
    short = float(counts["n_short"].sum()) / windows
    optimizer = (there["phase"] == "optimizer").mean() > 0.5
    remedy = ("fused=True or foreach=True in the optimizer" if optimizer else
              "torch.compile (mode=\"reduce-overhead\" for graphs), CUDA or HIP graphs, fused operators")
    return Diagnosis(
        "small_kernels", severity(gain, step),
        f"{short:.0f} of {n / windows:.0f} kernels of a step take less than 10 µs, and the GPU waits {gain:.3g} ms of "
        f"a step of {step:.3g} ms for their launches; most of it in {worst}",
        title="A storm of small kernels",
        evidence=(Evidence("kernels below 10 µs in a step", short),
                  Evidence("their share of the kernels", float(counts["n_short"].sum()) / n, "share"),
                  *((Evidence("their share of the kernel time", float(
                      (counts["short_time_share"] * counts["time_us"]).sum() / counts["time_us"].sum()), "share"),)
                    if counts["time_us"].any() else ()),
                  Evidence(f"of them in {worst}", len(there) / windows),
                  Evidence(f"waits for launches in {worst}", of_worst_us, "us"),
                  *(Evidence("queue empty", e, "share") for e in [float(busiest["empty_share"].mean())] if e == e)),
        cause="every kernel costs a launch, and these take no longer than it", remedy=remedy, gain_ms=gain,
        gain_how=HOW, view="host", selection={"focus": worst},
        kernel=largest(there, there["prep_ns"] + there["call_ns"]))
