"""Memory that grows from step to step: something is kept that should not be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tb_chopper.backend.metrics.memory import TELEMETRY
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("look for losses or metrics kept with their graph (total += loss instead of loss.item()), lists of outputs "
          "or batches, hooks and caches that hold activations, retain_graph=True, a growing key-value cache; "
          "torch.cuda.memory._record_memory_history() and a snapshot after some steps name the lines that allocated "
          "what stays (pytorch.org/memory_viz)")
HOW = "a risk: no time is gained until the allocator runs out and frees its cache"


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all GPUs (processes, without any) whose floor rises steadily over at least four steps."""
    rows = run.memory()
    grown = rows[rows["steady"].astype(bool)]
    if not len(grown):
        return []
    worst = grown.loc[grown["growth_per_step_bytes"].astype("float64").idxmax()]
    per_step, left, gpu = float(worst["growth_per_step_bytes"]), float(worst["steps_left"]), int(worst["gpu"])
    gpus = tuple(map(int, grown["gpu"]))
    sampled = worst["source"] == TELEMETRY
    ends = f"; at this rate it is full after {left:,.0f} more steps" if math.isfinite(left) else ""
    noun = "process" if (run.workers["device"] == "cpu").all() else "GPU"
    which = f"{noun} {gpu}" if len(gpus) == 1 else f"{len(gpus)} of them (most: {noun} {gpu})"
    return [Diagnosis(
        "memory_growth", "warning",
        f"the {'used' if sampled else 'allocated'} memory of {which} grows by {per_step / 2**20:,.3g} MiB in every step"
        f"{ends}",
        title="Memory grows from step to step",
        evidence=(Evidence("growth per step", per_step, "bytes"), Evidence("steps", int(worst["n_steps"])),
                  *((Evidence("steps until full", round(left)),) if math.isfinite(left) else ()),
                  Evidence("source", str(worst["source"]))),
        cause="the lowest level rises by about as much from step to step: tensors of each step are kept",
        remedy=REMEDY, gain_how=HOW, gpus=gpus, view="memory", selection={"gpu": gpu})]
