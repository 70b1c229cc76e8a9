"""Collectives across ranks: who waits for whom, for how long, and how fast the links are (docs/collectives.md).

    wait_r   = max start − start_r         skew = max start − min start        transfer = min end − max start
    algbw    = bytes / transfer            busbw = algbw · f,   f by collective and group size
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.alignment import ranks
from tb_chopper.backend.attribution import names
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.timeline import lanes

BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""times (n − 1) / n; every other collective has factor 1 (kineto's and nccl-tests' convention)"""
WHOLE_IS_OUTPUT = ("all_gather", "gather")
"""collectives whose message is counted by what a rank receives; else by what it sends"""
ELEMENT_BYTES = {
    "double": 8, "long": 8, "int64": 8, "uint64": 8, "complexfloat": 8, "float": 4, "int": 4, "int32": 4, "uint32": 4,
    "half": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2, "char": 1, "byte": 1, "int8": 1, "uint8": 1,
    "bool": 1, "complexdouble": 16,
}
SMALL_NS = 20_000
"""a message that the link could carry in less than this is bound by latency"""
MEASURED, BOUND = "measured", "lower bound"
UNKNOWN = "unknown"
UNNAMED = "unnamed group"
"""collectives of which the trace does not tell the process group"""
DEEP_EP = "DeepEP"
"""group of the kernels of that library, which carry no metadata"""

Groups = Mapping[int, Mapping[str, Sequence[int]]]
"""By gpu and group name: the ranks in it, as far as the traces tell."""


# ---- one row per collective and GPU ----------------------------------------------------------------------------------

def arrivals(kernels: pd.DataFrame, hosts: Mapping[int, str | None], groups: Groups | None = None,
             correct_clocks: bool = True) -> tuple[pd.DataFrame, ranks.Matched]:
    """One row per communication activity, in order of collective and gpu, and how they were matched.

    instance, gpu, group, group_desc, group_size (−1: not told), seq, name (all_reduce, ...), bytes (NaN: not told),
    received_bytes (what the rank receives; NaN: not told), step, phase, layer, operation, capture, span, worker, kernel
    (its name), peer (of a send or recv: the other rank, else −1), start_ns, end_ns (on the first host's clock),
    kernel_start_ns (on its own, as in KERNELS), n_ranks (gpus that have a row of it), wait_ns (0 for the last to
    arrive; NaN where no other gpu is known to take part), exposed_wait_ns (the part of it under which no computation
    ran; of waits at the same time the first has it), exposed_ns (the part of the row under which no computation ran),
    alone_ns (the part after the last rank arrived under which nothing else ran: no computation, no communication of
    another group; NaN where no other gpu takes part), is_last.

    hosts: by gpu. Rows of one GPU count once per kernel; those of CPU profiles are the collectives themselves, not the
    operators that issue them.
    """
    rows = _rows(kernels)
    out = pd.DataFrame({
        "gpu": rows["gpu"], "group": _group_names(rows, groups or {}), "group_desc": _text(rows["group_desc"]),
        "group_size": rows["group_size"], "seq": rows["group_seq"], "name": _names(rows),
        "step": rows["step"], "phase": rows["phase"].astype(object), "layer": rows["layer"].astype(object),
        "operation": rows["operation"].astype(object), "capture": rows["capture"], "span": rows["span"],
        "worker": rows["worker"].astype(object),
        "kernel": rows["name"].astype(object), "start_ns": rows["start_ns"], "end_ns": rows["end_ns"],
        "kernel_start_ns": rows["start_ns"], "peer": rows["peer"]})
    out["bytes"] = _bytes(rows, out["name"])
    out["received_bytes"] = _size(rows, rows["out_nelems"])
    matched = ranks.match(out, hosts, correct_clocks)
    out = out.assign(instance=matched.instance, start_ns=out["start_ns"] + matched.shift_ns,
                     end_ns=out["end_ns"] + matched.shift_ns)
    by_instance = out.groupby("instance")
    last = by_instance["start_ns"].transform("max")
    n_ranks = by_instance["gpu"].transform("size")
    wait = (last - out["start_ns"]).where(n_ranks > 1)
    exposed_wait, exposed, alone = _exposed(kernels, out, last, matched.shift_ns)
    first_last = out.sort_values("gpu", kind="stable")
    first_last = first_last[first_last["start_ns"] == last[first_last.index]].drop_duplicates("instance").index
    out = out.assign(n_ranks=n_ranks, wait_ns=wait, exposed_wait_ns=np.where(n_ranks > 1, exposed_wait, np.nan),
                     exposed_ns=exposed, alone_ns=np.where(n_ranks > 1, alone, np.nan),
                     is_last=out.index.isin(first_last) & (last > by_instance["start_ns"].transform("min")))
    return out.sort_values(["instance", "gpu"], kind="stable", ignore_index=True), matched


