"""What two sequences have in common: the longest common subsequence, in O(n · differences).

E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", Algorithmica 1 (1986); all diagonals at once.
"""

from __future__ import annotations

import numpy as np

GIVE_UP = 4000
"""Sequences with more differences than this have nothing to do with each other, and memory is not for proving it."""


def common(a: np.ndarray, b: np.ndarray, give_up: int = GIVE_UP) -> tuple[np.ndarray, np.ndarray]:
    """Indices into `a` and `b` (int arrays) of a longest common subsequence, both rising; of several, one that
    matches as early as it can. Only the common beginning where there are more than `give_up` differences.
    """
    n = min(len(a), len(b))
    equal = a[:n] == b[:n]
    head = n if equal.all() else int(np.argmin(equal))
    rest_a, rest_b = _different(a[head:], b[head:], give_up)
    return np.concatenate((np.arange(head), head + rest_a)), np.concatenate((np.arange(head), head + rest_b))


def _different(a: np.ndarray, b: np.ndarray, give_up: int) -> tuple[np.ndarray, np.ndarray]:
    n, m = len(a), len(b)
    nothing = np.empty(0, np.int64)
    if n == 0 or m == 0:
        return nothing, nothing
    # far[k + m + 1]: how far along `a` the best path on diagonal k (index in a − index in b) has come.
    far = np.full(n + m + 3, -1, np.int64)
    far[m + 2] = 0
    history = []
    for d in range(min(n + m, give_up) + 1):
        k = np.arange(max(-d, -m + (d - m) % 2 if d > m else -d), min(d, n - (d - n) % 2 if d > n else d) + 1, 2)
        history.append(far[max(m - d, 0):m + d + 3].copy())
        down, right = far[k + m + 2], far[k + m] + 1
        x = np.where((k == -d) | ((k != d) & (right <= down)), down, right)
        x = _slide(a, b, x, k)
        far[k + m + 1] = x
        if ((x >= n) & (x - k >= m)).any():
            return _backtrack(history, n, m)
    return nothing, nothing


def _slide(a: np.ndarray, b: np.ndarray, x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Each path as far as its diagonal runs through equal elements."""
    moving = np.arange(len(x))
    while len(moving):
        at, other = x[moving], x[moving] - k[moving]
        inside = (at < len(a)) & (other < len(b)) & (other >= 0)
        moving, at, other = moving[inside], at[inside], other[inside]
        moving = moving[a[at] == b[other]]
        x[moving] += 1
    return x


def _backtrack(history: list[np.ndarray], n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = n, m
    pairs_x: list[np.ndarray] = []
    pairs_y: list[np.ndarray] = []
    for d in range(len(history) - 1, -1, -1):
        first = max(m - d, 0)  # index in `far` of the first entry kept

        def far(k: int, kept: np.ndarray = history[d], first: int = first) -> int:
            return int(kept[k + m + 1 - first])

        k = x - y
        down = d > 0 and (k == -d or (k != d and far(k - 1) + 1 <= far(k + 1)))
        before = 0 if d == 0 else far(k + 1) if down else far(k - 1) + 1
        pairs_x.append(np.arange(before, x))
        pairs_y.append(np.arange(before - k, y))
        x, y = (before, before - k - 1) if down else (before - 1, before - k)
    return np.concatenate(pairs_x[::-1]), np.concatenate(pairs_y[::-1])
