"""Plotly figures in the house's shape: one look, one unit, safe labels, a legend that the frontend can set in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.views import text
from tb_chopper.backend.views.palette import COLORS, COMPARED_PATTERN, LABELS

ROW_PX = 34
MAX_ROWS = 24
"""Bars of a horizontal bar chart: more are in the table."""


def figure(
    title: str,
    description: str,
    *,
    height: int = 360,
    wide: bool = False,
    legend: Iterable[Mapping[str, Any]] = (),
    **layout: Any,
) -> go.Figure:
    """An empty figure. `description` is one sentence on what it shows; `wide`: it takes a whole row of the page."""
    out = go.Figure()
    out.update_layout(
        xaxis={"rangemode": "tozero"},
        title=text.escape(title),
        height=height,
        hovermode="closest",
        bargap=0.25,
        showlegend=True,
        meta={"description": description, "wide": wide, "legend": list(legend)},
        **layout,
    )
    return out


def entry(thing: str, definition: str = "", label: str = "", **extra: Any) -> dict[str, Any]:
    """A legend entry for a thing of the palette."""
    return {"label": label or LABELS[thing], "color": COLORS[thing], "definition": definition, **extra}


def rows_axis(labels: Sequence[str], limit: int = 34) -> dict[str, Any]:
    """A y axis of bars, the first on top. Rows are numbers, so that two equal labels stay two rows."""
    n = len(labels)
    return {
        "tickvals": list(range(n)),
        "ticktext": [text.label(s, limit) for s in labels],
        "range": [n - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "ticklabelposition": "outside",
    }


def steps_axis(steps: pd.Series) -> dict[str, Any]:
    """An x axis of step numbers: whole ones only."""
    few = int(steps.max()) - int(steps.min()) < 16 if len(steps) else False
    return {"title": {"text": "step"}, "rangemode": "normal", **({"dtick": 1} if few else {})}


def bars(
    thing: str,
    y: Sequence[float],
    values_us: Sequence[float],
    divisor: float,
    hover: Sequence[str],
    *,
    starts_us: Sequence[float] | None = None,
    width: float | Sequence[float] = 0.62,
    labels: Sequence[str] | None = None,
    compared: Sequence[bool] | bool = False,
    links: Sequence[str] | None = None,
    name: str = "",
    color: str = "",
) -> go.Bar:
    """Horizontal bars of one thing. `starts_us` makes them stand where they are told instead of being stacked."""
    pattern = [COMPARED_PATTERN if c else "" for c in ([compared] * len(y) if isinstance(compared, bool) else compared)]
    return go.Bar(
        x=[v / divisor for v in values_us],
        y=list(y),
        orientation="h",
        width=width,
        name=name or LABELS[thing],
        base=None if starts_us is None else [v / divisor for v in starts_us],
        marker={
            "color": color or COLORS[thing],
            "line": {"width": 0},
            "pattern": {
                "shape": pattern,
                "bgcolor": color or COLORS[thing],
                "fgcolor": "white",
                "fgopacity": 0.6,
                "size": 7,
                "solidity": 0.3,
            },
        },
        text=None if labels is None else ["" if p else t for t, p in zip(labels, pattern, strict=True)],
        textposition="inside" if labels is not None else "none",
        insidetextanchor="middle",
        textangle=0,
        hovertext=list(hover),
        hovertemplate="%{hovertext}<extra></extra>",
        customdata=None if links is None else [[link] for link in links],
    )


def height_of(rows: int, row_px: int = ROW_PX) -> int:
    """Height of a horizontal bar chart of so many rows."""
    return max(150, rows * row_px + 70)


def top(frame: pd.DataFrame, column: str, n: int = MAX_ROWS) -> pd.DataFrame:
    """The n rows with the largest values, largest first."""
    return frame.sort_values(column, ascending=False, kind="stable").head(n).reset_index(drop=True)


def most(frame: pd.DataFrame, column: str, n: int = MAX_ROWS) -> pd.DataFrame:
    """The n rows with the largest values, in the order they stood."""
    return frame.loc[frame[column].nlargest(n).index].sort_index()


def largest(frame: pd.DataFrame, column: str) -> dict[str, Any]:
    """The row with the largest value (a Series would turn its integers into floats)."""
    return frame.loc[[frame[column].idxmax()]].to_dict("records")[0]


def row_label(row: Mapping[str, Any], by: Sequence[str]) -> str:
    """What a group is called: `GPU 2 · step 5`, `layers.3 · attn`."""
    return " · ".join(group_name(column, row[column]) for column in by)


def faded(color: str, opacity: float) -> str:
    """A colour of the palette with an opacity."""
    return f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},{opacity})"


def group_name(column: str, value: Any) -> str:
    """One group of a column: `GPU 2`, `step 5`, or the name itself."""
    if value is None or value is pd.NA or value != value:
        return {"step": "outside steps", "layer": "no layer"}.get(column, f"no {column}")
    if column == "gpu":
        return f"GPU {value}"
    return f"step {value}" if column == "step" else str(value)
