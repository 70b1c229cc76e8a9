"""Counters onto the kernels of a trace: two runs of one program, matched by what they launch and in which order.

Nothing but the program is common to the two runs: ids, addresses, times, even the order between streams differ, and
dispatches are missing. So, per GPU, pass and step: kernels get symbols (name in its common form, and grid), the step is
looked for among the dispatches by the symbols that it has once, and the two sequences are aligned.

    exact        forced by the order around it, or as often between two forced ones on either side. Order counts within
                 a stream only: streams may change places, so a kernel beside the main stream is exact where its
                 stream lost none of its kind
    approximate  which dispatch it is is not certain: that of the same operation in another layer stands for it, else
                 another one of its name and grid; or a variant of its family, where no kernel of its name was counted
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import kernel_names
from tb_chopper.backend.alignment.sequences import common
from tb_chopper.backend.classify import COMPUTE
from tb_chopper.backend.findings import Finding

EXACT, APPROXIMATE = "exact", "approximate"
TRUSTED_SHARE = 0.9
"""Of compute time: below, a breakdown says so at the top."""
_MOST_SPREAD = 0.05
_LONG_CYCLES = 200_000
_HELPERS = "__amd_rocclr_"
_THREAD_GRIDS = "hipExtModuleLaunchKernel"
_NONE = -1
_SHAPE = re.compile(r"\[?\s*\d{1,10}(\s*,\s*\d{1,10}){0,2}\s*\]?")
_STAND_IN, _ORDERED, _FORCED = 0, 1, 2
"""How certain a dispatch is: another one of the kernel, the n-th of as many, or the one that it must be."""


Ranks = Mapping[tuple[int, str, int], int]
"""Rank by pass, host and process id of the counter run."""


@dataclass
class Alignment:
    """pairs: one row per kernel and pass: kernel (index of KERNELS), pass, row (index of COUNTERS), match.

    names: one row per kernel name of the trace: name, n_kernels, n_exact, n_approximate (a kernel is what it is in its
    worst pass), time_us, matched_share of its time. only_counted: name, n_dispatches of kernels that the trace lacks.
    matched_share: of the trace's compute time, in every pass. pass_spread: how far the passes are
    apart, as the median over kernels of (most − fewest) / median cycles; NaN with one pass.
    """

    pairs: pd.DataFrame
    names: pd.DataFrame
    only_counted: pd.DataFrame
    matched_share: float
    pass_spread: float = np.nan
    findings: list[Finding] = field(default_factory=list)


def align(kernels: pd.DataFrame, counters: pd.DataFrame, ranks: Ranks | None = None) -> Alignment:
    """Match the dispatches of COUNTERS to the kernels of KERNELS. `ranks`: what the processes said of themselves."""
    rows = _rows(kernels)
    groups, findings = _gpus(counters, sorted(rows["gpu"].unique()), ranks or {})
    trace_symbol, counter_symbol, by_family = _symbols(rows, counters)
    parts = []
    for (number, gpu), dispatches in groups:
        mine = rows[rows["gpu"] == gpu]
        d = counter_symbol[counters.index.get_indexer(dispatches)]
        symbols = trace_symbol[rows.index.get_indexer(mine.index)]
        beside = _beside(mine["stream"].to_numpy(), symbols, len(by_family))
        for sequence, steps in _sequences(mine, symbols):
            found, certainty = _match(sequence, d, beside)
            certainty = np.where(by_family[sequence], np.minimum(certainty, _ORDERED), certainty)
            known = found >= 0
            for step in steps:
                parts.append(pd.DataFrame({"kernel": step[known], "pass": number, "row": dispatches[found[known]],
                                           "certainty": certainty[known]}))
    pairs = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(
        {c: np.empty(0, np.int64) for c in ("kernel", "pass", "row", "certainty")})
    pairs["row"] = _siblings(pairs, rows)
    pairs["match"] = pd.Categorical(np.where(pairs["certainty"] == _FORCED, EXACT, APPROXIMATE), [EXACT, APPROXIMATE])
    pairs = pairs.drop(columns="certainty")
    names, share = _report(rows, pairs)
    only = _only_counted(rows, counters)
    spread, apart = _pass_spread(counters, pairs)
    findings += [*_report_findings(names, only, share, len(pairs)), *apart]
    return Alignment(pairs, names, only, share, spread, findings)


# ---- what is to be matched


def _rows(kernels: pd.DataFrame) -> pd.DataFrame:
    """The kernels that a counter run has too, in order of launch."""
    helper = np.array([n.startswith(_HELPERS) for n in kernels["name"].cat.categories] + [False])
    keep = (kernels["activity"] == "kernel").to_numpy() & ~helper[kernels["name"].cat.codes]
    rows = kernels[keep]
    launched = rows["launch_ns"].fillna(rows["start_ns"]).to_numpy("int64")
    return rows.iloc[np.lexsort((rows["start_ns"], launched, rows["gpu"]))]


def _gpus(counters: pd.DataFrame, gpus: Sequence[int], ranks: Ranks,
          ) -> tuple[list[tuple[tuple[int, int], np.ndarray]], list[Finding]]:
    """((pass, gpu), counter rows in dispatch order) of every process and device that counted.

    The rank tells the gpu: from `ranks`, else the file's name; without either, the one GPU there is, or the place
    among the GPUs (said in a finding).
    """
    helper = np.array([n.startswith(_HELPERS) for n in counters["name"].cat.categories] + [False])
    kept = counters[~helper[counters["name"].cat.codes]]
    keys = ["pass", "host", "process", "agent"]
    found: list[tuple[int, int, int, np.ndarray]] = []
    unplaced, guessed = 0, 0
    for (number, host, process, _), rows in kept.groupby(keys, observed=True, dropna=False, sort=True):
        first = rows.iloc[0]
        rank = ranks.get((int(number), "" if pd.isna(host) else str(host), int(process)), first["rank"])
        if not pd.isna(rank):
            gpu = int(rank)
        elif len(gpus) == 1:
            gpu = gpus[0]
        else:
            gpu, guessed = int(first["gpu_index"]), guessed + 1
        if gpu in gpus:
            ordered = rows.index[np.argsort(rows["dispatch"].to_numpy(), kind="stable")]
            found.append((int(number), gpu, int(process), ordered.to_numpy()))
        else:
            unplaced += 1
    findings = []
    if guessed:
        findings.append(Finding("counter_rank_guessed", "warning", "counter files that do not tell their rank: the "
                                "n-th GPU is taken for rank n; collect with tb-chopper collect to be sure", guessed))
    if unplaced:
        findings.append(Finding("counter_rank_unknown", "warning", "processes of the counter run that are no GPU of "
                                "this trace are left out", unplaced))
    return [((number, gpu), rows) for number, gpu, rows in _numbered(found)], findings


def _numbered(found: list[tuple[int, int, int, np.ndarray]]) -> list[tuple[int, int, np.ndarray]]:
    """(pass, gpu, rows); files without passes in their folders are numbered by process, one run of the program each."""
    if len({(number, gpu) for number, gpu, _, _ in found}) == len(found):
        return [(number, gpu, rows) for number, gpu, _, rows in found]
    seen: dict[int, int] = {}
    out = []
    for _, gpu, _, rows in sorted(found, key=lambda f: f[:3]):
        seen[gpu] = seen.get(gpu, 0) + 1
        out.append((seen[gpu], gpu, rows))
    return out


def _symbols(rows: pd.DataFrame, counters: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A number per kernel and per dispatch, equal where they may be the same; and which numbers stand for families."""
    trace_form, counter_form = (_forms(frame["name"]) for frame in (rows, counters))
    both = set(trace_form) & set(counter_form)
    sizes = _sizes(rows, trace_form, counters, counter_form)
    keys: list[list[tuple[str, Any]]] = []
    for forms, size, name in zip((trace_form, counter_form), sizes, (rows["name"], counters["name"]), strict=True):
        family = {f: kernel_names.family(n) for f, n in zip(forms, name, strict=True) if f not in both}
        keys.append([(f, s) if f in both else ("", family[f]) for f, s in zip(forms, size, strict=True)])
    codes, uniques = pd.factorize(pd.Series([*keys[0], *keys[1]], dtype=object))
    by_family = np.array([form == "" for form, _ in uniques], bool)
    return codes[:len(rows)], codes[len(rows):], by_family


