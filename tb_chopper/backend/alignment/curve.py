"""A sampled quantity over time: means and integrals over any intervals.

Between two samples the quantity is taken as a straight line. A pause of more than GAP periods is not bridged: there
each sample stands for half a period on its side, and the rest is unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

GAP = 3.0


class Places(NamedTuple):
    """Intervals as seen by a grid: the stretch around each one's middle (0: before the first node), and which of
    them are longer than their stretch."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    cell: np.ndarray
    long: np.ndarray


class Grid:
    """The times of samples (int64, rising) as nodes with stretches between them; stretch i lies before node i.
    `sample` is the sample whose value each node has; `known` is False for the stretch of a pause."""

    def __init__(self, t_ns: np.ndarray) -> None:
        n = len(t_ns)
        self.period_ns = int(np.median(np.diff(t_ns))) if n > 1 else 0
        half = max(self.period_ns // 2, 1)
        wide = np.flatnonzero(np.diff(t_ns) > GAP * max(self.period_ns, 1))
        ends = np.array([0, n - 1] if n else [], np.int64)
        outside = t_ns[ends] + np.array([-half, half], np.int64)[:len(ends)]
        # Each end of a pause, and of the whole, is a node of its own with the value beside it.
        nodes = np.concatenate((t_ns, t_ns[wide] + half, t_ns[wide + 1] - half, outside))
        order = np.argsort(nodes, kind="stable")
        self.nodes = nodes[order]
        self.sample = np.concatenate((np.arange(n), wide, wide + 1, ends))[order]
        self.length_ns = np.diff(self.nodes)
        self.known = np.ones(len(self.length_ns), bool)
        self.known[np.searchsorted(self.nodes, t_ns[wide] + half)] = False
        self._covered = np.concatenate(([0], np.cumsum(np.where(self.known, self.length_ns, 0))))
        never_long = np.iinfo(np.int64).max
        self._longest = np.concatenate(([never_long], self.length_ns, [never_long]))

    def place(self, start_ns: np.ndarray, end_ns: np.ndarray) -> Places:
        duration = end_ns - start_ns
        cell = np.searchsorted(self.nodes, start_ns + duration // 2, side="right")
        return Places(start_ns, end_ns, cell, np.flatnonzero(duration > self._longest[cell]))

    def covered_ns(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """The part of each interval in which the quantity is known."""
        if not len(self.length_ns):
            return np.zeros(len(start_ns), np.int64)
        return self._covered_before(end_ns) - self._covered_before(start_ns)

    def locate(self, t_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index of the node before each time, and the time since it; times outside are moved to the ends."""
        t = np.clip(t_ns, self.nodes[0], self.nodes[-1])
        node = np.clip(np.searchsorted(self.nodes, t, side="right") - 1, 0, len(self.length_ns) - 1)
        return node, t - self.nodes[node]

    def _covered_before(self, t_ns: np.ndarray) -> np.ndarray:
        node, into = self.locate(t_ns)
        return self._covered[node] + np.where(self.known[node], into, 0)


class Curve:
    """Values (one per sample of the grid, none missing) as a function of time."""

    def __init__(self, grid: Grid, values: np.ndarray) -> None:
        self.grid = grid
        level = values[grid.sample]
        length = grid.length_ns.astype(np.float64)
        middle = (level[:-1] + level[1:]) / 2
        self._left = level[:-1]
        self._slope = np.divide(np.diff(level), length, out=np.zeros(len(length)), where=length > 0)
        self._cell_mean = np.concatenate(([np.nan], np.where(grid.known, middle, np.nan), [np.nan]))
        # Integrals of the distance from the mean: small numbers lose nothing over long times.
        self._mean = float(np.mean(values)) if len(values) else 0.0
        area = np.where(grid.known, (middle - self._mean) * length, 0.0)
        self._area = np.concatenate(([0.0], np.cumsum(area)))

    def integral(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """value × ns over the known part of each interval; 0 where nothing is known."""
        if not len(self._left):
            return np.zeros(len(start_ns))
        area = self._area_before(end_ns) - self._area_before(start_ns)
        return area + self._mean * self.grid.covered_ns(start_ns, end_ns)

    def mean(self, places: Places) -> np.ndarray:
        """Time-weighted mean over each interval. One that is shorter than the samples are apart shares the mean of
        the stretch between the two samples around its middle. NaN where less than half of it is known."""
        out = self._cell_mean[places.cell]
        if len(places.long):
            a, b = places.start_ns[places.long], places.end_ns[places.long]
            covered = self.grid.covered_ns(a, b)
            known = 2 * covered >= b - a
            out[places.long] = np.where(known, self.integral(a, b) / np.maximum(covered, 1), np.nan)
        return out

    def _area_before(self, t_ns: np.ndarray) -> np.ndarray:
        node, into = self.grid.locate(t_ns)
        x = into.astype(np.float64)
        part = (self._left[node] - self._mean) * x + self._slope[node] * x * x / 2
        return self._area[node] + np.where(self.grid.known[node], part, 0.0)


def rise(t_ns: np.ndarray, counter: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """What a counter (rising, sampled at t_ns) counted over intervals, linear between samples however far apart they
    are: it goes on counting. NaN for intervals that reach beyond the samples."""
    if len(t_ns) < 2:
        return np.full(len(start_ns), np.nan)
    origin = t_ns[0]
    x = (t_ns - origin).astype(np.float64)
    base = counter - counter[0]
    first, last = ((t - origin).astype(np.float64) for t in (start_ns, end_ns))
    counted = np.interp(last, x, base) - np.interp(first, x, base)
    return np.where((start_ns >= origin) & (end_ns <= t_ns[-1]), counted, np.nan)
