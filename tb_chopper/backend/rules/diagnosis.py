"""What a rule says: what costs time, the numbers that show it, its likely cause, the remedy and what it would gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from tb_chopper.backend.findings import Finding, Severity
from tb_chopper.backend.rules import thresholds

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run


class Evidence(NamedTuple):
    """One number behind a diagnosis. `unit` is one of the units of views (us, share, bytes, ...); "" for a count."""

    label: str
    value: float | str
    unit: str = ""


@dataclass(frozen=True)
class Diagnosis(Finding):
    """A finding about the training itself.

    `title`: what costs time, in a few words; `message`: one sentence with the numbers. `gain_ms`: milliseconds per step
    that the remedy would save (estimated by what `gain_how` says), None where it cannot be told. `view` and `selection`
    (gpu, step, by, focus) name the tab that shows it; `kernel` is one for the Trace tab (`at` of views.trace_link).
    `explained_by`: codes of rules that name the cause of what this one sees; where they speak of most of it, it is
    silent.
    """

    title: str = ""
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    remedy: str = ""
    gain_ms: float | None = None
    gain_how: str = ""
    gpus: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    view: str = ""
    selection: Mapping[str, int | str] = field(default_factory=dict)
    kernel: str = ""
    explained_by: tuple[str, ...] = ()


def step_ms(run: Run) -> float | None:
    """Median time of a step on its slowest GPU, in ms; None without complete steps, or if they take no time."""
    longest = run.own_times.groupby("step")["time_us"].max().median()
    return float(longest) / 1000 if longest > 0 else None


def named(gpus: Sequence[int], verb: str) -> str:
    """`GPU 3 holds`, `GPUs 0, 2 and 6 hold`."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]} {verb}s"
    return f"GPUs {', '.join(map(str, gpus[:-1]))} and {gpus[-1]} {verb}"


def largest(kernels: pd.DataFrame, size: pd.Series | None = None) -> str:
    """The kernel of the largest `size` (default: the longest) as the Trace tab takes it; "" of none."""
    if not len(kernels):
        return ""
    size = kernels["end_ns"] - kernels["start_ns"] if size is None else size
    row = kernels.loc[size.astype("float64").idxmax()]
    return f"{row['gpu']}@{row['start_ns']}"


def longest_collective(run: Run, instances: pd.DataFrame) -> str:
    """The kernel of the collective (of run.collectives) that took longest, on one of its GPUs, for the Trace tab."""
    rows = run.arrivals(where={"instance": instances["instance"].tolist()})
    return largest(rows.assign(start_ns=rows["kernel_start_ns"]), rows["end_ns"] - rows["start_ns"])


def severity(gain_ms: float | None, of_ms: float | None) -> Severity:
    """`warning` where the gain is a large part of a step, else `info`."""
    large = gain_ms is not None and of_ms is not None and gain_ms >= thresholds.LARGE_GAIN * of_ms
    return "warning" if large else "info"
