"""`at`: one kernel of a run in a link, as `gpu@start_ns`; the Trace tab jumps there."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import grouping

FORM = re.compile(r"(\d{1,9})@(-?\d{1,19})")


def largest(kernels: pd.DataFrame, codes: np.ndarray, size: np.ndarray | None = None) -> list[str]:
    """`at` of one kernel of each group: the one of the largest `size`, by default the longest; of equals the first.

    `codes`: group of each row, numbered densely from 0.
    """
    size = (kernels["end_ns"] - kernels["start_ns"]).to_numpy() if size is None else size
    gpu, start_ns = kernels["gpu"].to_numpy(), kernels["start_ns"].to_numpy()
    order = np.lexsort((gpu, start_ns, -size))
    rows = order[np.unique(codes[order], return_index=True)[1]]
    return [f"{g}@{s}" for g, s in zip(gpu[rows].tolist(), start_ns[rows].tolist(), strict=True)]


def linked(rows: pd.DataFrame, kernels: pd.DataFrame, by: list[str], size: np.ndarray | None = None) -> pd.DataFrame:
    """`rows`, one per group `by`, with `at`: a kernel of the group as `largest` picks it; missing where it has none."""
    codes, groups = grouping.number(kernels, by)
    return rows.merge(groups.assign(at=largest(kernels, codes, size)), on=by, how="left", validate="one_to_one")


def find(kernels: pd.DataFrame, at: str) -> pd.Series:
    """The row of the kernels table that `at` names; of several that start together the longest. InvalidSelection."""
    found = FORM.fullmatch(at)
    if not found:
        raise InvalidSelection(f"at={at[:100]!r}: give a kernel as gpu@start_ns, e.g. 0@1763990928000001234")
    gpu, start_ns = map(int, found.groups())
    rows = kernels[(kernels["gpu"] == gpu) & (kernels["start_ns"] == start_ns)]
    if not len(rows):
        raise InvalidSelection(f"at={at}: no kernel of GPU {gpu} starts at that time; has the run changed?")
    row: pd.Series = rows.loc[(rows["end_ns"] - rows["start_ns"]).idxmax()]
    return row
