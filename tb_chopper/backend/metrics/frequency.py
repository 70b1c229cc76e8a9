"""The engine clock of kernels, operations, steps and GPUs from sampled telemetry, and what it costs
(docs/telemetry.md).

    clock of a group = Σ duration × clock of the kernel / Σ duration       over its kernels with a sampled clock
    lost to clock    = Σ duration × max(0, 1 − clock / f_peak)             over its compute kernels

The second is the time that a kernel bound by the engine clock would save at f_peak: an upper bound for one that waits
for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend import schema
from tb_chopper.backend.alignment.curve import GAP
from tb_chopper.backend.alignment.telemetry import SAMPLED, with_clocks
from tb_chopper.backend.classify import COMPUTE
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.power import KNOWN_SHARE, power

Peak = float | Mapping[int, float] | None
"""f_peak in MHz for all GPUs, by gpu, or None: the highest clock that the telemetry names"""
UNAVAILABLE = "unavailable"


def frequency(kernels: pd.DataFrame, steps: pd.DataFrame, samples: pd.DataFrame, by: By = "operation",
              where: Where = None, peak_mhz: Peak = None) -> pd.DataFrame:
    """One row per group of `by`: n (activities), time_us (Σ duration), clock_mhz, memory_clock_mhz, power_w, energy_j
    (metrics.power), lost_to_clock_us, sampled_share (of time_us), source (sampled | unavailable).

    samples: TELEMETRY of the run. Means over less than half of a group's time are missing, and so is lost_to_clock_us
    where no peak is known.
    """
    by = grouping.columns(by)
    rows = kernels if "clock_mhz" in kernels else with_clocks(kernels, samples)
    chosen = grouping.select(rows, where)
    codes, groups = grouping.number(chosen, by)
    n = len(groups)
    duration = np.maximum(chosen["end_ns"].to_numpy() - chosen["start_ns"].to_numpy(), 0).astype(np.float64)
    total = np.bincount(codes, duration, n)
    clock = chosen["clock_mhz"].to_numpy()
    peak = chosen["gpu"].map(peaks(samples, peak_mhz)).to_numpy(np.float64)
    compute = schema.codes(chosen["kind"], schema.KINDS) == COMPUTE
    lost = duration * np.clip(1 - clock / peak, 0, None)
    measured = compute & ~np.isnan(lost)
    sampled = np.bincount(codes, np.where(np.isnan(clock), 0, duration), n) / np.maximum(total, 1)
    compute_ns, measured_ns = (np.bincount(codes, np.where(m, duration, 0), n) for m in (compute, measured))
    # Kernels without a sample are taken to lose what the others of their group lose.
    scale = np.where(measured_ns >= KNOWN_SHARE * compute_ns, compute_ns / np.maximum(measured_ns, 1), np.nan)
    lost_ns = np.where(compute_ns > 0, np.bincount(codes, np.where(measured, lost, 0), n) * scale, 0.0)
    known = sampled >= KNOWN_SHARE
    out = groups.assign(
        n=np.bincount(codes, minlength=n), time_us=total / 1000,
        clock_mhz=np.where(known, _weighted(codes, n, duration, clock), np.nan),
        memory_clock_mhz=np.where(known, _weighted(codes, n, duration, chosen["memory_clock_mhz"].to_numpy()), np.nan))
    watts = power(kernels, steps, samples, by, where)[[*by, "power_w", "energy_j"]]
    out = out.merge(watts, on=by, how="left") if by else out.assign(**watts)
    return out.assign(lost_to_clock_us=lost_ns / 1000, sampled_share=sampled,
                      source=np.where(known & (total > 0), SAMPLED, UNAVAILABLE))


def peaks(samples: pd.DataFrame, peak_mhz: Peak) -> dict[int, float]:
    """f_peak by gpu: as told, else the limit that the telemetry names."""
    told: dict[int, float] = samples.groupby("gpu")["clock_limit_mhz"].max().to_dict()
    if isinstance(peak_mhz, Mapping):
        return {**told, **peak_mhz}
    return told if peak_mhz is None else dict.fromkeys(told, peak_mhz)


def _weighted(codes: np.ndarray, n: int, weight: np.ndarray, values: np.ndarray) -> np.ndarray:
    weight = np.where(np.isnan(values), 0, weight)
    total = np.bincount(codes, weight, n)
    mean = np.bincount(codes, weight * np.nan_to_num(values), n) / np.maximum(total, 1e-300)
    return np.where(total > 0, mean, np.nan)


def stretches(samples: pd.DataFrame) -> pd.DataFrame:
    """The time that each sample stands for: half way to its neighbours, half a period at a pause and at the ends.
    `samples` in order of gpu and time, with start_ns, end_ns."""
    start, end = samples["t_ns"].to_numpy().copy(), samples["t_ns"].to_numpy().copy()
    gpu = samples["gpu"].to_numpy()
    for number in np.unique(gpu):
        mine = np.flatnonzero(gpu == number)
        t = samples["t_ns"].to_numpy()[mine]
        step = np.diff(t)
        period = int(np.median(step)) if len(step) else 0
        half = np.where(step > GAP * max(period, 1), period // 2, step // 2)
        start[mine] = t - np.concatenate(([period // 2], half))
        end[mine] = t + np.concatenate((np.where(step > GAP * max(period, 1), half, step - half), [period // 2]))
    return samples.assign(start_ns=start, end_ns=end)


def residency(samples: pd.DataFrame, bin_mhz: float = 50.0, within: pd.DataFrame | None = None,
              column: str = "clock_mhz") -> pd.DataFrame:
    """Time at each clock: one row per gpu and occupied bin, with gpu, {column} (low edge of the bin), time_us, share.
    within: gpu, start_ns, end_ns of the time to look at (steps, busy time), disjoint per gpu; None for all."""
    known = stretches(samples[samples[column].notna()])
    time = _time_within(known, within)
    low = np.floor(known[column].to_numpy() / bin_mhz) * bin_mhz
    table = pd.DataFrame({"gpu": known["gpu"].to_numpy(), column: low, "time_us": time / 1000})
    out = table[table["time_us"] > 0].groupby(["gpu", column], as_index=False)["time_us"].sum()
    return out.assign(share=out["time_us"] / out.groupby("gpu")["time_us"].transform("sum"))


def _time_within(rows: pd.DataFrame, within: pd.DataFrame | None) -> np.ndarray:
    """ns of each row's [start_ns, end_ns) that lie in its GPU's part of `within`."""
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    if within is None:
        return end - start
    time = np.zeros(len(rows), np.int64)
    gpu = rows["gpu"].to_numpy()
    for number, windows in within.groupby("gpu"):
        mine = gpu == number
        u = iv.union(windows["start_ns"].to_numpy(), windows["end_ns"].to_numpy())
        time[mine] = iv.covered(start[mine], end[mine], u)
    return time


def throttle_shares(samples: pd.DataFrame, within: pd.DataFrame | None = None) -> pd.DataFrame:
    """Share of time per throttle reason: gpu, reason, time_us, share, known_us (time with a known state). Reasons can
    hold at once, so that shares need not add up to 1; `none` is the time in which no reason held.

    A sample speaks for the time since the one before it, and its percentages are shares of that.
    """
    rows = samples[samples["throttle"].notna()]
    t, gpu = rows["t_ns"].to_numpy(), rows["gpu"].to_numpy()
    first = np.concatenate(([True], gpu[1:] != gpu[:-1])) if len(rows) else np.zeros(0, bool)
    before = np.where(first, t, np.concatenate((t[:1], t[:-1])))
    known = rows.assign(start_ns=before, end_ns=t)
    time = _time_within(known, within)
    texts = known["throttle"].astype(str).to_numpy()
    parts = []
    for text in pd.unique(texts):
        mine = texts == text
        spent = pd.Series(time[mine]).groupby(gpu[mine]).sum()
        parts += [pd.DataFrame({"gpu": spent.index, "reason": reason, "time_us": spent.to_numpy() * share / 1000})
                  for reason, share in _shares(text).items()]
    names = ["gpu", "reason", "time_us", "share", "known_us"]
    if not parts:
        return pd.DataFrame(columns=names)
    out = pd.concat(parts).groupby(["gpu", "reason"], as_index=False)["time_us"].sum()
    out["known_us"] = out["gpu"].map(pd.Series(time / 1000).groupby(gpu).sum())
    out["share"] = np.where(out["known_us"] > 0, out["time_us"] / out["known_us"].where(out["known_us"] > 0), np.nan)
    return out.sort_values(["gpu", "time_us"], ascending=[True, False], ignore_index=True)[names]


def throttled(samples: pd.DataFrame) -> np.ndarray:
    """Share of each sample's time in which at least one reason held for certain; NaN where that is unknown."""
    texts = samples["throttle"].astype(object)
    known = {text: 1 - _shares(text)["none"] for text in texts.dropna().unique()}
    return texts.map(known).to_numpy(np.float64)


