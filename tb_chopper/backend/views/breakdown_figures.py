"""Figures of the breakdown: the stacked bars of the Chopper paper's figure 15, and the roofline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.views import figures, text
from tb_chopper.backend.views.breakdown_parts import PARTS
from tb_chopper.backend.views.palette import COLORS, LABELS

MAX_BARS = 24
FACTORS = (("inst", "ovr_inst"), ("util", "ovr_util"), ("overlap", "ovr_overlap"), ("freq", "ovr_freq"))


def stack(rows: pd.DataFrame, by: list[str], bars: str, compared: pd.DataFrame | None, names: tuple[str, str],
          ) -> go.Figure:
    """One bar per group, the most lost time first: parts from theoretical to frequency. `bars`: duration or share;
    `compared`: the other run's rows, drawn below each and hatched; `names`: of both runs."""
    shown = rows[rows["act_us"] > 0].nlargest(MAX_BARS if compared is None else MAX_BARS // 2, "lost_us")
    drawn = shown.assign(other=False, place=range(len(shown)))
    if compared is not None:
        beside = shown[by].assign(place=range(len(shown))).merge(compared, on=by, how="left").assign(other=True)
        drawn = pd.concat([drawn, beside], ignore_index=True).sort_values(["place", "other"], ignore_index=True)
    share = bars == "share"
    unit, divisor = ("% of the actual time", 0.01) if share else text.time_unit(float(drawn["act_us"].max()))
    labels = [figures.row_label(r, by) + (f" · {text.short(names[1], 16)}" if r["other"] else "")
              for r in drawn.to_dict("records")]
    used = [p for p in PARTS if drawn[p.column].fillna(0).sum() > 0]
    clockless = "frequency" not in {p.thing for p in used}
    fig = figures.figure(
        "From theoretical to actual time by " + " and ".join(by),
        ("Share of each one's actual time" if share else "Time in a step of one GPU") + ", the most lost time first. "
        "Each part is what its factor adds to the parts before it.",
        height=figures.height_of(len(drawn), 27), wide=True, barmode="stack",
        legend=[
            *(figures.entry(p.thing, p.definition, label=part_label(p.thing, clockless)) for p in used),
            *([figures.entry("idle", label=f"hatched: {names[1]}", pattern=True)] if compared is not None else []),
        ])
    whole = drawn["act_us"].replace(0, np.nan)
    for part in used:
        values = drawn[part.column]
        drawn_values = (values / whole if share else values).fillna(0.0)
        fig.add_trace(figures.bars(
            part.thing, range(len(drawn)), drawn_values.tolist(), divisor, name=part_label(part.thing, clockless),
            hover=[_hover(label, part.thing, row, part.column, clockless) for label, row in
                   zip(labels, drawn.to_dict("records"), strict=True)],
            compared=drawn["other"].tolist(),
            links=[json.dumps({"focus": str(o)}) for o in drawn["operation"]] if "operation" in by else None))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis(labels, 44))
    return fig


def part_label(thing: str, clockless: bool) -> str:
    """`Utilization and clock` where no clock tells them apart."""
    if thing == "utilization" and clockless:
        return "Utilization (with the clock, where none was sampled)"
    return {"vector": "Vector work at the peak's clock"}.get(thing, LABELS[thing])


def _hover(label: str, thing: str, row: dict[str, Any], column: str, clockless: bool) -> str:
    value, actual = row[column], row["act_us"]
    lines = [f"<b>{text.hover(label)}</b>",
             f"{text.escape(part_label(thing, clockless))}: {text.duration(value)} of {text.duration(actual)} "
             f"({text.share(value / actual if actual else None)})"]
    factors = [f"{name} {row[c]:.3f}" for name, c in FACTORS if np.isfinite(row[c])]
    if factors:
        lines += ["factors: " + " · ".join(factors),
                  f"one instance: theory {text.duration(row['d_thr_us'])}, actual {text.duration(row['d_act_us'])}"]
    if row["n_instances"] > 0:
        lines.append(f"{int(row['n_instances']):,} instances; overlap by the {row['overlap_method']} method")
        lines.append(str(row["source"]))
    return "<br>".join(lines)


