"""Efficiency, side by side, because a busy GPU is not an efficient one (docs/metrics.md, "Efficiency").

    gpu_utilization = busy / total
    sm_efficiency   = ∫ min(1, Σ blocks / SMs) dt / total, over the kernels whose grid is known (estimated)
    occupancy       = Σ est. occupancy · duration / Σ duration, over the kernels that carry it
    hfu             = counted FLOPs / (time · peak)
    mfu             = model FLOPs / (time · peak): without recomputation
    tensor share    = Σ duration of kernels on the matrix cores / Σ duration of GEMM and attention kernels

and what the time of compute kernels went to, e being the share of SMs that a kernel's blocks fill:

    lost   = Σ (1 − e) · duration                               SMs that had no block
    ideal  = Σ max(FLOPs / peak, bytes / memory bandwidth)      what the recorded shapes need, at most e · duration
    below  = Σ e · duration − ideal                             slower than the hardware allows
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from tb_chopper.backend import flops, schema
from tb_chopper.backend.classify import COMPUTE
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.precision import Gpus, matrix_types, on_matrix_cores, peaks
from tb_chopper.backend.metrics.timeline import timeline

_SHAPE = re.compile(r"(?<=^\[)\s*\d+\s*(,\s*\d+\s*)*(?=\]$)")
_THREAD_GRIDS = "hipExtModuleLaunchKernel"


def efficiency(kernels: pd.DataFrame, steps: pd.DataFrame, gpus: Gpus, by: By = "gpu", where: Where = None,
               model_flop_per_step: Mapping[int, float] | None = None) -> pd.DataFrame:
    """One row per group of `by`, all ratios from 0 to 1, NaN where unknown:

    time_us: total time of windows (gpu, step, ...), compute time of anything finer. FLOPs are measured against it
    gpu_utilization; sm_efficiency, and sm_known: the share of kernel time whose grid is known
    occupancy, and occupancy_known: the share of kernel time that carries it
    flop: counted from recorded shapes, and flop_known: the share of compute time whose FLOPs are known
    hfu; mfu, and mfu_source: `model` (from `model_flop_per_step`, by gpu; over the steps only), `counted` (from
    shapes, recomputation left out) or `unavailable`
    tensor_share: part of the time of GEMM and attention kernels (matrix_us) in kernels whose name says that they use
    the matrix cores
    lost_us, ideal_us, below_us, unknown_us: what the time of compute kernels went to (above; unknown: their shapes or
    the peaks are not known); they add up to the sum of the durations, also of kernels that run side by side

    A finer group than windows has as sm_efficiency the time-weighted mean of its kernels' own min(1, blocks / SMs).
    Peaks are those of each call's data type, so that fp8 and bf16 in one step are each held to their own.
    """
    by = grouping.columns(by)
    asked = {grouping.source(c, kernels) for c in (*by, *(where or {}))}
    in_windows = asked <= grouping.WINDOW_COLUMNS
    times = timeline(kernels, steps, by, where)
    # Measured before the selection: a selected kernel has its share of its call's FLOPs, not all of them.
    rows = grouping.select(_measured(kernels, gpus), where)
    out = _per_group(rows, times[by], by)
    out["sm_known"] = _ratio(out["grid_us"], out["kernel_us"])
    out["occupancy_known"] = _ratio(out["occupancy_us"], out["kernel_us"])
    out["flop_known"] = _ratio(out["flop_us"], out["compute_us"])
    time_us = times["total_us"] if in_windows else times["compute_us"]
    out["time_us"], out["gpu_utilization"] = time_us, _ratio(times["busy_us"], times["total_us"])
    if in_windows:
        windows = _windows(kernels, steps, "step" in asked)
        saturation = _per_group(_saturation(kernels, grouping.select(windows, where), gpus), times[by], by)
        out["sm_efficiency"] = _ratio(saturation["saturated_us"], times["total_us"]).where(out["sm_known"] > 0)
    else:
        out["sm_efficiency"] = _ratio(out["saturated_us"], out["grid_us"])
    out["occupancy"] = _ratio(out["occupied_us"], out["occupancy_us"])
    seconds = time_us / 1e6
    # FLOPs of which none has a known peak are not an efficiency of 0.
    known = (out["flop_known"] > 0) & ((out["flop"] == 0) | (out["peak_s"] > 0))
    out["hfu"] = _ratio(out["peak_s"], seconds).where(known)
    out["mfu"] = _ratio(out["model_peak_s"], seconds).where(known)
    out["mfu_source"] = np.where(out["mfu"].notna(), "counted", "unavailable")
    if in_windows and model_flop_per_step:
        mfu = _model_mfu(kernels, steps, gpus, times[by], where, model_flop_per_step)
        out["mfu"], out["mfu_source"] = mfu.fillna(out["mfu"]), out["mfu_source"].where(mfu.isna(), "model")
    out["tensor_share"] = _ratio(out["tensor_us"], out["matrix_us"])
    return out[[*by, "time_us", "gpu_utilization", "sm_efficiency", "sm_known", "occupancy", "occupancy_known", "flop",
                "flop_known", "hfu", "mfu", "mfu_source", "tensor_share", "matrix_us", *PARTS]]


PARTS = ("lost_us", "ideal_us", "below_us", "unknown_us")
"""What the time of compute kernels went to."""


SAMPLED = {"sm_active": "sm_activity_pct", "sm_occupancy": "sm_occupancy_pct", "tensor_active": "tensor_activity_pct"}
"""What hardware counts and a sampler reads (NVML's GPM): the twins of SM efficiency, occupancy and matrix cores."""


def sampled(kernels: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu of `kernels`: sm_active, sm_occupancy, tensor_active (0 to 1), means over the readings of the
    telemetry from the first start to the last end of its kernels; NaN where none has the value."""
    rows = []
    for gpu, own in kernels.groupby("gpu", sort=True):
        within = samples["t_ns"].between(own["start_ns"].min(), own["end_ns"].max(), inclusive="left")
        near = samples[(samples["gpu"] == gpu) & within]
        rows.append((gpu, *(near[column].mean() / 100 for column in SAMPLED.values())))
    return pd.DataFrame(rows, columns=["gpu", *SAMPLED])


def blocks_per_unit(kernels: pd.DataFrame, gpus: Gpus) -> pd.Series:
    """Blocks per SM or CU of each row, NaN where its grid (or the GPU's number of units) is not known.

    On ROCm the grid is in threads where hipExtModuleLaunchKernel launched the kernel, else in blocks.
    """
    told = kernels["blocks_per_sm"].where(np.isfinite(kernels["blocks_per_sm"]))
    blocks, threads = _volume(kernels["grid"]), _volume(kernels["block"])
    blocks = blocks.where(kernels["launch_name"] != _THREAD_GRIDS, blocks / threads)
    units = kernels["gpu"].map({gpu: h.units for gpu, h in gpus.items() if h and h.units}).astype("float64")
    return told.where(told.notna(), blocks / units)


def _volume(shape: pd.Series) -> pd.Series:
    """`[4, 2, 1]` as 8."""
    volumes = [np.prod([int(v) for v in m[0].split(",")], dtype=float) if (m := _SHAPE.search(str(s))) else np.nan
               for s in shape.cat.categories]
    return pd.Series(np.array([*volumes, np.nan])[shape.cat.codes], shape.index)


def _measured(kernels: pd.DataFrame, gpus: Gpus) -> pd.DataFrame:
    """The rows with what adds up over them: times in µs, FLOPs, and seconds that they would take at the peak."""
    duration = (kernels["end_ns"] - kernels["start_ns"]) / 1000
    is_kernel = kernels["activity"] == "kernel"
    compute = schema.codes(kernels["kind"], schema.KINDS) == COMPUTE
    share = blocks_per_unit(kernels, gpus).clip(upper=1).where(is_kernel)
    occupancy = (kernels["occupancy"] / 100).where(is_kernel)
    cost = flops.kernel_costs(kernels)
    peak_s = (cost["flop"] / peaks(kernels, matrix_types(kernels, cost["dtype"]), gpus)).where(cost["flop"] > 0, 0.0)
    bandwidth = kernels["gpu"].map({g: h.memory_bytes_per_s for g, h in gpus.items() if h}).astype("float64")
    matrix = compute & kernels["op_type"].isin(["gemm", "attention"]).to_numpy()
    # FLOPs without a known peak count as not known: they must not look like a low efficiency.
    known = compute & cost["flop"].notna() & peak_s.notna()
    groups = kernels.drop(columns=kernels.select_dtypes(float).columns)
    return groups.assign(
        kernel_us=duration.where(is_kernel, 0.0), compute_us=duration.where(compute, 0.0),
        grid_us=duration.where(share.notna(), 0.0), saturated_us=(share * duration).fillna(0.0),
        occupancy_us=duration.where(occupancy.notna(), 0.0), occupied_us=(occupancy * duration).fillna(0.0),
        flop=cost["flop"].fillna(0.0), flop_us=duration.where(known, 0.0), peak_s=peak_s.fillna(0.0),
        model_peak_s=peak_s.fillna(0.0).where(~kernels["recompute"], 0.0),
        matrix_us=duration.where(matrix, 0.0),
        tensor_us=duration.where(matrix & on_matrix_cores(kernels["name"]), 0.0),
        **_parts(duration.where(compute, 0.0), share, cost, peak_s, cost["bytes"] / bandwidth))


def _parts(duration: pd.Series, share: pd.Series, cost: pd.DataFrame, peak_s: pd.Series,
           moving_s: pd.Series) -> dict[str, pd.Series]:
    """PARTS of each row's duration (µs, 0 for what is no compute kernel)."""
    lost = ((1 - share) * duration).fillna(0.0)
    filled = duration - lost
    # Without FLOPs a kernel needs its bytes; the bytes of one with FLOPs may be unknown.
    needed = np.fmax(peak_s, moving_s).where(np.where(cost["flop"] > 0, peak_s.notna(), moving_s.notna()))
    ideal = np.minimum(needed * 1e6, filled)
    return {"lost_us": lost, "ideal_us": ideal.fillna(0.0), "below_us": (filled - ideal).fillna(0.0),
            "unknown_us": filled.where(ideal.isna(), 0.0)}


def _per_group(rows: pd.DataFrame, groups: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`groups`, with the sums of each group's rows in their float columns (0 for a group without rows)."""
    codes, present = grouping.number(rows, by)
    sums = pd.DataFrame({c: np.bincount(codes, rows[c], len(present)) for c in rows.select_dtypes(float)})
    place = {key: i for i, key in enumerate(_keys(present))}
    at = [place.get(key, -1) for key in _keys(groups)]
    return pd.concat([groups.reset_index(drop=True), sums.reindex(at).fillna(0.0).reset_index(drop=True)], axis=1)


def _keys(groups: pd.DataFrame) -> list[tuple[str, ...]]:
    """A row as text, so that the several spellings of a missing value are one."""
    if not len(groups.columns):  # everything is one group
        return [()] * len(groups)
    return [tuple("" if pd.isna(v) else str(v) for v in row) for row in groups.itertuples(index=False)]


def _windows(kernels: pd.DataFrame, steps: pd.DataFrame, by_step: bool) -> pd.DataFrame:
    """Each capture, or each of its steps, as start_ns, end_ns and the columns that name it."""
    captures = kernels.groupby("capture", sort=True, as_index=False).agg(
        gpu=("gpu", "first"), worker=("worker", "first"), span=("span", "first"), device=("device", "first"),
        start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
    if not by_step:
        return captures.assign(step=pd.array([pd.NA] * len(captures), dtype="Int64"))
    some = steps.loc[steps["gpu_start_ns"].notna(), ["capture", "step", "gpu_start_ns", "gpu_end_ns"]]
    windows = captures.drop(columns=["start_ns", "end_ns"]).merge(some, on="capture")
    return windows.assign(
        start_ns=windows["gpu_start_ns"].astype("int64"), end_ns=windows["gpu_end_ns"].astype("int64"),
        step=windows["step"].astype("Int64"))


def _saturation(kernels: pd.DataFrame, windows: pd.DataFrame, gpus: Gpus) -> pd.DataFrame:
    """The windows with saturated_us = ∫ min(1, Σ blocks / SMs) dt over each."""
    out = windows.assign(saturated_us=0.0)
    rows = kernels[kernels["activity"] == "kernel"]
    load = blocks_per_unit(rows, gpus)
    for capture, mine in out.groupby("capture").groups.items():
        chosen = (rows["capture"] == capture) & load.notna()
        t, integral = _sweep(rows.loc[chosen, "start_ns"].to_numpy(), rows.loc[chosen, "end_ns"].to_numpy(),
                             load[chosen].to_numpy())
        if len(t):
            low, high = (np.interp(out.loc[mine, c].to_numpy() - t[0], t - t[0], integral)
                         for c in ("start_ns", "end_ns"))
            out.loc[mine, "saturated_us"] = (high - low) / 1000
    return out


def _sweep(start: np.ndarray, end: np.ndarray, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times (ns) and ∫ min(1, Σ load) dt up to each; both empty without kernels."""
    t = np.concatenate((start, end))
    order = np.argsort(t, kind="stable")
    level = np.clip(np.cumsum(np.concatenate((load, -load))[order]), 0, 1)
    t = t[order]
    return t, np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(t))))[:len(t)]


def _model_mfu(kernels: pd.DataFrame, steps: pd.DataFrame, gpus: Gpus, groups: pd.DataFrame, where: Where,
               model_flop_per_step: Mapping[int, float]) -> pd.Series:
    """The model's FLOPs at the bf16 peak over the time of the complete steps, per row of `groups`."""
    windows = grouping.select(_windows(kernels, steps[steps["complete"]], by_step=True), where)
    peaks = {gpu: peak.flop_per_s for gpu, h in gpus.items() if h and (peak := h.peak())}
    ideal_s = windows["gpu"].map(model_flop_per_step).astype(float) / windows["gpu"].map(peaks).astype(float)
    windows = windows.assign(ideal_s=ideal_s, step_s=(windows["end_ns"] - windows["start_ns"]) / 1e9)
    sums = _per_group(windows[ideal_s.notna()], groups, list(groups.columns))
    return _ratio(sums["ideal_s"], sums["step_s"])


def _ratio(part: pd.Series, whole: pd.Series) -> pd.Series:
    return part / whole.where(whole > 0)
