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
INSIDE = ("tensor", "context", "expert")
"""Roles whose groups can be made smaller than the host; data and sharding groups can be split in two levels."""


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
    known = not np.isnan(largest["ratio"])
    named = ", ".join(map(str, groups["group"].head(3))) + (", …" if len(groups) > 3 else "")
    noun = f"groups {named} span" if len(groups) > 1 else f"group {named} spans"
    inside = "measured inside one" if largest["within_source"] == MEASURED else "that links inside one should reach"
    speed = (f"large messages move at {largest['busbw_gbs']:.3g} GB/s, {largest['ratio']:.0%} of the "
             f"{largest['within_gbs']:.3g} GB/s {inside}") if known else "the bandwidth is not known"
    return Diagnosis(
        "islands", severity(gain, step),
        f"{noun} the islands {as_text(largest['islands'])}; {speed}",
        title=f"{largest['role'].capitalize()} groups span islands of GPUs" if largest["role"] != "unknown"
        else "Process groups span islands of GPUs",
        evidence=(
            Evidence("islands", as_text(largest["islands"])),
            *((Evidence("bus bandwidth, GB/s", largest["busbw_gbs"]),
               Evidence("bandwidth inside an island, GB/s", largest["within_gbs"]),
               Evidence("of the bandwidth inside", largest["ratio"], "share")) if known else ()),
            Evidence("transfer beside nothing, of the step", largest["transfer_us"] / 1000 / step, "share")),
        cause=f"between the islands there is {_between(run, gpus)}, and every ring over them is as slow",
        remedy=_remedy(str(largest["role"]), largest["islands"]), gain_ms=gain,
        gain_how=HOW if gain is not None else "", gpus=tuple(gpus), view="collectives", selection={"by": "group"})


def _between(run: Run, gpus: list[int]) -> str:
    links = run.topology.links
    across = links[links["gpu_a"].isin(gpus) & links["gpu_b"].isin(gpus) & ~links["fast"].astype(bool)]
    kinds = sorted(set(across["link"]) - {"unknown"})
    return f"no NVLink or XGMI but {', '.join(kinds)}" if kinds else "no NVLink or XGMI"


def _remedy(role: str, islands: list[list[int]]) -> str:
    size, n = min(map(len, islands)), len(islands)
    if role in INSIDE:
        word = {"tensor": "tp", "context": "cp", "expert": "ep"}[role]
        return (f"keep the group inside an island: a {role} group of {size} GPUs, "
                f"init_device_mesh(\"cuda\", ({n}, {size}), mesh_dim_names=(\"dp\", \"{word}\")), with the ranks of an "
                "island next to each other")
    return (f"reduce in two levels: init_device_mesh(\"cuda\", ({n}, {size}), mesh_dim_names=(\"replicate\", "
            "\"shard\")) with HSDP, or torch.distributed.new_group per island and one across; keep tensor and expert "
            "groups inside an island")
