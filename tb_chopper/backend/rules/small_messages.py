"""Many collectives too small for the link: each costs its latency, whatever it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.attribution.pipeline_actions import MESSAGES
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, longest_collective, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

OF_LAYERS = ("tensor", "context", "expert")
"""Roles whose messages are each waited for before the layer goes on."""
HOW = ("exposed time of these collectives in a step, waiting left out, mean over GPUs and steps: at most this, where "
       "they went together in a few")


def rule(run: Run) -> list[Finding]:
    """One diagnosis per run; only where sizes and the link's peak are known. Messages between two ranks do not count:
    in their receiver's kernel is the waiting for the sender. Nor do exchanges of layers, which cannot go together."""
    step = step_ms(run)
    windows = run.own_times[["gpu", "step"]].drop_duplicates()
    each = run.collectives(where={"step": windows["step"].unique().tolist()})
    small = each[(each["latency_bound"] == True)  # noqa: E712  (three-valued)
                 & ~each["name"].isin(MESSAGES) & ~each["role"].isin(OF_LAYERS)]
    if step is None or not len(small):
        return []
    n = len(small) / windows["step"].nunique()
    exposed = (small["exposed_us"] - small["exposed_wait_us"].fillna(0)).clip(lower=0)
    gain = float(exposed.sum()) / len(windows) / 1000
    if n < thresholds.MANY_MESSAGES or gain < thresholds.SMALL_MESSAGES * step:
        return []
    worst = exposed.groupby(small["group"]).sum().idxmax()
    size = float(small.loc[small["group"] == worst, "bytes"].median())
    return [Diagnosis(
        "small_messages", severity(gain, step),
        f"{n:.0f} collectives of a step are so small that latency is all they cost; most of it in group {worst}",
        title="Many small collectives",
        evidence=(Evidence("small collectives a step", round(n), "count"), Evidence("typical size", size, "bytes"),
                  Evidence("exposed", gain * 1000, "us")),
        cause="every parameter, loss or counter is communicated on its own",
        remedy="communicate in buckets (DDP: bucket_cap_mb; one flat tensor for metrics), or less often",
        gain_ms=gain, gain_how=HOW, view="collectives", selection={"by": "name"},
        kernel=longest_collective(run, small[small["group"] == worst]))]
