"""Pipeline schedules: which stage does what when, where the bubbles are, and what a perfect schedule would have left
(docs/parallelism.md).

    total  = last end of any action of the pipeline − first start of any     one step of the schedule, all ranks
    busy   = |work launched in the rank's actions|, messages between stages left out: a RECV kernel spins
    gaps   = |first start to last end of its actions| − busy                 launch gaps within actions
    bubble = total − busy − gaps                                             between actions, and at both ends
    theory = (p − 1) / (v m + p − 1) of the total              p ranks, m microbatches, v stages per rank, all equal

Theory: Huang et al., GPipe (2019), section 2.3; Narayanan et al., Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM (2021), section 2.2, as a share of the whole instead of the ideal time; zero bubble: Qi et
al. (2023), none at best.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics.grouping import By, Where

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, UNKNOWN = "GPipe", "1F1B", "interleaved", "zero bubble", "unknown"
FORWARD, BACKWARDS = "F", ("B", "I")
"""I computes the gradient that the previous stage waits for, as B does; W is waited for by nobody."""
FILL, STEADY, DRAIN = "fill", "steady", "drain"
PREVIOUS, NEXT, OWN, END = "previous stage", "next stage", "own", "end"
PASS = ["pipeline", "step", "turn"]
"""One step() of a schedule on all its ranks; with gradient accumulation a training step has several."""

ACTION_COLUMNS = ("gpu", "pipeline", "position", "step", "turn", "kind", "stage", "microbatch", "start_ns", "end_ns",
                  "busy_ns", "schedule", "ranks")

Members = Mapping[int, Mapping[str, Sequence[int]]]
"""By gpu and name of a process group: its ranks."""


# ---- actions on one clock, and who is in which pipeline --------------------------------------------------------------

def actions(table: pd.DataFrame, offset_ns: Mapping[int, int] | None = None, members: Members | None = None,
            ranks: int | None = None, all_here: bool = True, peers: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per action that did work on the device within a step, ACTION_COLUMNS, in order of pipeline, step, turn,
    position and start.

    table: schema.ACTIONS. start_ns, end_ns: of its work, on the first host's clock (offset_ns: how far each gpu's runs
    ahead); turn: which step() of the schedule within the step, from 0; pipeline: which of several equal ones (data
    parallel), from 0; position: of the gpu in it, by its first stage. Who is in a pipeline is told by the process group
    (`members`) that has one gpu of every position, else by who sends to whom (`peers`: gpu, peer), else by order.
    ranks: of a pipeline; missing where it is neither told (`ranks`) nor every rank of the training is here
    (`all_here`).
    """
    known = table[table["step"].notna()].copy()
    known["turn"] = known.groupby(["gpu", "step", "kind", "stage", "microbatch"], observed=True).cumcount()
    known = known[known["first_ns"].notna()]
    shift = known["gpu"].map(dict(offset_ns or {})).fillna(0).astype("int64")
    known = known.assign(start_ns=known["first_ns"].astype("int64") - shift,
                         end_ns=known["last_ns"].astype("int64") - shift, step=known["step"].astype("int64"),
                         kind=known["kind"].astype(object), schedule=known["schedule"].astype(object))
    groups = [g for own in (members or {}).values() for g in own.values()]
    places = _places(known, [*groups, *(_connected(peers) if peers is not None else ())], ranks)
    known = known.merge(places, on="gpu", how="left")
    seen = places["position"].nunique() if all_here else None
    known["ranks"] = pd.Series(ranks or seen, index=known.index, dtype="Int64")
    untold = known["stage"] < 0
    known.loc[untold, "stage"] = known.loc[untold, "position"]
    return known.sort_values([*PASS, "position", "start_ns"], kind="stable", ignore_index=True)[list(ACTION_COLUMNS)]


def _connected(peers: pd.DataFrame) -> list[list[int]]:
    """Ranks that messages connect, directly or over others."""
    group = {int(rank): {int(rank)} for rank in {*peers["gpu"], *peers["peer"]}}
    for a, b in zip(peers["gpu"], peers["peer"], strict=True):
        if group[a] is not group[b]:
            group[a] |= group[b]
            group |= dict.fromkeys(group[b], group[a])
    return [sorted(one) for one in {id(one): one for one in group.values()}.values()]


