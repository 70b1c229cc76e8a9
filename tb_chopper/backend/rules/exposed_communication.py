"""Communication that no computation hides, without the waiting for late ranks: what remains is transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.attribution.pipeline_actions import MESSAGES
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    import pandas as pd

    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = ("gradient_barrier", "slow_link", "small_messages", "islands", "over_sharding", "pipeline_bubble")
REMEDY = ("prefetch the next layer's parameters (FSDP2: set_modules_to_forward_prefetch), use larger local batches or "
          "gradient accumulation, or shard over fewer GPUs")
REMEDIES = {
    "data": "reduce gradients less often (gradient accumulation with no_sync()) or in fewer bits (a bf16 compression "
            "hook); larger local batches; larger buckets (DDP: bucket_cap_mb)",
    "tensor": "cut the layers among fewer GPUs; asynchronous tensor parallelism "
              "(torch._inductor.config._micro_pipeline_tp) and sequence parallelism; larger local batches",
    "expert": "overlap the exchange with shared experts or another microbatch; fewer GPUs per expert group; a token "
              "dispatch that sends less (capacity, fp8)",
    "context": "ring attention, which exchanges while it computes; cut the sequence among fewer GPUs",
}
"""By the role of the group that exchanges most without cover; parameters that FSDP shards, or not known: REMEDY."""
HOW = ("exposed communication of a step without its waiting for late ranks, median over GPUs and steps: at most this, "
       "where all of it could be hidden")


def rule(run: Run) -> list[Finding]:
    """One diagnosis where exposed transfers are a large part of the step."""
    step = step_ms(run)
    if step is None:
        return []
    exposed = run.timeline(by=["gpu", "step"])[["gpu", "step", "exposed_communication_us", "total_us"]]
    both = run.own_times.merge(exposed.astype({"step": "int64"}), on=["gpu", "step"])
    both = both.merge(_messages(run), on=["gpu", "step"], how="left").fillna({"messages_us": 0})
    if not len(both):
        return []
    transfer = (both["exposed_communication_us"] - both["wait_us"] - both["messages_us"]).clip(lower=0)
    share = float((transfer / both["total_us"]).median())
    if share < thresholds.EXPOSED_COMMUNICATION:
        return []
    gain = float(transfer.median()) / 1000
    by = run.collectives(by=["role", "name"])
    worst = by.sort_values("exposed_us", ascending=False).iloc[0] if len(by) else None
    most = f", most of it in {worst['name']}" if worst is not None else ""
    return [Diagnosis(
        "exposed_communication", severity(gain, step),
        f"{share:.0%} of a step is communication that no computation hides, waiting for late ranks left out{most}",
        title="Communication is not hidden behind compute",
        evidence=(Evidence("exposed transfer", share, "share"), Evidence("exposed transfer", gain * 1000, "us"),
                  Evidence("all exposed", float(both["exposed_communication_us"].median()), "us")),
        cause="collectives start too late, or carry more than the computation beside them can hide",
        remedy=REMEDIES.get(str(worst["role"]), REMEDY) if worst is not None else REMEDY,
        gain_ms=gain, gain_how=HOW, view="overlap", explained_by=CAUSES,
        kernel=largest(run.kernels[(run.kernels["kind"] == "communication") & run.kernels["step"].notna()]))]


def _messages(run: Run) -> pd.DataFrame:
    """Exposed time of messages between two ranks: gpu, step, messages_us. In it is the waiting for the sender."""
    rows = run.arrivals()
    rows = rows[rows["name"].isin(MESSAGES) & rows["step"].notna()]
    exposed = rows["exposed_ns"] - rows["exposed_wait_ns"].fillna(0)
    return rows.assign(messages_us=exposed / 1000).astype({"step": "int64"}).groupby(
        ["gpu", "step"])["messages_us"].sum().reset_index()
