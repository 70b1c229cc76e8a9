"""What the rules about the host share: idle time that calls of one kind cause in every step, and on which GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from tb_chopper.backend.metrics import host
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Evidence, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

HOW_ONE = ("idle time of a step that these calls cause on GPU {gpu}, less the median of the other GPUs, which wait for "
           "it in collectives; a mean over steps, without one that stands alone")
HOW_ALL = ("idle time of a step that these calls cause on the GPU that has most of it in that step; a mean over steps, "
           "without one that stands alone")


class Stall(NamedTuple):
    """Idle time that comes back. gain_ms: per step; alone: only `gpu` has it, so that the others wait for that one;
    by_step: µs of each step that was measured."""

    gain_ms: float
    step_ms: float
    gpu: int
    alone: bool
    names: list[str]
    at: str
    rows: pd.DataFrame
    by_step: pd.Series

    @property
    def gpus(self) -> tuple[int, ...]:
        return (self.gpu,) if self.alone else tuple(sorted(map(int, self.rows["gpu"].unique())))

    @property
    def how(self) -> str:
        return HOW_ONE.format(gpu=self.gpu) if self.alone else HOW_ALL

    @property
    def said(self) -> str:
        """`GPU 2 idles for 15 ms of a step, 12 % of it`."""
        many = not self.alone and self.rows["gpu"].nunique() > 1
        who = "the GPUs idle" if many else f"GPU {self.gpu} idles"
        return f"{who} for {self.gain_ms:.3g} ms of a step, {self.gain_ms / self.step_ms:.1%} of it"

    @property
    def hit(self) -> pd.Series:
        """The steps that have it: at least half of the gain."""
        return self.by_step[self.by_step >= self.gain_ms * 1000 / 2]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(map(int, self.hit.index))

    def evidence(self) -> tuple[Evidence, ...]:
        """Idle time per step, in how many steps, and the names that cause most of it."""
        n = len(self.rows) / max(len(self.by_step) * len(self.gpus), 1)
        return (Evidence("idle per step", self.gain_ms * 1000, "us"),
                Evidence("of the step", self.gain_ms / self.step_ms, "share"),
                Evidence("steps with it", f"{len(self.hit)} of {len(self.by_step)}"),
                Evidence("idle in such a step", float(self.hit.median()), "us"),
                Evidence("calls", ", ".join(self.names[:3]), "text"),
                Evidence("calls per GPU and step", round(n, 1)))


def find(run: Run, stalled: pd.DataFrame, first: bool = True) -> Stall | None:
    """What rows of `run.stalls` cost in every step; None where that is too little, unknown, or in a CPU-only run."""
    step = step_ms(run)
    if step is None or not len(stalled) or (run.workers["device"] == "cpu").all():
        return None
    cost = host.recurring(stalled, run.steps, first)
    if cost is None:
        return None
    alone = len(cost.per_gpu) > 1 and cost.excess_us > cost.us / 2
    gain = (cost.excess_us if alone else cost.us) / 1000
    if gain < thresholds.SMALL_GAIN * step:
        return None
    rows = stalled[stalled["gpu"] == cost.gpu] if alone else stalled
    gpu = cost.gpu if alone else int(cost.per_gpu.idxmax())
    by_name = rows.groupby(rows["name"].astype(str))["idle_ns"].sum().sort_values(ascending=False)
    longest = rows.loc[rows["idle_ns"].astype("int64").idxmax()]
    return Stall(gain, step, gpu, alone, list(by_name.index), str(longest["at"]), rows,
                 cost.excess_by_step if alone else cost.by_step)
