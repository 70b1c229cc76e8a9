"""The parts of a view: what travels, what a person reads, colours that everyone can tell apart."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import views
from tb_chopper.backend.errors import InvalidSelection, NotFound
from tb_chopper.backend.run import open_run
from tb_chopper.backend.views import text
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Selection, Table, TableColumn, View
from tests.builders import TraceBuilder

# ---- what travels ---------------------------------------------------------------------------------------------------


def test_a_table_travels_column_by_column_without_nan() -> None:
    rows = pd.DataFrame({
        "whole": pd.array([1, None], dtype="Int64"), "real": [0.5, np.inf], "name": pd.Categorical(["a", None]),
        "flag": [True, False], "big": np.array([2**53 - 1, 1], dtype=np.int64),
    })  # fmt: skip
    sent = Table("t", tuple(TableColumn(c, c) for c in rows), rows).as_dict()
    assert json.loads(json.dumps(sent, allow_nan=False))["data"] == [
        [1, None], [0.5, None], ["a", None], [True, False], [2**53 - 1, 1],
    ]  # fmt: skip


def test_a_key_figure_that_is_no_number_is_null() -> None:
    view = View(
        "h", key_figures=(KeyFigure("a", np.float64("nan"), "us", "d"), KeyFigure("b", np.int64(3), "count", "d"))
    )
    assert [k["value"] for k in view.as_dict()["key_figures"]] == [None, 3.0]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, {}), ({"gpu": 0}, {"gpu": [0]}), ({"gpu": [2, 3]}, {"gpu": [2, 3]}), ({"step": 5}, {"step": range(5, 6)}),
        ({"step": (5, 7)}, {"step": range(5, 8)}), ({"worker": "w", "span": 0}, {"worker": "w", "span": 0}),
    ],
)  # fmt: skip
def test_selections_as_people_write_them(given: dict, where: dict) -> None:
    assert Selection.of(**given).where() == where


@pytest.mark.parametrize(
    ("name", "given", "error"),
    [
        ("nothing", {}, NotFound), ("overview", {"step": (7, 5)}, InvalidSelection),
        ("overview", {"by": "name"}, InvalidSelection),
        ("overview", {"scope": "across"}, InvalidSelection), ("launch", {"scope": "x"}, InvalidSelection),
        ("dvfs", {"by": "gpu"}, InvalidSelection),
    ],
)  # fmt: skip
def test_impossible_selections_are_refused(tmp_path, name: str, given: dict, error: type[Exception]) -> None:
    run = open_run(TraceBuilder().training_step(0, 0).write(tmp_path / "w.pt.trace.json"))
    with pytest.raises(error):
        run.view(name, **given)


def test_a_view_in_a_notebook(tmp_path) -> None:
    run = open_run(TraceBuilder().training_step(0, 0).write(tmp_path / "w.pt.trace.json"))
    view = run.view("overlap", gpu=0)
    assert view.title == "Overlap" and view.figures["by_gpu"].data
    # 100 µs of communication, 35.5 of them beside the last backward GEMM (see builders.training_step).
    assert view.headline == "GPU 0 hides 36 % of its communication; the rest costs 64.5 of 750 µs."


def test_thousands_of_windows_become_a_readable_figure(tmp_path) -> None:
    trace = TraceBuilder()
    for step in range(40):
        trace.training_step(step, 1000 * step)
    view = open_run(trace.write(tmp_path / "w.pt.trace.json")).view("overview", by="step")
    figure = view.figures["step_time"]
    assert len(figure.layout.yaxis.tickvals) == 24 and "24 of 40 rows" in figure.layout.meta["description"]


# ---- what a person reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "words"),
    [(0, "0 µs"), (0.0123, "0.012 µs"), (5.5, "5.50 µs"), (999, "999 µs"), (1000, "1.00 ms"), (86570, "86.6 ms"),
     (2_560_000, "2.56 s"), (1.2e9, "1 200 s"), (-1500, "-1.50 ms"), (float("nan"), "–"), (None, "–")],
)  # fmt: skip
def test_durations(us: float | None, words: str) -> None:
    assert text.duration(us) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 %"),
        (0.0001, "< 0.1 %"),
        (0.005, "0.5 %"),
        (0.0994, "9.9 %"),
        (0.222, "22 %"),
        (0.99999, "99.9 %"),
        (1, "100 %"),
        (None, "–"),
    ],
)
def test_shares(value: float | None, words: str) -> None:
    assert text.share(value) == words


@pytest.mark.parametrize(
    ("value", "before", "words"),
    [(110, 100, "+10 %"), (70, 100, "−30 %"), (1200, 100, "× 12.0"), (100, 100, "no change")],
)
def test_changes(value: float, before: float, words: str) -> None:
    assert text.change(value, before) == words


def test_labels_are_short_and_text() -> None:
    hostile = "<b>" + "x" * 5000 + "%{y}&"
    for made in (text.label(hostile, 40), text.hover(hostile)):
        assert "<b>" not in made and "%{" not in made and "&lt;b&gt;" in made
    assert len(text.short(hostile, 40)) == 40
    assert text.short("layers.3\n mlp", 40) == "layers.3 mlp"


# ---- colours --------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SEES = {
    "everyone": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ]),
}  # fmt: skip
TOGETHER = {
    "overview": ("gemm", "attention", "vector", "communication", "memcpy", "idle"),
    "phases": ("forward", "backward", "optimizer", "other"),
    "overlap": ("hidden_communication", "communication"),
    "launch": ("prep", "call", "under_communication", "graph", "unattributed"),
    "breakdown": ("theoretical", "instruction", "utilization", "overlap", "frequency"),
    "sensors": ("frequency", "memory_clock", "power", "temperature"),
    "energy": ("power", "communication"),
    "collectives": ("waiting", "communication", "hidden_communication"),
    "memory": ("allocated", "reserved", "used"),
    "model state": ("parameters", "gradients", "optimizer_states", "activations"),
    "host": ("dispatch", "device", "sync", "loader", "allocation", "compile", "gc", "unknown"),
    "links": ("fast_link", "pcie_link", "socket_link", "unknown_link"),
    "cores": ("active_cores", "needed_cores", "siblings", "threads"),
}


def lab(color: str, seen_as: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as someone sees it."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(seen_as @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", list(SEES))
@pytest.mark.parametrize("figure", list(TOGETHER))
def test_colours_that_stand_together_differ_for_all_eyes(figure: str, eyes: str) -> None:
    for a, b in itertools.combinations(TOGETHER[figure], 2):
        distance = np.linalg.norm(lab(COLORS[a], SEES[eyes]) - lab(COLORS[b], SEES[eyes]))
        assert distance > 11, (a, b, distance)


def test_every_colour_has_a_name() -> None:
    assert COLORS.keys() == LABELS.keys()
    assert set(views.REGISTRY) >= {"overview", "breakdown", "overlap", "dvfs", "launch", "operations", "findings"}
