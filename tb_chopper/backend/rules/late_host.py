"""GPUs that the others wait for because their own hosts keep them idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, named, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("largest own time of a step - what would remain the largest if these GPUs' were the median of the others; own "
       "time is the time of the step without the waiting for others that no computation hides")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all GPUs that idle longer than the others while these wait for them: one alone may gain
    nothing."""
    rows, step = run.stragglers(), step_ms(run)
    if len(rows) < 2 or step is None or (run.workers["device"] == "cpu").all():
        return []
    late = rows[rows["explained_by"] == "host"]
    gpus = tuple(sorted(map(int, late["gpu"])))
    if not gpus or len(gpus) == len(rows):
        return []
    gain = run.gain(gpus).us / 1000
    if gain < thresholds.SMALL_GAIN * step:
        return []
    idle = run.imbalance().set_index("gpu")["host_excess_us"].reindex(gpus)
    worst = int(idle.idxmax())
    own = run.kernels[(run.kernels["gpu"] == worst) & run.kernels["step"].isin(run.own_times["step"])]
    pause, before = _pause(own)
    once = pause >= thresholds.EXPLAINED * idle[worst]
    each = [f"GPU {g} {'is idle ' if g == gpus[0] else ''}{us / 1000:.3g} ms" for g, us in idle.items()]
    hosts, them = ("its host launches", "it") if len(gpus) == 1 else ("their hosts launch", "them")
    return [Diagnosis(
        "late_host", severity(gain, step),
        f"{', '.join(each)} longer in a step than the median GPU, and the others wait for {them}",
        title=f"The {'host' if len(gpus) == 1 else 'hosts'} of {named(gpus, 'hold')} the others up",
        evidence=(*(Evidence(f"GPU {g} idles longer", float(us), "us") for g, us in idle.items()),
                  Evidence("arrives last", float(late["last_share"].sum()), "share"),
                  Evidence(f"longest pause of GPU {worst} in a step", pause, "us"), Evidence("before", before, "text")),
        cause=f"{hosts} nothing for {pause / 1000:.4g} ms at a time, before {before}" if once else
        f"{hosts} late: other work on the cores, data, or Python code",
        remedy="look at what the code does there (Show in Trace; with_stack=True names the lines)" if once else
        "compare the processes in the Host tab; pin each to its own cores beside its GPU (numactl)",
        gain_ms=gain, gain_how=HOW, gpus=gpus, view="host", selection={"gpu": worst},
        kernel=largest(own, own["prep_ns"]),
        explained_by=("data_stall", "synchronizing_calls", "allocator_calls", "garbage_collection", "outlier_step",
                      "pipeline_bubble"))]


def _pause(own: pd.DataFrame) -> tuple[float, str]:
    """The longest time of a step in which a host had not launched the next kernel while its GPU waited, µs, median over
    steps; and the operation of that kernel in most of them."""
    prep = own["prep_ns"].astype("float64").fillna(0.0)
    longest = prep.groupby(own["step"]).idxmax()
    return float(prep[longest].median()) / 1000, str(own.loc[longest, "operation"].astype(str).mode().iloc[0])
