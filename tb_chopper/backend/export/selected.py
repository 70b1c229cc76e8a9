"""The one trace file that a selection is about, and the place in it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from tb_chopper.backend.capture import Capture
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.export import chrome
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import context, trace_link
from tb_chopper.backend.views.view import Selection


@dataclass(frozen=True)
class Place:
    """A capture of a run, and a range in it: the selected steps, or the kernel `name`.

    `start_ns` and `end_ns` are in the file's own time, as a viewer of the file shows them; None for all of it.
    `where` says in words what is shown.
    """

    capture: Capture
    where: str
    start_ns: int | None = None
    end_ns: int | None = None
    name: str | None = None


def place(run: Run, selection: Selection, at: str | None = None) -> Place:
    """The first worker of the selection, or the one of the kernel that `at` names. InvalidSelection where none is."""
    if not len(run.workers):
        raise InvalidSelection("no file of this run holds a kernel, a copy or an operator; the Findings tab has more")
    if at:
        kernel = trace_link.find(run.kernels, at)
        worker = run.workers[run.workers["capture"] == kernel["capture"]].iloc[0]
        capture = _capture(run, worker)
        base_ns = chrome.base_ns(capture)
        return Place(capture, _words(run, worker), int(kernel["start_ns"]) - base_ns,
                     int(kernel["raw_end_ns"]) - base_ns, str(kernel["name"]))
    where = selection.where()
    steps = where.pop("step", None)
    workers = run.workers
    for column, value in where.items():
        workers = workers[workers[column].isin(value if isinstance(value, list) else [value])]
    if not len(workers):
        raise InvalidSelection("no trace file of this run matches the selected GPUs, worker and span")
    rows = run.steps[run.steps["capture"].isin(workers["capture"])]
    if steps is not None:
        rows = rows[rows["step"].isin(steps)]
        if not len(rows):
            raise InvalidSelection("no trace file of the selection holds the selected steps")
        workers = workers[workers["capture"].isin(rows["capture"])]
    worker = workers.sort_values(["gpu", "span"], kind="stable").iloc[0]
    capture = _capture(run, worker)
    if steps is None:
        return Place(capture, _words(run, worker))
    mine = rows[rows["capture"] == worker["capture"]]
    ends_ns = mine[["end_ns", "gpu_end_ns"]].max(axis=1)
    base_ns = chrome.base_ns(capture)
    numbers = sorted(int(s) for s in mine["step"].unique())
    word = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    return Place(capture, f"{_words(run, worker)}, {word}", int(mine["start_ns"].min()) - base_ns,
                 int(ends_ns.max()) - base_ns)


def _capture(run: Run, worker: pd.Series) -> Capture:
    return next(c for c in run.captures if c.file.path.name == worker["file"])


def _words(run: Run, worker: pd.Series) -> str:
    word = context.device(run)
    gpus = run.workers["gpu"].nunique()
    of = f" of {gpus}" if gpus > 1 else ""
    spans = f", span {int(worker['span'])}" if run.workers["span"].nunique() > 1 else ""
    return f"{word[0].upper()}{word[1:]} {int(worker['gpu'])}{of}{spans}"
