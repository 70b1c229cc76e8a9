"""Hardware counters of a run's kernels: the dispatches of its counter passes, matched to the kernels of its traces."""

from __future__ import annotations

import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.run import Run


def of_kernels(run: Run) -> pd.DataFrame:
    """One row per kernel that has counters (index of `run.kernels`), one float64 column per counter, NaN where a kernel
    was matched in other passes only. Counters are those of another run of the same program: counts carry over, times
    do not."""
    if not run.files.counters:
        return pd.DataFrame()
    counters, pairs = run.counters.counters, run.counter_alignment.pairs.sort_values("pass", kind="stable")
    if not len(pairs):
        return pd.DataFrame()
    values = counters.loc[pairs["row"], schema.counter_names(counters)]
    # A counter of several passes (the clocks are in all of them) is that of the first.
    return values.groupby(pairs["kernel"].to_numpy()).first()
