"""Slow GPUs and slow steps: who is ahead, who is late, what it costs and what explains it (docs/collectives.md).

    lead(g, k)  = max over GPUs of start(·, k) − start(g, k)      k: same step, phase, layer, operation and occurrence
    own(g, s)   = time of step s on g − its waiting in collectives that no computation hides
    slowness(g) = Σ duration of g's kernels / Σ median duration of the same kernels on all GPUs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend.metrics import collectives, grouping
from tb_chopper.backend.metrics.throughput import iterations
from tb_chopper.backend.metrics.timeline import exclusive, timeline

KEY = ["step", "phase", "layer", "operation"]
OUTLIER_Z, OUTLIER_FACTOR, OUTLIER_STEPS = 3.5, 1.2, 5
"""a step is an outlier above both: robust z = 0.6745 (x − median) / MAD, and the factor on the median; fewer steps than
that have no usual time"""
UNEVEN = 0.05
"""GPUs within this share of the median count as equal"""
HOT_C, POWER_FACTOR = 8.0, 1.1

# ---- leads -----------------------------------------------------------------------------------------------------------


def leads(kernels: pd.DataFrame, offset_ns: Mapping[int, int] | None = None) -> pd.DataFrame:
    """One row per compute kernel that every GPU ran: gpu, KEY, occurrence, name, start_ns (on the first host's clock),
    duration_ns, overlap_ns, lead_ns (0 for the GPU that starts it last).

    `offset_ns`: how far each gpu's clock runs ahead of the first host's. Operations of which the GPUs ran different
    numbers of kernels are left out: their k-th kernels are not the same. Empty for fewer than two GPUs.
    """
    compute = kernels[(kernels["kind"] == "compute") & kernels["step"].notna()]
    names = ["gpu", *KEY, "occurrence", "name", "start_ns", "duration_ns", "overlap_ns", "lead_ns"]
    n_gpus = compute["gpu"].nunique()
    if n_gpus < 2:
        return pd.DataFrame(columns=names)
    codes, _ = grouping.number(compute, KEY)
    rows = compute.assign(code=codes).sort_values(["gpu", "code", "start_ns"], kind="stable")
    rows["occurrence"] = rows.groupby(["gpu", "code"]).cumcount()
    per_gpu = rows.groupby(["code", "gpu"]).size().unstack(fill_value=0)
    even = per_gpu.index[(per_gpu.nunique(axis=1) == 1)]
    rows = rows[rows["code"].isin(even)]
    start = rows["start_ns"] - rows["gpu"].map(dict(offset_ns or {})).fillna(0).astype("int64")
    latest = start.groupby([rows["code"], rows["occurrence"]]).transform("max")
    return rows.assign(start_ns=start, duration_ns=rows["end_ns"] - rows["start_ns"], lead_ns=latest - start)[
        names].sort_values(["start_ns", "gpu"], kind="stable", ignore_index=True)


def step_leads(led: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu and step: gpu, step, n (kernels), lead_us (sum over the kernels), mean_lead_us, max_lead_us,
    last_lead_us (of the step's last kernel: what is left at its end), iteration_us (missing for a last step)."""
    grouped = led.sort_values("start_ns", kind="stable").groupby(["gpu", "step"])["lead_ns"]
    out = grouped.agg(["size", "sum", "mean", "max", "last"]).reset_index()
    out.columns = ["gpu", "step", "n", "lead_us", "mean_lead_us", "max_lead_us", "last_lead_us"]
    out[out.columns[3:]] = out[out.columns[3:]].astype("float64") / 1000
    times = iterations(steps)[["gpu", "step", "iteration_ns"]].drop_duplicates(["gpu", "step"])
    out = out.merge(times.astype({"step": "Int64"}), on=["gpu", "step"], how="left")
    return out.assign(iteration_us=out.pop("iteration_ns") / 1000)


# ---- what it costs ---------------------------------------------------------------------------------------------------

def own_times(arrived: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu and step: gpu, step, time_us (to the next step's first kernel), wait_us (waiting in its
    collectives under which nothing was computed), own_us (the rest). Complete steps that have a next one; where there
    is none, all steps, to the end of their own kernels."""
    times = iterations(steps)[["gpu", "step", "iteration_ns"]].drop_duplicates(["gpu", "step"])
    if not len(times):
        some = steps[steps["gpu_start_ns"].notna()].drop_duplicates(["gpu", "step"])
        length = (some["gpu_end_ns"] - some["gpu_start_ns"]).astype("int64")
        times = some[["gpu", "step"]].assign(iteration_ns=length)
    waits = arrived[arrived["step"].notna()].groupby(["gpu", "step"])["exposed_wait_ns"].sum().reset_index()
    out = times.merge(waits.astype({"step": "int64"}), on=["gpu", "step"], how="left").fillna({"exposed_wait_ns": 0})
    wait = np.minimum(out["exposed_wait_ns"], out["iteration_ns"]) / 1000
    time = out["iteration_ns"] / 1000
    return out[["gpu", "step"]].assign(time_us=time, wait_us=wait, own_us=time - wait)


WHAT_IF_COLUMNS = ("gpu", "own_us", "step_us", "what_if_us", "gain_us", "gain_at_most_us", "gain_share")
AT_THE_CAP = 0.9
"""a GPU whose mean power is this share of its cap, or more, is at its cap as far as the work lets it"""


class Gain(NamedTuple):
    """µs of a step. at_most: the other GPUs keep their clocks; at_least: their mean power rises to the cap and no
    further; us: in the middle."""

    us: float
    at_least_us: float
    at_most_us: float


def what_if(own: pd.DataFrame, gpus: pd.DataFrame, remaining_wait_us: float = np.nan) -> pd.DataFrame:
    """What each GPU costs: one row per gpu and a last one (gpu missing) for all of them; WHAT_IF_COLUMNS.

    own: of `own_times`; gpus: of `imbalance`; remaining_wait_us: of `remaining_wait`. step_us: time of a step on its
    slowest GPU; what_if_us = step_us − gain_us: if this GPU (or every one) were as fast as the median of the others;
    gain_share: of step_us. Estimated by `gain`.
    """
    table = own.pivot_table(index="step", columns="gpu", values="own_us").dropna()
    if table.shape[1] < 2 or not len(table):
        return pd.DataFrame(columns=list(WHAT_IF_COLUMNS))
    step = float(own.groupby("step")["time_us"].max().reindex(table.index).median())
    if not step > 0:
        return pd.DataFrame(columns=list(WHAT_IF_COLUMNS))
    rows = []
    for gpu in [*table.columns, None]:
        found = gain(own, gpus, list(table.columns) if gpu is None else [gpu], remaining_wait_us)
        rows.append((gpu, float(table[gpu].median()) if gpu is not None else np.nan, step, step - found.us, found.us,
                     found.at_most_us, found.us / step))
    return pd.DataFrame(rows, columns=list(WHAT_IF_COLUMNS)).astype({"gpu": "Int64"})


def gain(own: pd.DataFrame, gpus: pd.DataFrame, faster: Sequence[int], remaining_wait_us: float = np.nan) -> Gain:
    """What a step would gain if the GPUs `faster` were as fast as the median of the others (of all, where all are).

        gain = largest own time − what remains the largest + waiting of the slowest − waiting that remains

    The collectives that wait for the slowest GPU, s, slow the computation of the others beside them. That contention
    is taken out of the own times of the others: a GPU whose kernels run `r` times as fast as those of s would compute

        clean = (C − b · O) / r + b · O        C, O: compute time of s, and the part of it beside communication
        b = (c − C / r) / (o − O / r)          what communication adds to a kernel; c, o: the same of the other GPU

    where the kernels are those that both run. Once they wait less the others draw more power. `at_least_us` takes it
    that their mean power rises to the cap and that then their clock falls, power of the cores going with its third
    power; `at_most_us` that clocks stay, as they do while work is shorter than the firmware's view of power. Below the
    cap, and without sampled power, both are the same.
    """
    table = own.pivot_table(index="step", columns="gpu", values="own_us").dropna()
    step = float(own.groupby("step")["time_us"].max().reindex(table.index).median())
    if table.shape[1] < 2 or not step > 0:
        return Gain(0.0, 0.0, 0.0)
    rows = gpus.set_index("gpu").reindex(table.columns)
    slowest = table.median().idxmax()
    waits = own.pivot_table(index="step", columns="gpu", values="wait_us")[slowest].median()
    # What of the waiting remains is known only where every GPU that something makes slower is made faster.
    every = rows["explained_by"].isna()[[g not in faster for g in rows.index]].all()
    less_wait = waits - remaining_wait_us if every and slowest in faster and not np.isnan(remaining_wait_us) else 0.0

    def of(clock: float) -> float:
        """The gain where the others run at this share of their clocks."""
        after = _sped_up(table - _contention(rows, slowest, clock), faster)
        found = float((table.max(axis=1) - after.max(axis=1)).median())
        return found + less_wait if found > 0 else found

    most = least = of(1.0)
    for _ in range(CLOCK_ROUNDS):
        before, least = least, of(_clock_after(rows, slowest, faster, least / step))
        if abs(least - before) < AGREE * step:
            break
    most, least = max(most, 0.0), max(min(least, most), 0.0)
    return Gain((least + most) / 2, least, most)


CLOCK_ROUNDS, AGREE = 40, 1e-6
"""until the gain and the clock that follows from it agree, to this share of a step"""


def _sped_up(table: pd.DataFrame, faster: Sequence[int]) -> pd.DataFrame:
    """`table` (a column per gpu) with these gpus no worse than the median of the others in each row."""
    others = [g for g in table.columns if g not in faster] or list(table.columns)
    median = table[others].median(axis=1)
    return table.apply(lambda c: np.minimum(c, median) if c.name in faster else c)


def _ratio(rows: pd.DataFrame, slowest: int, clock: float = 1.0) -> pd.Series:
    """How many times as fast as those of the slowest GPU each one's kernels run, apart from communication; not more
    than the ratio of clocks, where these will not stay."""
    ratio = rows["slowness"][slowest] / rows["slowness"]
    return ratio if clock == 1 else np.fmin(ratio, rows["clock_mhz"] / rows["clock_mhz"][slowest])


def _contention(rows: pd.DataFrame, slowest: int, clock: float = 1.0) -> pd.Series:
    """µs of a step by which waiting collectives slow each GPU's kernels, more than they slow the slowest GPU's; less
    what a lower clock of theirs would add."""
    same = rows["compute_us"] - rows["load_excess_us"]
    free = (same[slowest] - _per_overlap(rows, slowest) * rows["overlap_us"][slowest]).clip(lower=0)
    clean = free / _ratio(rows, slowest, clock) / clock + same[slowest] - free
    excess = (same - clean).fillna(0.0)
    excess[slowest] = 0.0
    return excess.clip(lower=0) if clock == 1 else excess


def _per_overlap(rows: pd.DataFrame, slowest: int) -> pd.Series:
    """By gpu: what a µs of communication beside a kernel adds to it, 0–0.5; 0 where it cannot be told."""
    ratio, same = _ratio(rows, slowest), rows["compute_us"] - rows["load_excess_us"]
    more = rows["overlap_us"] - rows["overlap_us"][slowest] / ratio
    added = same - same[slowest] / ratio
    return (added / more.where(more > LEAST_OVERLAP * same[slowest])).clip(0.0, 0.5).fillna(0.0)


LEAST_OVERLAP = 0.01
"""of the compute time: where GPUs differ by less in what runs beside communication, its effect cannot be told"""


def _clock_after(rows: pd.DataFrame, slowest: int, faster: Sequence[int], gain_share: float) -> float:
    """Share of their clock that the other GPUs keep when a step is shorter by `gain_share`: the energy of a step goes
    with the square of the clock, and their mean power may not pass the cap."""
    others = [g for g in rows.index if g not in faster] or list(rows.index)
    power = rows["power_share"]
    if power.isna().any():
        return 1.0
    same = rows["compute_us"] - rows["load_excess_us"]
    work = 1 - float((_contention(rows, slowest) / same)[others].median())
    cap = float(power.max()) if power.max() >= AT_THE_CAP else 1.0
    return float(min(1.0, np.sqrt(cap * (1 - gain_share) / (power[others].median() * work))))


def remaining_wait(kernels: pd.DataFrame, own: pd.DataFrame, gpus: pd.DataFrame) -> float:
    """µs of a step that a GPU waits for others, with nothing to compute, when those that something makes slower
    (`explained_by` of `imbalance`) are left out: what remains where all are equal. NaN for fewer than two of them."""
    equal = gpus.loc[gpus["explained_by"].isna(), "gpu"].astype("int64").tolist()
    if len(equal) < 2 or len(equal) == len(gpus):
        return np.nan
    among, _ = collectives.arrivals(kernels[kernels["gpu"].isin(equal)], dict.fromkeys(equal, None))
    waits = among[among["step"].isin(own["step"])].groupby(["step", "gpu"])["exposed_wait_ns"].sum()
    return float(waits.unstack().median(axis=1).median()) / 1000 if len(waits) else 0.0


# ---- why -------------------------------------------------------------------------------------------------------------

IMBALANCE_COLUMNS = ("gpu", "n_kernels", "compute_us", "overlap_us", "idle_us", "slowness", "clock_mhz", "power_w",
                     "power_share", "temperature_c", "host_excess_us", "load_excess_us", "contention_excess_us",
                     "slow_excess_us", "explained_by")
EXCESSES = ("host", "load", "contention", "slow")


def imbalance(kernels: pd.DataFrame, steps: pd.DataFrame, led: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu; IMBALANCE_COLUMNS: n_kernels, compute_us (time of a step in which it computes), overlap_us (the
    part of it beside communication) and idle_us (time without any activity), medians over steps; slowness; clock_mhz
    and power_w (mean over its compute kernels, where `kernels` has them); power_share (mean over the samples, of its
    cap) and temperature_c (mean); and what a step of it has more than the median GPU:

        host        idle time: waiting for a loader or launches, not for other GPUs
        load        computation that the others do not have: other kernels, or more of them
        contention  the same kernels, longer where communication runs beside them: it waits for others
        slow        the same kernels, longer also where none does

    explained_by: the largest of these, where it is above 5 % of the median compute time (host: of the step). `slow` is
    told further: `cooling` (8 °C hotter than the median and at a lower clock), `power` (draws a tenth more at a lower
    clock), `clock` (a lower clock, and no sample says why), `unknown` (not the clock, or none was sampled).
    """
    compute = kernels[(kernels["kind"] == "compute") & kernels["step"].notna()]
    duration = compute["end_ns"] - compute["start_ns"]
    out = compute.groupby(["gpu", "step"]).size().groupby("gpu").median().rename("n_kernels").to_frame()
    windows = timeline(kernels, steps, ["gpu", "step"]).groupby("gpu")[
        ["compute_us", "overlap_us", "idle_us", "total_us"]].median()
    out = out.join(windows.drop(columns="total_us"))
    for column in ("clock_mhz", "power_w"):
        out[column] = _weighted(compute, column, duration) if column in compute else np.nan
    sampled = samples.groupby("gpu")
    out["power_share"] = sampled["power_w"].mean() / sampled["power_limit_w"].median()
    out["temperature_c"] = sampled["temperature_c"].mean()
    free, every = slowness(led), slowness(led, free=False)
    usual = out["compute_us"].median()
    out = out.assign(
        slowness=free, host_excess_us=out["idle_us"] - out["idle_us"].median(),
        load_excess_us=out["compute_us"] - usual * every, contention_excess_us=usual * (every - free),
        slow_excess_us=usual * (free - 1))
    out["explained_by"] = _explanations(out, UNEVEN * usual, UNEVEN * windows["total_us"].median())
    return out.reset_index()[list(IMBALANCE_COLUMNS)]


def slowness(led: pd.DataFrame, free: bool = True) -> pd.Series:
    """By gpu: the time of its kernels over the median time of the same kernels on all GPUs; `free`: of those that no
    communication overlaps on any GPU, as long as there are some."""
    if not len(led):
        return pd.Series(dtype="float64")
    codes, _ = grouping.number(led, [*KEY, "occurrence"])
    table = led.assign(code=codes)
    alone = table.groupby("code")["overlap_ns"].max() == 0
    if free and alone.any():
        table = table[table["code"].map(alone)]
    median = table.groupby("code")["duration_ns"].transform("median")
    return table["duration_ns"].groupby(table["gpu"]).sum() / median.groupby(table["gpu"]).sum()


def _weighted(rows: pd.DataFrame, column: str, duration: pd.Series) -> pd.Series:
    known = rows[column].notna()
    weight = duration[known]
    total = (rows.loc[known, column] * weight).groupby(rows.loc[known, "gpu"]).sum()
    return total / weight.groupby(rows.loc[known, "gpu"]).sum()


def _explanations(gpus: pd.DataFrame, least_us: float, least_idle_us: float) -> pd.Series:
    """What makes each GPU slower than the median, null where nothing does."""
    excess = gpus[[f"{e}_excess_us" for e in EXCESSES]].fillna(0).to_numpy()
    excess = np.where(excess > [least_idle_us, least_us, least_us, least_us], excess, 0)
    found = [EXCESSES[i] if row[i] > 0 else None for row, i in zip(excess, excess.argmax(axis=1), strict=True)]
    median = gpus.median(numeric_only=True)
    return pd.Series([_why_slow(gpus.loc[gpu], median) if why == "slow" else why
                      for gpu, why in zip(gpus.index, found, strict=True)], index=gpus.index, dtype=object)


def _why_slow(gpu: pd.Series, median: pd.Series) -> str:
    # What the clock alone would make of it, against what it is: half is enough to name it.
    if not np.log(median["clock_mhz"] / gpu["clock_mhz"]) > np.log(gpu["slowness"]) / 2:
        return "unknown"
    if gpu["temperature_c"] > median["temperature_c"] + HOT_C:
        return "cooling"
    return "power" if gpu["power_w"] > POWER_FACTOR * median["power_w"] else "clock"


# ---- outlier steps ---------------------------------------------------------------------------------------------------

CLASSES = ("compute", "exposed_communication", "exposed_memcpy", "idle")
WARM_UP = 0.01
"""of a step's window in which kernels ran that were launched before the capture: more, and its time is not its own"""


def outlier_steps(kernels: pd.DataFrame, steps: pd.DataFrame, own: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per step that has a next one, in order: step, time_us (of the GPU that took longest, without its waiting
    for others), gpu (that one), z (robust), outlier, excess_us (over the median), and against the median over steps, on
    that GPU: compute_delta_us, exposed_communication_delta_us, exposed_memcpy_delta_us, idle_delta_us, grew (the class
    with the largest). Of outliers also: operation and operation_delta_us (the operation whose kernels grew most, or
    before which most idle time came), at (its longest kernel, or the one after the longest gap: gpu@start_ns) and
    at_step (the step in which that one was launched: a step's window on the GPU ends with the first kernel of the next
    one, so that a host that begins the next step late lengthens this one).

    own: of `own_times`, without which waiting counts as a step's own time. z is missing below five steps, and in a step
    that ran what was launched before the capture: it is not comparable. A constant time (MAD 0) makes any step above
    the factor an outlier.
    """
    names = ["step", "time_us", "gpu", "z", "outlier", "excess_us", *(f"{c}_delta_us" for c in CLASSES), "grew",
             "operation", "operation_delta_us", "at", "at_step"]
    times = iterations(steps)
    if not len(times):
        return pd.DataFrame(columns=names)
    time = times["iteration_ns"] / 1000
    if own is not None and len(own):
        known = own.drop_duplicates(["gpu", "step"]).set_index(["gpu", "step"])["own_us"]
        at = pd.MultiIndex.from_frame(times[["gpu", "step"]].astype("int64"))
        time = known.reindex(at).set_axis(times.index).fillna(time)
    times = times.assign(time_us=time)
    slowest = times.sort_values("time_us", kind="stable").drop_duplicates("step", keep="last").sort_values("step")
    x = slowest["time_us"].to_numpy()
    early = _launched_before(kernels, slowest) > WARM_UP
    usual = x[~early] if (~early).any() else x
    median = float(np.median(usual))
    spread = float(np.median(np.abs(usual - median)))
    z = np.full(len(x), np.nan)
    if len(usual) >= OUTLIER_STEPS:
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.where(x == median, 0.0, 0.6745 * (x - median) / spread)
        z[early] = np.nan
    out = pd.DataFrame({"step": slowest["step"], "time_us": x, "gpu": slowest["gpu"], "z": z,
                        "outlier": (z > OUTLIER_Z) & (x > OUTLIER_FACTOR * median),
                        "excess_us": x - median}).reset_index(drop=True)
    deltas = _class_deltas(kernels, steps, out)
    out = pd.concat([out, deltas], axis=1)
    out["grew"] = deltas.fillna(-np.inf).idxmax(axis=1).str.removesuffix("_delta_us")
    odd = [(*_operation(kernels, times, row.gpu, row.step, row.grew),) if row.outlier else _NOTHING
           for row in out.itertuples()]
    found = pd.DataFrame(odd, columns=["operation", "operation_delta_us", "at", "at_step"]).astype({"at_step": "Int64"})
    return pd.concat([out, found], axis=1)[names]


def _launched_before(kernels: pd.DataFrame, windows: pd.DataFrame) -> np.ndarray:
    """Of each step's window (gpu, start_ns, iteration_ns) the share in which kernels ran that no step launched."""
    share = np.zeros(len(windows))
    early = kernels[kernels["step"].isna() & kernels["launch_ns"].isna()]
    start = windows["start_ns"].to_numpy("int64")
    length = windows["iteration_ns"].to_numpy("int64")
    for gpu, rows in early.groupby("gpu"):
        mine = (windows["gpu"] == gpu).to_numpy()
        busy = iv.union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
        share[mine] = iv.covered(start[mine], start[mine] + length[mine], busy) / np.maximum(length[mine], 1)
    return share


def _class_deltas(kernels: pd.DataFrame, steps: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """Time of each class in the steps of `chosen` on their GPU, against the median over that GPU's steps, µs."""
    complete = steps[steps["complete"].to_numpy(bool)]
    times = exclusive(kernels, complete)
    named = times["category"].replace(
        {"communication": "exposed_communication", "memcpy": "exposed_memcpy",
         "gemm": "compute", "attention": "compute", "vector": "compute"})
    table = times.assign(kind=named).pivot_table(index=["gpu", "step"], columns="kind", values="time_us", aggfunc="sum",
                                                 fill_value=0.0).reindex(columns=list(CLASSES), fill_value=0.0)
    delta = table - table.groupby("gpu").transform("median")
    at = pd.MultiIndex.from_arrays([chosen["gpu"], chosen["step"].astype("Int64")], names=["gpu", "step"])
    return delta.reindex(at).add_suffix("_delta_us").reset_index(drop=True)


_NOTHING = (None, np.nan, None, pd.NA)


def _operation(kernels: pd.DataFrame, times: pd.DataFrame, gpu: int, step: int,
               grew: str) -> tuple[str | None, float, str | None, object]:
    """The operation of a step that grew most against its median over steps, by how much (µs), its longest kernel or
    gap, and that kernel's step."""
    rows = kernels[(kernels["gpu"] == gpu) & kernels["step"].notna()].sort_values("start_ns", kind="stable")
    if grew == "idle":
        reach = rows["end_ns"].cummax().shift(fill_value=rows["start_ns"].min())
        value = (rows["start_ns"] - reach).clip(lower=0)
        own = times[times["gpu"] == gpu].sort_values("start_ns")
        place = np.searchsorted(own["start_ns"].to_numpy(), reach.to_numpy(), side="right") - 1
        window = pd.Series(own["step"].to_numpy()[np.maximum(place, 0)], index=rows.index)
    else:
        kind = {"exposed_communication": "communication", "exposed_memcpy": "memcpy"}.get(grew, grew)
        rows = rows[rows["kind"] == kind]
        value, window = rows["end_ns"] - rows["start_ns"], rows["step"].astype("int64")
    operation = rows["operation"].astype(object)
    table = value.groupby([operation, window]).sum().unstack(fill_value=0)
    if step not in table.columns:
        return _NOTHING
    delta = table[step] - table.median(axis=1)
    name = str(delta.idxmax())
    longest = rows.loc[value[(operation == name) & (window == step)].idxmax()]
    return name, float(delta.max()) / 1000, f"{gpu}@{longest['start_ns']}", longest["step"]


# ---- all of it per GPU -----------------------------------------------------------------------------------------------

COLUMNS = ("gpu", "n_collectives", "n_last", "last_share", "wait_us", "exposed_wait_us", "mean_lead_us", "slowness",
           "explained_by", "own_us", "gain_us", "gain_at_most_us")


def stragglers(arrived: pd.DataFrame, led: pd.DataFrame, cost: pd.DataFrame, gpus: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu, the one that costs the others most first: gpu, n_collectives (with others), n_last, last_share
    (0–1), wait_us and exposed_wait_us (sums), mean_lead_us, slowness and explained_by (`gpus`: of `imbalance`), own_us,
    gain_us and gain_at_most_us (`cost`: of `what_if`, per step)."""
    together = arrived[arrived["n_ranks"] > 1]
    out = together.groupby("gpu").agg(n_collectives=("instance", "nunique"), n_last=("is_last", "sum"),
                                      wait_us=("wait_ns", "sum"), exposed_wait_us=("exposed_wait_ns", "sum"))
    out[["wait_us", "exposed_wait_us"]] /= 1000
    each = cost.dropna(subset=["gpu"]).astype({"gpu": "int64"}).set_index("gpu")
    out = out.join(led.groupby("gpu")["lead_ns"].mean().div(1000).rename("mean_lead_us"), how="outer")
    out = out.join(gpus.set_index("gpu")[["slowness", "explained_by"]], how="outer")
    out = out.join(each[["own_us", "gain_us", "gain_at_most_us"]], how="left")
    out[["n_collectives", "n_last"]] = out[["n_collectives", "n_last"]].fillna(0).astype("int64")
    out["last_share"] = out["n_last"] / out["n_collectives"].where(out["n_collectives"] > 0)
    out = out.rename_axis("gpu").reset_index().sort_values(["gain_us", "n_last"], ascending=False, kind="stable")
    return out[list(COLUMNS)].reset_index(drop=True)
