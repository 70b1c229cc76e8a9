"""How much slower computation runs beside communication.

    D = D_0 + κ · O          duration D of a kernel of which O lies under communication; D_0 the same for equal kernels

κ is the share of the overlapped time that is lost. A kernel that is longer for another reason has more overlap, too, so
that κ is estimated through the overlap ratio o = O / D (as an instrument): the ratio of two covariances within
equal kernels, cov(D, o) / cov(O, o), for each type of work, and its mean over the overlapped time. A type that tells
nothing counts as one that loses nothing.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

EQUAL = ("gpu", "name", "grid", "op_args")
MOST = 0.5
"""of the overlapped time: more is not contention"""
UNCERTAIN = 0.1
"""standard error of κ from which a type of work tells nothing"""


def contention(kernels: pd.DataFrame) -> float:
    """κ of the compute kernels of KERNELS, 0 to MOST; NaN where equal kernels overlap communication equally, or differ
    too much for other reasons. Kernels outside of steps count where there are no others."""
    rows = kernels[kernels["kind"] == "compute"]
    rows = rows[rows["step"].notna()] if rows["step"].notna().any() else rows
    rows = rows[rows["end_ns"] > rows["start_ns"]]
    told = [(kappa, own["overlap_ns"].sum()) for _, own in rows.groupby("op_type", observed=True)
            for kappa, error in [_slope(own)] if error < UNCERTAIN]
    return float(sum(k * n for k, n in told) / rows["overlap_ns"].sum()) if told else float("nan")


def _slope(rows: pd.DataFrame) -> tuple[float, float]:
    """κ of one type of work and its standard error (infinite where nothing tells)."""
    duration = (rows["end_ns"] - rows["start_ns"]).astype("float64")
    overlap = rows["overlap_ns"].astype("float64")
    equal = rows.groupby(list(EQUAL), observed=True, dropna=False, sort=False).ngroup()

    def within(values: pd.Series) -> pd.Series:
        return values - values.groupby(equal).transform("mean")

    ratio, longer, covered = within(overlap / duration), within(duration), within(overlap)
    shared = float((covered * ratio).sum())
    if not shared > 0:
        return 0.0, float("inf")
    kappa = float((longer * ratio).sum()) / shared
    error = float(np.sqrt((((longer - kappa * covered) * ratio) ** 2).sum())) / shared
    return float(np.clip(kappa, 0.0, MOST)), error
