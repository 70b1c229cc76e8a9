"""Process groups that span islands of fast links, and are as slow as what lies between them (docs/topology.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics.topology import MEASURED, as_text
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("transfer of these groups beside nothing else on their GPUs x (1 - bandwidth / bandwidth inside an island), and "
       "what computation beside them loses; mean over GPUs and steps, at the clocks as they are")
NAMES = {"shard": "Sharding", "data": "Data-parallel", "tensor": "Tensor-parallel", "expert": "Expert-parallel",
         "context": "Context-parallel", "pipeline": "Pipeline"}
INSIDE = {"tensor": "tp", "context": "cp", "expert": "ep"}
"""Roles whose groups belong inside an island, and the names of their mesh dimensions."""


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all groups that span islands of one host and are far slower than those inside one, or whose
    exposed transfer is a large part of the step."""
    step = step_ms(run)
    if step is None or not len(run.topology.islands):
        return []
    groups = run.group_islands()
    slow = groups["ratio"] < thresholds.ISLANDS_SLOW
    large = groups["transfer_us"] / 1000 > thresholds.ISLANDS_SHARE * step
    found = groups[groups["spans"] & (slow | large)]
    if not len(found):
        return []
    gain = _gain_ms(found)
    if gain is not None and gain < thresholds.SMALL_GAIN * step:
        return []
    return [_diagnosis(run, found, gain, step)]


def _gain_ms(groups: pd.DataFrame) -> float | None:
    """Per step, mean over the GPUs of these groups; None where no bandwidth is known."""
    if groups["saved_us"].isna().all():
        return None
    gpus = len(set().union(*groups["gpus"]))
    return float((groups["saved_us"] * groups["gpus"].map(len)).sum()) / gpus / 1000


def _diagnosis(run: Run, groups: pd.DataFrame, gain: float | None, step: float) -> Diagnosis:
    largest = groups.iloc[int(groups["transfer_us"].fillna(0).to_numpy().argmax())]
    gpus = sorted(set().union(*groups["gpus"]))
    islands = run.topology.islands
    of_largest = islands[islands["island"].isin(islands.loc[islands["gpu"].isin(largest["gpus"]), "island"])]
    names = as_text(own.tolist() for _, own in of_largest.groupby("island")["gpu"])
    known = not np.isnan(largest["ratio"])
    listed = ", ".join(map(str, groups["group"].head(3))) + (", …" if len(groups) > 3 else "")
    noun = f"groups {listed} span" if len(groups) > 1 else f"group {listed} spans"
    inside = "measured inside one" if largest["within_source"] == MEASURED else "that links inside one should reach"
    speed = (f"large messages move at {largest['busbw_gbs']:.3g} GB/s, {largest['ratio']:.0%} of the "
             f"{largest['within_gbs']:.3g} GB/s {inside}") if known else "the bandwidth is not known"
    return Diagnosis(
        "islands", severity(gain, step), f"{noun} the islands {names}; {speed}",
        title=f"{NAMES.get(largest['role'], 'Process')} groups span islands of GPUs",
        evidence=(
            Evidence("islands", names),
            *((Evidence("bus bandwidth, GB/s", largest["busbw_gbs"]),
               Evidence("bandwidth inside an island, GB/s", largest["within_gbs"]),
               Evidence("of the bandwidth inside", largest["ratio"], "share")) if known else ()),
            Evidence("bare transfer, of the step", largest["transfer_us"] / 1000 / step, "share")),
        cause=f"between the islands there is {_between(run, gpus)}, and every ring over them is as slow",
        remedy=_remedy(str(largest["role"]), largest["islands"], int(of_largest.groupby("island").size().min())),
        gain_ms=gain, gain_how=HOW if gain is not None else "", gpus=tuple(gpus), view="collectives",
        selection={"by": "group"})


def _between(run: Run, gpus: list[int]) -> str:
    links = run.topology.links
    across = links[links["gpu_a"].isin(gpus) & links["gpu_b"].isin(gpus) & ~links["fast"].astype(bool)]
    kinds = sorted(set(across["link"]) - {"unknown"})
    return f"no NVLink or XGMI but {', '.join(kinds)}" if kinds else "no NVLink or XGMI"


def _remedy(role: str, parts: list[list[int]], size: int) -> str:
    """`parts`: the group's GPUs by island; `size`: GPUs of an island."""
    own, n = min(map(len, parts)), len(parts)
    if role in INSIDE:
        return (f"keep the group inside an island of {size} GPUs, its ranks next to each other: init_device_mesh("
                f"\"cuda\", (world // n, n), mesh_dim_names=(\"dp\", \"{INSIDE[role]}\")) with n of {size} at most")
    if own > 1:
        return (f"reduce in two levels: init_device_mesh(\"cuda\", ({n}, {own}), mesh_dim_names=(\"replicate\", "
                "\"shard\")) with HSDP, or torch.distributed.new_group per island and one across; keep tensor and "
                "expert groups inside an island")
    swap = "exchange the dimensions of the mesh so that the groups that move most lie inside an island"
    if role == "shard":
        return ("replicate over the islands in place of sharding (HSDP: one reduction of gradients per step, no "
                f"gathers in every layer), or {swap}")
    return f"{swap}; else reduce less: gradient accumulation, or bfloat16 gradients (DDP: bf16_compress_hook)"
