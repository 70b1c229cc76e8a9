"""What a process group is for: data, shard, tensor, pipeline, context or expert parallelism (docs/collectives.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

from tb_chopper.backend.metrics.collectives import DEEP_EP

UNKNOWN = "unknown"
ROLES = ("shard", "data", "tensor", "pipeline", "expert", "context", UNKNOWN)
WORDS: dict[str, set[str]] = {
    "shard": {"fsdp", "hsdp", "shard", "sharded", "zero"},
    "data": {"dp", "ddp", "data", "replicate", "replicas"},
    "tensor": {"tp", "tensor"},
    "pipeline": {"pp", "pipeline", "pipe", "embedding"},
    "expert": {"ep", "expert", "experts", "moe"},
    "context": {"cp", "context", "sequence", "ulysses", "ring"},
}
"""Words of a group's description (`mesh_tp`, `DATA_PARALLEL_GROUP_WITH_CP`); the first role that has one wins: a group
of data and context ranks reduces gradients, an expert's tensor group does tensor parallelism."""
CALLERS: dict[str, re.Pattern[str]] = {
    "shard": re.compile(r"^FSDP::|FullyShardedDataParallel"),
    "data": re.compile(r"Reducer|\bDDP\b|DistributedDataParallel"),
    "pipeline": re.compile(r"\b(SEND|RECV)_[FB]\b|^PP::"),
    "expert": re.compile(r"\b(moe|experts?)\b", re.IGNORECASE),
}
"""Scopes from which the collectives of a group are called."""
FORWARD_SHARE = 0.25
"""reductions of tensor parallelism stand in forward and backward alike; those of gradients only in backward"""
MANY = 4
"""reductions of a step: fewer in forward may be a loss or a metric that is averaged"""

COLUMNS = ("group", "description", "role", "role_source", "size", "gpus", "n_collectives", "names")


def process_groups(arrivals: pd.DataFrame, roles: Mapping[str, str] | None = None) -> pd.DataFrame:
    """One row per process group of `collectives.arrivals`: group, description, role (one of ROLES), role_source
    (given | description | kernels | callers | pattern | unknown), size (ranks, by the trace, else those seen together),
    gpus (list), n_collectives, names (list of its collectives).

    `roles` overrides: by group or description.
    """
    rows = []
    for group, mine in arrivals.groupby("group", sort=False, dropna=False):
        description = next(iter(mine["group_desc"].dropna()), None)
        role, source = _role(mine, group, description, roles or {})
        size = int(mine["group_size"].max())
        rows.append((group, description, role, source, size if size > 0 else int(mine["n_ranks"].max()),
                     sorted(map(int, mine["gpu"].unique())), mine["instance"].nunique(),
                     sorted(map(str, mine["name"].unique()))))
    return pd.DataFrame(rows, columns=list(COLUMNS)).sort_values(
        "n_collectives", ascending=False, kind="stable", ignore_index=True)


def _role(rows: pd.DataFrame, group: object, description: str | None, given: Mapping[str, str]) -> tuple[str, str]:
    for name in (group, description):
        if isinstance(name, str) and name in given:
            return given[name], "given"
    if description and (role := of_description(description)):
        return role, "description"
    if group == DEEP_EP:
        return "expert", "kernels"
    if role := _of_callers(rows):
        return role, "callers"
    if role := _of_pattern(rows):
        return role, "pattern"
    return UNKNOWN, UNKNOWN


def of_description(description: str) -> str | None:
    """The role that a group's description tells, None where it tells none (`default_pg`)."""
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", description).lower()))
    return next((role for role, own in WORDS.items() if words & own), None)


def _of_callers(rows: pd.DataFrame) -> str | None:
    """The role that most of the group's collectives are called for."""
    operations = rows["operation"].astype(str).value_counts()
    votes = {role: sum(int(n) for name, n in operations.items() if pattern.search(str(name)))
             for role, pattern in CALLERS.items()}
    role = max(votes, key=lambda r: votes[r])
    return role if 2 * votes[role] > len(rows) else None


def _of_pattern(rows: pd.DataFrame) -> str | None:
    """The role by which collectives it has in which phase, where these tell it. Broadcasts and barriers stand beside
    any of them."""
    rows = rows[~rows["name"].isin(("broadcast", "barrier"))]
    names = rows["name"].value_counts()
    share = {name: int(n) / len(rows) for name, n in names.items()}
    known = rows[rows["step"].notna()]
    if share.get("send", 0) + share.get("recv", 0) > 0.5:
        return "pipeline"
    gathers, reductions = share.get("all_gather", 0), share.get("reduce_scatter", 0)
    if gathers and reductions and gathers + reductions > 0.5:
        scatters = known.loc[known["name"] == "reduce_scatter", "phase"]
        if len(scatters) and (scatters != "forward").all():
            return "shard"
        return "tensor" if _in_layers(known, scatters) else None  # sequence parallel: what else scatters in forward?
    reduces = known.loc[known["name"] == "all_reduce", "phase"]
    if share.get("all_reduce", 0) > 0.5 and len(reduces):
        if _in_layers(known, reduces):
            return "tensor"
        # The norm of the gradients, too, is reduced: by the optimizer, over all ranks.
        gradients = (reduces == "forward").mean() < 0.1 and (reduces != "optimizer").any()
        return "data" if gradients else None
    return None


def _in_layers(rows: pd.DataFrame, phases: pd.Series) -> bool:
    """Whether so many of these reductions stand in forward as between the operations of layers."""
    per_step = len(phases) / max(len(rows.drop_duplicates(["gpu", "step"])), 1)
    return bool((phases == "forward").mean() >= FORWARD_SHARE) and per_step >= MANY
