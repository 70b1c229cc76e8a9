"""The numbers behind the DVFS tab: what the sensors said about the selected part of a run, GPU by GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics import frequency, grouping, power
from tb_chopper.backend.metrics.frequency import Regression
from tb_chopper.backend.views import context
from tb_chopper.backend.views.view import Selection

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

FREE = "none"
"""The throttle reason of time without one."""


@dataclass(frozen=True)
class Clocks:
    """One run's sensors over its selected windows (steps, else whole captures).

    kernels: the selected compute kernels with their clock; samples: all of the selected GPUs' logs; windows: gpu,
    start_ns, end_ns; steps: STEPS of the selection; gpus, operations, by_step: one row per GPU, group, GPU and step
    (see `_gpus`, `_operations`, `_by_step`); throttle: metrics.frequency.throttle_shares.
    """

    name: str
    by: tuple[str, ...]
    kernels: pd.DataFrame
    samples: pd.DataFrame
    windows: pd.DataFrame
    steps: pd.DataFrame
    gpus: pd.DataFrame
    operations: pd.DataFrame
    by_step: pd.DataFrame
    throttle: pd.DataFrame

    @property
    def inside(self) -> pd.DataFrame:
        """The samples within the windows."""
        keep = np.zeros(len(self.samples), bool)
        t, gpu = self.samples["t_ns"].to_numpy(), self.samples["gpu"].to_numpy()
        for number, start, end in self.windows[["gpu", "start_ns", "end_ns"]].itertuples(index=False):
            keep |= (gpu == number) & (t >= start) & (t < end)
        return self.samples[keep]

    @property
    def slowest(self) -> dict[str, Any] | None:
        """The row of `gpus` with the lowest share of its peak clock, else the lowest clock; None without any clock."""
        known = self.gpus[self.gpus["clock_mhz"].notna()]
        if not len(known):
            return None
        order = known["clock_share"] if known["clock_share"].notna().all() else known["clock_mhz"]
        return known.loc[[order.idxmin()]].to_dict("records")[0]

    @property
    def clock_mhz(self) -> float:
        """Mean clock of the compute time of all GPUs."""
        return _mean(self.gpus["clock_mhz"], self.gpus["compute_us"])

    @property
    def power_w(self) -> float:
        """Mean power of a GPU over the windows."""
        return _mean(self.gpus["power_w"], self.gpus["window_us"])

    @property
    def lost_share(self) -> float:
        """Compute time lost to the clock / compute time, of all GPUs; NaN where it is not known for one."""
        return float(self.gpus["lost_us"].sum(skipna=False) / self.gpus["compute_us"].sum())

    @property
    def j_per_step(self) -> float:
        """Energy of all GPUs per step, mean over steps; NaN where a GPU's is unknown."""
        per_step = self.by_step.groupby("step")["energy_j"].agg(lambda e: e.sum(skipna=False))
        return float(per_step.mean()) if len(per_step) else np.nan

    @property
    def j_per_token(self) -> float:
        """Energy of all GPUs / tokens of all GPUs; NaN where one of them is unknown."""
        tokens = (self.by_step["energy_j"] / self.by_step["j_per_token"]).sum(skipna=False)
        return float(self.by_step["energy_j"].sum(skipna=False) / tokens) if len(self.by_step) else np.nan

    @property
    def waiting_share(self) -> float:
        """Energy while nothing but communication ran / energy, of all GPUs."""
        total = self.gpus["energy_j"].sum(skipna=False)
        return float(self.gpus["waiting_j"].sum(skipna=False) / total) if total > 0 else np.nan

    @property
    def reasons(self) -> pd.DataFrame:
        """Throttle reasons over all GPUs, the longest first: reason, share (of the time with a known state), lowest
        and highest share of a GPU. Time without a reason is left out."""
        rows = self.throttle[(self.throttle["reason"] != FREE) & (self.throttle["known_us"] > 0)]
        known = self.throttle.drop_duplicates("gpu")
        if not len(rows):
            return pd.DataFrame({"reason": [], "share": [], "low": [], "high": []})
        shares = rows.pivot(index="reason", columns="gpu", values="share").reindex(columns=known["gpu"]).fillna(0.0)
        out = pd.DataFrame({"reason": shares.index, "low": shares.min(axis=1), "high": shares.max(axis=1),
                            "share": rows.groupby("reason")["time_us"].sum() / known["known_us"].sum()})
        return out.sort_values("share", ascending=False, ignore_index=True)

    @property
    def throttled_share(self) -> float:
        """Share of the time with a known state in which any reason held; NaN where no state is known."""
        known = self.throttle.drop_duplicates("gpu")["known_us"].sum()
        free = self.throttle.loc[self.throttle["reason"] == FREE, "time_us"].sum()
        return float(1 - free / known) if known > 0 else np.nan

    def mean_steps(self) -> pd.DataFrame:
        """One row per step: step, time_us, clock_mhz, means over the GPUs."""
        return self.by_step.groupby("step", as_index=False)[["time_us", "clock_mhz"]].agg(
            lambda values: values.mean(skipna=False))

    def step_time(self) -> Regression | None:
        """Step time against clock, one point per step: GPUs of one step are not independent."""
        steps = self.mean_steps()
        return frequency.step_time_against_clock(steps["time_us"].to_numpy(float), steps["clock_mhz"].to_numpy(float))


