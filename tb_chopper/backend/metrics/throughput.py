"""Throughput and iteration time (docs/metrics.md, "Throughput")."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

COLUMNS = ("gpu", "n_steps", "iteration_ms", "iteration_min_ms", "iteration_max_ms", "steps_per_s", "tokens_per_s",
           "tokens_per_s_per_gpu", "kind")


def iterations(steps: pd.DataFrame) -> pd.DataFrame:
    """The time of every complete step but the last of its capture: from its first device activity to the next
    step's. Columns capture, gpu, step, start_ns, iteration_ns. A step without device activity ends none and has none.
    """
    some = steps[steps["gpu_start_ns"].notna()].sort_values(["capture", "step"], kind="stable")
    start = some["gpu_start_ns"].astype("int64").to_numpy()
    capture, number = some["capture"].to_numpy(), some["step"].to_numpy()
    follows = (capture[1:] == capture[:-1]) & (number[1:] == number[:-1] + 1)
    has_next = np.append(follows, False) & some["complete"].to_numpy(bool)
    out = some.loc[has_next, ["capture", "gpu", "step"]].assign(start_ns=start[has_next])
    return out.assign(iteration_ns=(np.append(start[1:], 0) - start)[has_next]).reset_index(drop=True)


def throughput(steps: pd.DataFrame, tokens_per_step: Mapping[int, int] | None = None) -> pd.DataFrame:
    """One row per gpu, and a last one (gpu missing) for the run.

    iteration_ms: median over the steps; the run's is the median over steps of the slowest gpu, because no gpu starts
    the next step before the slowest has ended this one. steps_per_s = 1 / iteration. tokens_per_s of a gpu: its own
    tokens (`tokens_per_step` by gpu); of the run: all gpus together, per gpu: their mean. NaN where not told, then
    `kind` is `steps/s`, else `tokens/s/gpu`. A gpu with fewer than two steps in a row has n_steps 0 and NaN.
    """
    every = iterations(steps)
    gpus = sorted(steps["gpu"].unique())
    rows = [_row(gpu, every.loc[every["gpu"] == gpu, "iteration_ns"], _tokens(tokens_per_step, [gpu]), 1)
            for gpu in gpus]
    slowest = every.groupby("step")["iteration_ns"].max() if len(every) else every["iteration_ns"]
    rows.append(_row(pd.NA, slowest, _tokens(tokens_per_step, gpus), max(len(gpus), 1)))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"gpu": "Int64"})


def _tokens(tokens_per_step: Mapping[int, int] | None, gpus: list[int]) -> float:
    """Tokens of a step on all the gpus, NaN unless every one is known."""
    return float(sum((tokens_per_step or {}).get(gpu, np.nan) for gpu in gpus)) if gpus else np.nan


def _row(gpu: object, iteration_ns: pd.Series, tokens: float, n_gpus: int) -> tuple[object, ...]:
    seconds = iteration_ns / 1e9
    median = seconds.median() if len(seconds) else np.nan
    low, high = (seconds.min(), seconds.max()) if len(seconds) else (np.nan, np.nan)
    rate = 1 / median if median > 0 else np.nan
    kind = "steps/s" if np.isnan(tokens) else "tokens/s/gpu"
    return (gpu, len(seconds), median * 1e3, low * 1e3, high * 1e3, rate, tokens * rate,
            tokens * rate / n_gpus, kind)
