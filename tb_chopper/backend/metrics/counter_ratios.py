"""Utilizations from hardware counters, per group of kernels (docs/metrics.md, "Derived counters").

Each is a ratio of sums over the same dispatches of one pass, so that long kernels weigh more and no two passes mix.
C: CUs, G: cycles per die while the kernel ran alone.

    matrix_utilization  SQ_VALU_MFMA_BUSY_CYCLES / (G · C · 4)
    cu_active           4 · SQ_BUSY_CU_CYCLES / (G · C)          SQ_BUSY_CU_CYCLES counts quad-cycles
    wave_occupancy      4 · SQ_WAVE_CYCLES / (G · C · 32)        32 waves fit into a CU
    valu_busy           SQ_ACTIVE_INST_VALU / (G · C)
    l2_hit              TCC_HIT_sum / (TCC_HIT_sum + TCC_MISS_sum)
    fabric_read_gbs, fabric_write_gbs
                        bytes between L2 and fabric (Infinity Cache hits and peer traffic included: not HBM), over the
                        time in the trace
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend.alignment.cycles import with_cycles
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where

Term = Callable[[pd.DataFrame], pd.Series]


class Ratio(NamedTuple):
    """part over whole; both get a table of dispatches with counters, cycles, units and act_ns (time in the trace).
    `most`: the largest value that makes sense."""

    needs: tuple[str, ...]
    part: Term
    whole: Term
    most: float = np.inf


def _unit_cycles(v: pd.DataFrame) -> pd.Series:
    return v["cycles"] * v["units"]


def _read_bytes(v: pd.DataFrame) -> pd.Series:
    narrow, all_, wide = v["TCC_EA0_RDREQ_32B_sum"], v["TCC_EA0_RDREQ_sum"], v["TCC_BUBBLE_sum"]
    return 128 * wide + 64 * (all_ - wide - narrow) + 32 * narrow


def _time(v: pd.DataFrame) -> pd.Series:
    return v["act_ns"]


RATIOS: dict[str, tuple[Ratio, ...]] = {
    "matrix_utilization": (
        Ratio(("SQ_VALU_MFMA_BUSY_CYCLES", "cycles"), lambda v: v["SQ_VALU_MFMA_BUSY_CYCLES"],
              lambda v: 4 * _unit_cycles(v), 1.0),
        Ratio(("sm__pipe_tensor_cycles_active.avg", "sm__cycles_elapsed.avg"),
              lambda v: v["sm__pipe_tensor_cycles_active.avg"], lambda v: v["sm__cycles_elapsed.avg"], 1.0)),
    "cu_active": (
        Ratio(("SQ_BUSY_CU_CYCLES", "cycles"), lambda v: 4 * v["SQ_BUSY_CU_CYCLES"], _unit_cycles, 1.0),
        Ratio(("sm__cycles_active.avg", "sm__cycles_elapsed.avg"), lambda v: v["sm__cycles_active.avg"],
              lambda v: v["sm__cycles_elapsed.avg"], 1.0)),
    "wave_occupancy": (
        Ratio(("SQ_WAVE_CYCLES", "cycles"), lambda v: 4 * v["SQ_WAVE_CYCLES"], lambda v: 32 * _unit_cycles(v), 1.0),
        Ratio(("sm__warps_active.avg.pct_of_peak_sustained_active", "sm__cycles_active.avg"),
              lambda v: v["sm__warps_active.avg.pct_of_peak_sustained_active"] / 100 * v["sm__cycles_active.avg"],
              lambda v: v["sm__cycles_active.avg"], 1.0)),
    "valu_busy": (
        Ratio(("SQ_ACTIVE_INST_VALU", "cycles"), lambda v: v["SQ_ACTIVE_INST_VALU"], _unit_cycles, 1.0),),
    "l2_hit": (
        Ratio(("TCC_HIT_sum", "TCC_MISS_sum"), lambda v: v["TCC_HIT_sum"],
              lambda v: v["TCC_HIT_sum"] + v["TCC_MISS_sum"], 1.0),
        Ratio(("lts__t_sector_hit_rate.pct", "sm__cycles_elapsed.avg"),
              lambda v: v["lts__t_sector_hit_rate.pct"] / 100 * v["sm__cycles_elapsed.avg"],
              lambda v: v["sm__cycles_elapsed.avg"], 1.0)),
    "fabric_read_gbs": (
        Ratio(("FETCH_SIZE",), lambda v: 1024 * v["FETCH_SIZE"], _time),
        Ratio(("TCC_EA0_RDREQ_32B_sum", "TCC_EA0_RDREQ_sum", "TCC_BUBBLE_sum"), _read_bytes, _time),
        Ratio(("dram__bytes_read.sum",), lambda v: v["dram__bytes_read.sum"], _time)),
    "fabric_write_gbs": (
        Ratio(("WRITE_SIZE",), lambda v: 1024 * v["WRITE_SIZE"], _time),
        Ratio(("dram__bytes_write.sum",), lambda v: v["dram__bytes_write.sum"], _time)),
}
"""By name, for each set of counters that tells it; the first that was collected counts."""


def counter_ratios(kernels: pd.DataFrame, counters: pd.DataFrame, agents: pd.DataFrame, pairs: pd.DataFrame,
                   by: By = "operation", where: Where = None) -> pd.DataFrame:
    """One row per group of `by` (any columns of KERNELS) with a column per RATIOS (NaN: not collected) and
    matched_share: the part of the group's kernel time that has any counters.

    Values above the possible (1 for shares) are cut to it: counting takes place a little longer than the kernel.
    """
    by = grouping.columns(by)
    rows = grouping.select(kernels[kernels["activity"] == "kernel"], where)
    codes, groups = grouping.number(rows, by)
    place = pd.Series(codes, rows.index)
    time = (rows["end_ns"] - rows["start_ns"]).astype("float64")
    pairs = pairs[pairs["kernel"].isin(rows.index)]
    units = counters["gpu_index"].map(_units(agents)).astype("float64")
    values = with_cycles(counters).assign(units=units).reindex(pairs["row"]).set_index(pairs["kernel"].to_numpy())
    values["act_ns"] = time.reindex(values.index)
    n = len(groups)
    out = groups.copy()
    for name, ways in RATIOS.items():
        out[name] = _ratio(values, next((w for w in ways if set(w.needs) <= set(values.columns)), None), place, n)
    matched = time[time.index.isin(pairs["kernel"])]
    whole = np.bincount(codes, time, n)
    share = np.bincount(place[matched.index], matched, n) / np.where(whole > 0, whole, np.nan)
    return out.assign(matched_share=share)


def _ratio(values: pd.DataFrame, way: Ratio | None, place: pd.Series, n: int) -> np.ndarray:
    if way is None or not len(values):
        return np.full(n, np.nan)
    # Only the pass that holds all of them: other rows of the kernel lack one and give NaN.
    part, whole = way.part(values), way.whole(values)
    known = (part.notna() & whole.notna()).to_numpy()
    group = place.reindex(values.index[known]).to_numpy(np.int64)
    sums = [np.bincount(group, column[known], n) for column in (part.to_numpy(), whole.to_numpy())]
    return np.minimum(np.divide(sums[0], sums[1], out=np.full(n, np.nan), where=sums[1] > 0), way.most)


def _units(agents: pd.DataFrame) -> dict[int, int]:
    gpus = agents[(agents["gpu_index"] >= 0) & (agents["units"] > 0)]
    return dict(zip(gpus["gpu_index"], gpus["units"], strict=True))