def clocks(run: Run, selection: Selection, by: tuple[str, ...]) -> Clocks:
    """The numbers of a selection; InvalidSelection where it matches nothing."""
    where = selection.where()
    chosen = context.kernels(run, selection)
    gpus = sorted(map(int, chosen["gpu"].unique()))
    windows = power.windows(run.kernels, run.steps, [], where)
    samples = run.telemetry.samples[run.telemetry.samples["gpu"].isin(gpus)].reset_index(drop=True)
    compute = grouping.select(run.clocked_kernels, {**where, "kind": "compute"})
    throttle = frequency.throttle_shares(samples, windows)
    by_step = _by_step(run, where)
    return Clocks(
        run.name, by, compute, samples, windows, grouping.select(run.steps, where),
        _gpus(run, selection, chosen, compute, windows, throttle, by_step), _operations(run, where, by), by_step,
        throttle)  # fmt: skip


def _operations(run: Run, where: dict[str, Any], by: tuple[str, ...]) -> pd.DataFrame:
    """Compute work by group: columns of metrics.frequency.frequency, lost_share (of its time)."""
    rows = run.frequency(by, {**where, "kind": "compute"})
    return rows.assign(lost_share=rows["lost_to_clock_us"] / rows["time_us"].where(rows["time_us"] > 0))


def _by_step(run: Run, where: dict[str, Any]) -> pd.DataFrame:
    """One row per GPU and step: gpu, step, time_us, clock_mhz (of compute time), power_w, energy_j, j_per_token,
    energy_source."""
    energy = run.step_energy().rename(columns={"source": "energy_source"})
    energy = energy[energy["step"].notna()]
    energy = energy[energy["gpu"].isin(grouping.select(run.steps, where)["gpu"])]
    if "step" in where:
        energy = energy[energy["step"].isin(where["step"])]
    clock = run.frequency(["gpu", "step"], {**where, "kind": "compute"})[["gpu", "step", "clock_mhz"]]
    out = energy.merge(clock, on=["gpu", "step"], how="left")
    return out[["gpu", "step", "time_us", "clock_mhz", "power_w", "energy_j", "j_per_token", "energy_source"]]


def _gpus(run: Run, selection: Selection, chosen: pd.DataFrame, compute: pd.DataFrame, windows: pd.DataFrame,
          throttle: pd.DataFrame, by_step: pd.DataFrame) -> pd.DataFrame:  # fmt: skip
    """One row per GPU: gpu, clock_mhz (of compute time), clock_to_median, peak_mhz, clock_share, compute_us, lost_us,
    lost_share, window_us, power_w, limit_w, temperature_c, above_median_c, note (slow, hot), energy_j,
    energy_source, waiting_j, waiting_share, j_per_step, j_per_token, reason (the longest), reason_share."""
    where, samples = selection.where(), run.telemetry.samples
    watts = run.power("gpu", where).rename(columns={"time_us": "window_us", "source": "energy_source"})
    lost = run.frequency("gpu", {**where, "kind": "compute"})[["gpu", "clock_mhz", "time_us", "lost_to_clock_us"]]
    known = compute["gpu"].isin(lost.loc[lost["clock_mhz"].notna(), "gpu"])
    lost = lost.rename(columns={"time_us": "compute_us", "lost_to_clock_us": "lost_us"})
    spread = frequency.spread(compute[known], samples, windows).drop(columns=["clock_mhz", "power_w"])
    waiting = power.collective_energy(chosen, samples)[["gpu", "energy_j", "share"]]
    waiting = waiting.rename(columns={"energy_j": "waiting_j", "share": "waiting_share"})
    out = watts[["gpu", "window_us", "power_w", "energy_j", "energy_source"]]
    for more in (lost, spread, waiting, _per_step(by_step), _longest_reason(throttle)):
        out = out.merge(more, on="gpu", how="left")
    out["peak_mhz"] = out["gpu"].map(run.f_peak_mhz)
    out["limit_w"] = out["gpu"].map(samples.groupby("gpu")["power_limit_w"].median())
    out["clock_share"] = out["clock_mhz"] / out["peak_mhz"]
    out["lost_share"] = out["lost_us"] / out["compute_us"].where(out["compute_us"] > 0)
    return out.assign(note=out["note"].fillna(""))


def _per_step(by_step: pd.DataFrame) -> pd.DataFrame:
    per_gpu = by_step.groupby("gpu")[["energy_j", "j_per_token"]].agg(lambda values: values.mean(skipna=False))
    return per_gpu.rename(columns={"energy_j": "j_per_step"}).reset_index()


def _longest_reason(throttle: pd.DataFrame) -> pd.DataFrame:
    """Per GPU with a known state the reason that held longest (None: none did) and its share."""
    rows = throttle[throttle["known_us"] > 0]
    named = rows[rows["reason"] != FREE].sort_values("share", ascending=False).drop_duplicates("gpu")
    gpus = rows[["gpu"]].drop_duplicates()
    out = gpus.merge(named[["gpu", "reason", "share"]].rename(columns={"share": "reason_share"}), on="gpu", how="left")
    return out.assign(reason_share=out["reason_share"].astype(float).fillna(0.0))


def _mean(values: pd.Series, weight: pd.Series) -> float:
    known = values.notna()
    total = weight[known].sum()
    return float((values[known] * weight[known]).sum() / total) if total > 0 else np.nan
