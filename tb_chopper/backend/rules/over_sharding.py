"""Tensor parallelism over more GPUs than its layers can feed, or over more than one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = ("islands", "slow_link")
"""of slow tensor groups; those of other groups explain nothing here"""
HALVED = ("transfer of tensor parallelism beside nothing else x (n / 2) / (n - 1), mean over GPUs: with half of the n "
          "ranks and twice the data-parallel groups a message is half as large and its ring shorter; at most this: "
          "what those groups gather and reduce is not counted")
INSIDE = ("transfer of tensor parallelism beside nothing else x (1 - bandwidth / bandwidth inside a host), and what "
          "computation beside it loses; mean over GPUs")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all tensor-parallel groups: their exposed transfers, waiting left out, are a large part of the
    layers' time, or they span hosts at a fraction of the links' peak."""
    step = step_ms(run)
    if step is None or (run.workers["device"] == "cpu").all():
        return []
    groups = run.group_islands()
    tensor = groups[(groups["role"] == "tensor") & groups["transfer_us"].gt(0) & (groups["size"] > 1)]
    if not len(tensor):
        return []
    share = _share(run)
    size = int(tensor["size"].max())
    transfer = _mean(tensor, "transfer_us")
    peak = run.link_bytes_per_s
    across = tensor[(tensor["n_hosts"] > 1) & (tensor["busbw_gbs"] * 1e9 < thresholds.TENSOR_LINK * (peak or 0))]
    if len(across):
        gain, how = _mean(across, "saved_us"), INSIDE
    elif share is not None and share > thresholds.TENSOR_SHARE:
        gain, how = transfer * (size / 2) / (size - 1), HALVED
    else:
        return []
    if not gain >= thresholds.SMALL_GAIN * step:
        return []
    return [_diagnosis(run, tensor, across, share, size, gain, how, step)]


def _share(run: Run) -> float | None:
    """Exposed transfer over the time of the layers that have it; where no layer is known, over that of the capture.
    None where the waits are not known."""
    rows = run.exchanges(("role", "layer"), {"step": run.own_times["step"].unique().tolist()})
    rows = rows[rows["role"] == "tensor"]
    if rows["layer"].notna().any():
        rows = rows[rows["layer"].notna()]
    elapsed = rows["elapsed_us"].sum()
    if not elapsed > 0 or rows["transfer_share"].isna().any():
        return None
    return float((rows["transfer_share"] * rows["elapsed_us"]).sum() / elapsed)


def _mean(groups: pd.DataFrame, column: str) -> float:
    """Of a GPU and step, ms."""
    gpus = set().union(*groups["gpus"])
    return float((groups[column] * groups["gpus"].map(len)).sum()) / len(gpus) / 1000


def _diagnosis(run: Run, tensor: pd.DataFrame, across: pd.DataFrame, share: float | None, size: int, gain: float,
               how: str, step: float) -> Diagnosis:
    largest = tensor.iloc[int(tensor["transfer_us"].to_numpy().argmax())]
    peak = run.link_bytes_per_s
    known = bool(peak) and not pd.isna(largest["busbw_gbs"])
    reached = float(largest["busbw_gbs"]) * 1e9 / peak if known and peak else None
    part = "" if share is None else f"takes {share:.0%} of the layers' time, waiting left out"
    fast = "" if reached is None else f"its large messages move at {reached:.0%} of the links' peak"
    hosts = f" on {int(across['n_hosts'].max())} hosts" if len(across) else ""
    if len(across):
        title, cause = "Tensor parallelism spans hosts", "the ring goes over the network in every layer"
        remedy = (f"keep the tensor group inside one host: at most {_of_host(run)} ranks, "
                  "init_device_mesh(..., mesh_dim_names=(\"dp\", \"tp\")) with tp as the last dimension")
    else:
        title = f"Tensor parallelism over {size} GPUs is too wide"
        cause = "each rank's part of a layer is too small for what it has to send"
        remedy = f"halve the tensor group to {size // 2} and double the data-parallel or pipeline groups" if size > 2 \
            else "shard parameters (FSDP) in place of tensor parallelism where memory allows"
    return Diagnosis(
        "over_sharding", severity(gain, step),
        f"tensor parallelism over {size} GPUs{hosts} " + "; ".join(filter(None, (part, fast))),
        title=title,
        evidence=(*(() if share is None else (Evidence("exposed transfer, of the layers' time", share, "share"),)),
                  Evidence("transfer beside nothing, of a step", float(largest["transfer_us"]), "us"),
                  *(() if reached is None else (Evidence("of the links' peak", reached, "share"),)),
                  Evidence("ranks of the group", size, "count")),
        cause=cause, remedy=remedy, gain_ms=gain, gain_how=how,
        gpus=tuple(sorted(set().union(*tensor["gpus"]))), view="parallelism",
        explained_by=CAUSES if (tensor["ratio"] < thresholds.ISLANDS_SLOW).any() else ())


def _of_host(run: Run) -> int:
    return int(run.workers.drop_duplicates("gpu")["host"].value_counts().max())
