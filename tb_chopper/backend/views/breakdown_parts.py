"""The time of an operation as parts that add up: what each factor of the breakdown costs, and what would help."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.breakdown import ESTIMATED, UNAVAILABLE


class Part(NamedTuple):
    """A part of the stack: its column (µs), the thing of the palette it is, its factor's column, and what it means."""

    column: str
    thing: str
    factor: str
    definition: str


PARTS = (
    Part("theoretical_us", "theoretical", "",
         "D_thr = theoretical FLOPs / peak FLOP/s: what the mathematics would take at the peak of its data type."),
    Part("vector_us", "vector", "",
         "Operations without matrix products have no theoretical time here: what their cycles take alone, at the clock "
         "of the peak."),
    Part("instruction_us", "instruction", "ovr_inst",
         "Ovr_inst = performed / theoretical FLOPs: tiles that reach over the edge of the matrix."),
    Part("utilization_us", "utilization", "ovr_util",
         "Ovr_util = 1 / utilization of the matrix cores while the kernel ran alone."),
    Part("overlap_us", "overlap", "ovr_overlap", "Ovr_overlap: slower because communication ran beside it."),
    Part("frequency_us", "frequency", "ovr_freq", "Ovr_freq = clock of the peak / clock while it ran."),
)
"""In the order in which they are stacked: together the actual time, D_act."""
OVERHEADS = PARTS[2:]

REMEDIES = {
    "instruction": "sizes that are multiples of the tile (pad vocabulary and hidden sizes to 256), or another kernel: "
    "tune GEMMs (TunableOp, hipBLASLt, max-autotune)",
    "utilization": "larger batches or longer sequences per GPU, tuned or fused kernels; look at L2 hits and occupancy "
    "below",
    "overlap": "fewer channels for collectives (NCCL_MAX_NCHANNELS), communication moved to where memory-bound work "
    "runs, other prefetch; look at Overlap",
    "frequency": "power: look at DVFS for throttling; less power elsewhere (steady memory reuse as in FSDP2), a higher "
    "power cap, cooling",
    "vector": "no matrix work: fuse with neighbours (torch.compile, fused norms and optimizers), smaller data types",
    "theoretical": "near its peak: fewer FLOPs, or a data type with a higher peak (fp8)",
}
"""The usual ones, by what costs most."""


FACTORS = ("ovr_inst", "ovr_util", "ovr_overlap", "ovr_freq", "d_thr_us", "d_act_us")
COLUMNS = [*(p.column for p in PARTS), "act_us", "lost_us"]


def with_parts(table: pd.DataFrame, windows: int) -> pd.DataFrame:
    """`table` of overhead_breakdown, one row per operation and phase or finer, with the columns of PARTS, act_us and
    lost_us: µs per GPU and step (`windows`: how many of these there are). The actual time is that of all instances. The
    work itself, up to utilization, is the median's times the number of instances; overlap and frequency divide what is
    left as they divide the median's.

    lost_us: actual − theoretical time, of vector work − that of its own cycles. A factor below 1 (noise) takes nothing
    away: its part is 0 and the next one smaller, so that the parts add up. NaN where unavailable.
    """
    vector, no_clock = (table["d_thr_us"] == 0).to_numpy(), table["ovr_freq"].isna().to_numpy()
    theory, inst, util, overlap, actual = (
        table[c].to_numpy(float) for c in ("d_thr_us", "ovr_inst", "ovr_util", "ovr_overlap", "d_act_us"))
    # Without a clock, utilization and clock are one block, up to what the overlap took.
    peak = np.where(no_clock, actual / overlap, np.where(vector, table["d_peak_us"], theory * inst * util))
    contended = np.where(no_clock, actual, peak * overlap)
    performed = np.where(vector, peak, theory * inst)
    levels = np.stack([theory, np.where(vector, peak, theory), performed, peak, contended, actual])
    levels = np.minimum(np.maximum.accumulate(levels, axis=0), actual)
    known = (table["source"] != UNAVAILABLE).to_numpy() & np.isfinite(levels).all(axis=0)
    parts = np.where(known, np.diff(levels, axis=0, prepend=0.0), np.nan)
    count, total = table["n_instances"].to_numpy(float) / max(windows, 1), table["total_us"].to_numpy(float) / max(
        windows, 1)
    fixed = np.arange(len(PARTS))[:, None] < np.where(no_clock, 3, 4)
    left, above = total - np.nansum(parts * fixed, axis=0) * count, np.nansum(parts * ~fixed, axis=0)
    # Instances of several sizes have no typical one: then all parts stretch alike.
    alike = (left >= 0) & (above > 0)
    even = np.divide(total, actual, out=np.zeros(len(table)), where=actual > 0)
    stretch = np.where(fixed, count, np.divide(left, above, out=np.zeros(len(table)), where=above > 0))
    parts = parts * np.where(alike, stretch, even)
    out = table.assign(act_us=total, lost_us=np.where(known, total - parts[:2].sum(axis=0), np.nan))
    for part, values in zip(PARTS, parts, strict=True):
        out[part.column] = values
    return out


