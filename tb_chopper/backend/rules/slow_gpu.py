"""GPUs that the others wait for (reference: straggler analysis by leads and by what would be if they were not slow)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, named, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = {
    "cooling": ("hotter than the others, at a lower clock", "check the cooling and the air flow of the slot"),
    "power": ("draws more power than the others, at a lower clock",
              "check the power cap of every GPU of the host, or move less work there"),
    "clock": ("a lower clock", "compare the clock and power limits of the GPUs (amd-smi, nvidia-smi -q)"),
    "load": ("more to compute than the others", "spread the work evenly: sequence lengths, experts, stages"),
    "unknown": ("the same kernels take longer", "record telemetry to see the clock; then exchange the GPU"),
}
HOW = ("largest own time of a step - what would remain the largest if these GPUs were as fast as the median of the "
       "others; own time is the time of the step without the waiting for others that no computation hides, and without "
       "what waiting collectives add to the kernels beside them")
HOW_CAPPED = ("; the others are at their power cap and slow down once they wait less: {:.3g} ms if their mean power "
              "only rises to the cap, {:.3g} ms if their clocks stay; this is the middle")
RANGE = 1.02
"""the larger estimate over the smaller: below they are the same"""


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all GPUs that hold the others up by their device work, since one alone may gain nothing; what
    their hosts do is another rule's."""
    rows, step = run.stragglers(), step_ms(run)
    if len(rows) < 2 or step is None or (run.workers["device"] == "cpu").all():
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
    more = run.imbalance().set_index("gpu")["load_excess_us"].reindex(slow["gpu"]).to_numpy()
    slow = slow.assign(slower=slow["slowness"] / usual - 1, more_us=more).sort_values("own_us", ascending=False)
    worst = slow.iloc[0]
    cause, remedy = CAUSES[str(worst["explained_by"])]
    own = run.kernels[(run.kernels["gpu"] == int(worst["gpu"])) & (run.kernels["kind"] == "compute")]
    least, most = found.at_least_us / 1000, found.at_most_us / 1000
    capped = most > RANGE * least
    return [Diagnosis(
        "slow_gpu", severity(gain, step), _message(slow, cause), title=f"{named(gpus, 'hold')} the others up",
        evidence=_evidence(run, slow, (least, most) if capped else None),
        cause=cause, remedy=remedy, gain_ms=gain,
        gain_how=HOW + (HOW_CAPPED.format(least, most) if capped else ""),
        gpus=gpus, view="stragglers", selection={"gpu": int(worst["gpu"])}, kernel=largest(own))]


def _message(slow: pd.DataFrame, cause: str) -> str:
    """The slowest first. A GPU with more to compute is as fast as the others for the same kernels."""
    each = [f"GPU {int(row['gpu'])} " + (f"computes {row['more_us'] / 1000:.3g} ms a step more"
                                         if row["explained_by"] == "load" else
                                         f"needs {row['slower']:.1%} longer for the same kernels")
            for _, row in slow.iterrows()]
    last = "it arrives" if len(slow) == 1 else "they arrive"
    return (f"{', '.join(each)} than the median of the others; {last} last in {slow['last_share'].sum():.0%} of the "
            f"collectives: {cause}")


def _evidence(run: Run, slow: pd.DataFrame, gain_ms: tuple[float, float] | None) -> tuple[Evidence, ...]:
    clocks = run.imbalance().set_index("gpu")["clock_mhz"]
    others = clocks[~clocks.index.isin(slow["gpu"])].median()
    rows: list[Evidence] = []
    for gpu, slower, more, own, why in slow[["gpu", "slower", "more_us", "own_us", "explained_by"]].itertuples(
            index=False):
        rows += [Evidence(f"GPU {gpu} computes more", float(more), "us") if why == "load" else
                 Evidence(f"GPU {gpu} slower than the others", float(slower), "share"),
                 Evidence(f"GPU {gpu} own time of a step", float(own), "us")]
        if not pd.isna(clocks[gpu]):
            rows.append(Evidence(f"GPU {gpu} clock", float(clocks[gpu]), "mhz"))
    if not pd.isna(others):
        rows.append(Evidence("clock of the others", float(others), "mhz"))
    rows.append(Evidence("arrives last", float(slow["last_share"].sum()), "share"))
    if gain_ms is not None:
        rows += [Evidence(f"gain at {word}", ms * 1000, "us") for word, ms in zip(("least", "most"), gain_ms,
                                                                                 strict=True)]
    return tuple(rows)
