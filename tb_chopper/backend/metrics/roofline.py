"""The roofline: what rate an operation reaches, and what its FLOPs per byte allow (docs/metrics.md, "Roofline").

    intensity  = FLOPs / bytes
    attainable = min(peak, intensity · memory bandwidth)
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import flops
from tb_chopper.backend.classify import COMPUTE
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.efficiency import Gpus
from tb_chopper.backend.metrics.grouping import By, Where

COMPUTE_BOUND, MEMORY_BOUND = "compute", "memory"


def roofline(kernels: pd.DataFrame, gpus: Gpus, by: By = "operation", where: Where = None,
             bytes_measured: pd.Series | None = None) -> pd.DataFrame:
    """One row per group of `by`: flop, bytes, bytes_source, time_us (of its compute kernels), intensity (FLOP/B),
    flop_per_s, bytes_per_s, peak_flop_per_s, peak_at_clock_flop_per_s (NaN without clock_mhz in `kernels`),
    memory_bytes_per_s, attainable_flop_per_s, bound (compute, memory or null), share_of_attainable.

    `bytes_measured`: by kernel, from counters (bytes_source `measured`); else from the recorded shapes (`shapes`: every
    input read once, every output written once, so a lower bound of the traffic). Only kernels whose FLOPs and bytes
    are both known enter; known_share is their part of the group's compute time.
    """
    by = grouping.columns(by)
    cost = flops.kernel_costs(kernels)
    rows = grouping.select(kernels[kernels["kind"].cat.codes == COMPUTE], where)
    cost = cost.loc[rows.index]
    traffic = cost["bytes"] if bytes_measured is None else bytes_measured.reindex(rows.index)
    duration = (rows["end_ns"] - rows["start_ns"]) / 1e9
    peak = pd.Series([p.flop_per_s if (h := gpus.get(g)) and (p := h.peak(d if isinstance(d, str) else "bf16"))
                      else np.nan for g, d in zip(rows["gpu"], cost["dtype"].astype(object), strict=True)], rows.index)
    memory = rows["gpu"].map({g: h.memory_bytes_per_s for g, h in gpus.items() if h}).astype("float64")
    f_peak = rows["gpu"].map({g: h.f_peak_mhz for g, h in gpus.items() if h}).astype("float64")
    clock = rows["clock_mhz"] if "clock_mhz" in rows else pd.Series(np.nan, rows.index)
    known = cost["flop"].notna() & traffic.notna()
    codes, groups = grouping.number(rows, by)
    n = len(groups)

    def total(values: pd.Series, of: pd.Series = known) -> np.ndarray:
        return np.bincount(codes, values.where(of, 0.0), n)

    def mean(values: pd.Series) -> np.ndarray:
        """Weighted by time, over the kernels that have it."""
        has = known & values.notna()
        return _over(total(values * duration, has), total(duration, has))

    seconds, flop, moved = total(duration), total(cost["flop"]), total(traffic)
    out = groups.assign(
        flop=flop, bytes=moved, bytes_source="shapes" if bytes_measured is None else "measured",
        time_us=seconds * 1e6, known_share=_over(seconds, total(duration, known | True)),
        intensity=_over(flop, moved), flop_per_s=_over(flop, seconds), bytes_per_s=_over(moved, seconds),
        peak_flop_per_s=mean(peak), peak_at_clock_flop_per_s=mean(peak * clock / f_peak),
        memory_bytes_per_s=mean(memory))
    by_memory = out["intensity"] * out["memory_bytes_per_s"]
    out["attainable_flop_per_s"] = np.minimum(by_memory, out["peak_flop_per_s"])
    bound = pd.Series(np.where(by_memory < out["peak_flop_per_s"], MEMORY_BOUND, COMPUTE_BOUND), dtype=object)
    out["bound"] = bound.where(out["attainable_flop_per_s"].notna(), None)
    # Without FLOPs the roof is the bandwidth itself.
    share = np.where(flop > 0, _over(out["flop_per_s"], out["attainable_flop_per_s"]),
                     _over(out["bytes_per_s"], out["memory_bytes_per_s"]))
    return out.assign(share_of_attainable=share)


def _over(part: np.ndarray | pd.Series, whole: np.ndarray | pd.Series) -> np.ndarray:
    part, whole = np.asarray(part, float), np.asarray(whole, float)
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
