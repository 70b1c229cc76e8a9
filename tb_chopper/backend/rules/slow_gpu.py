"""GPUs that the others wait for (reference: straggler analysis by leads and by what would be if they were not slow)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = {
    "cooling": ("hotter than the others, at a lower clock", "check the cooling and the air flow of its slot"),
    "power": ("draws more power than the others, at a lower clock",
              "check the power cap of every GPU of the host, or move less work there"),
    "clock": ("a lower clock", "compare the clock and power limits of the GPUs (amd-smi, nvidia-smi -q)"),
    "load": ("more to compute than the others", "spread the work evenly: sequence lengths, experts, stages"),
    "unknown": ("the same kernels take longer", "record telemetry to see its clock; then exchange the GPU"),
}
HOW = ("largest own time of a step - what would remain the largest if these GPUs were as fast as the median of the "
       "others; own time is the time of the step without the waiting for others that no computation hides, and without "
       "what waiting collectives add to the kernels beside them")
HOW_CAPPED = "; at the power cap the others' clocks fall once they wait less: without that it would be {:.3g} ms"
RANGE = 1.02
"""the larger estimate over the smaller: below they are the same"""


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all GPUs that hold the others up by their device work, since one alone may gain nothing; what
    their hosts do is another rule's."""
    rows, step = run.stragglers(), step_ms(run)
    if len(rows) < 2 or step is None:
        return []
    if run.pipeline_actions()["position"].nunique() > 1:  # stages have different work: pipeline_bubble compares them
        return []
    late = rows["own_us"] > rows["own_us"].median()
    slow = rows[rows["explained_by"].isin(list(CAUSES)) & (late | (rows["gain_us"] > 0))]
    if not len(slow) or len(slow) == len(rows):
        return []
    gpus = tuple(sorted(map(int, slow["gpu"])))
    found = run.gain(gpus)
    gain = found.us / 1000
    if gain < thresholds.SMALL_GAIN * step:
        return []
    usual = float(rows.loc[~rows["gpu"].isin(gpus), "slowness"].median())
    slow = slow.assign(slower=slow["slowness"] / usual - 1).sort_values("slower", ascending=False)
    worst = slow.iloc[0]
    cause, remedy = CAUSES[str(worst["explained_by"])]
    own = run.kernels[(run.kernels["gpu"] == int(worst["gpu"])) & (run.kernels["kind"] == "compute")]
    capped = found.at_most_us > RANGE * found.us
    return [Diagnosis(
        "slow_gpu", severity(gain, step), _message(slow, cause), title=f"{_named(gpus)} the others up",
        evidence=_evidence(run, slow, gain, found.at_most_us / 1000 if capped else None),
        cause=cause, remedy=remedy, gain_ms=gain,
        gain_how=HOW + (HOW_CAPPED.format(found.at_most_us / 1000) if capped else ""),
        gpus=gpus, view="stragglers", selection={"gpu": int(worst["gpu"])}, kernel=largest(own))]


def _named(gpus: tuple[int, ...]) -> str:
    if len(gpus) == 1:
        return f"GPU {gpus[0]} holds"
    return f"GPUs {', '.join(map(str, gpus[:-1]))} and {gpus[-1]} hold"


def _message(slow: pd.DataFrame, cause: str) -> str:
    """The slowest first. A GPU with more to compute is as fast as the others for the same kernels."""
    each = ", ".join(f"GPU {int(g)} {s:.1%}" for g, s in zip(slow["gpu"], slow["slower"], strict=True))
    return (f"longer for the same kernels than the median of the other GPUs: {each}; arrives last in "
            f"{slow['last_share'].sum():.0%} of the collectives: {cause}")


def _evidence(run: Run, slow: pd.DataFrame, gain_ms: float, at_most_ms: float | None) -> tuple[Evidence, ...]:
    clocks = run.imbalance().set_index("gpu")["clock_mhz"]
    others = clocks[~clocks.index.isin(slow["gpu"])].median()
    rows: list[Evidence] = []
    for gpu, slower, own in zip(slow["gpu"], slow["slower"], slow["own_us"], strict=True):
        rows += [Evidence(f"GPU {gpu} slower than the others", float(slower), "share"),
                 Evidence(f"GPU {gpu} own time of a step", float(own), "us")]
        if not pd.isna(clocks[gpu]):
            rows.append(Evidence(f"GPU {gpu} clock", float(clocks[gpu]), "mhz"))
    if not pd.isna(others):
        rows.append(Evidence("clock of the others", float(others), "mhz"))
    rows.append(Evidence("arrives last", float(slow["last_share"].sum()), "share"))
    if at_most_ms is not None:
        rows += [Evidence("gain, likely", gain_ms * 1000, "us"), Evidence("gain at most", at_most_ms * 1000, "us")]
    return tuple(rows)