def _shares(text: str) -> dict[str, float]:
    """`power:40 thermal:5` as shares; what no reason covers for certain is `none`."""
    if text == "none":
        return {"none": 1.0}
    pairs = (part.partition(":") for part in text.split())
    shares = {reason: float(percent) / 100 for reason, _, percent in pairs}
    return {**shares, "none": max(0.0, 1.0 - max(shares.values(), default=0.0))}


def spread(kernels: pd.DataFrame, samples: pd.DataFrame, within: pd.DataFrame | None = None) -> pd.DataFrame:
    """How the GPUs differ: gpu, clock_mhz (over kernel time), power_w, temperature_c (over the time of `within`),
    clock_to_median (ratio), above_median_c, note (`slow`: clock more than 2 % below the median of the GPUs; `hot`: more
    than 5 °C above; both; or empty). Sorted by clock, slowest first."""
    clocked = kernels if "clock_mhz" in kernels else with_clocks(kernels, samples)
    codes, clock = grouping.number(clocked, ["gpu"])
    duration = np.maximum(clocked["end_ns"].to_numpy() - clocked["start_ns"].to_numpy(), 0).astype(np.float64)
    clock["clock_mhz"] = _weighted(codes, len(clock), duration, clocked["clock_mhz"].to_numpy())
    weighted = stretches(samples)
    time = _time_within(weighted, within).astype(np.float64)
    gpus, codes = np.unique(weighted["gpu"].to_numpy(), return_inverse=True)
    means = pd.DataFrame({"gpu": gpus, **{c: _weighted(codes, len(gpus), time, weighted[c].to_numpy())
                                         for c in ("power_w", "temperature_c")}})
    out = clock.merge(means, on="gpu", how="left")
    out["clock_to_median"] = out["clock_mhz"] / out["clock_mhz"].median()
    out["above_median_c"] = out["temperature_c"] - out["temperature_c"].median()
    slow, hot = out["clock_to_median"] < 0.98, out["above_median_c"] > 5
    out["note"] = np.select([slow & hot, slow, hot], ["slow, hot", "slow", "hot"], "")
    return out.sort_values("clock_mhz", ignore_index=True)


