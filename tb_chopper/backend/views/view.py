"""What a tab, a notebook and a report show: the parts of a View and their form on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.findings import Finding, by_severity
from tb_chopper.backend.rules.diagnosis import Diagnosis

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tb_chopper.backend.run import Run

Source = Literal["measured", "sampled", "estimated", "unavailable"]
Unit = Literal["us", "share", "count", "factor", "per_s", "bytes", "mhz", "w", "j", "celsius", "flop_per_s", "text", ""]
"""Units of the wire: the frontend scales `us`, `bytes`, `j` and `flop_per_s` and shows `share` (0 to 1) in percent."""


@dataclass(frozen=True)
class Selection:
    """What part of a run a view is about. Empty means everything.

    `gpus`: GPUs as in the kernels table; `steps`: first and last step, both included; `by`: granularity, columns of
    the kernels table; `focus`: one operation looked at closely; `compare`: another run shown beside this one;
    `options`: what a single view offers besides (the registry names them), e.g. {"scope": "within"}.
    """

    gpus: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None
    worker: str | None = None
    span: int | None = None
    by: tuple[str, ...] = ()
    focus: str | None = None
    compare: Run | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        gpu: int | Sequence[int] | None = None,
        step: int | Sequence[int] | None = None,
        worker: str | None = None,
        span: int | None = None,
        by: str | Sequence[str] | None = None,
        focus: str | None = None,
        compare: Run | None = None,
        **options: str,
    ) -> Selection:
        """A selection as a person writes it: `gpu=0`, `gpu=[0, 1]`, `step=5`, `step=(5, 8)`, `by="operation"`."""
        steps = (step, step) if isinstance(step, int) else tuple(step) if step is not None else None
        if steps is not None and (len(steps) != 2 or steps[0] > steps[1]):
            raise InvalidSelection(f"step {step!r}: give one step or (first, last)")
        if steps is not None and max(map(abs, steps)) >= 2**62:
            raise InvalidSelection(f"step {step!r}: no step has such a number")
        return cls(
            gpus=(gpu,) if isinstance(gpu, int) else tuple(gpu or ()),
            steps=steps,  # type: ignore[arg-type]  # length checked above
            worker=worker,
            span=span,
            by=(by,) if isinstance(by, str) else tuple(by or ()),
            focus=focus,
            compare=compare,
            options=options,
        )

    def where(self) -> dict[str, Any]:
        """The filters of the metrics: column of the kernels table to value or values."""
        filters: dict[str, Any] = {}
        if self.gpus:
            filters["gpu"] = list(self.gpus)
        if self.steps is not None:
            filters["step"] = range(self.steps[0], self.steps[1] + 1)
        if self.worker is not None:
            filters["worker"] = self.worker
        if self.span is not None:
            filters["span"] = self.span
        return filters


@dataclass(frozen=True)
class KeyFigure:
    """One number that answers part of the question. `value` is in `unit`; None where it is unavailable."""

    label: str
    value: float | str | None
    unit: Unit
    definition: str
    source: Source = "measured"
    note: str = ""
    color: str = ""


@dataclass(frozen=True)
class TableColumn:
    """A column of a `Table`: its name in the frame, what the header says, its unit and its definition."""

    name: str
    label: str
    unit: Unit = ""
    definition: str = ""
    bar: bool = False


@dataclass(frozen=True)
class Table:
    """Rows for people: a frame and what its columns mean.

    `sort` is a column name, the largest first; `link` maps a key of the selection (gpu, step, focus) to the column
    whose value a click on a row selects; `at` is a column of `rows` with a kernel per row that the Trace tab can show
    (see trace_link), or "".
    """

    title: str
    columns: tuple[TableColumn, ...]
    rows: pd.DataFrame
    sort: str = ""
    link: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    at: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Column-wise JSON; missing values and infinities are null."""
        return {
            "title": self.title,
            "columns": [asdict(c) for c in self.columns],
            "data": [_plain(self.rows[c.name]) for c in self.columns],
            "sort": self.sort,
            "link": dict(self.link),
            "note": self.note,
            "at": _plain(self.rows[self.at]) if self.at else [],
        }


@dataclass(frozen=True)
class Missing:
    """What a view could show and does not: why, and the command that adds it."""

    what: str
    why: str
    command: str = ""


@dataclass(frozen=True)
class View:
    """One tab. The first figure is the main one; a figure's title and description are in its layout.

    A view's module fills all but name and title; the findings and banners that every tab of a run has come first.
    """

    headline: str
    key_figures: tuple[KeyFigure, ...] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    definitions: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[Missing, ...] = ()
    name: str = ""
    title: str = ""
    findings: tuple[Finding, ...] = ()
    banners: tuple[str, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The view as JSON-able values; arrays of figures travel as Plotly's base64 typed arrays."""
        return {
            "name": self.name,
            "title": self.title,
            "headline": self.headline,
            "key_figures": [{**asdict(k), "value": _number(k.value)} for k in self.key_figures],
            "figures": {name: _figure(figure) for name, figure in self.figures.items()},
            "tables": {name: table.as_dict() for name, table in self.tables.items()},
            "definitions": dict(self.definitions),
            "missing": [asdict(m) for m in self.missing],
            "findings": [f.as_dict() for f in by_severity(self.findings)],
            "banners": list(self.banners),
            "diagnoses": [_diagnosis(d) for d in self.diagnoses],
        }


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    from tb_chopper.backend.views import REGISTRY

    evidence = [[e.label, _number(e.value), e.unit] for e in diagnosis.evidence]
    title = REGISTRY[diagnosis.view].title if diagnosis.view else ""
    return {**diagnosis.as_dict(), "evidence": evidence, "gain_ms": _number(diagnosis.gain_ms), "view_title": title}


def _plain(column: pd.Series) -> list[Any]:
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        values = column.to_numpy(dtype="float64", na_value=np.nan)
        whole = not pd.api.types.is_float_dtype(column)
        return [None if not math.isfinite(v) else int(v) if whole else v for v in values.tolist()]
    return [None if v is None or v is pd.NA or v != v else v for v in column.astype(object).tolist()]


def _number(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else None


def _figure(figure: go.Figure) -> dict[str, Any]:
    import json

    figure_dict: dict[str, Any] = json.loads(figure.to_json())
    figure_dict["layout"].pop("template", None)  # the frontend brings its own, in both themes
    return figure_dict