def grouped(units: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Rows of with_parts summed by `by`, with `dominant`, the thing that costs most, and `help` against it;
    n_instances, source, overlap_method; and FACTORS where the group is one operation. What is unavailable adds to
    unknown_us alone.
    """
    known = units["lost_us"].notna()
    codes, groups = grouping.number(units, by)
    n = len(groups)
    sums = {c: np.bincount(codes, units[c].where(known, 0.0), n) for c in COLUMNS}
    out = groups.assign(**sums, unknown_us=np.bincount(codes, units["act_us"].where(~known, 0.0), n),
                        n_instances=np.bincount(codes, units["n_instances"], n).astype("int64"))
    # Another run's groups are looked up by these: whatever they are, a missing one is None.
    out = out.assign(**{c: out[c].astype(object).where(out[c].notna(), None) for c in by})
    _, first = np.unique(codes, return_index=True)
    alone = np.bincount(codes, minlength=n) == 1
    for factor in FACTORS:
        out[factor] = np.where(alone, units[factor].to_numpy(float)[first], np.nan)
    for column in ("source", "overlap_method"):
        told = units[column].where(known).groupby(codes).agg(lambda values: _common(set(values.dropna())))
        out[column] = told.to_numpy()
    dominant = [_dominant(row) for row in out.to_dict("records")]
    return out.assign(dominant=dominant, help=[REMEDIES.get(thing, "") for thing in dominant])


def _common(values: set[str]) -> str:
    """The one value; else the weaker source, or `mixed`."""
    return UNAVAILABLE if not values else values.pop() if len(values) == 1 else (
        ESTIMATED if ESTIMATED in values else "mixed")


def _dominant(row: dict[str, float]) -> str:
    """What costs most: an overhead where it is more than a tenth of the time, else the work itself."""
    if not row["act_us"] > 0:
        return ""
    largest = max(OVERHEADS, key=lambda part: row[part.column])
    if row[largest.column] > 0.1 * row["act_us"]:
        return largest.thing
    return "vector" if row["vector_us"] > 0 else "theoretical"


def other_methods(row: dict[str, object], tolerance: float = 0.05) -> str:
    """What the other overlap methods say where they differ by more than `tolerance`: `percentile 1.02`."""
    mine = row["ovr_overlap"]
    told = []
    for method in ("clock", "percentile", "regression"):
        value = row[f"ovr_overlap_{method}"]
        if method == row["overlap_method"] or not isinstance(value, float) or not isinstance(mine, float):
            continue
        if np.isfinite(value) and mine > 0 and abs(value / mine - 1) > tolerance:
            told.append(f"{method} {value:.2f}")
    return ", ".join(told)