def roofline(rows: pd.DataFrame, by: list[str]) -> go.Figure | None:
    """FLOP/s against FLOPs per byte, with the roof of the hardware; None without FLOPs, bytes or peaks."""
    known = rows[(rows["flop"] > 0) & (rows["intensity"] > 0) & rows["attainable_flop_per_s"].notna()]
    if not len(known):
        return None
    biggest = known.loc[known["time_us"].idxmax()]
    peak, memory = float(biggest["peak_flop_per_s"]), float(biggest["memory_bytes_per_s"])
    clocked = float(biggest["peak_at_clock_flop_per_s"])
    ridge = peak / memory
    x = np.geomspace(min(known["intensity"].min() / 3, ridge / 10), max(known["intensity"].max() * 3, ridge * 10), 60)
    fig = figures.figure(
        "Roofline", "What rate each operation reaches, and what the hardware allows at its FLOPs per byte. Bytes are "
        + ("counted." if (known["bytes_source"] == "measured").all() else
           "those of the recorded shapes, the least that must move: points may lie too far right."),
        height=420, wide=True,
        legend=[figures.entry("theoretical", "Dense peak of the data type, and memory bandwidth.", label="Roof",
                              line=True),
                *([figures.entry("frequency", "Peak × sampled clock / clock of the peak, of the largest operation.",
                                 label="Roof at the sampled clock", line=True)] if np.isfinite(clocked) else []),
                *(figures.entry(t) for t in ("gemm", "attention", "vector") if (known["op_type"] == t).any())])
    for thing, top, dash in (("theoretical", peak, "solid"), ("frequency", clocked, "dash")):
        if np.isfinite(top):
            fig.add_trace(go.Scatter(
                x=x, y=np.minimum(x * memory, top) / 1e12, mode="lines", showlegend=False, hoverinfo="skip",
                line={"color": COLORS[thing], "width": 2, "dash": dash}))
    for thing in ("gemm", "attention", "vector"):
        mine = known[known["op_type"] == thing]
        if len(mine):
            fig.add_trace(go.Scatter(
                x=mine["intensity"], y=mine["flop_per_s"] / 1e12, mode="markers", showlegend=False,
                marker={"color": COLORS[thing], "size": _sizes(mine["time_us"], known["time_us"].max()),
                        "line": {"width": 1, "color": "white"}},
                hovertext=[_roof_hover(r, by) for r in mine.to_dict("records")],
                hovertemplate="%{hovertext}<extra></extra>",
                customdata=[[json.dumps({"focus": str(o)})] for o in mine["operation"]] if "operation" in by else None))
    fig.update_layout(
        xaxis={"type": "log", "dtick": "D2", "title": {"text": "FLOPs per byte"}, "rangemode": "normal"},
        yaxis={"type": "log", "dtick": "D2", "title": {"text": "TFLOP/s"}})
    return fig


def _sizes(time: pd.Series, most: float) -> Sequence[float]:
    return (8 + 18 * np.sqrt(time / max(most, 1e-9))).tolist()


def _roof_hover(row: dict[str, Any], by: list[str]) -> str:
    bound = {"compute": "compute-bound", "memory": "memory-bound"}.get(row["bound"], "")
    return (f"<b>{text.hover(figures.row_label(row, by))}</b><br>{row['flop_per_s'] / 1e12:,.1f} TFLOP/s, "
            f"{text.share(row['share_of_attainable'])} of what {row['intensity']:,.0f} FLOPs per byte allow<br>"
            f"{bound}; {text.duration(row['time_us'])} of kernel time<br>"
            f"{'measured' if row['bytes_source'] == 'measured' else 'estimated: bytes by shapes'}")