class Regression(NamedTuple):
    """y = intercept + slope x by least squares, with the 95 % confidence interval of the slope."""

    slope: float
    low: float
    high: float
    intercept: float
    r: float
    n: int


def step_time_against_clock(steps_us: np.ndarray, clock_mhz: np.ndarray) -> Regression | None:
    """Step time in µs against 1000 / clock in MHz: slope is the part of a step in µs × GHz that scales with the
    clock, intercept the part that does not. None with fewer than four steps or without any change of the clock."""
    known = ~(np.isnan(steps_us) | np.isnan(clock_mhz)) & (clock_mhz > 0)
    return regression(1000 / clock_mhz[known], steps_us[known])


def regression(x: np.ndarray, y: np.ndarray) -> Regression | None:
    n = len(x)
    if n < 4 or np.ptp(x) <= 1e-9 * np.abs(x).max():
        return None
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    rest = dy - slope * dx
    error = float(np.sqrt(rest @ rest / (n - 2) / (dx @ dx))) * _t95(n - 2)
    spread_y = float(np.sqrt(dy @ dy))
    r = float(dx @ dy / (np.sqrt(dx @ dx) * spread_y)) if spread_y > 0 else 0.0
    return Regression(slope, slope - error, slope + error, float(y.mean() - slope * x.mean()), r, n)


def _t95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; 0.2 % off at 3 degrees of freedom, less above).
    Exact for 2."""
    if freedom == 2:
        return 4.30265
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
             (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160)
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
