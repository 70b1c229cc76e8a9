"""Samples over time as figures draw them: one axis for all panels, and no more points than a screen has columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend.alignment.curve import GAP
from tb_chopper.backend.views import text

COLUMNS = 800
"""Columns of pixels that a trace of a figure is drawn for; each keeps its first, last, lowest and highest sample."""


class Axis(NamedTuple):
    """Time from `start_ns` on, in `unit`s of `divisor` µs."""

    start_ns: int
    end_ns: int
    unit: str
    divisor: float

    def x(self, t_ns: np.ndarray) -> np.ndarray:
        return np.asarray((np.asarray(t_ns, np.int64) - self.start_ns) / 1000 / self.divisor)


def axis(start_ns: int, end_ns: int, unit_for_ns: int | None = None) -> Axis:
    """The axis of a stretch of time; `unit_for_ns`: the longest stretch that stands beside it."""
    unit, divisor = text.time_unit((unit_for_ns or end_ns - start_ns) / 1000)
    return Axis(start_ns, end_ns, unit, divisor)


def line(t_ns: np.ndarray, values: np.ndarray, time: Axis) -> tuple[np.ndarray, np.ndarray]:
    """x and y of a line through samples in order of time: first, last, lowest and highest of each column, nothing
    else; broken (NaN) at a pause of more than three periods that a screen can show."""
    t_ns, values = t_ns[~np.isnan(values)], values[~np.isnan(values)]
    if len(t_ns) < 2:
        return time.x(t_ns), values
    kept = _extremes(t_ns, values, time)
    period, column = float(np.median(np.diff(t_ns))), max(time.end_ns - time.start_ns, 1) / COLUMNS
    x, y = time.x(t_ns[kept]), values[kept]
    # Neighbours of one column may lie apart although samples were left out between them: only those of a pause break.
    breaks = np.flatnonzero(np.diff(t_ns) > GAP * max(period, column))
    at = np.searchsorted(kept, breaks, side="right")
    return np.insert(x, at, time.x(t_ns[breaks])), np.insert(y, at, np.nan)


def _extremes(t_ns: np.ndarray, values: np.ndarray, time: Axis) -> np.ndarray:
    """Places of the samples that a line of COLUMNS columns needs, rising."""
    if len(t_ns) <= 4 * COLUMNS:
        return np.arange(len(t_ns))
    column = column_of(t_ns, time, COLUMNS)
    order = np.lexsort((values, column))
    edges = np.flatnonzero(np.diff(column[order], prepend=-1))
    lasts = np.append(edges[1:], len(order)) - 1
    first = np.flatnonzero(np.diff(column, prepend=-1))
    last = np.append(first[1:], len(column)) - 1
    return np.unique(np.concatenate((order[edges], order[lasts], first, last)))


def column_of(t_ns: np.ndarray, time: Axis, columns: int) -> np.ndarray:
    """The column, from 0, that each moment falls into."""
    width = max(time.end_ns - time.start_ns, 1) / columns
    return np.clip(((t_ns - time.start_ns) / width).astype(np.int64), 0, columns - 1)


def columns_for(t_ns: np.ndarray, time: Axis, most: int = COLUMNS) -> int:
    """How many columns hold about one sample or more each, where `t_ns` are the times of one source."""
    period = float(np.median(np.diff(t_ns))) if len(t_ns) > 1 else 0.0
    return most if period <= 0 else int(np.clip((time.end_ns - time.start_ns) / period, 1, most))


def band(samples: pd.DataFrame, column: str, time: Axis) -> pd.DataFrame:
    """Several GPUs as one row per column of the screen: x, low and high over all samples, median over the GPUs' means.
    samples: gpu, t_ns, `column`. Rows of NaN stand where a pause is."""
    known = samples[samples[column].notna()]
    t_ns = known["t_ns"].to_numpy()
    if not len(known):
        return pd.DataFrame({"x": [], "low": [], "median": [], "high": []}, dtype=float)
    one = known.loc[known["gpu"] == known["gpu"].iloc[0], "t_ns"].to_numpy()
    n = columns_for(one, time)
    place = column_of(t_ns, time, n)
    values = known.assign(place=place)
    extremes = values.groupby("place")[column].agg(low="min", high="max")
    means = values.groupby(["place", "gpu"])[column].mean().groupby(level=0).median()
    width = (time.end_ns - time.start_ns) / n
    out = extremes.assign(median=means, x=time.x((time.start_ns + (extremes.index + 0.5) * width).astype("int64")))
    pauses = np.flatnonzero(np.diff(out.index) > GAP)
    holes = pd.DataFrame({"x": out["x"].to_numpy()[pauses]}, index=out.index[pauses] + 0.5)
    return pd.concat([out, holes]).sort_index()[["x", "low", "median", "high"]].reset_index(drop=True)
