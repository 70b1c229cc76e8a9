"""How much slower computation runs beside communication.

    D = D_0 + κ · O          duration D of a kernel of which O lies under communication; D_0 the same for equal kernels

κ is the share of the overlapped time that is lost. A kernel that is longer for another reason has more overlap, too, so
that κ is estimated through the overlap ratio o = O / D (as an instrument): the ratio of two covariances within
equal kernels, cov(D, o) / cov(O, o).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

EQUAL = ("gpu", "name", "grid", "op_args")
MOST = 0.5
"""of the overlapped time: more is not contention"""
LEAST_SPREAD = 1e-3
"""of the compute time, as squared differences of overlap ratios: where equal kernels differ by less, nothing tells"""


def contention(kernels: pd.DataFrame) -> float:
    """κ of the compute kernels of KERNELS, 0 to MOST; NaN where equal kernels overlap communication equally."""
    rows = kernels[kernels["kind"] == "compute"]
    duration = (rows["end_ns"] - rows["start_ns"]).astype("float64")
    rows, duration = rows[duration > 0], duration[duration > 0]
    overlap = rows["overlap_ns"].astype("float64")
    kind = rows.groupby(list(EQUAL), observed=True, dropna=False, sort=False).ngroup()

    def within(values: pd.Series) -> pd.Series:
        return values - values.groupby(kind).transform("mean")

    ratio = within(overlap / duration)
    if not (ratio**2 * duration).sum() > LEAST_SPREAD * duration.sum():
        return float("nan")
    shared = float((within(overlap) * ratio).sum())
    return float(np.clip((within(duration) * ratio).sum() / shared, 0.0, MOST)) if shared > 0 else float("nan")