def _rows(kernels: pd.DataFrame) -> pd.DataFrame:
    """The communication activities; of CPU profiles those that their backend ran, not the operators around them."""
    communication = kernels[kernels["kind"] == "communication"]
    stand_in = (communication["activity"] == "cpu_op").to_numpy()
    if not stand_in.any():
        return communication.reset_index(drop=True)
    ran = np.asarray([bool(_BACKEND.match(str(n))) for n in communication["name"].cat.categories], bool)
    return communication[~stand_in | ran[communication["name"].cat.codes]].reset_index(drop=True)


_DEEP_EP = re.compile(r"deep_?ep\b|\bep::(internode|intranode)", re.IGNORECASE)
_BACKEND = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):")


def _text(column: pd.Series) -> pd.Series:
    values = column.astype(object)
    return values.where(values.notna() & (values != ""), None)


def _names(rows: pd.DataFrame) -> pd.Series:
    """Plain name of each collective: from what the communication library says, else from the kernel's name."""
    def plain(column: pd.Series) -> pd.Series:
        found = {c: names.collective(str(c)) for c in column.cat.categories}
        return column.astype(object).map(found)

    told = plain(rows["collective"])
    by_kernel = plain(rows["name"])
    return told.where(told.notna() & (told != ""), by_kernel).replace("", "communication").fillna("communication")


def _group_names(rows: pd.DataFrame, groups: Groups) -> pd.Series:
    """Names that mean the same ranks on every gpu: where one name means several sets, the ranks stand behind it."""
    name = _text(rows["group"])
    of_library = {c: DEEP_EP for c in rows["name"].cat.categories if _DEEP_EP.search(str(c))}
    name = name.fillna(rows["name"].astype(object).map(of_library)) if of_library else name
    sets: dict[str, set[tuple[int, ...]]] = {}
    for of_gpu in groups.values():
        for group, members in of_gpu.items():
            if members:
                sets.setdefault(group, set()).add(tuple(members))
    shared = {group for group, members in sets.items() if len(members) > 1}
    if not shared:
        return name.fillna(UNNAMED)
    pairs = pd.DataFrame({"gpu": rows["gpu"], "group": name}).drop_duplicates()
    label = {(gpu, group): f"{group} [{', '.join(map(str, groups.get(gpu, {}).get(group, ())))}]"
             if group in shared else group for gpu, group in zip(pairs["gpu"], pairs["group"], strict=True)}
    return pd.Series([label[pair] for pair in zip(rows["gpu"], name, strict=True)], index=rows.index,
                     dtype=object).fillna(UNNAMED)


def members(distributed: Mapping[str, Any]) -> dict[str, list[int]]:
    """Ranks of each process group by name, from a trace's `distributedInfo`; what is malformed is left out."""
    configs = distributed.get("pg_config")
    return {str(c["pg_name"]): [int(r) for r in c["ranks"]] for c in (configs if isinstance(configs, list) else [])
            if isinstance(c, dict) and c.get("pg_name") is not None and isinstance(c.get("ranks"), list)
            and all(isinstance(r, int) for r in c["ranks"])}


def _bytes(rows: pd.DataFrame, name: pd.Series) -> np.ndarray:
    """Size of the message on each rank, NaN where the trace does not tell."""
    return _size(rows, rows["out_nelems"].where(name.isin(WHOLE_IS_OUTPUT), rows["in_nelems"]))


def _size(rows: pd.DataFrame, elements: pd.Series) -> np.ndarray:
    """Bytes of so many elements (negative: not told) of each row's dtype."""
    dtype = rows["dtype"].astype(object).map(element_bytes).astype("float64").to_numpy()
    count = elements.to_numpy("float64")
    return np.where(count >= 0, count, np.nan) * dtype


