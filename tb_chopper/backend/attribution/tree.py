"""The nesting of host scopes: who was running inside whom, per thread, by containment in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]

SLACK_NS = 2
"""How far a child may reach out of its parent: clocks of different records are rounded differently."""


def take(values: NDArray[Any], index: Index) -> NDArray[Any]:
    """`values[index]`; where the index is -1: -1, or False of masks."""
    missing = False if values.dtype == bool else -1
    if len(values) == 0:
        return np.full(len(index), missing, values.dtype)
    return np.where(index >= 0, values[index], missing)


@dataclass(frozen=True)
class Tree:
    """Nodes sorted by (thread, start, longest first), so that a parent stands before its children.

    `row` is the row each node has in the arrays given to `build`; `parent` is a node, -1 at the top. Every other
    array is indexed by node.
    """

    row: Index
    thread: Int
    start_ns: Int
    end_ns: Int
    parent: Index

    def __len__(self) -> int:
        return len(self.row)

    def nearest(self, nodes: Index, marked: Mask) -> Index:
        """The closest ancestor of each node that is marked, the node itself included; -1 where there is none."""
        found = nodes.copy()
        active = np.flatnonzero(found >= 0)
        while len(active):
            active = active[~marked[found[active]]]
            found[active] = self.parent[found[active]]
            active = active[found[active] >= 0]
        return found

    def locate(self, thread: Int, time_ns: Int) -> Index:
        """The innermost node of a thread that runs at a time; -1 where none does."""
        found = self._last_started(thread, time_ns)
        active = np.flatnonzero(found >= 0)
        while len(active):
            active = active[self.end_ns[found[active]] <= time_ns[active]]
            found[active] = self.parent[found[active]]
            active = active[found[active] >= 0]
        return found

    def _last_started(self, thread: Int, time_ns: Int) -> Index:
        found = np.full(len(time_ns), -1, np.intp)
        by_thread = np.argsort(thread, kind="stable")
        borders = np.flatnonzero(np.diff(thread[by_thread])) + 1
        for asked in np.split(by_thread, borders) if len(thread) else ():
            low, high = np.searchsorted(self.thread, [thread[asked[0]], thread[asked[0]] + 1])
            last = low + np.searchsorted(self.start_ns[low:high], time_ns[asked], side="right") - 1
            found[asked] = np.where(last >= low, last, -1)
        return found


def build(thread: Int, start_ns: Int, end_ns: Int) -> Tree:
    """The tree of any intervals. One that ends after its surroundings is no child of them."""
    row = _order(thread, start_ns, end_ns)
    thread, start_ns, end_ns = thread[row], start_ns[row], end_ns[row]
    return Tree(row, thread, start_ns, end_ns, _parents(thread, start_ns, end_ns))


def _order(thread: Int, start_ns: Int, end_ns: Int) -> Index:
    if len(thread) and _is_sorted(thread, start_ns, end_ns):
        return np.arange(len(thread))
    return np.lexsort((-end_ns, start_ns, thread))


def _is_sorted(thread: Int, start_ns: Int, end_ns: Int) -> bool:
    same_thread, same_start = thread[1:] == thread[:-1], start_ns[1:] == start_ns[:-1]
    later = start_ns[1:] > start_ns[:-1]
    return bool(np.all((thread[1:] > thread[:-1])
                       | (same_thread & (later | (same_start & (end_ns[1:] <= end_ns[:-1]))))))


def _parents(thread: Int, start_ns: Int, end_ns: Int) -> Index:
    """The closest earlier node that contains each node.

    Everybody first asks its predecessor. Who is refused asks the one that the refuser asks at that moment: all
    between the two end before the refuser does, so none of them can be the parent. Chains of siblings are thus
    crossed in doubling steps, and no assumption about nesting is needed.
    """
    n = len(start_ns)
    asked = np.arange(-1, n - 1, dtype=np.intp)
    if n == 0:
        return asked
    asked[np.concatenate(([True], thread[1:] != thread[:-1]))] = -1
    reach = end_ns + SLACK_NS
    active = np.flatnonzero(asked >= 0)
    while len(active):
        candidate = asked[active]
        refused = (reach[candidate] < end_ns[active]) | (end_ns[candidate] <= start_ns[active])
        active, candidate = active[refused], candidate[refused]
        asked[active] = asked[candidate]
        active = active[asked[active] >= 0]
    return asked
