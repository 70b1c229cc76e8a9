"""The longest common subsequence against the textbook's table, on every kind of difference."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_chopper.backend.alignment.sequences import common


def longest(a: list[int], b: list[int]) -> int:
    """Length by dynamic programming."""
    row = [0] * (len(b) + 1)
    for x in a:
        new = [0]
        for j, y in enumerate(b):
            new.append(row[j] + 1 if x == y else max(row[j + 1], new[j]))
        row = new
    return row[-1]


def check(a: list[int], b: list[int]) -> None:
    x, y = common(np.array(a, np.int64), np.array(b, np.int64))
    assert len(x) == len(y) == longest(a, b)
    assert [a[i] for i in x] == [b[i] for i in y]
    assert (np.diff(x) > 0).all() and (np.diff(y) > 0).all()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=30), st.lists(st.integers(0, 4), max_size=30))
def test_as_long_as_the_textbooks(a, b):
    check(a, b)


def test_corners():
    for a, b in (([], []), ([1], []), ([1], [2]), ([1, 2, 3], [1, 2, 3]), ([1, 2], [2, 1]), ([1] * 5, [1] * 9)):
        check(a, b)


def test_thousands_of_kernels_with_a_twentieth_missing():
    rng = np.random.default_rng(0)
    step = np.tile(rng.integers(0, 40, 60), 70)
    kept = np.flatnonzero(rng.random(len(step)) > 0.05)
    started = time.process_time()
    x, _ = common(step, step[kept])
    assert len(x) == len(kept) and time.process_time() - started < 5


def test_sequences_that_have_nothing_in_common_give_up():
    a, b = np.arange(300), np.arange(1000, 1300)
    assert len(common(a, b, give_up=50)[0]) == 0
