"""Where torch.compile had to leave its graph, and what runs there (docs/fusion.md, "Graph breaks").

A region (`Torch-Compiled Region: i/j`) is a frame with compiled code: i counts code objects, j the times one was
compiled. What follows a graph break in it is a region of its own inside the first; so every region inside another one
is a break. Graphs are the scopes that run compiled code; a trace without them counts its regions as graphs.

    eager kernels = compute kernels of the forward phase launched within a region, but in none of its graphs
    idle          = idle time of the GPU before them and before the first kernel of each region inside another
    between       = compute kernels of the forward phase launched between two regions: code that is not compiled at all
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.timeline import gaps

INSIDE, BETWEEN, RESUMED = "in a graph break", "between regions", "after a graph break"
"""Where a kernel was launched: eager within a region, eager outside of all, or first in a region inside another."""
PLACES = (INSIDE, BETWEEN, RESUMED)
BY = ("gpu", "step", "layer")
"""What regions and kernels both have."""

_OVERHEAD = re.compile(r"^(TorchDynamo |AOTDispatcher |Pregraph |Torch-Compiled |## )")
"""Work of torch.compile itself, which a CPU-only profile shows as operators."""


def graph_breaks(compiled: pd.DataFrame, kernels: pd.DataFrame, by: By = ("gpu", "step"),
                 where: Where = None) -> pd.DataFrame:
    """One row per group (of BY): n_regions, n_breaks (regions inside another), n_codes (code objects),
    n_variants (of all of them), eager_kernels, eager_us (Σ duration), idle_us, between_kernels, between_us.

    `compiled`: CALLS of schema.COMPILED_KINDS. The layer of a region is that of most of its kernels' time.
    """
    by = grouping.columns(by)
    if unknown := [c for c in by if c not in BY]:
        raise InvalidSelection(f"graph breaks are not told apart by {unknown[0]!r}; by {', '.join(BY)}")
    found, marked = (grouping.select(t, where) for t in _marked(compiled, kernels))
    codes, groups = grouping.number(pd.concat([found[by], marked[by]], ignore_index=True), by)
    n = len(groups)
    region, kernel = codes[:len(found)], codes[len(found):]
    us = (marked["end_ns"] - marked["start_ns"]) / 1000
    eager, between = marked["place"] == INSIDE, marked["place"] == BETWEEN
    return groups.assign(
        n_regions=np.bincount(region, minlength=n), n_breaks=np.bincount(region, found["depth"] > 0, n).astype(int),
        n_codes=_distinct(region, found["code"], n), n_variants=_distinct(region, found["name"], n),
        eager_kernels=np.bincount(kernel, eager, n).astype(int), eager_us=np.bincount(kernel, us.where(eager, 0.0), n),
        idle_us=np.bincount(kernel, (marked["idle_ns"] / 1000).where(~between, 0.0), n),
        between_kernels=np.bincount(kernel, between, n).astype(int),
        between_us=np.bincount(kernel, us.where(between, 0.0), n))


def eager(compiled: pd.DataFrame, kernels: pd.DataFrame, by: By = ("place", "operation"),
          where: Where = None) -> pd.DataFrame:
    """Eager kernels by group, the longest first: n, time_us, idle_us (of the GPU before them), at (the longest of them,
    as `gpu@start_ns`). `by` knows place (INSIDE or BETWEEN) besides the columns of KERNELS."""
    by = grouping.columns(by)
    rows = grouping.select(_marked(compiled, kernels)[1], where)
    rows = rows[rows["place"] != RESUMED]
    codes, groups = grouping.number(rows, by)
    n = len(groups)
    duration = (rows["end_ns"] - rows["start_ns"]).to_numpy()
    order = np.lexsort((rows["start_ns"], -duration))
    first = rows.iloc[order[np.unique(codes[order], return_index=True)[1]]]
    out = groups.assign(
        n=np.bincount(codes, minlength=n), time_us=np.bincount(codes, duration, n) / 1000,
        idle_us=np.bincount(codes, rows["idle_ns"], n) / 1000,
        at=[f"{g}@{s}" for g, s in zip(first["gpu"], first["start_ns"], strict=True)])
    return out.sort_values("time_us", ascending=False, kind="stable", ignore_index=True)


def regions(compiled: pd.DataFrame) -> pd.DataFrame:
    """The regions in order of gpu and start: CALLS with code (i of i/j, null where the name has none) and depth (number
    of regions around it)."""
    found = compiled[compiled["kind"] == "region"].sort_values(
        ["gpu", "start_ns", "end_ns"], ascending=[True, True, False], kind="stable", ignore_index=True)
    code = found["name"].astype(str).str.extract(r": (\d+)/\d+$", expand=False)
    depth = np.zeros(len(found), np.int64)
    around: dict[tuple[int, int], list[int]] = {}
    for i, (gpu, thread, start, end) in enumerate(zip(
            found["gpu"], found["thread"], found["start_ns"], found["end_ns"], strict=True)):
        ends = around.setdefault((gpu, thread), [])
        while ends and ends[-1] <= start:
            ends.pop()
        depth[i] = len(ends)
        ends.append(end)
    return found.assign(code=code, depth=depth)


def _marked(compiled: pd.DataFrame, kernels: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The regions with their layer, and the compute kernels with a place (of PLACES), with it and idle_ns."""
    found = regions(compiled)
    graphs = compiled[compiled["kind"] == "compiled"]
    layers = pd.Series(None, found.index, dtype=object)
    parts = [kernels[:0].assign(place=pd.Categorical([], PLACES), idle_ns=np.zeros(0, np.int64))]
    for _, rows in kernels.groupby("capture", sort=True):
        gpu = rows["gpu"].iloc[0]
        mine, own = found[found["gpu"] == gpu], graphs[graphs["gpu"] == gpu]
        chosen = rows[(rows["kind"] == "compute") & ~_each_overhead(rows["name"])]
        if not len(mine) or not len(chosen):
            continue
        # A CPU operator launches itself.
        time = chosen["launch_ns"].fillna(chosen["start_ns"]).to_numpy(np.int64)
        region = _innermost(mine, time)
        layers.update(_layers(chosen, region))
        place = _places(mine, own, chosen, time, region)
        free = gaps(rows)
        idle = pd.Series(free.host + free.device, rows.index)[chosen.index]
        parts.append(chosen.assign(place=pd.Categorical.from_codes(place, PLACES), idle_ns=idle)[place >= 0])
    return found.assign(layer=layers), pd.concat(parts, ignore_index=True)