def _forms(names: pd.Series) -> list[str]:
    forms = [kernel_names.normalize(n) for n in names.cat.categories]
    return [forms[c] for c in names.cat.codes]


def _sizes(rows: pd.DataFrame, trace_form: list[str], counters: pd.DataFrame, counter_form: list[str],
           ) -> tuple[list[int], list[int]]:
    """Threads of each grid, -1 for kernels whose grid the trace does not tell every time.

    Of what the trace may mean (blocks, threads, or both swapped) the reading that the counters know counts.
    """
    grid, block = (_volume(rows[c]) for c in ("grid", "block"))
    blocks = (rows["launch_name"] != _THREAD_GRIDS).to_numpy()
    readings = np.stack((np.where(blocks, grid * block, grid), grid * block, grid, block))
    counted: dict[str, set[int]] = {}
    for form, size in zip(counter_form, counters["grid"], strict=True):
        counted.setdefault(form, set()).add(int(size))
    untold = {f for f, g in zip(trace_form, grid, strict=True) if np.isnan(g)} | {
        f for f, known in counted.items() if -1 in known}
    of_trace = []
    for form, candidates in zip(trace_form, readings.T, strict=True):
        known = counted.get(form, set())
        told = [int(c) for c in candidates if not np.isnan(c)]
        of_trace.append(_NONE if form in untold else next((c for c in told if c in known), told[0]))
    of_counters = [_NONE if f in untold else int(g) for f, g in zip(counter_form, counters["grid"], strict=True)]
    return of_trace, of_counters


