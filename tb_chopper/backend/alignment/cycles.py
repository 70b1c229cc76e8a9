"""Clock cycles of a dispatch, without those that counting itself costs.

GRBM_GUI_ACTIVE holds some 16,000 cycles per die and dispatch more than the kernel lasts (starting and stopping the
counters, caches; measured on an MI300X with ROCm 7.1). They show as what is left at duration 0:

    cycles(kernel) = clock · duration + overhead      fitted to the dispatches of one process and device

A fit that is no plausible clock and overhead is not used.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

MOST_OVERHEAD = 60_000
"""Cycles per die; three times of what was measured."""
CLOCKS_GHZ = (0.3, 3.0)
_DISTINCT = 8
"""Kernels of different length that a fit needs"""
_SPREAD = 4.0
"""longest over shortest of them"""
_FIT = 150


def with_cycles(counters: pd.DataFrame) -> pd.DataFrame:
    """COUNTERS with two more columns: `cycles`, per die and without overhead, and `overhead_cycles` that were taken
    away (0 where no fit could be trusted). NaN where GRBM_GUI_ACTIVE or the number of dies is not known."""
    if "GRBM_GUI_ACTIVE" not in counters:
        return counters.assign(cycles=np.nan, overhead_cycles=np.nan)
    raw = counters["GRBM_GUI_ACTIVE"] / counters["xcc"].astype("float64")
    overhead = pd.Series(0.0, counters.index)
    duration = (counters["end_ns"] - counters["start_ns"]).where(counters["start_ns"] >= 0).astype("float64")
    known = raw.notna() & (duration > 0)
    kinds = pd.DataFrame({"raw": raw, "duration": duration, **{c: counters[c] for c in ("name", "grid")}})
    for _, rows in counters[known].groupby(["pass", "process", "agent"], observed=True, sort=False):
        typical = kinds.loc[rows.index].groupby(["name", "grid"], observed=True)[["raw", "duration"]].median()
        overhead[rows.index] = _overhead(typical["raw"].to_numpy(), typical["duration"].to_numpy())
    # Never more than half of a dispatch: the shortest ones are mostly overhead, and noise must not make them negative.
    overhead = overhead.clip(upper=raw / 2)
    return counters.assign(cycles=raw - overhead, overhead_cycles=overhead.where(raw.notna()))


def _overhead(cycles: np.ndarray, duration: np.ndarray) -> float:
    """By the median of the slopes between all pairs (Theil and Sen), which a few odd kernels do not move."""
    order = np.argsort(duration)[np.unique(np.linspace(0, len(duration) - 1, min(len(duration), _FIT)).astype(int))]
    cycles, duration = cycles[order], duration[order]
    if len(np.unique(duration)) < _DISTINCT or duration[-1] < _SPREAD * duration[0]:
        return 0.0
    i, j = np.triu_indices(len(duration), 1)
    apart = duration[j] > duration[i]
    clock = float(np.median((cycles[j] - cycles[i])[apart] / (duration[j] - duration[i])[apart]))
    left = cycles - clock * duration
    overhead = float(np.median(left))
    trusted = CLOCKS_GHZ[0] <= clock <= CLOCKS_GHZ[1] and 0 < overhead <= MOST_OVERHEAD
    steady = np.median(np.abs(left - overhead)) <= 0.25 * overhead if overhead else False
    return overhead if trusted and steady else 0.0
