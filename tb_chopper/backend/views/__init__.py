"""One file per tab: the numbers of the metrics in, headline, figures, tables and definitions out."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_chopper.backend.errors import InvalidSelection, NotFound

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run
    from tb_chopper.backend.views.view import View


class Entry(NamedTuple):
    """A tab: its name in URLs and in the API, its title, the question it answers, the granularities it offers, and
    choices of its own by name, the default first (none: any text)."""

    name: str
    title: str
    question: str
    by: tuple[str, ...] = ()
    options: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  (a NamedTuple's default, never changed)


REGISTRY: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("overview", "Overview", "Where does the time of a step go?", ("gpu", "step", "worker")),
        Entry("diagnosis", "Diagnosis", "What costs time, and what would make it faster?"),
        Entry(
            "breakdown",
            "Breakdown",
            "Why does an operation take longer than it could?",
            ("operation", "layer", "phase"),
            {"bars": ("duration", "share"), "overlap_method": ("auto", "clock", "percentile", "regression"),
             "hardware": ()},
        ),
        Entry(
            "efficiency",
            "Efficiency",
            "A busy GPU is not an efficient one: how well is it used?",
            ("operation", "layer", "phase", "gpu", "kernel"),
            {"hardware": ()},
        ),
        Entry(
            "overlap",
            "Overlap",
            "How much communication is hidden behind compute?",
            ("operation", "layer", "phase", "step"),
        ),
        Entry(
            "collectives",
            "Collectives",
            "Who waits for whom, and how fast are the links?",
            ("role", "group", "name", "step", "phase", "layer", "operation"),
        ),
        Entry("stragglers", "Stragglers", "Which GPU or step holds the others up, and why?"),
        Entry(
            "parallelism",
            "Parallelism",
            "Where are the bubbles, and what do tensor, context and expert parallelism cost?",
        ),
        Entry(
            "dvfs",
            "DVFS",
            "At which clock did the hardware run, and what did that cost?",
            ("operation", "layer", "phase", "kernel"),
            {"time": ("capture", "around")},
        ),
        Entry(
            "cpu",
            "CPU",
            "How many of the host's cores are awake, and how few would do?",
            (),
            {"time": ("capture", "around"), "core_draws": ("4 W", "2 W", "6 W", "8 W")},
        ),
        Entry(
            "launch",
            "Launch",
            "How long does the GPU wait for its next kernel, and why?",
            ("operation", "layer", "phase", "step", "gpu"),
            {"scope": ("across", "within")},
        ),
        Entry(
            "host",
            "Host",
            "What does the host do while the GPU is idle?",
            ("operation", "layer", "phase", "step", "gpu"),
        ),
        Entry("memory", "Memory", "How close does each GPU come to its memory's limit, and when?"),
        Entry(
            "operations",
            "Operations",
            "Which operations take the time?",
            ("operation", "layer", "phase", "step", "gpu", "kernel"),
        ),
        Entry(
            "fusion",
            "Fusion",
            "Which kernels could run as one?",
            ("pattern", "layer", "phase", "step", "gpu"),
            {"hardware": ()},
        ),
        Entry("findings", "Findings", "Can these numbers be trusted?"),
    )
}
"""The tabs in the order they are shown. Names map to modules of this package."""


def build(name: str, run: Run, **selection: Any) -> View:
    """View `name` of `run`; keyword arguments as `Selection.of` takes them and as the view's own options.

    NotFound for an unknown view, InvalidSelection for a granularity, an option or a value that it does not have.
    """
    from tb_chopper.backend.views import context
    from tb_chopper.backend.views.view import Selection

    if name not in REGISTRY:
        raise NotFound(f"no view {name!r}; there are {', '.join(REGISTRY)}")
    chosen = Selection.of(**selection)
    for option, value in chosen.options.items():
        values = REGISTRY[name].options.get(option)
        if values is None:
            raise InvalidSelection(f"view {name!r} has no option {option!r}")
        if values and value not in values:
            raise InvalidSelection(f"{option}={value!r}: one of {', '.join(values)}")
    for column in chosen.by:
        if column not in REGISTRY[name].by:
            raise InvalidSelection(f"view {name!r} cannot be shown by {column!r}; {_offer(REGISTRY[name].by)}")
    module = importlib.import_module(f"{__name__}.{name}")
    view: View = module.view(run, chosen)
    return replace(
        view,
        name=name,
        title=REGISTRY[name].title,
        findings=(*run.findings, *view.findings),
        banners=(*context.banners(run), *view.banners),
    )


def _offer(by: tuple[str, ...]) -> str:
    return f"by {', '.join(by)}" if by else "it has one form only"
