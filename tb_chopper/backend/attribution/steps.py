"""Training steps: where they begin and end, and which device rows belong to which.

A row belongs to the step in which it was launched, on whatever thread; of overlapping steps to the one that
began last. Definitions: docs/metrics.md, "Timeline of a GPU".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import tree
from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Int, Mask
from tb_chopper.backend.findings import Finding

OUTSIDE = -1


@dataclass(frozen=True)
class Windows:
    """Steps on the host, sorted by start. `finished` is False for a step that was open when the capture stopped."""

    step: Int
    start_ns: Int
    end_ns: Int
    finished: Mask
    source: str

    def __len__(self) -> int:
        return len(self.step)

    def at(self, time_ns: Int) -> Index:
        """Position of the step that runs at each time, the one that began last of several; -1 outside."""
        nested = tree.build(np.zeros(len(self), np.int64), self.start_ns, self.end_ns)
        return tree.take(nested.row, nested.locate(np.zeros(len(time_ns), np.int64), time_ns))


def find(host: pd.DataFrame, scopes: Scopes) -> tuple[Windows, list[Finding]]:
    """The steps that the host events tell of: scopes of steps, else optimizer steps, else batches loaded."""
    for finder in (_profiler_steps, _step_scopes, _optimizer_steps, _batches):
        windows, findings = finder(host, scopes)
        if len(windows):
            return windows, findings
    return _windows([], [], [], NONE), []


def by_repetition(device: pd.DataFrame) -> Windows:
    """Steps where the host tells of none: the longest sequence of kernels that repeats on the busiest stream.

    Times are those of the device. A single pass through many equal layers is no sequence of steps: it has kernels
    that occur once. Nothing is found then.
    """
    kernels = device[device["activity"] == "kernel"]
    if len(kernels) < 2 * _SHORTEST_STEP:
        return _windows([], [], [], NONE)
    queue = kernels.groupby(["device", "stream"], observed=True, sort=False).ngroup()
    kernels = kernels[queue == queue.mode()[0]]
    sequence, start = kernels["name"].cat.codes.to_numpy(), kernels["start_ns"].to_numpy()
    counts = np.bincount(sequence)
    rarest = counts[counts > 0].min()
    if rarest < 2:
        return _windows([], [], [], NONE)
    for anchor in np.flatnonzero(counts == rarest):
        at = np.flatnonzero(sequence == anchor)
        period = int(np.median(np.diff(at)))
        if _SHORTEST_STEP <= period <= len(sequence) // 2 and \
                (sequence[period:] == sequence[:-period]).mean() >= _SAME:
            begin = start[at[0] % period::period]
            end = np.append(begin[1:], kernels["end_ns"].to_numpy().max() + 1)
            return _windows(np.arange(len(begin)), begin, end, REPETITION)
    return _windows([], [], [], NONE)


NONE = "none"
REPETITION = "sequence"
_SHORTEST_STEP = 8
"""Kernels that a step must have to be found by repetition."""
_SAME = 0.95
"""Share of kernels that must be the same one period later."""


def told(windows: Windows) -> list[Finding]:
    """What a user must know about where the steps come from."""
    if windows.source == "ProfilerStep":
        return []
    if len(windows) == 0:
        return [Finding("no_steps", "info", "no training steps found; give torch.profiler a schedule and call step()")]
    return [Finding("steps_without_profiler", "info",
                    f"no ProfilerStep in this trace; its {len(windows)} steps are taken from: {windows.source}")]


def lost_work(windows: Windows, call_ns: Int, lost_ns: Int) -> Mask:
    """Steps of which more than a tenth of the launch calls (times `call_ns`) have no kernel (`lost_ns`)."""
    def count(times: Int) -> Int:
        position = windows.at(times)
        return np.bincount(position[position >= 0], minlength=len(windows))

    return count(lost_ns) > _LOST * count(call_ns)


_LOST = 0.1


def _profiler_steps(host: pd.DataFrame, scopes: Scopes) -> tuple[Windows, list[Finding]]:
    return _named(host, scopes, re.compile(r"^ProfilerStep#(\d{1,18})$"), "ProfilerStep")


def _step_scopes(host: pd.DataFrame, scopes: Scopes) -> tuple[Windows, list[Finding]]:
    windows, findings = _named(host, scopes, re.compile(r"^Iteration_?(\d{1,18})$"), "annotation")
    if len(windows):
        return windows, findings
    node = np.flatnonzero(scopes.role == Role.STEP)
    node = node[scopes.tree.nearest(scopes.tree.parent[node], scopes.role == Role.STEP) < 0]
    return _counted(scopes, node, host, "annotation"), []


def _named(host: pd.DataFrame, scopes: Scopes, pattern: re.Pattern[str], source: str) -> tuple[Windows, list[Finding]]:
    """Steps whose scopes are numbered. Of several scopes of one number the longest counts."""
    number = np.asarray([int(m[1]) if (m := pattern.match(x.label)) else -1 for x in scopes.meanings], np.int64)
    node = np.flatnonzero(number[scopes.meaning] >= 0) if len(number) else np.empty(0, np.intp)
    step, start, end = number[scopes.meaning[node]], scopes.tree.start_ns[node], scopes.tree.end_ns[node]
    order = np.lexsort((start, start - end, step))
    keep = np.sort(order[np.unique(step[order], return_index=True)[1]])
    findings = []
    if len(keep) < len(node):
        findings.append(Finding("duplicate_steps", "warning",
                                f"{len(node) - len(keep)} scopes repeat the number of another step; the longest one "
                                "of each number counts", len(node) - len(keep)))
    finished = host["finished"].to_numpy()[scopes.host_row[node[keep]]]
    windows = _windows(step[keep], start[keep], end[keep], source, finished)
    overlaps = int((windows.start_ns[1:] < np.maximum.accumulate(windows.end_ns)[:-1]).sum())
    if overlaps:
        findings.append(Finding("overlapping_steps", "warning",
                                f"{overlaps} steps begin before the previous one ends; what was launched inside both "
                                "counts for the later", overlaps))
    return windows, findings


def _optimizer_steps(host: pd.DataFrame, scopes: Scopes) -> tuple[Windows, list[Finding]]:
    """A step ends with its last Optimizer.step. Two of them without backward work between belong to one step."""
    is_step = np.asarray([m.role == Role.OPTIMIZER and "step" in m.label for m in scopes.meanings], bool)
    node = np.flatnonzero(is_step[scopes.meaning]) if len(is_step) else np.empty(0, np.intp)
    if len(node) == 0:
        return _windows([], [], [], "optimizer"), []
    node = node[np.argsort(scopes.tree.start_ns[node], kind="stable")]
    backward = np.sort(scopes.tree.start_ns[scopes.role == Role.AUTOGRAD])
    done = np.searchsorted(backward, scopes.tree.start_ns[node])
    last = np.concatenate((done[1:] > done[:-1], [True])) if len(backward) else np.ones(len(node), bool)
    end = scopes.tree.end_ns[node][last]
    first, stop = int(scopes.tree.start_ns.min()), int(scopes.tree.end_ns.max()) + 1
    # What follows the last optimizer step is the beginning of a step that the capture cut off.
    tail = bool(len(backward) and backward[-1] >= end[-1])
    ends = np.concatenate((end, [stop])) if tail else end
    starts = np.concatenate(([first], end)) if tail else np.concatenate(([first], end[:-1]))
    finished = np.ones(len(ends), bool)
    finished[-1] = not tail
    return _windows(np.arange(len(ends)), starts, ends, "optimizer", finished), []


def _batches(host: pd.DataFrame, scopes: Scopes) -> tuple[Windows, list[Finding]]:
    """A step begins when its batch is asked for."""
    is_loader = np.asarray([m.label == "DataLoader" for m in scopes.meanings], bool)
    node = np.flatnonzero(is_loader[scopes.meaning]) if len(is_loader) else np.empty(0, np.intp)
    start = np.sort(scopes.tree.start_ns[node])
    end = np.concatenate((start[1:], [int(scopes.tree.end_ns.max()) + 1])) if len(node) else start
    return _windows(np.arange(len(start)), start, end, "dataloader"), []


def _counted(scopes: Scopes, node: Index, host: pd.DataFrame, source: str) -> Windows:
    node = node[np.argsort(scopes.tree.start_ns[node], kind="stable")]
    return _windows(np.arange(len(node)), scopes.tree.start_ns[node], scopes.tree.end_ns[node], source,
                    host["finished"].to_numpy()[scopes.host_row[node]])


def _windows(step: object, start: object, end: object, source: str, finished: Mask | None = None) -> Windows:
    step, start, end = (np.asarray(a, np.int64) for a in (step, start, end))
    finished = np.ones(len(step), bool) if finished is None else finished
    order = np.lexsort((step, start))
    return Windows(step[order], start[order], end[order], finished[order], source)


def by_device_time(windows: Windows, position: Index, device: pd.DataFrame, rows: Index) -> Index:
    """Position of the step whose work surrounds each of `rows` on its device; by host time where nothing is known.

    `position`: step position of every row of `device`, -1 where unknown.
    """
    start = device["start_ns"].to_numpy()
    if not (position >= 0).any():
        return windows.at(start[rows])
    label = device["device"].cat.codes.to_numpy()
    found = np.full(len(rows), OUTSIDE)
    for one in np.unique(label[rows]):
        asked = label[rows] == one
        known = (label == one) & (position >= 0)
        used, first = np.unique(position[known], return_index=True)  # rows are in order of start
        begins = np.minimum.accumulate(start[known][first][::-1])[::-1]
        at = np.searchsorted(begins, start[rows[asked]], side="right") - 1
        found[asked] = np.where(at >= 0, used[at], OUTSIDE)
    return found


def table(windows: Windows, kernels: pd.DataFrame, lost: Mask) -> pd.DataFrame:
    """STEPS, one row per (device, step), from the rows of KERNELS with their `step` filled in. `lost`: steps that
    lost kernels."""
    frames = [_of_device(windows, rows, str(device), lost)
              for device, rows in kernels.groupby("device", observed=True, sort=True)]
    return schema.concat(frames, schema.STEPS)


def incomplete(table: pd.DataFrame) -> list[Finding]:
    """Steps that lie partly outside the capture or lost kernels: means over steps should leave them out."""
    whole, cut = table[table["complete"] & (table["n_kernels"] > 0)], table[~table["complete"]]
    if not len(whole) or not len(cut):
        return []
    usual, steps = int(whole["n_kernels"].median()), cut.drop_duplicates("step")
    named = ", ".join(f"{s.step} ({s.n_kernels})" for s in steps.head(5).itertuples())
    return [Finding("incomplete_step", "warning", f"possibly incomplete steps, with their kernels: {named}"
                    f"{', ...' if len(steps) > 5 else ''}; the others have {usual}", len(steps))]


def _of_device(windows: Windows, rows: pd.DataFrame, device: str, lost: Mask) -> pd.DataFrame:
    of_row = _positions(windows, rows["step"])
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    work = (of_row >= 0) & (rows["kind"] != "memcpy").to_numpy()
    none = np.iinfo(np.int64).max
    first, last = np.full(len(windows), none), np.full(len(windows), -1)
    np.minimum.at(first, of_row[work], start[work])
    np.maximum.at(last, of_row[of_row >= 0], end[of_row >= 0])
    count = np.bincount(of_row[(of_row >= 0) & rows["activity"].isin(["kernel", "cpu_op"]).to_numpy()],
                        minlength=len(windows))
    has = first < none
    gpu_end = last.copy()
    gpu_end[:-1] = np.where(has[1:], first[1:], last[:-1])
    return schema.conform(pd.DataFrame({
        "step": windows.step, "start_ns": windows.start_ns, "end_ns": windows.end_ns,
        "gpu_start_ns": pd.Series(first, dtype="Int64").mask(~has),
        "gpu_end_ns": pd.Series(gpu_end, dtype="Int64").mask(~has),
        "n_kernels": count, "complete": windows.finished & _whole(count) & ~lost,
        "source": windows.source, "device": device,
    }), schema.STEPS)


def _positions(windows: Windows, step: pd.Series) -> Index:
    """Position of each row's step; -1 for rows outside every step."""
    order = np.argsort(windows.step)
    numbers = step.fillna(-1).to_numpy(np.int64)
    at = np.searchsorted(windows.step[order], numbers)
    return np.where(numbers >= 0, order[np.minimum(at, len(order) - 1)], -1) if len(order) else \
        np.full(len(step), -1, np.intp)


def _whole(count: Int) -> Mask:
    """False for a last step with less than half the kernels of the others: the capture stopped in it."""
    whole = np.ones(len(count), bool)
    others = count[:-1][count[:-1] > 0]
    if len(others):
        whole[-1] = bool(count[-1] >= 0.5 * np.median(others))
    return whole
