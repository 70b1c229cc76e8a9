"""What every view asks of a run first: how its devices are called, what the data is, what must be said on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.views.view import Missing, Selection

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

SIMULATED = "Simulated data: these numbers come from a model of a node, not from hardware."
CPU_ONLY = (
    "CPU operations: this trace holds no GPU activity, so the leaf operators on the CPU stand in as device work. "
    "Their times are CPU times."
)


NOTHING_MATCHES = "nothing in this run matches the selected GPUs, steps, worker and span"


def is_cpu_only(run: Run) -> bool:
    """Whether CPU operators stand in for device work everywhere in the run."""
    return len(run.workers) > 0 and bool((run.workers["device"] == "cpu").all())


def banners(run: Run) -> tuple[str, ...]:
    """Sentences above everything else."""
    simulated = any(c.sidecar.get("simulated") for c in run.captures)
    return (*((SIMULATED,) if simulated else ()), *((CPU_ONLY,) if is_cpu_only(run) else ()))


def kernels(run: Run, selection: Selection, steps: bool = True) -> pd.DataFrame:
    """The kernels of the selection; without `steps`, of all steps. InvalidSelection where nothing is left."""
    where = selection.where()
    if not steps:
        where.pop("step", None)
    chosen = grouping.select(run.kernels, where)
    if len(run.kernels) and not len(chosen):
        raise InvalidSelection(NOTHING_MATCHES)
    return chosen


def nothing_to_show(run: Run) -> bool:
    """Whether the run holds no device activity at all."""
    return len(run.kernels) == 0


NO_KERNELS = Missing(
    "Device activity",
    "No file of this run holds a kernel, a copy or an operator. The Findings tab says what was read.",
    "with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], ...)",
)


def device(run: Run) -> str:
    """What a row of the table of GPUs is: `GPU`, or `process` where there is none."""
    return "process" if is_cpu_only(run) else "GPU"


def work(run: Run) -> str:
    """`GPU work` or `CPU work`."""
    return "CPU work" if is_cpu_only(run) else "GPU work"


def devices(n: int, cpu: bool) -> str:
    """`4 GPUs`, `1 process`."""
    noun = "process" if cpu else "GPU"
    plural = "processes" if cpu else "GPUs"
    return f"{n} {noun if n == 1 else plural}"
