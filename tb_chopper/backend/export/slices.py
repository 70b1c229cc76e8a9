"""Slices that may overlap onto lanes where they only nest, as begin and end events in order of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Edge(NamedTuple):
    """A slice begins (`row` is its row) or the innermost open one ends (`row` is -1)."""

    t_ns: int
    row: int


def lanes(start_ns: np.ndarray, end_ns: np.ndarray) -> list[np.ndarray]:
    """Rows of each lane, in order of start, the longest first of equals. The first lane takes what it can; a slice
    that would end after one that it began in goes to the next lane."""
    order = np.lexsort((-end_ns, start_ns))
    start, end = start_ns[order], end_ns[order]
    found: list[np.ndarray] = []
    while len(order):
        fits = _nesting(start.tolist(), end.tolist())
        found.append(order[fits])
        order, start, end = order[~fits], start[~fits], end[~fits]
    return found


def _nesting(start: list[int], end: list[int]) -> np.ndarray:
    fits = np.ones(len(start), bool)
    open_ends: list[int] = []
    for i, (t, until) in enumerate(zip(start, end, strict=True)):
        while open_ends and open_ends[-1] <= t:
            open_ends.pop()
        if open_ends and open_ends[-1] < until:
            fits[i] = False
        else:
            open_ends.append(until)
    return fits


def edges(rows: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> Iterator[Edge]:
    """Begin and end events of a lane of `lanes`, in an order that closes every slice before the next one begins."""
    open_ends: list[int] = []
    for row, t, until in zip(rows.tolist(), start_ns[rows].tolist(), end_ns[rows].tolist(), strict=True):
        while open_ends and open_ends[-1] <= t:
            yield Edge(open_ends.pop(), -1)
        yield Edge(t, row)
        open_ends.append(max(t, until))
    while open_ends:
        yield Edge(open_ends.pop(), -1)
