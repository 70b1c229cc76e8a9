"""Interval algebra against a brute-force count of whole units of time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tb_chopper.backend import intervals as iv

SPAN = 40
pieces = st.lists(st.tuples(st.integers(0, SPAN), st.integers(-3, 12)), max_size=12)


def arrays(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([s for s, _ in spans], np.int64)
    return start, start + np.array([d for _, d in spans], np.int64)


def units(spans: list[tuple[int, int]]) -> set[int]:
    """Every unit of time that some interval covers."""
    return {t for s, d in spans for t in range(s, s + d)}


def units_of(u: iv.Union) -> set[int]:
    return {t for s, e in zip(u.starts, u.ends, strict=True) for t in range(s, e)}


def is_canonical(u: iv.Union) -> bool:
    return bool((u.ends > u.starts).all() and (u.starts[1:] > u.ends[:-1]).all())


@given(pieces)
def test_a_union_covers_each_unit_once(spans):
    u = iv.union(*arrays(spans))
    assert units_of(u) == units(spans)
    assert u.length == len(units(spans))
    assert is_canonical(u)


@given(pieces, pieces)
def test_set_operations(a, b):
    ua, ub = iv.union(*arrays(a)), iv.union(*arrays(b))
    assert units_of(iv.intersect(ua, ub)) == units(a) & units(b)
    assert units_of(iv.subtract(ua, ub)) == units(a) - units(b)
    assert units_of(iv.merge(ua, ub)) == units(a) | units(b)
    assert all(is_canonical(iv.merge(u)) for u in (ua, ub))


@given(pieces, pieces)
def test_covered_length_of_each_interval(spans, cover):
    got = iv.covered(*arrays(spans), iv.union(*arrays(cover)))
    assert got.tolist() == [len({*range(s, s + d)} & units(cover)) for s, d in spans]


def test_nanoseconds_since_the_epoch_stay_exact():
    t = 1_700_000_000_000_000_001
    u = iv.union(np.array([t, t + 3]), np.array([t + 2, t + 4]))
    assert u.length == 3
    assert iv.covered(np.array([t + 1]), np.array([t + 4]), u).tolist() == [2]
