"""Which part of an operation's time is theory, padding, utilization, contention and clock (docs/metrics.md).

    D_thr  = F_gemm / TPT_peak      Ovr_inst    = F_perf / F_gemm      Ovr_util = G / busy
    D_peak = G / f_peak             Ovr_overlap: one of three methods  Ovr_freq = (D_act / D_peak) / Ovr_overlap
    D_thr · Ovr_inst · Ovr_util · Ovr_overlap · Ovr_freq = D_act

G: cycles per die while the kernel ran alone, busy: those of a matrix core, both of the same pass. TPT_peak and f_peak
are one pair. Sums over the kernels of an instance, medians over the instances of an operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import flops, schema
from tb_chopper.backend.alignment.cycles import with_cycles
from tb_chopper.backend.classify import COMPUTE
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.hardware import Hardware
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.overlap import INSTANCE, instances

MEASURED, ESTIMATED, UNAVAILABLE = "measured", "estimated", "unavailable"
Method = Literal["auto", "clock", "percentile", "regression"]
METHODS: tuple[Method, ...] = ("auto", "clock", "percentile", "regression")
Gpus = Mapping[int, Hardware | None]

FLOP_PER_MOP = 512
_MOPS = "SQ_INSTS_VALU_MFMA_MOPS_"
_BUSY = "SQ_VALU_MFMA_BUSY_CYCLES"
_TENSOR, _ELAPSED = "sm__pipe_tensor_cycles_active.avg", "sm__cycles_elapsed.avg"
_WHOLE = 0.999
_MOST_PAIRS = 400
"""Instances of a regression: the slopes between all pairs of them are looked at"""

COLUMNS = ("n_instances", "flop_theoretical", "flop_performed", "d_thr_us", "ovr_inst", "ovr_util", "ovr_overlap",
           "ovr_freq", "d_peak_us", "d_act_us", "residual", "source", "matched_share", "overlap_method",
           "ovr_overlap_percentile", "ovr_overlap_regression", "ovr_overlap_low", "ovr_overlap_high",
           "ovr_overlap_clock", "clock_share", "total_us")


def overhead_breakdown(kernels: pd.DataFrame, counters: pd.DataFrame, pairs: pd.DataFrame, gpus: Gpus,
                       by: By = "operation", where: Where = None, overlap_method: Method = "auto") -> pd.DataFrame:
    """One row per group of `by` (of gpu, step, phase, layer, operation, op_type) with COLUMNS.

    `pairs`: of alignment.counters.align, may be empty. `kernels` may have clock_mhz, the sampled clock of each.
    A row is one instance of the operation: medians over its instances. A group of several operations or phases is what
    they take per GPU and step: the sum of their medians, each as often as it has instances there. `source`: measured
    (counters), estimated (padding by the tile in the kernel's name, utilization is what is left; without a sampled
    clock ovr_freq is NaN and ovr_util holds both), unavailable (FLOPs or peak unknown). `auto` takes the clock where
    it covers half of the operation's time, else the percentile method of the paper. `total_us`: kernel time of all
    instances.
    """
    if overlap_method not in METHODS:
        raise InvalidSelection(f"no overlap method {overlap_method!r}; there are {', '.join(METHODS)}")
    by = grouping.columns(by)
    allowed = {*INSTANCE, "op_type"}
    for column in by:
        if column not in allowed:
            raise InvalidSelection(f"the breakdown is of operations: group by {', '.join(sorted(allowed))}, "
                                   f"not {column!r}")
    each = _instances(kernels, counters, pairs, gpus, where)
    unit = list(dict.fromkeys([*by, "operation", "phase"]))
    codes, units = grouping.number(each, unit)
    rows = [_unit(mine, overlap_method) for mine in _split(each, codes, len(units))]
    table = pd.concat([units, pd.DataFrame(rows, columns=list(_Unit._fields))], axis=1)
    group_codes, groups = grouping.number(table, by)
    steps = each[["gpu", "capture", "step"]].assign(group=group_codes[codes]).drop_duplicates()
    windows = steps.groupby("group").size()
    fields = {c: table[c].to_numpy() for c in _Unit._fields}
    members = np.split(np.argsort(group_codes, kind="stable"), np.cumsum(np.bincount(group_codes))[:-1])
    out = [_group({c: v[m] for c, v in fields.items()}, int(windows[i])) for i, m in enumerate(members) if len(m)]
    result = pd.concat([groups, pd.DataFrame(out, columns=list(COLUMNS))], axis=1)
    return result.sort_values("d_act_us", ascending=False, kind="stable", ignore_index=True)


# ---- kernels and instances


def _instances(kernels: pd.DataFrame, counters: pd.DataFrame, pairs: pd.DataFrame, gpus: Gpus, where: Where,
               ) -> pd.DataFrame:
    """`overlap.instances` with the sums over their compute kernels."""
    cost = flops.kernel_costs(kernels)
    # A vector kernel does no matrix products, whether or not its operator has a formula.
    cost["flop"] = cost["flop"].mask(cost["flop"].isna() & (kernels["op_type"] == "vector"), 0.0)
    rows = grouping.select(kernels[kernels["kind"].cat.codes == COMPUTE], where)
    cost = cost.loc[rows.index]
    duration = (rows["end_ns"] - rows["start_ns"]).astype("float64")
    work = _counted(kernels, counters, pairs, gpus).reindex(rows.index)
    f_peak = rows["gpu"].map({g: h.f_peak_mhz for g, h in gpus.items() if h}).astype("float64")
    clock = rows["clock_mhz"] if "clock_mhz" in rows else pd.Series(np.nan, rows.index)
    parts = pd.DataFrame({
        "flop": cost["flop"], "thr_ns": _at_peak_ns(rows, cost, gpus), "performed": work["performed"],
        "padded": cost["flop"] * _padding(rows), "busy": work["busy"], "cycles": work["cycles"],
        "matched_ns": duration.where(work["cycles"].notna(), 0.0), "act_ns": duration,
        "peak_cycles_per_ns": f_peak / 1000 * duration,
        "clocked_ns": duration.where(clock.notna(), 0.0), "clock_ns": (clock * duration).fillna(0.0)})
    codes, groups = grouping.number(rows, INSTANCE)
    # A kernel without a value makes the instance's sum unknown; a vector kernel beside a GEMM has 0 FLOPs, not none.
    sums = {c: np.bincount(codes, parts[c], len(groups)) for c in parts}
    return instances(kernels, where).merge(groups.assign(**sums), on=INSTANCE, how="left")


def _at_peak_ns(rows: pd.DataFrame, cost: pd.DataFrame, gpus: Gpus) -> pd.Series:
    """Time of the FLOPs at the peak of their data type; 0 FLOPs take none."""
    peak = {(g, dtype): p.flop_per_s for g, h in gpus.items() if h for dtype, p in h.peaks.items()}
    found = [peak.get(key, np.nan) for key in zip(rows["gpu"], cost["dtype"].astype(object), strict=True)]
    return (cost["flop"] / np.array(found) * 1e9).where(cost["flop"] != 0, 0.0)


def _padding(rows: pd.DataFrame) -> np.ndarray:
    """Performed over theoretical FLOPs by the tile in the name; 1 where it tells none."""
    keys = pd.MultiIndex.from_arrays([rows["name"], rows["cpu_op"], rows["op_args"]])
    codes, distinct = keys.factorize()
    factor = np.ones(len(distinct) + 1)
    for i, (name, op, args) in enumerate(distinct):
        gemm = flops.gemm_shape(op, args) if isinstance(op, str) and isinstance(args, str) else None
        padding = flops.tile_padding(str(name), gemm) if gemm else np.nan
        factor[i] = padding if padding >= 1 else 1.0
    return factor[codes]


def _counted(kernels: pd.DataFrame, counters: pd.DataFrame, pairs: pd.DataFrame, gpus: Gpus) -> pd.DataFrame:
    """By kernel: cycles and busy (cycles of one matrix core) of the pass that holds both, performed (matrix FLOPs)."""
    columns = ["cycles", "busy", "performed"]
    amd = _BUSY in counters
    if not len(pairs) or not (amd or {_TENSOR, _ELAPSED} <= set(counters.columns)):
        return pd.DataFrame(columns=columns, dtype="float64")
    counters = with_cycles(counters) if amd else counters
    values = counters.reindex(pairs["row"]).set_index(pairs["kernel"].to_numpy())
    has_busy = values[_BUSY if amd else _TENSOR].notna()
    first = values[has_busy & ~values.index.where(has_busy, -1).duplicated()]
    gpu = kernels["gpu"].reindex(first.index)
    units = gpu.map({g: h.units for g, h in gpus.items() if h}).astype("float64")
    if amd:
        cores = gpu.map({g: h.units * h.matrix_cores_per_unit for g, h in gpus.items() if h}).astype("float64")
        # Each data type was counted in one of the passes.
        performed = pd.Series(0.0, first.index)
        for name in (c for c in schema.counter_names(counters) if c.startswith(_MOPS)):
            counted = values[name].dropna()
            performed += counted[~counted.index.duplicated()].reindex(first.index).fillna(0.0) * FLOP_PER_MOP
        return pd.DataFrame({"cycles": first["cycles"], "busy": first[_BUSY] / cores, "performed": performed})
    rate = gpu.map({g: p.flop_per_s / (h.units * p.clock_mhz * 1e6) for g, h in gpus.items()
                    if h and (p := h.peak())}).astype("float64")
    return pd.DataFrame({"cycles": first[_ELAPSED], "busy": first[_TENSOR], "performed": first[_TENSOR] * units * rate})


Rows = Mapping[str, np.ndarray]
"""Columns of a table as arrays: there are thousands of small ones."""
_NUMBERS = ["overlap_ratio", "elapsed_ns", "flop", "thr_ns", "performed", "padded", "busy", "cycles", "matched_ns",
            "act_ns", "peak_cycles_per_ns", "clocked_ns", "clock_ns"]


def _split(each: pd.DataFrame, codes: np.ndarray, n: int) -> list[Rows]:
    """The instances of each unit, by GPU (`device`) in order of overlap ratio, ties by start."""
    device = each.groupby(["gpu", "capture"], sort=False).ngroup().to_numpy()
    order = np.lexsort((each["start_ns"], each["overlap_ratio"], device, codes))
    columns = {c: each[c].to_numpy("float64")[order] for c in _NUMBERS} | {"device": device[order]}
    ends = np.cumsum(np.bincount(codes, minlength=n))
    return [{c: v[low:high] for c, v in columns.items()} for low, high in zip([0, *ends][:-1], ends, strict=True)]


# ---- one operation


class _Unit(NamedTuple):
    """Medians of one operation and phase, ns; the time after each factor, and what the methods say of the overlap."""

    n: int
    flop: float
    performed: float
    thr: float
    inst: float
    util: float
    peak: float
    contended: float
    act: float
    source: str
    matched_share: float
    method: str
    percentile: float
    regression: float
    low: float
    high: float
    clock: float
    clock_share: float
    has_clock: bool
    total: float


def _unit(each: Rows, wanted: Method) -> _Unit:
    total = max(float(each["act_ns"].sum()), 1.0)
    matched = float(each["matched_ns"].sum()) / total
    whole = (each["matched_ns"] >= _WHOLE * each["act_ns"]) & (each["act_ns"] > 0)
    measured = bool(whole.any())
    some = {c: v[whole] for c, v in each.items()} if measured else each
    flop, thr, act = (_median(some[c]) for c in ("flop", "thr_ns", "act_ns"))
    running = some["act_ns"] > 0
    f_peak = _median(some["peak_cycles_per_ns"][running] / some["act_ns"][running])  # cycles per ns
    clock_share = float(each["clocked_ns"].sum()) / total
    clocked = each["clocked_ns"] > 0
    clock = _median(each["clock_ns"][clocked] / each["clocked_ns"][clocked]) / 1000
    borders = np.flatnonzero(np.diff(each["device"])) + 1
    of_gpus = list(zip(np.split(each["overlap_ratio"], borders), np.split(each["elapsed_ns"], borders), strict=True))
    percentile = float(np.median([percentile_overlap(ratio, elapsed) for ratio, elapsed in of_gpus]))
    lines = [regression_overlap(ratio, elapsed) for ratio, elapsed in of_gpus]
    regression, low, high = (float(v) for v in np.median(lines, axis=0))
    peak = _median(some["cycles"]) / f_peak if measured else np.nan
    by_clock = act / peak / (f_peak / clock) if measured else np.nan
    usable = bool(clock_share >= 0.5 and np.isfinite(clock))
    method = wanted if wanted != "auto" else "clock" if usable and measured else "percentile"
    overlap = {"clock": by_clock, "percentile": percentile, "regression": regression}[method]
    if measured:
        performed, busy, cycles = (_median(some[c]) for c in ("performed", "busy", "cycles"))
        inst = thr * performed / flop if flop > 0 else 0.0
        util = inst * cycles / busy if busy > 0 and flop > 0 else peak
    else:
        performed = _median(some["padded"])
        inst = thr * performed / flop if flop > 0 else 0.0
        # What is left of the time at the sampled clock; without one, utilization and clock stay one block.
        util = peak = act / overlap / (f_peak / clock if usable else 1.0)
    source = UNAVAILABLE if not np.isfinite(thr) or not np.isfinite(f_peak) else MEASURED if measured else ESTIMATED
    return _Unit(len(each["act_ns"]), flop, performed, thr, inst, util, peak, util * overlap, act, source, matched,
                 method, percentile, regression, low, high, by_clock, clock_share, measured or usable,
                 float(each["act_ns"].sum()))


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else np.nan


def percentile_overlap(ratio: np.ndarray, elapsed: np.ndarray) -> float:
    """D_50% / D_0% as in the paper: the instances of one GPU in order of overlap ratio (ties by start), as they are
    given; the one whose share of the order is nearest to 50 %, over the first. 1 where it has no overlap, and never
    below 1."""
    n = len(ratio)
    middle = int(np.argmin(np.abs(100 * (np.arange(n) + 1) / n - 50)))
    if ratio[middle] == 0 or elapsed[0] <= 0:
        return 1.0
    return max(1.0, float(elapsed[middle] / elapsed[0]))


def regression_overlap(ratio: np.ndarray, elapsed: np.ndarray) -> tuple[float, float, float]:
    """mean(D) / D_0 of the robust line D = D_0 (1 + c · ratio), by the median of all slopes (Theil and Sen), and the
    same at the ends of a 95 % interval of the slope. NaN where the ratio does not vary."""
    step = -(-len(ratio) // _MOST_PAIRS)
    ratio, elapsed = ratio[::step], elapsed[::step]
    i, j = np.triu_indices(len(ratio), 1)
    apart = np.abs(ratio[j] - ratio[i]) > 1e-3
    if apart.sum() < 3:
        return (np.nan, np.nan, np.nan)
    slopes = np.sort((elapsed[j] - elapsed[i])[apart] / (ratio[j] - ratio[i])[apart])
    n = len(ratio)
    # Sen's interval: the ranks of the slopes by the variance of Kendall's statistic.
    width = 1.96 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    ends = np.clip([len(slopes) / 2 - width, len(slopes) / 2 + width], 0, len(slopes) - 1).astype(int)
    chosen = (float(np.median(slopes)), slopes[ends[0]], slopes[ends[1]])
    alone = [float(np.median(elapsed - slope * ratio)) for slope in chosen]
    best, low, high = (elapsed.mean() / a if a > 0 else np.nan for a in alone)
    return max(1.0, best), max(1.0, low), max(1.0, high)


# ---- one group


_TIMES = ["flop", "performed", "thr", "inst", "util", "contended", "peak", "act"]


def _group(units: Rows, windows: int) -> tuple[object, ...]:
    """A row of COLUMNS: the sums of the operations' times, and the ratios of the sums. `windows`: GPUs and steps."""
    one = len(units["n"]) == 1
    if not one:
        units = {**units, **{c: units[c] * units["n"] / windows for c in _TIMES}}
    known = units["source"] != UNAVAILABLE
    some = {c: v[known] for c, v in units.items()} if known.any() else units
    thr, inst, util, contended, peak, act = (
        float(some[c].sum()) for c in ("thr", "inst", "util", "contended", "peak", "act"))
    has_clock = bool(some["has_clock"].all())
    overlap = contended / util if util else np.nan
    factors = (_over(inst, thr), _over(util, inst), overlap, act / peak / overlap if has_clock and peak else np.nan)
    product = thr * np.prod([f if np.isfinite(f) else 1.0 for f in factors]) if thr > 0 else np.nan
    if not known.any() or units["act"][known].sum() < 0.5 * units["act"].sum():
        source = UNAVAILABLE
        thr, peak, factors, product = np.nan, np.nan, (np.nan,) * 4, np.nan
    else:
        source = MEASURED if (some["source"] == MEASURED).all() else ESTIMATED
    weight = units["act"] / max(units["act"].sum(), 1.0)
    alone = [float(units[c][0]) if one else np.nan for c in ("percentile", "regression", "low", "high", "clock")]
    methods = set(units["method"])
    return (int(units["n"].sum()), some["flop"].sum(), some["performed"].sum(), thr / 1000, *factors, peak / 1000,
            act / 1000, product / act - 1 if act > 0 else np.nan, source,
            float((units["matched_share"] * weight).sum()), methods.pop() if len(methods) == 1 else "mixed", *alone,
            float((units["clock_share"] * weight).sum()), float(units["total"].sum()) / 1000)


def _over(after: float, before: float) -> float:
    return after / before if before > 0 else np.nan
