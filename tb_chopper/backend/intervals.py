"""Pure interval algebra on sorted int64 arrays.

A `Union` is a pair of equally long int64 arrays (starts, ends), half-open, disjoint, sorted, none empty.
Everything else here takes and gives unions, so that a length is never counted twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


class Union(NamedTuple):
    """Disjoint, sorted, non-empty half-open intervals."""

    starts: Int
    ends: Int

    def __len__(self) -> int:  # number of intervals, not of fields
        return len(self.starts)

    @property
    def length(self) -> int:
        """Total length."""
        return int(self.ends.sum() - self.starts.sum())


def union(starts: Int, ends: Int) -> Union:
    """The union of any intervals, in any order; empty and reversed ones add nothing."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if len(starts) == 0:
        return Union(starts, ends)
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Union(starts[first], reach[last])


def merge(*unions: Union) -> Union:
    """a ∪ b ∪ ..."""
    return union(np.concatenate([u.starts for u in unions]), np.concatenate([u.ends for u in unions]))


def intersect(a: Union, b: Union) -> Union:
    """a ∩ b."""
    if len(a) == 0 or len(b) == 0:
        return Union(np.empty(0, np.int64), np.empty(0, np.int64))
    # For every interval of a, the run of intervals of b that touch it.
    low = np.searchsorted(b.ends, a.starts, side="right")
    high = np.searchsorted(b.starts, a.ends, side="left")
    counts = np.maximum(high - low, 0)
    ia = np.repeat(np.arange(len(a)), counts)
    ib = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    return Union(np.maximum(a.starts[ia], b.starts[ib]), np.minimum(a.ends[ia], b.ends[ib]))


def subtract(a: Union, b: Union) -> Union:
    """a \\ b."""
    if len(a) == 0 or len(b) == 0:
        return a
    low, high = min(a.starts[0], b.starts[0]), max(a.ends[-1], b.ends[-1])
    gaps_start = np.concatenate(([low], b.ends))
    gaps_end = np.concatenate((b.starts, [high]))
    keep = gaps_end > gaps_start
    return intersect(a, Union(gaps_start[keep], gaps_end[keep]))


def covered(starts: Int, ends: Int, u: Union) -> Int:
    """|[start, end) ∩ u| of each interval; the intervals may overlap and stand in any order."""
    return np.maximum(_measure_before(ends, u) - _measure_before(starts, u), 0)


def clip(starts: Int, ends: Int, low: int, high: int) -> tuple[Int, Int]:
    """The intervals cut to [low, high); those outside become empty, none is dropped."""
    return np.clip(starts, low, high), np.clip(ends, low, high)


def _measure_before(t: Int, u: Union) -> Int:
    """Length of u to the left of each time."""
    if len(u) == 0:
        return np.zeros(len(t), np.int64)
    total = np.concatenate(([0], np.cumsum(u.ends - u.starts)))
    i = np.searchsorted(u.starts, t, side="right")
    last = np.maximum(i - 1, 0)
    return total[i] - np.where(i > 0, np.maximum(u.ends[last] - t, 0), 0)