def _volume(shape: pd.Series) -> np.ndarray:
    """`[4, 2, 1]` as 8, NaN where missing or no shape."""
    volumes = [math.prod(map(int, str(s).strip("[]").split(","))) if _SHAPE.fullmatch(str(s)) else np.nan
               for s in shape.cat.categories]
    return np.array([*volumes, np.nan], "float64")[shape.cat.codes]


def _sequences(rows: pd.DataFrame, symbols: np.ndarray) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Each distinct sequence of symbols that a step of one GPU is, with the kernels of all steps that are it. What
    belongs to no step is a sequence of its own."""
    out: dict[bytes, tuple[np.ndarray, list[np.ndarray]]] = {}
    step = rows["step"].fillna(_NONE).to_numpy("int64")
    for capture, number in pd.unique(pd.Series(list(zip(rows["capture"], step, strict=True)))):
        mine = (rows["capture"].to_numpy() == capture) & (step == number)
        sequence = symbols[mine]
        out.setdefault(sequence.tobytes(), (sequence, []))[1].append(rows.index.to_numpy()[mine])
    return list(out.values())


def _beside(stream: np.ndarray, symbols: np.ndarray, n: int) -> np.ndarray:
    """By symbol: 0, it is on the main stream (that of most kernels) alone; 1, on one other alone; 2, on several."""
    out = np.zeros(n, np.int8)
    if len(stream):
        _, place, count = np.unique(stream, return_inverse=True, return_counts=True)
        pairs = np.unique(np.stack((symbols, place)), axis=1)
        out[pairs[0][pairs[1] != np.argmax(count)]] = 1
        out[np.bincount(pairs[0], minlength=n) > 1] = 2
    return out


# ---- matching


def _match(t: np.ndarray, d: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each element of a step: the index of its dispatch in `d` (-1: none), and how certain that is. `beside`: by
    symbol, which streams it is on."""
    found, exact = np.full(len(t), _NONE, np.int64), np.zeros(len(t), bool)
    low, high, head, tail = _window(t, d)
    a, b = _pairs(t, d[low:high], beside)
    found[a], exact[a] = b + low, True
    # In front of the first certain place of the step, a missing kernel may have been taken for one of the step before.
    if not np.array_equal(t[:head], d[low:low + head]):
        exact[:head] = False
    if tail and not np.array_equal(t[len(t) - tail:], d[max(high - tail, 0):high]):
        exact[len(t) - tail:] = False
    found[~exact] = _NONE
    certainty = np.where(exact, _FORCED, _STAND_IN)
    for symbol in np.unique(t[~exact]):
        missing = np.flatnonzero((t == symbol) & ~exact)
        same = np.flatnonzero(d == symbol)
        free = np.setdiff1d(same[(same >= low) & (same < high)], found)
        if len(free) == len(missing):
            found[missing], certainty[missing] = free, _ORDERED
        elif len(same):
            found[missing] = same[len(same) // 2]
    return found, certainty


def _window(t: np.ndarray, d: np.ndarray) -> tuple[int, int, int, int]:
    """Where the step lies among the dispatches: [low, high), and the length of its uncertain head and tail.

    Symbols that the step has once vote for its beginning; the window with most votes wins, the last of equals.
    """
    symbols, first, count = np.unique(t, return_index=True, return_counts=True)
    once = np.full(int(max(t.max(initial=0), d.max(initial=0))) + 1, _NONE, np.int64)
    once[symbols[count == 1]] = first[count == 1]
    at = np.flatnonzero(once[d] >= 0)
    if not len(at):
        return max(len(d) - 2 * len(t), 0), len(d), len(t), 0
    place = once[d[at]]
    begin = at - place
    order = np.argsort(begin, kind="stable")
    cluster = np.concatenate(([0], np.cumsum(np.diff(begin[order]) > max(len(t) // 2, 1))))
    votes = np.bincount(cluster)
    best = len(votes) - 1 - int(np.argmax(votes[::-1]))
    chosen = order[cluster == best]
    front, back = chosen[np.argmin(place[chosen])], chosen[np.argmax(place[chosen])]
    low = max(int(begin[front]), 0)
    high = min(int(at[back] + len(t) - place[back]), len(d))
    return low, max(high, low), int(place[front]), int(len(t) - 1 - place[back])


def _pairs(t: np.ndarray, d: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The certain pairs of a step and its window."""
    if np.array_equal(t, d):
        return np.arange(len(t)), np.arange(len(d))
    main_t, main_d = np.flatnonzero(beside[t] == 0), np.flatnonzero(beside[d] == 0)
    a, b = _forced(t[main_t], d[main_d])
    a, b = _fill(t[main_t], d[main_d], a, b)
    parts = [(main_t[a], main_d[b])]
    for symbol in np.unique(t[beside[t] == 1]):
        mine, theirs = np.flatnonzero(t == symbol), np.flatnonzero(d == symbol)
        if len(mine) == len(theirs):
            parts.append((mine, theirs))
    a, b = (np.concatenate(side) for side in zip(*parts, strict=True))
    return a, b


def _forced(t: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a longest common subsequence that do not depend on whether one looks from the front or the back:
    where a kernel is missing from a row of equal ones, the two disagree."""
    a, b = common(t, d)
    ra, rb = common(t[::-1], d[::-1])
    other = np.full(len(t), _NONE, np.int64)
    other[len(t) - 1 - ra] = len(d) - 1 - rb
    same = other[a] == b
    return a[same], b[same]


def _fill(t: np.ndarray, d: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The forced pairs, and between two of them the kernels that are there as often on either side (streams that
    changed places)."""
    left_t, left_d = np.setdiff1d(np.arange(len(t)), a), np.setdiff1d(np.arange(len(d)), b)
    tables = []
    for left, anchors, symbols in ((left_t, a, t), (left_d, b, d)):
        table = pd.DataFrame({"at": left, "gap": np.searchsorted(anchors, left), "symbol": symbols[left]})
        by = table.groupby(["gap", "symbol"])["at"]
        tables.append(table.assign(n=by.transform("size"), k=by.cumcount()))
    pairs = tables[0].merge(tables[1], on=["gap", "symbol", "n", "k"])
    a, b = np.concatenate((a, pairs["at_x"])), np.concatenate((b, pairs["at_y"]))
    order = np.argsort(a)
    return a[order].astype(np.int64), b[order].astype(np.int64)


def _siblings(pairs: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The dispatch of each pair; a stand-in gets that of its operation in another layer, where one is certain: the same
    kernel over the same grid may do more work elsewhere."""
    same = rows.groupby(["gpu", "name", "operation", "phase", "op_args"], observed=True, dropna=False, sort=False)
    keys = pd.DataFrame({"pass": pairs["pass"], "of": same.ngroup().reindex(pairs["kernel"]).to_numpy()})
    certain = (pairs["certainty"] == _FORCED).to_numpy()
    middle = pairs[certain].groupby([keys["pass"][certain], keys["of"][certain]])["row"].agg(
        lambda found: found.iloc[len(found) // 2])
    other = middle.reindex(pd.MultiIndex.from_frame(keys)).to_numpy()
    keep = (pairs["certainty"] != _STAND_IN).to_numpy() | np.isnan(other)
    return pd.Series(np.where(keep, pairs["row"], other).astype(np.int64), pairs.index)


# ---- report


def _report(rows: pd.DataFrame, pairs: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    time = ((rows["end_ns"] - rows["start_ns"]) / 1000).to_numpy()
    passes = pairs["pass"].nunique()
    at = rows.index.get_indexer(pairs["kernel"])
    matched = np.bincount(at, minlength=len(rows)) >= max(passes, 1)
    exact = np.bincount(at, (pairs["match"] == EXACT).to_numpy(), len(rows)) >= max(passes, 1)
    names = pd.DataFrame({
        "name": rows["name"].to_numpy(), "exact": exact, "approximate": matched & ~exact, "time_us": time,
        "matched_us": np.where(matched, time, 0.0)}).groupby("name", observed=True, sort=False).agg(
            n_kernels=("time_us", "size"), n_exact=("exact", "sum"), n_approximate=("approximate", "sum"),
            time_us=("time_us", "sum"), matched_us=("matched_us", "sum")).reset_index()
    names["matched_share"] = names["matched_us"] / names["time_us"].where(names["time_us"] > 0)
    names = names.drop(columns="matched_us").sort_values("time_us", ascending=False, ignore_index=True)
    compute = rows["kind"].cat.codes.to_numpy() == COMPUTE
    total = time[compute].sum()
    return names, float(time[compute & matched].sum() / total) if total else 0.0


def _pass_spread(counters: pd.DataFrame, pairs: pd.DataFrame) -> tuple[float, list[Finding]]:
    """Kernels are as long in every pass when they run alone; where they are not, ratios of two passes are worth little.
    Short ones are left out: mostly overhead."""
    exact = pairs[pairs["match"] == EXACT]
    if "GRBM_GUI_ACTIVE" not in counters or not len(exact):
        return np.nan, []
    cycles = counters["GRBM_GUI_ACTIVE"] / counters["xcc"].astype("float64")
    values = pd.Series(cycles.reindex(exact["row"]).to_numpy(), exact["kernel"].to_numpy())
    of = values[values > _LONG_CYCLES].groupby(level=0).agg(["count", "min", "max", "median"])
    several = of[of["count"] > 1]
    if not len(several):
        return np.nan, []
    spread = (several["max"] - several["min"]) / several["median"]
    typical, off = float(spread.median()), int((spread > 4 * _MOST_SPREAD).sum())
    if typical <= _MOST_SPREAD and off <= _MOST_SPREAD * len(spread):
        return typical, []
    return typical, [Finding("passes_disagree", "warning", f"the passes differ by {typical:.1%} in the cycles of a "
                             f"kernel (median), and by more than {4 * _MOST_SPREAD:.0%} for some: something else ran "
                             "beside them, or the program does not repeat itself", off)]


def _only_counted(rows: pd.DataFrame, counters: pd.DataFrame) -> pd.DataFrame:
    known = {kernel_names.normalize(n) for n in rows["name"].cat.remove_unused_categories().cat.categories}
    counts = counters["name"].value_counts()
    return pd.DataFrame([(n, int(c)) for n, c in counts.items() if c and kernel_names.normalize(str(n)) not in known
                         and not str(n).startswith(_HELPERS)], columns=["name", "n_dispatches"])


def _report_findings(names: pd.DataFrame, only: pd.DataFrame, share: float, n_pairs: int) -> list[Finding]:
    findings = []
    missing = names[names["n_exact"] + names["n_approximate"] == 0]
    if not n_pairs:
        findings.append(Finding("counters_unmatched", "error", "no dispatch of the counter run is a kernel of this "
                                "trace: are they of the same program, on the same GPUs?"))
    elif share < TRUSTED_SHARE:
        findings.append(Finding("counters_partly_matched", "warning", f"only {share:.0%} of the compute time has "
                                "counters; the largest without: " + ", ".join(map(_short, missing["name"][:3])),
                                int(missing["n_kernels"].sum())))
    if len(only):
        findings.append(Finding("kernels_only_counted", "info", "kernels that the counter run launched and the trace "
                                "did not: " + ", ".join(map(_short, only["name"][:3])),
                                int(only["n_dispatches"].sum())))
    return findings


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:57] + "..."
