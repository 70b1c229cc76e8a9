"""The numbers behind the CPU tab: how the hosts' cores were used in the selected part of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.metrics import cpu, power
from tb_chopper.backend.views import context
from tb_chopper.backend.views.view import Selection

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

FEWEST = 3
"""With fewer samples of a host within the selected time, all that was read of its log is looked at instead."""


Span = tuple[object, int, int, bool]
"""host, start_ns, end_ns, whether it is more than the selected time"""


@dataclass(frozen=True)
class Cores:
    """One run's CPUs. use: metrics.cpu.cpu_utilization of the looked-at samples with spare (metrics.cpu.spare_cores);
    hosts: metrics.cpu.summary with spare (median), limit_w (power limits of the host's GPUs), logical (CPUs) and
    start_ns, end_ns, whole (the time looked at; whole: the log around the selection); rows, cores: CPU and CPU_CORES of
    the same samples."""

    name: str
    use: pd.DataFrame
    hosts: pd.DataFrame
    rows: pd.DataFrame
    cores: pd.DataFrame

    @property
    def main(self) -> pd.Series:
        """The host with the most cores to spare, else with the most active CPUs beyond those needed."""
        over = self.hosts["spare"].astype("Float64").fillna(self.hosts["c_active"] - self.hosts["c_min"])
        return self.hosts.loc[over.astype(float).idxmax()]

    def of_host(self, frame: pd.DataFrame, host: object) -> pd.DataFrame:
        """The rows of one host (None: a run without host names)."""
        missing = host is None or host != host
        return frame[frame["host"].isna() if missing else (frame["host"] == host).fillna(False)]

    def by_cpu(self, host: object) -> pd.DataFrame:
        """One row per logical CPU that was ever busy: cpu, core, busy_share and active_share (of the samples),
        clock_mhz (mean where read), threads (of the training, mean over the readings), the busiest first."""
        rows = self.of_host(self.rows, host)
        busy = cpu.busy_by_cpu(rows.assign(host=None))
        means = rows[rows["cpu"] >= 0].groupby("cpu")["clock_mhz"].mean()
        readings = rows.groupby("t_ns")["threads"].sum(min_count=1).notna().sum()
        threads = rows[rows["cpu"] >= 0].groupby("cpu")["threads"].sum(min_count=1) / max(int(readings), 1)
        core = self.of_host(self.cores, host).set_index("cpu")["core"]
        out = busy.assign(busy_share=busy["busy_pct"] / 100)[["cpu", "busy_share", "active_share"]]
        out = out.assign(core=out["cpu"].map(core).astype("Int64"), clock_mhz=out["cpu"].map(means),
                         threads=out["cpu"].map(threads))
        return out.sort_values("busy_share", ascending=False, ignore_index=True)

    def has_siblings(self, host: object) -> bool:
        """Whether any physical core of the host is two logical CPUs."""
        return bool(self.of_host(self.cores, host)["core"].duplicated().any())


def cores(run: Run, selection: Selection) -> Cores | None:
    """The CPUs of the hosts of the selected GPUs within the selected time; None where no CPU was sampled. A host with
    fewer than FEWEST samples there, or `time="around"`, is looked at over all that was read of its log: some seconds
    around the capture."""
    context.kernels(run, selection)  # refuses a selection that matches nothing
    rows = run.telemetry.cpu.astype({"host": object})
    windows = _windows(run, selection)
    parts, spans = [], []
    named = set(windows["host"]) & set(rows["host"].dropna())
    for host, own in rows.groupby("host", dropna=False):
        name = None if host != host else host
        if named and name not in named:
            continue  # no selected GPU is on it
        mine = windows[windows["host"] == name] if named else windows
        start, end = int(mine["start_ns"].min()), int(mine["end_ns"].max())
        inside = own[own["t_ns"].between(start, end)]
        whole = selection.options.get("time") == "around" or inside["t_ns"].nunique() < FEWEST
        kept = own if whole else inside
        parts.append(kept)
        first, last = (int(kept["t_ns"].min()), int(kept["t_ns"].max())) if whole else (start, end)
        spans.append((name, first, last, whole))
    if not parts:
        return None
    kept = schema.conform(pd.concat(parts, ignore_index=True), schema.CPU).astype({"host": object})
    known = run.telemetry.cores.astype({"host": object})
    use = cpu.cpu_utilization(kept, known)
    use = use.assign(spare=cpu.spare_cores(use))
    return Cores(run.name, use, _hosts(run, use, known, spans), kept, known)


def _windows(run: Run, selection: Selection) -> pd.DataFrame:
    """start_ns, end_ns and host of the selected steps or captures."""
    windows = power.windows(run.kernels, run.steps, [], selection.where())
    host = run.workers.drop_duplicates("gpu").set_index("gpu")["host"].astype(object)
    return windows.assign(host=windows["gpu"].map(host))


def _hosts(run: Run, use: pd.DataFrame, known: pd.DataFrame, spans: list[Span]) -> pd.DataFrame:
    out = cpu.summary(use)
    spare = use.groupby("host", dropna=False)["spare"].median()
    limits = run.telemetry.samples.groupby(["host", "gpu"], observed=True, dropna=False)["power_limit_w"].median()
    limit = limits.groupby(level=0).sum(min_count=1)
    logical = known.groupby("host", dropna=False)["cpu"].nunique()
    time = pd.DataFrame(spans, columns=["host", "start_ns", "end_ns", "whole"])
    keys = out["host"].astype(object)
    return out.assign(
        host=keys, spare=_lookup(keys, spare), limit_w=_lookup(keys, limit), logical=_lookup(keys, logical),
    ).merge(time.astype({"host": object}), on="host", how="left")  # fmt: skip


def _lookup(hosts: pd.Series, values: pd.Series) -> np.ndarray:
    """A value by host; a host without a name is looked up as one."""
    found = {None if h != h else h: v for h, v in zip(values.index.astype(object), values.astype(float), strict=True)}
    return np.array([found.get(None if h is None or h != h else h, np.nan) for h in hosts], np.float64)