def element_bytes(dtype: object) -> float:
    """Bytes of one element of a dtype as the profiler writes it (Float, BFloat16, Float8_e4m3fn), NaN if unknown."""
    text = str(dtype).lower()
    return 1.0 if text.startswith("float8") else float(ELEMENT_BYTES.get(text, np.nan))


def _exposed(kernels: pd.DataFrame, rows: pd.DataFrame, last: pd.Series,
             shift: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The part of each row's wait, and of the row, under which its GPU computes nothing; the part behind the wait under
    which it does nothing else at all, ns. Of waits at the same time (a pipeline receives ahead) the first has it."""
    wait, whole, alone = (np.zeros(len(rows), np.int64) for _ in range(3))
    start, end = rows["start_ns"].to_numpy() - shift, rows["end_ns"].to_numpy() - shift
    until = np.clip(last.to_numpy() - shift, start, end)
    capture, group = rows["capture"].to_numpy(), pd.factorize(rows["group"])[0]
    of_capture = dict(iter(kernels.groupby("capture"))) if len(rows) else {}

    def without(at: np.ndarray, first: np.ndarray, stop: np.ndarray, others: iv.Union) -> np.ndarray:
        return stop[at] - first[at] - iv.covered(first[at], stop[at], others)

    for c in np.unique(capture):
        mine = np.flatnonzero(capture == c)
        compute = lanes(of_capture[c]).compute
        mine = mine[np.argsort(start[mine], kind="stable")]
        reach = np.maximum.accumulate(until[mine])
        free = until.copy()
        free[mine] = np.clip(np.concatenate((start[mine[:1]], reach[:-1])), start[mine], until[mine])
        wait[mine] = without(mine, free, until, compute)
        whole[mine] = without(mine, start, end, compute)
        for g in np.unique(group[mine]):
            own, other = mine[group[mine] == g], mine[group[mine] != g]
            alone[own] = without(own, until, end, iv.merge(compute, iv.union(start[other], end[other])))
    return wait, whole, alone


# ---- one row per collective ------------------------------------------------------------------------------------------

INSTANCE_COLUMNS = ("instance", "group", "group_desc", "seq", "name", "step", "phase", "layer", "operation", "bytes",
                    "n_ranks", "size", "start_ns", "duration_us", "wait_us", "exposed_wait_us", "exposed_us", "skew_us",
                    "transfer_us", "algbw_gbs", "busbw_gbs", "last_rank", "source")


def instances(arrived: pd.DataFrame) -> pd.DataFrame:
    """One row per collective, in order of its first start; INSTANCE_COLUMNS.

    n_ranks: those that have a row of it; size: ranks of the group, where the trace tells. bytes: the largest message of
    its ranks. duration_us, wait_us, exposed_wait_us and exposed_us are sums over the ranks. skew_us, wait_us,
    last_rank (a gpu; the first of those that arrive at the same time): missing where one rank alone is here; last_rank
    also where all arrive at once.
    transfer_us: missing where the last rank arrives after another has left (a broadcast's root need not wait).
    algbw_gbs, busbw_gbs in 10⁹ bytes/s. source: measured, or `lower bound` (of the bandwidths) where ranks of the group
    are missing, since a missing one may have come later. Both halves of a message are one row, `send_recv`.
    """
    grouped = arrived.groupby("instance", sort=True)
    first = grouped.first().reset_index()
    start, end = grouped["start_ns"], grouped["end_ns"]
    n = grouped.size().to_numpy()
    size = grouped["group_size"].max().to_numpy()
    usual = first.assign(n=n).groupby("group")["n"].transform("max").to_numpy()
    pair = first["name"].isin(ranks.POINT_TO_POINT).to_numpy() & (n == 2)
    size = np.where(pair, 2, np.where(size > 0, size, usual))
    transfer = (end.min() - start.max()).to_numpy().astype("float64")
    transfer[transfer < 0] = np.nan
    largest = grouped["bytes"].max().to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        algbw = np.where(transfer > 0, largest / transfer, np.nan)
    together = n > 1
    skew = (start.max() - start.min()).to_numpy() / 1000
    late = arrived[arrived["is_last"]].set_index("instance")["gpu"].reindex(first["instance"]).astype("Int64")
    whole = together & (n >= size)
    duration = (end.sum() - start.sum()).to_numpy() / 1000
    return first.assign(
        name=first["name"].mask(pair, "send_recv"), bytes=largest, n_ranks=n, size=size,
        start_ns=start.min().to_numpy(), duration_us=duration,
        **{f"{c}_us": np.where(together, grouped[f"{c}_ns"].sum().to_numpy() / 1000, np.nan)
           for c in ("wait", "exposed_wait")},
        exposed_us=grouped["exposed_ns"].sum().to_numpy() / 1000,
        skew_us=np.where(together, skew, np.nan), transfer_us=transfer / 1000, algbw_gbs=algbw,
        busbw_gbs=algbw * bus_factor(first["name"], size), last_rank=late.array,
        source=np.where(whole, MEASURED, BOUND))[list(INSTANCE_COLUMNS)]


def bus_factor(name: pd.Series, size: np.ndarray) -> np.ndarray:
    """What to multiply the algorithm bandwidth with to compare it with the link: all-reduce 2 (n − 1) / n, all-gather,
    reduce-scatter and all-to-all (n − 1) / n, else 1."""
    factor = name.map(BUS_FACTORS).astype("float64").to_numpy()
    return np.where(np.isnan(factor), 1.0, factor * (size - 1) / np.maximum(size, 1))


# ---- groups of them --------------------------------------------------------------------------------------------------

def collectives(arrived: pd.DataFrame, by: By | None = None, where: Where = None,
                roles: Mapping[str, str] | None = None, link_bytes_per_s: float | None = None) -> pd.DataFrame:
    """Without `by` one row per collective as `instances` has it, with role, link_share (bus bandwidth / the link's
    peak) and latency_bound (the link could carry the message in under 20 µs; missing where size or link are unknown).

    With `by` (gpu, group, role, name, step, phase, layer, operation, bytes) one row per group: n (collectives),
    n_latency_bound, n_last (where gpu is in `by`: how often it arrived last), bytes (of all), duration_us, wait_us,
    exposed_wait_us, exposed_us (sums over the rows of the GPUs), exposed_share (exposed / duration), skew_us,
    transfer_us, algbw_gbs, busbw_gbs, link_share (medians over the collectives).
    """
    each = instances(arrived)
    each["role"] = _role_of(each["group"], roles)
    link = link_bytes_per_s or np.nan
    needed = each["bytes"] * bus_factor(each["name"], each["size"].to_numpy()) / link * 1e9
    each = each.assign(link_share=each["busbw_gbs"] * 1e9 / link,
                       latency_bound=(needed < SMALL_NS).astype("boolean").mask(needed.isna()))
    if by is None:
        return grouping.select(each, where)
    return _grouped(arrived, each, grouping.columns(by), where)


def _role_of(group: pd.Series, roles: Mapping[str, str] | None) -> pd.Series:
    known = roles or {}
    return pd.Series([known.get(g, UNKNOWN) for g in group], index=group.index, dtype=object)


def _grouped(arrived: pd.DataFrame, each: pd.DataFrame, by: list[str], where: Where) -> pd.DataFrame:
    of_instance = ["role", "bytes", "skew_us", "transfer_us", "algbw_gbs", "busbw_gbs", "link_share", "latency_bound"]
    per_row = arrived.drop(columns="bytes").merge(each[["instance", *of_instance]], on="instance")
    chosen = grouping.select(per_row, where)
    codes, groups = grouping.number(chosen, by)
    n = len(groups)
    once = ~pd.DataFrame({"code": codes, "instance": chosen["instance"].to_numpy()}).duplicated().to_numpy()
    distinct = chosen[once].assign(code=codes[once])
    duration = (chosen["end_ns"] - chosen["start_ns"]).to_numpy()

    def total(values: Any) -> np.ndarray:
        return np.bincount(codes, np.nan_to_num(np.asarray(values, "float64")), n) / 1000

    def count(group: np.ndarray, flags: pd.Series) -> np.ndarray:
        return np.bincount(group, flags.to_numpy("float64"), n).astype(np.int64)

    medians = distinct.groupby("code")[["skew_us", "transfer_us", "algbw_gbs", "busbw_gbs", "link_share"]].median()
    out = groups.assign(
        n=np.bincount(codes[once], minlength=n),
        n_latency_bound=count(codes[once], distinct["latency_bound"].fillna(False)),
        **({"n_last": count(codes, chosen["is_last"])} if "gpu" in by else {}),
        **({} if "bytes" in by else {"bytes": distinct.groupby("code")["bytes"].sum(min_count=1).to_numpy()}),
        duration_us=total(duration), wait_us=total(chosen["wait_ns"]), exposed_wait_us=total(chosen["exposed_wait_ns"]),
        exposed_us=total(chosen["exposed_ns"]), **{c: medians[c].to_numpy() for c in medians})
    return out.assign(exposed_share=out["exposed_us"] / out["duration_us"].where(out["duration_us"] > 0))


# ---- the gradient barrier --------------------------------------------------------------------------------------------

BARRIER_COLUMNS = ("step", "group", "name", "late_gpu", "skew_us", "transfer_us", "width_us", "busbw_gbs",
                   "exposed_tail_us", "held_us", "limited_by")


def gradient_barrier(arrived: pd.DataFrame, kernels: pd.DataFrame,
                     roles: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The last reduction of gradients in each step: one row per step and group of data-parallel (or sharded) ranks.

    late_gpu: the last to arrive; width_us: from the first arrival to the last end; limited_by: `imbalance` where
    the skew is longer than the transfer, else `bandwidth`; exposed_tail_us: mean over GPUs of the communication between
    the end of the last backward kernel and the first one of the optimizer; held_us: the part of it in which that one
    had been launched already: by so much the optimizer would start earlier. Groups without a role count where their
    reductions run in backward.
    """
    role = _role_of(arrived["group"], roles)
    mine = arrived[arrived["name"].isin(("all_reduce", "reduce_scatter")) & role.isin(("data", "shard", UNKNOWN))
                   & (arrived["phase"] == "backward") & arrived["step"].notna() & (arrived["n_ranks"] > 1)]
    if not len(mine):
        return pd.DataFrame(columns=list(BARRIER_COLUMNS))
    each = instances(mine)
    end = mine.groupby("instance")["end_ns"].max()
    last = each.sort_values("start_ns", kind="stable").drop_duplicates(["step", "group"], keep="last")
    tails = _tails(kernels).reindex(last["step"].astype("int64"))
    last = last.assign(
        late_gpu=last["last_rank"], width_us=(end.reindex(last["instance"]).to_numpy() - last["start_ns"]) / 1000,
        exposed_tail_us=tails["tail_us"].to_numpy(), held_us=tails["held_us"].to_numpy(),
        limited_by=np.where(last["skew_us"] > last["transfer_us"].fillna(0), "imbalance", "bandwidth"))
    return last.sort_values(["step", "group"], ignore_index=True)[list(BARRIER_COLUMNS)]


def _tails(kernels: pd.DataFrame) -> pd.DataFrame:
    """By step, means over GPUs: tail_us, the communication after the last backward kernel and before the optimizer's
    first; held_us, the part of it after the launch of that one (all of it where the launch is not known)."""
    found = []
    for (_, step), rows in kernels[kernels["step"].notna()].groupby(["capture", "step"]):
        compute = rows[rows["kind"] == "compute"]
        backward, optimizer = (compute[compute["phase"] == phase] for phase in ("backward", "optimizer"))
        if not (len(backward) and len(optimizer)):
            continue
        first = optimizer.loc[optimizer["start_ns"].idxmin()]
        low, high = int(backward["end_ns"].max()), int(first["start_ns"])
        launched = low if pd.isna(first["launch_ns"]) else min(max(low, int(first["launch_ns"])), high)
        covered = iv.covered(np.array([low, launched]), np.array([high, high]), lanes(rows).communication) / 1000
        found.append((int(step), *(covered if high > low else (0.0, 0.0))))
    return pd.DataFrame(found, columns=["step", "tail_us", "held_us"]).groupby("step").mean()


# ---- what is odd about them ------------------------------------------------------------------------------------------

def findings(arrived: pd.DataFrame, matched: ranks.Matched) -> list[Finding]:
    """What is to be known about the matching: clocks, collectives that lack ranks, names that mean several groups."""
    found = list(matched.findings)
    once = arrived.drop_duplicates("instance")
    crowded = once[(once["group_size"] > 0) & (once["n_ranks"] > once["group_size"])]
    if len(crowded):
        found.append(Finding("group_name_shared", "warning", f"{len(crowded)} collectives have more ranks than their "
                             f"group ({', '.join(sorted(set(crowded['group'])))}): one name means several groups, and "
                             "no file says which ranks are in which; their waits may be wrong", len(crowded)))
    return found
