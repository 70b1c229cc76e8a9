"""Bubbles of a pipeline: what filling and draining cost, what unequal stages add, and late messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.pipeline import INTERLEAVED, UNKNOWN, ZERO_BUBBLE, theory
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

PARTS = ("halved_gain_us", "imbalance_us", "transfer_excess_us")
HALVED = ("half of the bubble of the perfect schedule, (p - 1) / (v m) of the work of a rank: with twice the stages "
          "per rank v, or twice the microbatches m of half the size if kernels stay as efficient; mean over pipelines, "
          "median over steps")
EQUAL = ("length of the schedule played again without delays, with the mean durations of each stage - with those of "
         "all stages; mean over pipelines, median over steps")
PROMPT = ("length of the schedule - that of the same actions played again, each as soon as its inputs are computed; "
          "mean over pipelines, median over steps: at most this")


def rule(run: Run) -> list[Finding]:
    """At most one diagnosis per cause, where the bubble is a large part of the step; every stage must be here."""
    step, cost = step_ms(run), run.pipeline_what_if
    cost = grouping.select(cost, {"step": run.own_times["step"].unique().tolist()})
    if step is None or not len(cost) or not cost["complete"].all() or (run.actions["device"] == "cpu").all():
        return []
    rows = run.pipeline(by=("gpu", "step"), where={"step": cost["step"].unique().tolist()})
    bubble = float(rows.groupby("step")["bubble_us"].mean().median()) / 1000
    if bubble < thresholds.PIPELINE_BUBBLE * step:
        return []
    share = Evidence("bubble", bubble / step, "share")
    parts = cost.groupby(["pipeline", "step"])[list(PARTS)].sum(min_count=1)
    halved, imbalance, late = (parts.groupby("step").mean().median() / 1000).tolist()
    shape = cost.iloc[0]
    found: list[Finding] = []
    if 2 * halved >= thresholds.PIPELINE_BUBBLE * step and shape["schedule"] not in (UNKNOWN, ZERO_BUBBLE):
        found.append(_fill_and_drain(run, shape, halved, step, share))
    slowest = float(run.pipeline_stages()["slower"].max())
    if imbalance >= thresholds.PIPELINE_EXCESS * step and slowest >= thresholds.PIPELINE_UNEQUAL:
        found.append(_unequal(run, imbalance, step, share))
    if late >= thresholds.PIPELINE_LATE * step:
        found.append(_late(run, rows, late, step, share))
    return found


def _fill_and_drain(run: Run, shape: pd.Series, gain: float, step: float, share: Evidence) -> Diagnosis:
    ranks, virtual, m = (int(shape[c]) for c in ("n_ranks", "virtual_stages", "microbatches"))
    schedule = str(shape["schedule"])
    now, then = theory(schedule, ranks, virtual, m), theory(schedule, ranks, virtual, 2 * m)
    more = "more stages per rank" if schedule == INTERLEAVED else \
        "two stages per rank (ScheduleInterleaved1F1B; Megatron-LM: --num-layers-per-virtual-pipeline-stage)"
    smaller = (f"{2 * m} microbatches: of the same size where the batch may grow, of half the size where kernels stay "
               "efficient")
    return Diagnosis(
        "pipeline_bubble", severity(gain, step),
        f"{schedule} over {ranks} ranks with {m} microbatches idles for {now:.0%} of its time even if nothing is late: "
        "it fills and drains",
        title="The pipeline fills and drains for long",
        evidence=(share, Evidence("bubble of the perfect schedule", now, "share"),
                  Evidence("with twice the microbatches", then, "share"), Evidence("microbatches", m, "count"),
                  Evidence("ranks", ranks, "count")),
        cause="too few microbatches for so many ranks",
        remedy=f"{more}; or {smaller}", gain_ms=gain, gain_how=HALVED,
        view="parallelism", kernel=_behind_largest(run))


def _unequal(run: Run, gain: float, step: float, share: Evidence) -> Diagnosis:
    stages = run.pipeline_stages()
    slow, fast = (stages.loc[getattr(stages["slower"], which)()] for which in ("idxmax", "idxmin"))
    of, gpus = f"stage {int(slow['stage'])}", ", ".join(map(str, slow["gpus"]))
    if _clock_is_low(run, slow, stages):
        cause, remedy = f"the clock of GPU {gpus} is lower than that of the others", \
            f"check the power cap and the cooling of GPU {gpus} (amd-smi, nvidia-smi -q); its layers are not the cause"
    else:
        cause = f"{of} has more to compute than the others"
        remedy = (f"move layers from {of} to stage {int(fast['stage'])}; the embedding, the head and the loss count "
                  "like layers")
    return Diagnosis(
        "pipeline_bubble", severity(gain, step),
        f"{of} takes {slow['slower']:.0%} longer for a microbatch than the mean stage, and the others wait for it",
        title="The stages of the pipeline are unequal",
        evidence=(share, Evidence(f"{of}, above the mean", float(slow["slower"]), "share"),
                  Evidence(f"{of}, one microbatch", float(slow["microbatch_us"]), "us"),
                  Evidence(f"stage {int(fast['stage'])}, one microbatch", float(fast["microbatch_us"]), "us")),
        cause=cause, remedy=remedy, gain_ms=gain, gain_how=EQUAL, gpus=tuple(slow["gpus"]), view="parallelism",
        selection={"gpu": int(slow["gpus"][0])}, kernel=_behind_largest(run))


def _clock_is_low(run: Run, slow: pd.Series, stages: pd.DataFrame) -> bool:
    """Whether sampled clocks explain most of what the stage takes longer than the median of the others."""
    clock = run.imbalance().set_index("gpu")["clock_mhz"]
    own, others = clock[clock.index.isin(slow["gpus"])].mean(), clock[~clock.index.isin(slow["gpus"])].median()
    usual = stages.loc[stages["stage"] != slow["stage"], "microbatch_us"].median()
    longer = float(slow["microbatch_us"]) / float(usual)
    return bool(np.log(others / own) > np.log(longer) / 2)


def _late(run: Run, rows: pd.DataFrame, gain: float, step: float, share: Evidence) -> Diagnosis:
    message = float(rows.groupby("step")["message_us"].mean().median())
    return Diagnosis(
        "pipeline_bubble", severity(gain, step),
        f"what the next action needs is computed, and {message / 1000:.3g} ms of a step pass until the action begins",
        title="Messages between the stages are late",
        evidence=(share, Evidence("after the neighbour had finished", message, "us")),
        cause="the messages are slow or are sent late, or the host launches too late",
        remedy="neighbouring stages on one node or on the fastest links; a schedule that receives ahead "
               "(ScheduleInterleaved1F1B, defer_pp_recv=False); larger microbatches where the host is the limit",
        gain_ms=gain, gain_how=PROMPT, view="parallelism", kernel=_behind_largest(run))


def _behind_largest(run: Run) -> str:
    """The first kernel behind the largest bubble, for the Trace tab."""
    gone = run.pipeline_bubbles()
    gone = gone[gone["kind"].notna()]
    return run.behind_bubbles()[int(gone.loc[gone["bubble_us"].idxmax(), "gpu"])] if len(gone) else ""