def _places(known: pd.DataFrame, groups: Sequence[Sequence[int]], ranks: int | None) -> pd.DataFrame:
    """Pipeline and position of each gpu: gpu, pipeline, position. groups: of ranks, any."""
    stages = known.groupby("gpu")["stage"].agg(lambda s: tuple(sorted(set(s))))
    gpus = [int(g) for g in stages.index]
    if not gpus:
        return pd.DataFrame({"gpu": [], "pipeline": [], "position": []}, dtype="int64")
    distinct = sorted(set(stages))
    if distinct == [(-1,)]:
        n = ranks if ranks and len(gpus) % ranks == 0 else len(gpus)
        position = {gpu: i // (len(gpus) // n) for i, gpu in enumerate(gpus)}
    else:
        numbers = {s for own in distinct for s in own}
        seen_all = min(numbers) == 0 and len(numbers) == max(numbers) + 1
        position = {gpu: distinct.index(own) if seen_all else own[0] for gpu, own in zip(gpus, stages, strict=True)}
    n = len(set(position.values()))
    pipeline: dict[int, int] = {}
    for group in dict.fromkeys(tuple(sorted(g)) for g in groups):
        inside = [gpu for gpu in group if gpu in position and gpu not in pipeline]
        if len(inside) == n and len({position[gpu] for gpu in inside}) == n:
            pipeline |= dict.fromkeys(inside, len(set(pipeline.values())))
    if len(pipeline) < len(gpus):  # no group tells it: k-th of each position
        seen: dict[int, int] = {}
        for gpu in gpus:
            pipeline[gpu] = seen.get(position[gpu], 0)
            seen[position[gpu]] = pipeline[gpu] + 1
    return pd.DataFrame({"gpu": gpus, "pipeline": [pipeline[g] for g in gpus], "position": [position[g] for g in gpus]})


# ---- which schedule --------------------------------------------------------------------------------------------------

SHAPE_COLUMNS = (*PASS, "schedule", "told", "n_ranks", "n_stages", "virtual_stages", "microbatches", "complete")


def shapes(done: pd.DataFrame) -> pd.DataFrame:
    """One row per pass of `actions`; SHAPE_COLUMNS: schedule, recognised by the order of the actions on every rank
    (GPipe | 1F1B | interleaved | zero bubble | unknown), told (class in the schedule's scope, or null), n_ranks (of
    the pipeline), n_stages, virtual_stages (per rank), microbatches, complete (every stage is known to be here, with
    the forward of every microbatch)."""
    rows = []
    for key, own in done.groupby(PASS, sort=True):
        told = next(iter(own["schedule"].dropna()), None)
        cls, stages = _told(told)
        virtual = int(own.groupby("gpu")["stage"].nunique().max())
        microbatches = int(own["microbatch"].nunique())
        ranks = own["ranks"].iloc[0]
        known = stages or (None if pd.isna(ranks) else int(ranks) * virtual)
        n_stages = max(known or 0, int(own["stage"].max()) + 1)
        complete = known is not None and (own["kind"] == FORWARD).sum() == n_stages * microbatches
        n_ranks = -(-n_stages // virtual)
        rows.append((*key, recognised(own, n_ranks), cls, n_ranks, n_stages, virtual, microbatches, complete))
    return pd.DataFrame(rows, columns=list(SHAPE_COLUMNS))


def _told(told: str | None) -> tuple[str | None, int | None]:
    """Class and number of stages of `Schedule1F1B::stages4::mb8::v1`."""
    if told is None:
        return None, None
    cls, *rest = told.split("::")
    stages = next((part.removeprefix("stages") for part in rest if part.startswith("stages")), "")
    return cls, int(stages) if stages.isdecimal() else None


def recognised(done: pd.DataFrame, n_ranks: int) -> str:
    """The schedule by the order of one pass's actions on each gpu.

    W actions: zero bubble. Else by the most microbatches that a rank holds between forward and backward: all of them:
    GPipe; as many as there are ranks from it to the last: 1F1B. Several stages per rank, of which some backward comes
    before the last forward: interleaved. Where both fit (one microbatch, or as many as ranks on the first one alone)
    the rank that tells them apart decides.
    """
    kinds = set(done["kind"])
    if "W" in kinds:
        return ZERO_BUBBLE
    if not {FORWARD, "B"} <= kinds:
        return UNKNOWN
    held = {}
    for position, own in done.groupby("position"):
        change = np.where(own.sort_values("start_ns", kind="stable")["kind"] == FORWARD, 1, -1)
        held[int(position)] = (int(np.cumsum(change).max()), len(change) // 2)
    if all(most == every for most, every in held.values()):
        # 1F1B with one rank left and m <= p looks the same from its first ranks.
        return GPIPE if any(every > n_ranks - p for p, (_, every) in held.items()) or len(held) == n_ranks else UNKNOWN
    if done.groupby("gpu")["stage"].nunique().max() > 1:
        return INTERLEAVED
    if all(most == min(every, n_ranks - p) for p, (most, every) in held.items()):
        return ONE_F_ONE_B
    return UNKNOWN


def theory(schedule: str, n_ranks: int, virtual_stages: int, microbatches: int) -> float:
    """Share of the bubble in a pipeline of equal stages whose messages cost nothing; NaN for an unknown schedule."""
    if schedule == UNKNOWN:
        return float("nan")
    return 0.0 if schedule == ZERO_BUBBLE else (n_ranks - 1) / (virtual_stages * microbatches + n_ranks - 1)


# ---- bubbles ---------------------------------------------------------------------------------------------------------

BUBBLE_COLUMNS = ("gpu", "pipeline", "position", "step", "turn", "start_ns", "end_ns", "bubble_us", "phase", "reason",
                  "waits_for", "wait_us", "kind", "stage", "microbatch")


def bubbles(done: pd.DataFrame) -> pd.DataFrame:
    """One row per time that a gpu has no action while its pipeline runs; BUBBLE_COLUMNS.

    phase: fill (before the rank's first backward), drain (after its last forward), steady (between); without backward:
    before its first, after its last, between. reason: previous stage (the forward behind the bubble needs its
    output), next stage (the backward needs its gradient), own (nothing from elsewhere is needed), end (nothing
    follows). waits_for: the gpu that computes what is needed; wait_us: the part of the bubble in which it had not
    finished it; the rest is the message and the launch. kind, stage, microbatch: of the action behind the bubble.
    """
    if not len(done):
        return pd.DataFrame(columns=list(BUBBLE_COLUMNS))
    low = done.groupby(PASS)["start_ns"].transform("min")
    # from the start of the pass: these fit into a float to the ns, times since the epoch do not
    rows = done.assign(low=low, start_ns=done["start_ns"] - low, end_ns=done["end_ns"] - low)
    rows["high"] = rows.groupby(PASS)["end_ns"].transform("max")
    rows = rows.sort_values([*PASS, "gpu", "start_ns"], kind="stable", ignore_index=True)
    lane = rows.groupby([*PASS, "gpu"], sort=False)
    reach = lane["end_ns"].cummax()
    before = reach.groupby(lane.ngroup()).shift().fillna(0)
    inner = rows.assign(begin=before, stop=rows["start_ns"])
    last = lane.tail(1).index
    tail = rows.loc[last].assign(begin=reach[last], stop=rows["high"], kind=None, stage=-1, microbatch=-1)
    out = pd.concat([inner, tail], ignore_index=True)
    out = out[out["stop"] > out["begin"]].drop(columns=["start_ns", "end_ns"])
    out = out.merge(_needed(rows), on=[*PASS, "kind", "stage", "microbatch"], how="left")
    out = out.merge(_borders(rows), on=[*PASS, "gpu"], how="left")
    fills, drains = out["stop"] <= out["first_backward"], out["begin"] >= out["last_forward"]
    phase = np.select([fills, drains], [FILL, DRAIN], STEADY)
    foreign = out["ready_ns"].notna() & (out["needs_gpu"] != out["gpu"])
    reason = np.select([out["kind"].isna(), foreign & (out["kind"] == FORWARD), foreign], [END, PREVIOUS, NEXT], OWN)
    wait = (out["ready_ns"].clip(upper=out["stop"]) - out["begin"]).clip(lower=0).where(foreign, 0.0)
    out = out.assign(
        phase=phase, reason=reason, waits_for=out["needs_gpu"].where(foreign).astype("Int64"), wait_us=wait / 1000,
        start_ns=out["low"] + out["begin"].astype("int64"), end_ns=out["low"] + out["stop"].astype("int64"),
        bubble_us=(out["stop"] - out["begin"]) / 1000)
    return out.sort_values([*PASS, "position", "start_ns"], kind="stable", ignore_index=True)[list(BUBBLE_COLUMNS)]


def _needed(done: pd.DataFrame) -> pd.DataFrame:
    """What each action needs first: PASS, kind, stage, microbatch, needs_gpu, ready_ns (when it was computed).
    done: with times from the start of their pass."""
    keys = [*PASS, "kind", "stage", "microbatch"]
    made = done[[*keys, "gpu", "end_ns"]].rename(columns={"gpu": "needs_gpu", "end_ns": "ready_ns"})
    forward = made[made["kind"] == FORWARD].assign(stage=made["stage"] + 1)
    gradient = made[made["kind"].isin(BACKWARDS)].assign(stage=made["stage"] - 1)
    needs = pd.concat([forward, *(gradient.assign(kind=kind) for kind in BACKWARDS)], ignore_index=True)
    return needs.drop_duplicates(keys)


def _borders(rows: pd.DataFrame) -> pd.DataFrame:
    """Where each gpu's pass stops to fill and begins to drain: PASS, gpu, first_backward, last_forward (ns from the
    start of the pass)."""
    lane = [*PASS, "gpu"]
    out = rows.groupby(lane).agg(first=("start_ns", "min"), last=("end_ns", "max"))
    out["first_backward"] = rows[rows["kind"].isin(BACKWARDS)].groupby(lane)["start_ns"].min()
    out["last_forward"] = rows[rows["kind"] == FORWARD].groupby(lane)["end_ns"].max()
    whole = out["first_backward"].notna() & out["last_forward"].notna()
    out["first_backward"] = out["first_backward"].where(whole, out["first"])
    out["last_forward"] = out["last_forward"].where(whole, out["last"])
    return out[["first_backward", "last_forward"]].reset_index()


# ---- one row per gpu and step ----------------------------------------------------------------------------------------

TIMES = ("total", "busy", "gaps", "bubble", "fill", "steady", "drain", "wait_previous", "wait_next", "message", "own",
         "end", "theory")
COLUMNS = ("pipelines", "schedule", "told", "stages", "n_stages", "microbatches", "virtual_stages",
           *(f"{t}_us" for t in TIMES), "excess_us", "bubble_share", "theory_share")


def pipeline(done: pd.DataFrame, by: By = ("gpu", "step"), where: Where = None) -> pd.DataFrame:
    """One row per group of `by` (of gpu, step, pipeline, position): COLUMNS.

    schedule, told, n_stages, microbatches, virtual_stages as in `shapes`, where they are the same in the whole group
    (`several`, else); stages (text) and pipelines (how many) that it holds. total_us = busy_us + gaps_us + bubble_us,
    summed over gpus: GPU time. bubble_us = fill_us + steady_us + drain_us = wait_previous_us + wait_next_us (a
    neighbour had not finished) + message_us (it had: transfer and launch) + own_us (nobody is waited for) + end_us
    (nothing follows). theory_us: bubble of a perfect schedule with the pipeline's mean work; excess_us = bubble_us −
    theory_us; bubble_share and theory_share: of total_us (theory: of the perfect schedule's).
    """
    by = grouping.columns(by)
    rows = grouping.select(_lanes(done), where)
    codes, groups = grouping.number(rows, by)
    out = groups.assign(pipelines=rows.groupby(codes)["pipeline"].nunique().to_numpy())
    for name in ("schedule", "told", "stages", "n_stages", "microbatches", "virtual_stages"):
        out[name] = _same(rows[name], codes, len(groups))
    for name in TIMES:
        out[f"{name}_us"] = pd.Series(rows[name].to_numpy(float) / 1000).groupby(codes).sum(min_count=1).to_numpy()
    out["excess_us"] = out["bubble_us"] - out["theory_us"]
    out["bubble_share"] = out["bubble_us"] / out["total_us"]
    work = out["busy_us"] + out["gaps_us"]
    ideal = pd.Series(rows["work"].to_numpy(float) / 1000).groupby(codes).sum().to_numpy() if len(rows) else work
    out["theory_share"] = out["theory_us"] / (ideal + out["theory_us"])
    return out


def _same(values: pd.Series, codes: np.ndarray, n: int) -> list[object]:
    """The value that all rows of a group share, else `several`."""
    distinct: list[set[object]] = [set() for _ in range(n)]
    for code, value in zip(codes, values.astype(object).where(values.notna(), None), strict=True):
        distinct[code].add(value)
    return [next(iter(found)) if len(found) == 1 else "several" for found in distinct]


def _lanes(done: pd.DataFrame) -> pd.DataFrame:
    """One row per gpu and pass with its times in ns; `work`: mean of busy + gaps over the pipeline's gpus."""
    lane = [*PASS, "gpu"]
    names = [*lane, "position", "schedule", "told", "stages", "n_stages", "microbatches", "virtual_stages", "work",
             *TIMES]
    if not len(done):
        return pd.DataFrame(columns=names)
    own = done.groupby(lane).agg(position=("position", "first"), busy=("busy_ns", "sum"),
                                 stages=("stage", lambda s: ", ".join(map(str, sorted(set(s))))))
    own = own.reset_index().merge(shapes(done), on=PASS)
    window = done.groupby(PASS).agg(low=("start_ns", "min"), high=("end_ns", "max"))
    own = own.merge((window["high"] - window["low"]).rename("total").reset_index(), on=PASS)
    gone = bubbles(done)
    ns = (gone["end_ns"] - gone["start_ns"]).astype("int64")
    wait = (gone["wait_us"] * 1000).round().astype("int64")
    parts = {"bubble": ns, **{phase: ns.where(gone["phase"] == phase, 0) for phase in (FILL, STEADY, DRAIN)},
             "wait_previous": wait.where(gone["reason"] == PREVIOUS, 0),
             "wait_next": wait.where(gone["reason"] == NEXT, 0),
             "message": (ns - wait).where(gone["reason"].isin((PREVIOUS, NEXT)), 0),
             "own": ns.where(gone["reason"] == OWN, 0), "end": ns.where(gone["reason"] == END, 0)}
    sums = gone[lane].assign(**parts).groupby(lane).sum().reset_index()
    own = own.merge(sums, on=lane, how="left").fillna(dict.fromkeys(parts, 0))
    own["busy"] = np.minimum(own["busy"], own["total"] - own["bubble"])  # actions that overlap share their time
    own["gaps"] = own["total"] - own["bubble"] - own["busy"]
    own["work"] = (own["busy"] + own["gaps"]).groupby([own[k] for k in PASS]).transform("mean")
    share = np.array([theory(s, r, v, m) for s, r, v, m in zip(
        own["schedule"], own["n_ranks"], own["virtual_stages"], own["microbatches"], strict=True)])
    own["theory"] = own["work"] * share / (1 - share)
    return own[names]


def behind_largest(gone: pd.DataFrame, offset_ns: Mapping[int, int] | None = None) -> dict[int, str]:
    """By gpu: the first kernel behind the largest of its `bubbles`, as the Trace tab takes it (gpu@start_ns, on the
    clock of its own host)."""
    rows = gone[gone["kind"].notna()].sort_values("bubble_us", kind="stable").drop_duplicates("gpu", keep="last")
    return {int(gpu): f"{gpu}@{end + (offset_ns or {}).get(int(gpu), 0)}"
            for gpu, end in zip(rows["gpu"], rows["end_ns"], strict=True)}


# ---- what would help -------------------------------------------------------------------------------------------------

WHAT_IF_COLUMNS = (*PASS, "schedule", "n_ranks", "virtual_stages", "microbatches", "total_us", "prompt_us",
                   "steady_us", "balanced_us", "theory_us", "transfer_excess_us", "variation_us", "imbalance_us",
                   "halved_gain_us", "complete")


def what_if(done: pd.DataFrame) -> pd.DataFrame:
    """What makes each pass longer than its theory; WHAT_IF_COLUMNS, one row per pass.

    The actions are played again in their order on every gpu, each as soon as what it needs is there: prompt_us with
    their own durations, so without messages and delays of the host; steady_us with all microbatches of a stage as long
    (its mean, by kind); balanced_us with all stages as long, too. theory_us: length of the perfect schedule with the
    same mean work. transfer_excess_us = total_us − prompt_us; variation_us = prompt_us − steady_us; imbalance_us =
    steady_us − balanced_us; halved_gain_us: half of the theory's bubble, which twice the microbatches, or twice the
    stages per rank, would save.
    """
    rows = []
    lanes = dict(iter(_lanes(done).groupby(PASS)))
    passes = dict(iter(done.groupby(PASS)))
    for shape in shapes(done).itertuples(index=False):
        key = tuple(getattr(shape, k) for k in PASS)
        own, lane = passes[key], lanes[key]
        length = (own["end_ns"] - own["start_ns"]).to_numpy()
        total, work = float(lane["total"].iloc[0]), float(lane["work"].iloc[0])
        prompt, steady, balanced = (replay(own, durations) for durations in (
            length, _means(own, length, ["kind", "stage"]), _means(own, length, ["kind"])))
        bubble = float(lane["theory"].iloc[0])
        rows.append((*key, shape.schedule, shape.n_ranks, shape.virtual_stages, shape.microbatches,
                     *(ns / 1000 for ns in (total, prompt, steady, balanced, work + bubble, total - prompt,
                                            prompt - steady, steady - balanced, bubble / 2)), shape.complete))
    return pd.DataFrame(rows, columns=list(WHAT_IF_COLUMNS))


def _means(own: pd.DataFrame, length: np.ndarray, by: list[str]) -> np.ndarray:
    """Durations as if the actions of each group took the mean of it."""
    return own.assign(length=length).groupby(by)["length"].transform("mean").to_numpy(float)


def replay(own: pd.DataFrame, length: np.ndarray) -> float:
    """How long one pass would take (ns) if each action began as soon as the one before it on its gpu, and what it needs
    from others, were done. `length`: of each action of `own`, ns."""
    place = {key: i for i, key in enumerate(zip(own["kind"], own["stage"], own["microbatch"], strict=True))}
    needs = [_need(place, *key) for key in place]
    if len(place) < len(own):  # an action twice in one pass: not a schedule
        return float("nan")
    queues = [deque(np.flatnonzero((own["gpu"] == gpu).to_numpy())) for gpu in own["gpu"].unique()]
    end = np.full(len(own), np.nan)
    free = np.zeros(len(queues))
    moved = True
    while moved:
        moved = False
        for lane, queue in enumerate(queues):
            while queue and ((need := needs[queue[0]]) is None or not np.isnan(end[need])):
                i = queue.popleft()
                end[i] = free[lane] = max(free[lane], 0.0 if need is None else end[need]) + length[i]
                moved = True
    return float(free.max()) if not any(queues) else float("nan")


def _need(place: dict[tuple[str, int, int], int], kind: str, stage: int, microbatch: int) -> int | None:
    """The action of another stage that must come first: row of `place`, None where there is none."""
    if kind == FORWARD:
        return place.get((FORWARD, stage - 1, microbatch))
    if kind not in BACKWARDS:
        return None
    after = (place.get((k, stage + 1, microbatch)) for k in BACKWARDS)
    return next((i for i in after if i is not None), None)


# ---- stages ----------------------------------------------------------------------------------------------------------

STAGE_COLUMNS = ("stage", "gpus", "forward_us", "backward_us", "microbatch_us", "slower")


def stages(done: pd.DataFrame) -> pd.DataFrame:
    """One row per stage: stage, gpus (list), forward_us, backward_us (B, or I and W together) and microbatch_us (both):
    of one microbatch, means; slower: microbatch_us over the mean of the stages, less 1."""
    length = (done["end_ns"] - done["start_ns"]) / 1000
    per = done.assign(us=length, way=np.where(done["kind"] == FORWARD, "forward_us", "backward_us"))
    each = per.groupby(["stage", "gpu", *PASS, "microbatch", "way"])["us"].sum()
    table = each.groupby(["stage", "way"]).mean().unstack().reindex(columns=["forward_us", "backward_us"])
    out = table.assign(microbatch_us=table.fillna(0).sum(axis=1))
    out["slower"] = out["microbatch_us"] / out["microbatch_us"].mean() - 1
    out["gpus"] = done.groupby("stage")["gpu"].agg(lambda g: sorted({int(x) for x in g}))
    return out.reset_index()[list(STAGE_COLUMNS)]
