"""Actions of pipeline schedules: the scopes that torch_ext.pipeline draws, else those of torch itself, and the device
work launched in each.

    chopper::pp::B::stage2::mb5    torch_ext.annotate_pipeline
    PP:2B5                         schedules of several stages per rank (interleaved, zero bubble); waits included
    Forward 5, Backward 5          ScheduleGPipe; the stage is not told

Messages between stages are no work of an action: their kernels spin until the neighbour is there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals as iv
from tb_chopper.backend import schema
from tb_chopper.backend.attribution import names, standin
from tb_chopper.backend.attribution.steps import Windows
from tb_chopper.backend.attribution.tree import Index, Int, Mask

OWN = re.compile(r"^chopper::pp::(?P<kind>[FBIW])::stage(?P<stage>\d{1,9})::mb(?P<microbatch>\d{1,9})$")
TORCH = (
    re.compile(r"^PP:(?P<stage>\d{1,9})(?P<kind>[FBIW])(?P<microbatch>\d{1,9})$"),
    re.compile(r"^(?P<kind>F)orward (?P<microbatch>\d{1,9})$"),
    re.compile(r"^(?P<kind>B)ackward (?P<microbatch>\d{1,9})$"),
)
SCHEDULE = re.compile(r"^chopper::pp::schedule::(?P<told>.+)$")
MESSAGES = ("send", "recv", "send_recv")
SHARDING = re.compile(r"^FSDP::(all_gather|post_backward_reduce)\b")


def find(host: pd.DataFrame, kernels: pd.DataFrame, windows: Windows) -> pd.DataFrame:
    """ACTIONS without gpu and capture, in order of start. `kernels`: of one process, attributed."""
    annotation = np.flatnonzero((host["kind"] == "annotation").to_numpy())
    code = host["name"].cat.codes.to_numpy()
    used = np.unique(code[annotation])
    by_code = {c: parsed for c, name in zip(used, host["name"].cat.categories[used], strict=True)
               if (parsed := _parse(str(name)))}
    own = {c for c, parsed in by_code.items() if parsed.own}
    # Anybody may call a scope `Forward 5`: without messages it is no stage of a pipeline.
    staged = bool(own) or bool(is_message(kernels).any())
    by_code = {c: parsed for c, parsed in by_code.items() if (not own or c in own) and (staged or parsed.stage >= 0)}
    rows = annotation[np.isin(code[annotation], list(by_code))]
    if not len(rows) or not len(kernels):
        return schema.empty(schema.ACTIONS)
    rows = rows[np.argsort(host["start_ns"].to_numpy()[rows], kind="stable")]
    table = pd.DataFrame([by_code[c] for c in code[rows]]).drop(columns="own")
    table = _joined(table.assign(start_ns=host["start_ns"].to_numpy()[rows], end_ns=host["end_ns"].to_numpy()[rows]))
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    position = windows.at(start)
    step = pd.Series(windows.step[position] if len(windows) else position, dtype="Int64").mask(position < 0)
    return schema.conform(table.assign(step=step, schedule=_schedules(host, annotation, start),
                                       **_work(kernels, start, end)), schema.ACTIONS)


def is_message(kernels: pd.DataFrame) -> Mask:
    """Rows that carry a message from one rank to another."""
    def among(column: pd.Series) -> Mask:
        found = np.asarray([*(names.collective(str(c)) in MESSAGES for c in column.cat.categories), False], bool)
        return found[column.cat.codes.to_numpy()]

    # all_to_all has the kernel of a message, too: the name of the collective comes first
    told = kernels["collective"].notna() & ~kernels["collective"].isin(["", "coalesced"])
    communication = (kernels["kind"] == "communication").to_numpy()
    return np.where(told, among(kernels["collective"]), among(kernels["name"])) & communication


class Parsed(NamedTuple):
    """What the name of a scope says; stage -1: nothing of it. `own`: it is one of ours."""

    kind: str
    stage: int
    microbatch: int
    own: bool


def _parse(name: str) -> Parsed | None:
    for pattern in (OWN, *TORCH):
        if match := pattern.match(name):
            told = match.groupdict()
            return Parsed(told["kind"], int(told.get("stage", -1)), int(told["microbatch"]), pattern is OWN)
    return None


def _joined(table: pd.DataFrame) -> pd.DataFrame:
    """Scopes of one action that follow each other as one: the loss is computed in a scope of its own."""
    key = table[["kind", "stage", "microbatch"]]
    number = (key != key.shift()).any(axis=1).cumsum()
    return table.groupby(number, sort=True).agg(
        kind=("kind", "first"), stage=("stage", "first"), microbatch=("microbatch", "first"),
        start_ns=("start_ns", "first"), end_ns=("end_ns", "max")).reset_index(drop=True)


def _schedules(host: pd.DataFrame, annotation: Index, start: Int) -> pd.Categorical:
    """What the scope of the schedule around each action tells, null where there is none."""
    told = {c: match["told"] for c, name in enumerate(host["name"].cat.categories)
            if (match := SCHEDULE.match(str(name)))}
    code = host["name"].cat.codes.to_numpy()
    rows = annotation[np.isin(code[annotation], list(told))]
    if not len(rows):
        return pd.Categorical([None] * len(start))
    rows = rows[np.argsort(host["start_ns"].to_numpy()[rows], kind="stable")]
    begin, stop = (host[c].to_numpy()[rows] for c in ("start_ns", "end_ns"))
    at = np.searchsorted(begin, start, side="right") - 1
    inside = (at >= 0) & (start < stop[np.maximum(at, 0)])
    named = pd.Series([told[c] for c in code[rows]], dtype=object).iloc[np.maximum(at, 0)]
    return pd.Categorical(named.where(inside, None))


def _work(kernels: pd.DataFrame, start: Int, end: Int) -> dict[str, object]:
    """First start, last end and busy time of the work launched in each action, and the device that it ran on.

    An action runs from its first to its last computation, where it has any: parameters may be gathered long before it,
    and gradients reduced behind it keep nobody of the pipeline waiting (FSDP's copies for either do not count).
    """
    launch = kernels["launch_ns"]
    issued = launch.fillna(schema.MISSING).to_numpy(np.int64)
    stand_in = (kernels["activity"] == standin.ACTIVITY).to_numpy()
    issued = np.where(stand_in, kernels["start_ns"].to_numpy(), issued)
    known = np.flatnonzero((launch.notna().to_numpy() | stand_in) & ~is_message(kernels))
    action = np.searchsorted(start, issued[known], side="right") - 1
    inside = (action >= 0) & (issued[known] < end[np.maximum(action, 0)])
    rows, action, n = known[inside], action[inside], len(start)
    low, high = kernels["start_ns"].to_numpy()[rows], kernels["end_ns"].to_numpy()[rows]
    computes = ((kernels["kind"] == "compute").to_numpy() & ~_is_sharding(kernels["operation"]))[rows]
    first, last = _extent(low, high, action, n)
    compute_first, compute_last = _extent(low[computes], high[computes], action[computes], n)
    has_compute = compute_first <= compute_last
    first, last = np.where(has_compute, compute_first, first), np.where(has_compute, compute_last, last)
    none = first > last
    return {"first_ns": pd.Series(first, dtype="Int64").mask(none),
            "last_ns": pd.Series(last, dtype="Int64").mask(none),
            "busy_ns": _busy(low, high, action, first, last), "device": _devices(kernels, rows, action, n)}


def _is_sharding(operation: pd.Series) -> Mask:
    """Rows that copy parameters for gathering, or gradients for reduction, in FSDP2."""
    found = np.asarray([*(bool(SHARDING.match(str(c))) for c in operation.cat.categories), False], bool)
    return found[operation.cat.codes.to_numpy()]


def _extent(low: Int, high: Int, action: Index, n: int) -> tuple[Int, Int]:
    """First start and last end by action; start behind end for one without any."""
    first, last = np.full(n, np.iinfo(np.int64).max), np.full(n, np.iinfo(np.int64).min)
    np.minimum.at(first, action, low)
    np.maximum.at(last, action, high)
    return first, last


def _busy(low: Int, high: Int, action: Index, first: Int, last: Int) -> Int:
    """Time within each action in which any of its work ran."""
    busy = np.zeros(len(first), np.int64)
    order = np.argsort(action, kind="stable")
    borders = np.flatnonzero(np.diff(action[order])) + 1
    for mine in np.split(order, borders) if len(order) else ():
        at = action[mine[0]]
        busy[at] = iv.union(*iv.clip(low[mine], high[mine], first[at], last[at])).length
    return busy


def _devices(kernels: pd.DataFrame, rows: Index, action: Index, n: int) -> pd.Categorical:
    """The device that most rows of each action ran on; that of most rows for an action without any."""
    device = kernels["device"]
    usual = int(np.bincount(device.cat.codes.to_numpy()).argmax())
    count = np.zeros((n, len(device.cat.categories)), np.int64)
    np.add.at(count, (action, device.cat.codes.to_numpy()[rows]), 1)
    code = np.where(count.any(axis=1), count.argmax(axis=1), usual)
    return pd.Categorical.from_codes(code, device.cat.categories)
