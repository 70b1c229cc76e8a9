"""What tensor, context and expert parallelism exchange inside the layers, and what it costs (docs/collectives.md).

    elapsed        = GPU time of the layer: computation, exposed communication and copies, and the idle time before them
    share          = exposed communication / elapsed
    transfer share = exposed communication without waiting for late ranks / elapsed
    imbalance      = largest / mean of what the ranks of an all-to-all receive
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.metrics import grouping, timeline
from tb_chopper.backend.metrics.grouping import By, Where

INSIDE = ("tensor", "context", "expert")
"""Roles whose exchanges stand between the operations of a layer."""
BY = ("role", "group", "name", "layer", "phase", "step", "gpu")
OF_KERNELS = ("layer", "phase", "step", "gpu")
"""Columns of BY that the elapsed time can be cut by; the others tell exchanges apart, not time."""
UNEQUAL = ("all_to_all", "dispatch", "combine")
"""Exchanges of which ranks may receive different amounts."""
MEASURES = ("n", "n_per_step", "duration_us", "median_us", "exposed_us", "exposed_wait_us", "exposed_share",
            "elapsed_us", "share", "transfer_share", "bytes", "busbw_gbs", "link_share", "imbalance")


def exchanges(arrived: pd.DataFrame, each: pd.DataFrame, kernels: pd.DataFrame, steps: pd.DataFrame,
              by: By = ("role", "layer"), where: Where = None) -> pd.DataFrame:
    """One row per group of `by` (of BY): the columns of `by`, and MEASURES.

    n: collectives; n_per_step: of one GPU; duration_us, exposed_us, exposed_wait_us: sums over the GPUs; median_us: of
    one kernel; exposed_share: exposed / duration; elapsed_us: GPU time of the group's layer (phase, step, GPU; of the
    whole capture where `by` has none of them) on the GPUs that take part; share, transfer_share: see above; bytes: of
    all messages; busbw_gbs and link_share (of the links' peak): medians over the messages that are not bound by
    latency, missing where none is known; imbalance: median over the collectives of UNEQUAL whose sizes are told.
    exposed_wait_us and transfer_share are missing where one rank alone is here: only the others tell its waits.

    arrived: collectives.arrivals; each: collectives.collectives, one row per collective; kernels, steps: KERNELS and
    STEPS of the same captures.
    """
    by = grouping.columns(by)
    if unknown := [c for c in by if c not in BY]:
        raise InvalidSelection(f"exchanges are not told apart by {unknown[0]!r}; by {', '.join(BY)}")
    of_instance = each[["instance", "role", "busbw_gbs", "link_share", "latency_bound"]].assign(
        whole=each["bytes"], imbalance=_imbalance(arrived).reindex(each["instance"]).to_numpy())
    rows = grouping.select(arrived.merge(of_instance, on="instance", how="inner"), where)
    codes, groups = grouping.number(rows, by)
    n = len(groups)
    duration = (rows["end_ns"] - rows["start_ns"]).to_numpy() / 1000
    once = ~pd.DataFrame({"code": codes, "instance": rows["instance"].to_numpy()}).duplicated().to_numpy()
    single = rows[once].assign(code=codes[once])
    # Where nothing tells a message's size its bandwidth is missing, too.
    large = single["latency_bound"].isna() | ~single["latency_bound"].fillna(False).astype(bool)
    speeds = single[["busbw_gbs", "link_share"]].where(large)
    medians = speeds.assign(imbalance=single["imbalance"]).groupby(single["code"]).median().reindex(range(n))
    whole = single.groupby("code")["whole"].sum(min_count=1).reindex(range(n))

    def total(ns: pd.Series) -> np.ndarray:
        return ns.astype("float64").groupby(codes).sum(min_count=1).reindex(range(n)).to_numpy() / 1000

    out = groups.assign(
        n=np.bincount(codes[once], minlength=n),
        n_per_step=_per_step(rows, codes, n, 1 if "step" in by else rows["step"].nunique()),
        duration_us=np.bincount(codes, duration, n),
        median_us=pd.Series(duration).groupby(codes).median().reindex(range(n)).to_numpy(),
        exposed_us=total(rows["exposed_ns"]), exposed_wait_us=total(rows["exposed_wait_ns"]),
        elapsed_us=_elapsed(rows, codes, groups, kernels, steps, by, where), bytes=whole.to_numpy(),
        **{c: medians[c].to_numpy() for c in medians})
    elapsed = out["elapsed_us"].where(out["elapsed_us"] > 0)
    out = out.assign(
        exposed_share=out["exposed_us"] / out["duration_us"].where(out["duration_us"] > 0),
        share=out["exposed_us"] / elapsed,
        transfer_share=(out["exposed_us"] - out["exposed_wait_us"]).clip(lower=0) / elapsed)
    return out[[*by, *MEASURES]]


def _imbalance(arrived: pd.DataFrame) -> pd.Series:
    """By collective: the largest of what its ranks receive over the mean; only where every rank's part is told."""
    rows = arrived[arrived["name"].isin(UNEQUAL) & (arrived["n_ranks"] > 1)]
    received = rows.groupby("instance")["received_bytes"]
    complete = received.count() == received.size()
    return (received.max() / received.mean().where(lambda mean: mean > 0)).where(complete)


def _per_step(rows: pd.DataFrame, codes: np.ndarray, n: int, n_steps: int) -> np.ndarray:
    """Collectives of one GPU and step: rows within steps over the GPUs of each group and the steps."""
    inside = rows["step"].notna().to_numpy()
    pairs = pd.DataFrame({"code": codes[inside], "gpu": rows["gpu"].to_numpy()[inside]}).drop_duplicates()
    gpus = pairs.groupby("code").size().reindex(range(n)).to_numpy("float64")
    return np.bincount(codes[inside], minlength=n) / (gpus * max(n_steps, 1))


def _elapsed(rows: pd.DataFrame, codes: np.ndarray, groups: pd.DataFrame, kernels: pd.DataFrame, steps: pd.DataFrame,
             by: list[str], where: Where) -> np.ndarray:
    """GPU time of what `by` cuts time into, on the GPUs that take part in each group, µs."""
    cut = [c for c in by if c in OF_KERNELS]
    # Filters on the collectives themselves do not choose time.
    of_time = {k: v for k, v in (where or {}).items() if k in {*OF_KERNELS, "worker", "span", "capture"}}
    keys = list(dict.fromkeys(["gpu", *cut]))
    times = timeline.timeline(kernels, steps, keys, of_time)
    pairs = pd.DataFrame({"code": codes, "gpu": rows["gpu"].to_numpy()}).drop_duplicates()
    wanted = pairs.join(groups[[c for c in cut if c != "gpu"]], on="code")
    for column in keys:
        wanted[column], times[column] = _text(wanted[column]), _text(times[column])
    found = wanted.merge(times[[*keys, "total_us"]], on=keys, how="left")
    return found.groupby("code")["total_us"].sum(min_count=1).reindex(range(len(groups))).to_numpy("float64")


def _text(column: pd.Series) -> pd.Series:
    """Values that can be matched, missing ones too."""
    values = column.astype(object)
    return values.where(values.notna(), "").astype(str)
