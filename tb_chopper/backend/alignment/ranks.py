"""Ranks onto ranks: which rows of several GPUs are one collective, and the clocks of their hosts on one clock.

A collective is known by its process group and sequence number; where a trace has none, by its occurrence: the k-th of
its name and group in a step. Where the ranks have different numbers of them (a capture that began later, lost
records) those that ran at the same time are one.

A collective that every rank needs from every other ends everywhere at once. So the clocks of two hosts differ by

    offset = median over their collectives of (end on one − end on the other)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tb_chopper.backend.findings import Finding

SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send_recv")
"""Collectives that end on all ranks at about the same time. `send_recv` is what NCCL's kernel of an all-to-all is
called where the trace does not tell; a pipeline's are matched by nobody, their ends spread and their residual shows."""
POINT_TO_POINT = ("send", "recv")
"""One rank's half of a transfer: the other is the peer's k-th, where the trace tells the peer; else it is alone."""
APART_NS = 200_000
"""GPUs of unknown hosts whose collectives end further apart than this do not share a clock; those of one host agree
within 50 µs in real traces, unsynchronised hosts are off by milliseconds."""
MIN_COLLECTIVES = 3
"""fewer than this say nothing about a clock"""
UNRELATED_NS = 600 * 10**9
"""captures that begin further apart than this were not taken together"""

CLOCK_COLUMNS = ("clock", "gpus", "offset_us", "residual_us", "n_collectives", "known")


@dataclass(frozen=True)
class Matched:
    """`instance`: number of the collective of each row, in order of first start; rows of one share it, at most one per
    gpu. `shift_ns`: to be added to the row's times to have all of them on the first host's clock. `clocks`: one row
    per clock with CLOCK_COLUMNS: clock (host, or `clock of GPU 2`), gpus (list), offset_us (how far it runs ahead of
    the first one's), residual_us (nine of ten collectives end within this of each other after correction),
    n_collectives that tell, known (False: nothing ties it to the others, nothing is corrected)."""

    instance: np.ndarray
    shift_ns: np.ndarray
    clocks: pd.DataFrame
    findings: list[Finding] = field(default_factory=list)


def match(rows: pd.DataFrame, hosts: Mapping[int, str | None], correct_clocks: bool = True) -> Matched:
    """The collectives behind the communication rows of a run.

    rows: gpu, group (a name that means the same set of ranks on every gpu, or null), seq (-1: none), name (plain name
    of the collective), step (missing: none), span, start_ns, end_ns, and peer (of a send or recv: the other rank, else
    -1) where it is known. hosts: by gpu, None where not known.
    """
    rows = rows.reset_index(drop=True)
    if not len(rows):
        none = np.zeros(0, np.int64)
        return Matched(none, none, pd.DataFrame(columns=list(CLOCK_COLUMNS)))
    key, certain = _keys(rows)
    instance = np.where(certain, key, -1)
    clocks = _clocks(rows, instance, hosts)
    offset = {gpu: ns for c in clocks for gpu, ns in zip(c.gpus, [c.offset_ns] * len(c.gpus), strict=True)}
    shift = -rows["gpu"].map(offset).fillna(0).to_numpy(np.int64)
    instance = _by_time(rows, key, instance, shift)
    table = pd.DataFrame([c.row() for c in clocks], columns=list(CLOCK_COLUMNS))
    applied = shift if correct_clocks else np.zeros_like(shift)
    return Matched(_in_order(instance, rows["start_ns"].to_numpy() + shift), applied, table,
                   _findings(clocks, correct_clocks))


def comparable(workers: pd.DataFrame) -> tuple[list[int], list[Finding]]:
    """Captures (rows of WORKERS) that belong to one job and one rank each, and what is left out of statistics over
    ranks and why: a rank's second process, ranks of a job of another size, captures of another time."""
    active = workers[workers["start_ns"] >= 0]
    kept = active[(active["rank"].isna() | (active["rank"] == active["gpu"])).to_numpy(bool)]
    findings = []
    if len(sizes := kept["world_size"].dropna()):
        usual = sizes.mode().iloc[0]
        findings += _left_out(kept, (kept["world_size"].fillna(usual) != usual).to_numpy(bool),
                              f"of another run: the others are of {usual} ranks")
        kept = kept[(kept["world_size"].fillna(usual) == usual).to_numpy(bool)]
    middle = kept.groupby("span")["start_ns"].transform("median")
    late = ((kept["start_ns"] - middle).abs() > UNRELATED_NS).to_numpy()
    findings += _left_out(kept, late, f"captured more than {UNRELATED_NS // 60_000_000_000} minutes from the others")
    return [int(c) for c in kept.loc[~late, "capture"]], findings


def _left_out(workers: pd.DataFrame, which: np.ndarray, why: str) -> list[Finding]:
    files = sorted(set(map(str, workers.loc[which, "file"])))
    return [Finding("rank_of_another_run", "warning", f"{', '.join(files)}: {why}; left out of statistics over ranks",
                    len(files))] if files else []


# ---- which rows are one collective -----------------------------------------------------------------------------------

