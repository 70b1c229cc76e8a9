"""`at`: one kernel of a run in a link, as `gpu@start_ns`; the Trace tab jumps there."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection

FORM = re.compile(r"(\d{1,9})@(-?\d{1,19})")


def longest(kernels: pd.DataFrame, codes: np.ndarray, n: int) -> list[str | None]:
    """`at` of the longest kernel of each of the n groups; None for a group without one.

    `codes`: the group of each row, -1 for none. Of equally long kernels the first.
    """
    duration = (kernels["end_ns"] - kernels["start_ns"]).to_numpy()
    order = np.lexsort((kernels["start_ns"].to_numpy(), -duration))
    group, first = np.unique(np.asarray(codes)[order], return_index=True)
    gpu, start_ns = kernels["gpu"].to_numpy(), kernels["start_ns"].to_numpy()
    out: list[str | None] = [None] * n
    for code, row in zip(group.tolist(), order[first].tolist(), strict=True):
        if code >= 0:
            out[code] = f"{gpu[row]}@{start_ns[row]}"
    return out


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
