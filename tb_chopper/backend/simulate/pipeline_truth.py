"""The right answers about a pipeline: when each GPU worked on which microbatch, and how long it was idle.

`truth/pipeline.parquet` has one row per action (`COLUMNS`); `truth/truth.json` has the idle share of every GPU and
step, and what theory says of equal stages. Times are ns on the clock of the rank's host.

    bubble = 1 - (time in actions) / (last end - first start),   first and last over all ranks of the rank's pipeline
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tb_chopper.backend.simulate import pipeline_schedule, plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.recorded import clock_offset

COLUMNS: dict[str, str] = {
    "rank": "rank",
    "step": "ProfilerStep",
    "stage": "stage, over all ranks",
    "microbatch": "microbatch",
    "kind": "F forward | B backward",
    "start_ns": "start of its first kernel",
    "end_ns": "end of its last kernel",
    "bubble_ns": "time before it in which its GPU worked on no action: since the one before, of the first one since "
                 "the first start in its pipeline",
}


def actions(kernels: pd.DataFrame, config: Config) -> pd.DataFrame:
    """One row per action of the captured steps, in order of time; empty without a pipeline. `kernels`: all ranks'."""
    work = kernels[(kernels["stage"] >= 0) & kernels["launched"] & (kernels["stream"] == 0)]
    kind = work["phase"].astype(str).map({"forward": "F", "backward": "B"})
    keys = ["rank", "step", "stage", "microbatch", "kind"]
    table = (work.assign(kind=kind).groupby(keys, observed=True)
             .agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max")).reset_index()
             .sort_values(["rank", "start_ns"], ignore_index=True))
    shift = table["rank"].map(lambda r: clock_offset(config, r))
    pipeline = table["rank"].map(lambda r: plan.place(config, r)._replace(pipeline=0))
    begin = (table["start_ns"] - shift).groupby([pipeline, table["step"]]).transform("min") + shift
    before = table.groupby(["rank", "step"])["end_ns"].shift(fill_value=-1)
    return table.assign(bubble_ns=table["start_ns"] - before.where(before >= 0, begin))[list(COLUMNS)]


def summary(table: pd.DataFrame, config: Config) -> Mapping[str, Any]:
    """Idle share by rank and step, and the theory."""
    shift = table["rank"].map(lambda r: clock_offset(config, r))
    rows = table.assign(start=table["start_ns"] - shift, end=table["end_ns"] - shift,
                        pipeline=table["rank"].map(lambda r: plan.place(config, r)._replace(pipeline=0)))
    whole = rows.groupby(["pipeline", "step"]).agg(first=("start", "min"), last=("end", "max"))
    keys = ["pipeline", "step", "rank"]
    busy = rows.assign(busy=rows["end"] - rows["start"]).groupby(keys)["busy"].sum().reset_index()
    busy = busy.merge(whole, left_on=["pipeline", "step"], right_index=True)
    share = 1 - busy["busy"] / (busy["last"] - busy["first"])
    p = config.plan
    return {
        "schedule": pipeline_schedule.CLASSES[p.schedule], "stages": p.stages, "microbatches": p.microbatches,
        "stages_per_rank": p.virtual, "columns": COLUMNS,
        "bubble_of_equal_stages": pipeline_schedule.bubble(p.pipeline, p.virtual, p.microbatches),
        "bubbles": [{"rank": int(r), "step": int(s), "bubble": float(b)}
                    for r, s, b in zip(busy["rank"], busy["step"], share, strict=True)],
    }
