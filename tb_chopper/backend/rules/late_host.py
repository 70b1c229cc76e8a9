"""A GPU that the others wait for because its own host keeps it idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("largest own time of a step - what would remain the largest if this GPU's were the median one; own time is the "
       "time of the step without the waiting for others that no computation hides")


def rule(run: Run) -> list[Finding]:
    """One diagnosis per GPU that idles longer than the others while they wait for it."""
    rows, step = run.stragglers(), step_ms(run)
    if (run.workers["device"] == "cpu").all():
        return []
    if len(rows) < 2 or step is None:
        return []
    late = rows[(rows["explained_by"] == "host") & (rows["gain_us"] / 1000 >= thresholds.SMALL_GAIN * step)]
    idle = run.imbalance().set_index("gpu")
    found: list[Finding] = []
    for gpu, gain_us, last in zip(late["gpu"], late["gain_us"], late["last_share"], strict=True):
        more = float(idle["host_excess_us"][gpu])
        own = run.kernels[(run.kernels["gpu"] == gpu) & run.kernels["step"].isin(run.own_times["step"])]
        pause, before = _pause(own)
        once = pause >= thresholds.EXPLAINED * more
        found.append(Diagnosis(
            "late_host", severity(gain_us / 1000, step),
            f"GPU {gpu} is idle {more / 1000:.3g} ms longer in a step than the median GPU, and the others wait for it",
            title=f"The host of GPU {gpu} holds the others up",
            evidence=(Evidence("idles longer", more, "us"), Evidence("arrives last", float(last), "share"),
                      Evidence("longest pause of a step", pause, "us"), Evidence("before", before, "text")),
            cause=f"its process launches nothing for {pause / 1000:.4g} ms at a time, before {before}" if once else
            "its process launches late: other work on its cores, its data, or its Python code",
            remedy="look at what its code does there (Show in Trace; with_stack=True names the lines)" if once else
            "compare the processes in the Host tab; pin each to its own cores beside its GPU (numactl)",
            gain_ms=gain_us / 1000, gain_how=HOW, gpus=(int(gpu),), view="host", selection={"gpu": int(gpu)},
            kernel=largest(own, own["prep_ns"]),
            explained_by=("data_stall", "synchronizing_calls", "allocator_calls", "garbage_collection", "outlier_step",
                          "pipeline_bubble")))
    return found


def _pause(own: pd.DataFrame) -> tuple[float, str]:
    """The longest time of a step in which a host had not launched the next kernel while its GPU waited, µs, median over
    steps; and the operation of that kernel in most of them."""
    prep = own["prep_ns"].astype("float64").fillna(0.0)
    longest = prep.groupby(own["step"]).idxmax()
    return float(prep[longest].median()) / 1000, str(own.loc[longest, "operation"].astype(str).mode().iloc[0])