def _keys(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """A number per row, equal for rows of one collective, and where it is certain: elsewhere rows that share it are
    only candidates, because the gpus have different numbers of them."""
    one_sided = rows["name"].isin(POINT_TO_POINT).to_numpy()
    peer = rows["peer"].to_numpy() if "peer" in rows else np.full(len(rows), -1)
    gpu = rows["gpu"].to_numpy()
    paired = one_sided & np.isin(peer, gpu)
    sends = (rows["name"] == "send").to_numpy()
    numbered = (rows["seq"] >= 0).to_numpy() & ~paired  # each half counts for itself
    where = pd.DataFrame({
        "group": rows["group"].astype(object).fillna(""), "name": rows["name"].astype(object).mask(paired, "message"),
        "source": np.where(paired, np.where(sends, gpu, peer), -1),
        "target": np.where(paired, np.where(sends, peer, gpu), -1),
        "seq": np.where(numbered, rows["seq"], -1),
        "span": np.where(numbered, -1, rows["span"]),
        "step": np.where(numbered, -1, rows["step"].fillna(-1).to_numpy(np.int64)),
        "alone": np.where(one_sided & ~paired, np.arange(len(rows)), -1)})
    cell = where.groupby(list(where.columns), sort=False).ngroup().to_numpy()
    order = np.lexsort((rows["start_ns"].to_numpy(), rows["gpu"].to_numpy(), cell))
    occurrence = np.empty(len(rows), np.int64)
    occurrence[order] = _running_count(cell[order], rows["gpu"].to_numpy()[order])
    counts = pd.DataFrame({"cell": cell, "gpu": rows["gpu"]}).value_counts().groupby("cell")
    equal = (counts.max() == counts.min()).sort_index().to_numpy()
    outside = (where["step"] < 0).to_numpy() & ~numbered & rows["step"].notna().any()
    certain = equal[cell] & ~outside
    key = pd.DataFrame({"cell": cell, "k": np.where(certain, occurrence, -1)}).groupby(["cell", "k"]).ngroup()
    return key.to_numpy(), certain


def _running_count(*sorted_keys: np.ndarray) -> np.ndarray:
    """Position of each row within its run of equal keys; the rows are sorted by them."""
    n = len(sorted_keys[0])
    first = np.ones(n, bool)
    first[1:] = np.any([k[1:] != k[:-1] for k in sorted_keys], axis=0)
    start = np.maximum.accumulate(np.where(first, np.arange(n), 0))
    return np.arange(n) - start


def _by_time(rows: pd.DataFrame, key: np.ndarray, instance: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """`instance` with the uncertain rows filled in: each goes to the row that it shares time with and whose end is
    closest, on the gpu that has most of them; else it stands alone. Order is kept: one row each."""
    out = instance.copy()
    following = int(instance.max(initial=-1)) + 1
    start, end = (rows[c].to_numpy() + shift for c in ("start_ns", "end_ns"))
    open_rows = pd.DataFrame({"key": key, "gpu": rows["gpu"].to_numpy(), "end": end})[instance < 0]
    for _, cell in open_rows.sort_values("end").groupby("key", sort=False):
        reference = cell["gpu"].value_counts(sort=True).sort_index(kind="stable").idxmax()
        anchors = cell.index[cell["gpu"] == reference].to_numpy()
        out[anchors] = np.arange(following, following + len(anchors))
        following += len(anchors)
        for gpu, mine in cell.groupby("gpu", sort=True):
            own = mine.index.to_numpy()
            if gpu == reference:
                continue
            place = np.searchsorted(end[anchors], end[own])
            near = np.stack([np.clip(place - 1, 0, len(anchors) - 1), np.clip(place, 0, len(anchors) - 1)])
            distance = np.abs(end[anchors][near] - end[own])
            anchor = anchors[near[distance.argmin(axis=0), np.arange(len(own))]]
            together = (start[own] < end[anchor]) & (start[anchor] < end[own])
            pairs = pd.DataFrame({"anchor": anchor, "distance": distance.min(axis=0)})[together]
            pairs = pairs.sort_values("distance", kind="stable").drop_duplicates("anchor")
            found = np.arange(following, following + len(own))
            found[pairs.index] = out[pairs["anchor"]]
            out[own] = found
            following += len(own)
    return out


def _in_order(instance: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The same numbers renamed to 0, 1, 2, ... by first start."""
    _, dense = np.unique(instance, return_inverse=True)
    first = np.full(dense.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, dense, start)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[dense]


# ---- clocks ----------------------------------------------------------------------------------------------------------

@dataclass
class _Clock:
    name: str
    gpus: list[int]
    offset_ns: int = 0
    residual_ns: float = 0.0
    n: int = 0
    known: bool = True

    def row(self) -> tuple[object, ...]:
        return self.name, self.gpus, self.offset_ns / 1000, self.residual_ns / 1000, self.n, self.known


def _clocks(rows: pd.DataFrame, instance: np.ndarray, hosts: Mapping[int, str | None]) -> list[_Clock]:
    """The clocks of the gpus that communicate, the first one's offset being 0. Hosts that share no collective are tied
    by messages: a receiver may end a little after its sender, but they go both ways, and a median stands between."""
    gpus = sorted(int(g) for g in rows["gpu"].unique())
    usable = (instance >= 0) & rows["name"].isin(SYMMETRIC).to_numpy()
    every = pd.DataFrame({"instance": instance, "gpu": rows["gpu"], "end": rows["end_ns"]})
    ends = every[usable]
    named: dict[str, list[int]] = {}
    for gpu in gpus:
        if hosts.get(gpu) is not None:
            named.setdefault(str(hosts[gpu]), []).append(gpu)
    unnamed = [g for g in gpus if hosts.get(g) is None]
    groups = list(named.items()) + [(_clock_name(part), part) for part in _told_apart(ends, unnamed)]
    clocks = sorted((_Clock(name, part) for name, part in groups), key=lambda c: c.gpus[0])
    _fit(ends, clocks)
    if not all(c.known for c in clocks):
        _fit(every[usable | ((instance >= 0) & rows["name"].isin(POINT_TO_POINT).to_numpy())], clocks)
    return clocks


def _clock_name(gpus: list[int]) -> str:
    return f"clock of GPU {', '.join(map(str, gpus))}"


def _told_apart(ends: pd.DataFrame, gpus: list[int]) -> list[list[int]]:
    """GPUs whose hosts are unknown, those that share a clock together: by how far apart their collectives end."""
    if len(gpus) < 2:
        return [gpus] if gpus else []
    alone = [_Clock("", [gpu]) for gpu in gpus]
    _fit(ends, alone)
    tied = sorted((c for c in alone if c.known), key=lambda c: c.offset_ns)
    parts = [[tied[0]]]
    for clock in tied[1:]:
        jump = clock.offset_ns - parts[-1][-1].offset_ns
        # A spread as large as the jump means that the ends say nothing.
        sure = jump > max(APART_NS, 4 * clock.residual_ns, 4 * parts[-1][-1].residual_ns)
        if sure:
            parts.append([])
        parts[-1].append(clock)
    parts[0] += [c for c in alone if not c.known]  # nothing says that they are not on the first one's host
    return [sorted(c.gpus[0] for c in part) for part in parts]


def _fit(ends: pd.DataFrame, clocks: list[_Clock]) -> None:
    """Offsets against the first clock, in place: the clock with most collectives in common with those that are known
    comes next, so that hosts without a collective in common are tied through others."""
    if len(clocks) < 2:
        return
    clock_of = {gpu: i for i, clock in enumerate(clocks) for gpu in clock.gpus}
    mine = ends[ends["gpu"].isin(list(clock_of))]
    base = int(mine["end"].min()) if len(mine) else 0
    table = (mine.assign(clock=mine["gpu"].map(clock_of), end=(mine["end"] - base).astype("float64"))
             .pivot_table(index="instance", columns="clock", values="end", aggfunc="median")
             .reindex(columns=range(len(clocks))).to_numpy(copy=True))
    known, rest = [0], list(range(1, len(clocks)))
    while rest:
        with np.errstate(all="ignore"):
            reference = _row_median(table[:, known])
        shared = [int((~np.isnan(table[:, i]) & ~np.isnan(reference)).sum()) for i in rest]
        i = rest.pop(int(np.argmax(shared)))
        apart = table[:, i] - reference
        apart = apart[~np.isnan(apart)]
        clocks[i].n, clocks[i].known = len(apart), len(apart) >= MIN_COLLECTIVES
        if clocks[i].known:
            clocks[i].offset_ns = round(float(np.median(apart)))
            clocks[i].residual_ns = float(np.quantile(np.abs(apart - clocks[i].offset_ns), 0.9))
            table[:, i] -= clocks[i].offset_ns
            known.append(i)


def _row_median(table: np.ndarray) -> np.ndarray:
    """Median of each row without its missing values; NaN for a row that has none."""
    out = np.full(len(table), np.nan)
    some = ~np.isnan(table).all(axis=1)
    out[some] = np.nanmedian(table[some], axis=1)
    return out


def _findings(clocks: list[_Clock], corrected: bool) -> list[Finding]:
    moved = [c for c in clocks if c.known and abs(c.offset_ns) > APART_NS]
    lost = [c for c in clocks if not c.known]
    found = []
    if moved:
        each = "; ".join(f"{c.name} {c.offset_ns / 1e6:+.3f} ms (± {c.residual_ns / 1000:.0f} µs)" for c in moved)
        done = "corrected by the ends of their collectives" if corrected else "not corrected, as asked for"
        found.append(Finding("clocks_of_hosts", "warning",
                             f"clocks differ from that of {clocks[0].name}: {each}; {done}", len(moved)))
    if lost and len(clocks) > 1:
        names = ", ".join(c.name for c in lost)
        found.append(Finding("clock_unknown", "warning", f"too few collectives tie the clock of {names} to "
                             f"{clocks[0].name}: waits between them may be wrong", len(lost)))
    return found
