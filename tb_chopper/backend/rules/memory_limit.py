"""A GPU whose memory is almost full: a risk, not a loss of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.metrics.memory import TELEMETRY
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("activation checkpointing, a smaller microbatch with gradient accumulation, or more shards for parameters "
          "and optimizer states; against fragmentation PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
          "(PYTORCH_HIP_ALLOC_CONF on AMD)")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all GPUs whose allocated memory, and what the driver counts besides, comes close to the limit.

    Memory that the allocator only keeps does not count: it gives that back. Where nothing but the driver's count is
    known, which includes it, the rule is silent: a full cache is no risk.
    """
    rows = run.memory()
    rows = rows[(rows["source"] != TELEMETRY) & rows["total_known"].astype(bool) & rows["total_bytes"].notna()]
    if not len(rows):
        return []
    needed = rows["peak_bytes"] + rows["outside_bytes"].clip(lower=0).fillna(0)
    share = (needed / rows["total_bytes"]).astype("float64")
    full = rows[share >= thresholds.MEMORY_FULL]
    if not len(full):
        return []
    worst = full.loc[share[full.index].idxmax()]
    most, gpus = float(share.max()), tuple(map(int, full["gpu"]))
    left = float(worst["total_bytes"] - needed[worst.name])
    step = () if pd.isna(worst["step"]) else (int(worst["step"]),)
    when = "" if pd.isna(worst["operation"]) else f", in {worst['phase']}, for {worst['operation']}"
    return [Diagnosis(
        "memory_limit", "warning",
        f"GPU {int(worst['gpu'])} needs {most:.0%} of its memory at the peak{when}; {left / 2**30:.3g} GiB are left: a "
        "longer sequence or an uneven batch may fail",
        title="Memory is almost full",
        evidence=(Evidence("of the device", most, "share"),
                  Evidence("peak allocated", float(worst["peak_bytes"]), "bytes"), Evidence("left", left, "bytes"),
                  Evidence("fragmentation", float(worst["fragmentation"]), "share")),
        cause="parameters, optimizer states and activations together come close to the memory of the device",
        remedy=REMEDY, gain_how="a risk: no time is gained", gpus=gpus, steps=step, view="memory",
        selection={"gpu": int(worst["gpu"])}, kernel=worst["at"] or "")]
