"""Power and energy of steps, phases, operations and collectives from sampled telemetry (docs/telemetry.md).

    energy of an interval = rise of the energy counter over it, where there is one, else the integral of power
    power                 = energy / time

A counter is read between samples as a straight line. Energy belongs to time, not to kernels: two operations that run
at once both count the GPU's energy of that time, so that only windows (gpu, step) add up to the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.alignment.curve import rise
from tb_chopper.backend.alignment.telemetry import curve
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.timeline import lanes, union_by_group

SOURCES = ("counter", "integral", "unavailable")
KNOWN_SHARE = 0.5
"""with samples over less of the time than this, a mean says nothing"""


def energy(samples: pd.DataFrame, gpu: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> pd.DataFrame:
    """One row per interval: energy_j over its known part, known_ns, counted (True: from the energy counter).
    samples: TELEMETRY of a run; gpu: as in samples."""
    joules, known_ns, counted = np.zeros(len(gpu)), np.zeros(len(gpu), np.int64), np.zeros(len(gpu), bool)
    for number, rows in samples.groupby("gpu"):
        mine = np.flatnonzero(gpu == number)
        if len(mine):
            joules[mine], known_ns[mine], counted[mine] = _energy_of(rows, start_ns[mine], end_ns[mine])
    return pd.DataFrame({"energy_j": joules, "known_ns": known_ns, "counted": counted})


def _energy_of(rows: pd.DataFrame, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    watts = curve(rows, "power_w")
    counter = rows[rows["energy_j"].notna()]
    joules = rise(counter["t_ns"].to_numpy(), counter["energy_j"].to_numpy(), start, end)
    counted = ~np.isnan(joules)
    joules = np.where(counted, joules, watts.integral(start, end) / 1e9)
    return joules, np.where(counted, end - start, watts.grid.covered_ns(start, end)), counted


def power(kernels: pd.DataFrame, steps: pd.DataFrame, samples: pd.DataFrame, by: By = "gpu",
          where: Where = None) -> pd.DataFrame:
    """One row per group of `by`: time_us, power_w (mean of a GPU over that time), energy_j, known_share (of the time
    with samples), source (counter | integral | unavailable).

    Grouped and filtered by gpu, worker, span or step alone, a group is a window of time, idle included; else it is
    the time in which any of its activities ran on their GPU. NaN where less than half of the time has samples.
    """
    by = grouping.columns(by)
    asked = {grouping.source(c, kernels) for c in (*by, *(where or {}))}
    rows = windows(kernels, steps, by, where) if asked <= grouping.WINDOW_COLUMNS else pieces(kernels, by, where)
    return _summed(rows, samples, by)


def windows(kernels: pd.DataFrame, steps: pd.DataFrame, by: list[str], where: Where = None) -> pd.DataFrame:
    """Whole captures, or steps on the GPU where steps are asked for: gpu, start_ns, end_ns and columns to group by."""
    facts = kernels.groupby("capture", sort=True).agg(
        gpu=("gpu", "first"), worker=("worker", "first"), span=("span", "first"), device=("device", "first"),
        start_ns=("start_ns", "min"), end_ns=("end_ns", "max")).reset_index()
    if "step" not in by and "step" not in (where or {}):
        return grouping.select(facts.assign(step=pd.array([pd.NA] * len(facts), "Int64")), where)
    some = steps.loc[steps["gpu_start_ns"].notna(), ["capture", "step", "gpu_start_ns", "gpu_end_ns"]]
    rows = some.merge(facts.drop(columns=["start_ns", "end_ns"]), on="capture")
    return grouping.select(rows.assign(start_ns=rows["gpu_start_ns"].astype("int64"),
                                       end_ns=rows["gpu_end_ns"].astype("int64")), where)


def pieces(kernels: pd.DataFrame, by: list[str], where: Where = None) -> pd.DataFrame:
    """The union of each group's activities, GPU by GPU: gpu, start_ns, end_ns and the columns of `by`."""
    chosen = grouping.select(kernels, where)
    apart = list(dict.fromkeys(["capture", *by]))
    codes, groups = grouping.number(chosen, apart)
    starts, ends, group = union_by_group(chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy(), codes)
    gpu = chosen.groupby("capture")["gpu"].first()
    rows = groups.iloc[group].reset_index(drop=True)
    return rows.assign(gpu=rows["capture"].map(gpu).to_numpy(), start_ns=starts, end_ns=ends)


def _summed(rows: pd.DataFrame, samples: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    found = energy(samples, rows["gpu"].to_numpy(), start, end)
    codes, groups = grouping.number(rows.rename(columns=grouping.ALIASES), by)
    n = len(groups)
    time, known = grouping.sums(codes, n, end - start), grouping.sums(codes, n, found["known_ns"].to_numpy())
    joules = np.bincount(codes, found["energy_j"].to_numpy(), n)
    by_integral = np.bincount(codes, np.where(found["counted"], 0, found["known_ns"]), n)
    share = known / np.maximum(time, 1)
    enough = (share >= KNOWN_SHARE) & (known > 0)
    watts = np.where(enough, joules / np.maximum(known, 1) * 1e9, np.nan)
    source = np.where(~enough, 2, np.where(by_integral > 0, 1, 0))
    return groups.assign(time_us=time / 1000, power_w=watts, energy_j=watts * time / 1e9, known_share=share,
                         source=pd.Categorical.from_codes(source, categories=list(SOURCES)))


def step_energy(kernels: pd.DataFrame, steps: pd.DataFrame, samples: pd.DataFrame,
                tokens_per_step: Mapping[int, int] | None = None) -> pd.DataFrame:
    """One row per gpu and step: gpu, step, time_us, power_w, energy_j, j_per_token (`tokens_per_step` by gpu; NaN
    where not told), known_share, source."""
    out = power(kernels, steps, samples, ["gpu", "step"])
    tokens = out["gpu"].map(dict(tokens_per_step or {})).astype("float64")
    return out.assign(j_per_token=out["energy_j"] / tokens.where(tokens > 0))


def collective_energy(kernels: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu, what it spends while nothing but communication runs (waiting for others and transfer):
    gpu, time_us, power_w, energy_j, total_energy_j (whole capture), share, known_share, source."""
    parts = []
    for _, rows in kernels.groupby("capture", sort=True):
        lane = lanes(rows)
        exposed = iv.subtract(lane.communication, lane.compute)
        gpu = rows["gpu"].iloc[0]
        whole = iv.union(np.array([rows["start_ns"].min()]), np.array([rows["end_ns"].max()]))
        for part, u in (("exposed", exposed), ("total", whole)):
            parts.append(pd.DataFrame({"gpu": gpu, "part": part, "start_ns": u.starts, "end_ns": u.ends}))
    names = ["gpu", "time_us", "power_w", "energy_j", "total_energy_j", "share", "known_share", "source"]
    if not parts:
        return pd.DataFrame(columns=names)
    found = _summed(pd.concat(parts, ignore_index=True), samples, ["gpu", "part"])
    total = found[found["part"] == "total"].set_index("gpu")["energy_j"]
    out = found[found["part"] == "exposed"].reset_index(drop=True)
    out["total_energy_j"] = out["gpu"].map(total)
    return out.assign(share=out["energy_j"] / out["total_energy_j"])[names]