def _places(found: pd.DataFrame, graphs: pd.DataFrame, kernels: pd.DataFrame, time: np.ndarray,
            region: np.ndarray) -> np.ndarray:
    """Place in PLACES of kernels launched at `time` in `region` (label, -1: none), -1 for none of them."""
    starts = np.sort(graphs["start_ns"].to_numpy())
    low, high = (np.searchsorted(starts, found[c].to_numpy()) for c in ("start_ns", "end_ns"))
    with_graph = np.isin(region, found.index[high > low])
    in_graph = iv.covered(time, time + 1, iv.union(graphs["start_ns"].to_numpy(), graphs["end_ns"].to_numpy())) > 0
    spans = found[found["step"].notna()].groupby("step").agg(low=("start_ns", "min"), high=("end_ns", "max"))
    within = iv.covered(time, time + 1, iv.union(spans["low"].to_numpy(), spans["high"].to_numpy())) > 0
    forward = (kernels["phase"] == "forward").to_numpy()
    order = np.argsort(time, kind="stable")
    first = np.zeros(len(time), bool)
    first[order[np.unique(region[order], return_index=True)[1]]] = True
    return np.select([with_graph & ~in_graph & forward, (region < 0) & within & forward,
                      first & np.isin(region, found.index[found["depth"] > 0])], [0, 1, 2], -1)


def _innermost(found: pd.DataFrame, time: np.ndarray) -> np.ndarray:
    """Label of the innermost region around each time, -1 for none."""
    out = np.full(len(time), -1, np.int64)
    for depth in range(int(found["depth"].max()) + 1):
        level = found[found["depth"] == depth]
        at = np.searchsorted(level["start_ns"].to_numpy(), time, side="right") - 1
        inside = (at >= 0) & (time < level["end_ns"].to_numpy()[np.maximum(at, 0)])
        out = np.where(inside, level.index.to_numpy()[np.maximum(at, 0)], out)
    return out


def _layers(kernels: pd.DataFrame, region: np.ndarray) -> pd.Series:
    """Layer with the most kernel time of each region that has one, by label of the region."""
    some = (region >= 0) & kernels["layer"].notna().to_numpy()
    rows = pd.DataFrame({"region": region[some], "layer": kernels["layer"].astype(object).to_numpy()[some],
                         "ns": (kernels["end_ns"] - kernels["start_ns"]).to_numpy()[some] + 1})
    sums = rows.groupby(["region", "layer"], sort=False, as_index=False)["ns"].sum()
    return sums.sort_values("ns", kind="stable").drop_duplicates("region", keep="last").set_index("region")["layer"]


def _each_overhead(names: pd.Series) -> np.ndarray:
    return np.array([*(bool(_OVERHEAD.search(n)) for n in names.cat.categories), False])[names.cat.codes.to_numpy()]


def _distinct(codes: np.ndarray, values: pd.Series, n: int) -> np.ndarray:
    """Number of different values per group; missing ones do not count."""
    pairs = pd.DataFrame({"group": codes, "value": values.astype(object).to_numpy()}).dropna().drop_duplicates()
    return np.bincount(pairs["group"], minlength=n)
