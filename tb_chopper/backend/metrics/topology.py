"""Process groups on the links of their GPUs: which span islands or hosts, how fast they are there, and what the same
transfers would take within an island (docs/topology.md).

    busbw(group) = Σ bytes · f / Σ transfer            over its messages that are not bound by latency
    ratio        = busbw / busbw of the groups within one island, else / REACHED · the links' peak
    saved        = min(bare, transfer · (1 − ratio)) + κ · (what of transfer · (1 − ratio) lies under computation)

Bare is the transfer under which its GPU does nothing else: no computation, no communication of another group. κ, what
computation beside a transfer loses, is that of metrics.contention. Clocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics.collectives import bus_factor

GROUP_COLUMNS = ("group", "role", "size", "gpus", "n_hosts", "n_islands", "islands", "spans", "n", "busbw_gbs",
                 "within_gbs", "within_source", "ratio", "transfer_us", "saved_us")
LARGE_BYTES = 2**20
"""where the links' peak is not known, smaller messages tell nothing of the links"""
REACHED = 0.70
"""of the links' peak: what well-tuned rings reach"""
MEASURED, ESTIMATED = "measured", "estimated"


def group_islands(arrived: pd.DataFrame, each: pd.DataFrame, groups: pd.DataFrame, islands: pd.DataFrame,
                  hosts: Mapping[int, str | None], link_bytes_per_s: float | None = None,
                  steps: Collection[int] = (), contention: float = 0.0) -> pd.DataFrame:
    """One row per process group, those that span islands first.

    group, role, size; gpus (list: those of the run); n_hosts (1 where no host is named); n_islands (missing where the
    links of one of its GPUs are not told); islands (list of lists of its GPUs); spans: more than one island on one of
    its hosts; n: collectives of the capture; busbw_gbs: over all its messages that are not latency-bound, in 10⁹
    bytes/s; within_gbs: the same over all groups inside one island, else REACHED of the links' peak, by within_source
    (measured | estimated); ratio; transfer_us and saved_us: bare transfer of a GPU and step, and what of it would be
    saved at within_gbs (missing for groups inside one island); mean over its GPUs and the steps.

    arrived, each, groups: collectives.arrivals, collectives.collectives (one row per collective), process_groups;
    islands: alignment.topology.ISLANDS; hosts: by gpu; steps: those to take means over, else all of the collectives;
    contention: κ, not a number where it cannot be told.
    """
    island = dict(zip(islands["gpu"], islands["island"], strict=True))
    bytes_, seconds = _carried(each)
    placed = [_placed(list(gpus), island, hosts) for gpus in groups["gpus"]]
    out = groups[["group", "role", "size", "gpus"]].assign(
        n_hosts=[p[0] for p in placed], n_islands=pd.array([p[1] for p in placed], dtype="Int64"),
        islands=[p[2] for p in placed], spans=[p[3] for p in placed], n=groups["n_collectives"])
    carried, took = (out["group"].map(v).fillna(0).to_numpy("float64") for v in (bytes_, seconds))
    inside = (out["n_islands"] == 1).fillna(False).to_numpy(bool) & (out["size"] > 1).to_numpy()
    within, source = _within(carried[inside].sum(), took[inside].sum(), link_bytes_per_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        busbw = np.where(took > 0, carried / took, np.nan) / 1e9
    out = out.assign(busbw_gbs=busbw, within_gbs=within, within_source=source, ratio=busbw / within)
    beyond = out["spans"].to_numpy(bool) | (out["n_hosts"] > 1).to_numpy()
    times = transfer_times(arrived, dict(zip(out["group"], out["ratio"].where(beyond), strict=True)),
                           0.0 if np.isnan(contention) else contention)
    wanted = times["step"].isin(list(steps)) if len(steps) else times["step"].notna()
    in_steps = times[wanted] if wanted.any() else times
    by_group = in_steps.groupby("group")
    n = by_group["gpu"].nunique() * max(in_steps["step"].nunique(), 1)
    mean = by_group[["transfer_us", "saved_us"]].sum(min_count=1).div(n, axis=0).reindex(out["group"])
    out = out.assign(transfer_us=mean["transfer_us"].to_numpy(), saved_us=mean["saved_us"].to_numpy())
    return out.sort_values("spans", ascending=False, kind="stable", ignore_index=True)[list(GROUP_COLUMNS)]


def as_text(islands: Iterable[Iterable[int]]) -> str:
    """`0-3 | 4-7`: the GPUs of each island."""
    return " | ".join(_stretches(sorted(island)) for island in islands)


def _stretches(gpus: list[int]) -> str:
    parts = np.split(np.array(gpus, np.int64), np.flatnonzero(np.diff(gpus) != 1) + 1)
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts if len(p))


def transfer_times(arrived: pd.DataFrame, ratio: Mapping[str, float], contention: float = 0.0) -> pd.DataFrame:
    """One row per collective, GPU (and step): group, gpu, step, transfer_us (bare) and saved_us: what would be saved at
    1 / ratio times the bandwidth (missing where the group's ratio is; no less than 0). Missing, too, where no other
    rank is here to tell the waiting.
    """
    last = arrived.groupby("instance")["start_ns"].transform("max")
    transfer = (arrived["end_ns"] - np.maximum(arrived["start_ns"], last)).clip(lower=0) / 1000
    bare = arrived["alone_ns"] / 1000
    hidden = transfer - (arrived["exposed_ns"] - arrived["exposed_wait_ns"]) / 1000
    less = transfer * (1 - arrived["group"].map(ratio).astype("float64")).clip(lower=0)
    shown = np.minimum(bare, less)
    saved = shown + contention * np.minimum(hidden.clip(lower=0), less - shown)
    return arrived[["group", "gpu", "step"]].assign(transfer_us=bare, saved_us=saved)


def _carried(each: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Bytes on the bus and seconds of transfer of each group, over its messages that are not bound by latency."""
    small = each["latency_bound"].fillna(each["bytes"] < LARGE_BYTES).astype(bool)
    told = each[~small & each["bytes"].gt(0) & each["transfer_us"].gt(0)]
    factor = bus_factor(told["name"], told["size"].to_numpy())
    sums = told.assign(bus=told["bytes"] * factor, s=told["transfer_us"] / 1e6).groupby("group")[["bus", "s"]].sum()
    return sums["bus"], sums["s"]


def _placed(gpus: list[int], island: Mapping[int, int],
            hosts: Mapping[int, str | None]) -> tuple[int, int | None, list[list[int]], bool]:
    """n_hosts, n_islands, islands, spans of a group."""
    n_hosts = max(len({hosts.get(g) for g in gpus} - {None}), 1)
    if not all(g in island for g in gpus):
        return n_hosts, None, [], False
    parts: dict[int, list[int]] = {}
    for gpu in gpus:
        parts.setdefault(island[gpu], []).append(gpu)
    on_host: dict[str | None, set[int]] = {}
    for gpu in gpus:
        on_host.setdefault(hosts.get(gpu), set()).add(island[gpu])
    return n_hosts, len(parts), list(parts.values()), any(len(i) > 1 for i in on_host.values())


def _within(carried: float, took: float, link_bytes_per_s: float | None) -> tuple[float, str | None]:
    if took > 0:
        return carried / took / 1e9, MEASURED
    return (REACHED * link_bytes_per_s / 1e9, ESTIMATED) if link_bytes_per_s else (np.nan, None)

