"""Large messages inside a host that stay far below the bandwidth of its links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.attribution.pipeline_actions import MESSAGES
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, longest_collective, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("exposed time of these collectives in a step, waiting left out, x (1 - bandwidth / what such a link reaches): "
       "mean over GPUs and steps")


def rule(run: Run) -> list[Finding]:
    """One diagnosis per process group; only where the link's peak is known and all ranks are on one host.

    Messages between two ranks do not count: the peak is that to all other GPUs of the host together, of which a pair
    has one link where each is linked to each.
    """
    step = step_ms(run)
    if step is None or run.workers["host"].nunique() > 1:
        return []
    windows = run.own_times[["gpu", "step"]].drop_duplicates()
    each = run.collectives(where={"step": windows["step"].unique().tolist()})
    each = each[(each["source"] == "measured") & each["link_share"].notna()
                & (each["latency_bound"] == False)  # noqa: E712  (three-valued)
                & ~(each["name"].isin(MESSAGES) & (each["n_ranks"] <= 2))]
    return [found for group, rows in each.groupby("group")
            if (found := _of_group(run, str(group), rows, step, len(windows)))]


def _of_group(run: Run, group: str, rows: pd.DataFrame, step: float, n: int) -> Diagnosis | None:
    # Weighted by time: a few slow ones among many must not be hidden by the median.
    weight = rows["transfer_us"] * rows["n_ranks"]
    reached = float((rows["link_share"] * weight).sum() / weight.sum())
    exposed = (rows["exposed_us"] - rows["exposed_wait_us"].fillna(0)).clip(lower=0).sum() / n / 1000
    gain = float(exposed) * (1 - reached / thresholds.LINK_REACHES)
    if reached >= thresholds.LINK_SLOW or gain < thresholds.SMALL_GAIN * step:
        return None
    busbw = float((rows["busbw_gbs"] * weight).sum() / weight.sum())
    return Diagnosis(
        "slow_link", severity(gain, step),
        f"large messages of group {group} move at {busbw:.3g} GB/s, {reached:.0%} of the link's peak",
        title=f"Group {group} uses a fraction of its links",
        evidence=(Evidence("bus bandwidth, GB/s", busbw), Evidence("of the link's peak", reached, "share"),
                  Evidence("collectives", len(rows), "count")),
        cause="the ring runs over a slower path than the links between the GPUs, or too few channels move the data",
        remedy="NCCL_DEBUG=INFO (RCCL: same) tells the path and the channels; check nvidia-smi topo -m or amd-smi "
               "topology, peer-to-peer access (NCCL_P2P_LEVEL), and NCCL_MIN_NCHANNELS",
        gain_ms=gain, gain_how=HOW, view="collectives", selection={"by": "group"},
        kernel=longest_collective(run, rows), explained_by=("islands",))
