"""The DVFS and CPU tabs in a real browser: what is drawn, said, selected, compared, and offered instead of data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.simulate import Options, simulate
from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows
from tests.unit import sampled_runs

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

SLOW = "slow"
"""three GPUs, the last one limited to four fifths of its clock"""
FIGURES = {
    "dvfs": {"timeline", "lost", "clock", "residency", "power_clock", "spread", "throttle", "energy", "step_time"},
    "cpu": {"over_time", "siblings", "by_cpu"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    folder = tmp_path_factory.mktemp("logs")
    for name, options in (
        (SLOW, Options(layers=6, seed=3, ranks=3, slow={2: 0.8})),
        ("other", Options(layers=6, seed=4, ranks=3, fsdp=1)),
    ):
        simulate(folder / "made", options)[0].rename(folder / name)
    (folder / "made").rmdir()
    sampled_runs.gpu_trace(folder / "bare", [(0, 100)])
    sampled_runs.gpu_trace(folder / "full", [(0, 100), (100, 200)])
    sampled_runs.log(folder / "full", 220, None, lambda t: dict.fromkeys(range(4), 95.0), {0: 0, 1: 1, 2: 0, 3: 1},
                     threads={0: 3, 2: 2})  # fmt: skip
    server = TensorBoard(folder)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def truth(server: TensorBoard) -> pd.DataFrame:
    kernels = pd.read_parquet(server.folder / SLOW / "truth/kernels.parquet")
    kernels = kernels.assign(duration=kernels["end_ns"] - kernels["start_ns"])
    return kernels[kernels["kind"] == "compute"]


def draw_all(frame: Any) -> list[str]:
    """Scrolls every figure into sight; their names."""
    for plot in frame.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
        plot.wait_for_selector("svg.main-svg")
    return [f.get_attribute("data-figure") for f in frame.query_selector_all("[data-figure]")]


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1920)])
def test_both_tabs_in_both_themes(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    tab = Tab(browser, server, theme, width)
    for view, expected in FIGURES.items():
        frame = tab.open(run=SLOW, view=view, compare="other")
        assert expected <= set(draw_all(frame))
        assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        assert frame.evaluate(CONTRAST) >= 4.5, view
        assert frame.evaluate(CUT) == [], "no key figure is cut off"
    complaints = list(tab.complaints)
    tab.context.close()
    assert complaints == []


CUT = """() => [...document.querySelectorAll(".key-figure dd:first-of-type")]
  .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""


def test_the_numbers_are_the_truth(tab: Tab, truth: pd.DataFrame) -> None:
    tab.open(run=SLOW, view="dvfs")
    shown = {int(row["gpu"]): row for row in table_rows(tab, "gpus")}
    for gpu, rows in truth.groupby("rank"):
        mean = np.average(rows["clock_mhz"], weights=rows["duration"])
        assert float(shown[int(gpu)]["clock_mhz"]) == pytest.approx(mean, rel=0.01)
    assert shown[2]["note"] == "slow"
    clock = np.average(truth["clock_mhz"], weights=truth["duration"])
    assert tab.number("Core clock") == pytest.approx(clock, rel=0.01)
    assert tab.frame().inner_text(".headline").startswith("GPU 2 ran at")
    sources = tab.frame().eval_on_selector_all(".key-figure .source", "all => all.map((e) => e.textContent)")
    assert sources.count("estimated") == 1 and set(sources) == {"sampled", "estimated"}


def test_a_click_on_a_gpu_shows_it_alone_and_a_link_does_the_same(tab: Tab, browser: Any) -> None:
    frame = tab.open(run=SLOW, view="dvfs")
    frame.click("[data-table=gpus] tbody tr >> nth=0")
    tab.page.wait_for_function("location.hash.includes('p.chopper.gpus=2')")
    frame = tab.frame("dvfs", SLOW)
    assert "slowest of" not in frame.inner_text(".headline")
    assert frame.query_selector("[data-figure=spread]") is None
    frame.select_option("#select-time", "around")
    tab.page.wait_for_function("location.hash.includes('p.chopper.time=around')")
    frame.wait_for_selector("[data-figure=timeline] figcaption p:has-text('Between the dashed lines')")
    other = Tab(browser, tab.server)
    other.page.goto(tab.page.url)
    assert other.frame("dvfs", SLOW).inner_text(".headline") == tab.frame("dvfs").inner_text(".headline")
    other.context.close()


def test_hovering_names_gpu_value_and_source(tab: Tab) -> None:
    frame = tab.open(run=SLOW, view="dvfs", gpus="1")
    draw_all(frame)
    hovers = frame.evaluate("""() => [...document.querySelectorAll("[data-figure=timeline] .plot")]
      .flatMap((p) => p.data).filter((t) => t.type === "scatter").map((t) => t.hovertemplate ?? "")""")
    assert sum("GPU 1" in text and "sampled" in text for text in hovers) == 4
    frame.evaluate("""() => { const p = document.querySelector("[data-figure=residency] .plot");
      p.scrollIntoView({block: "center"}); Plotly.Fx.hover(p, [{curveNumber: 0, pointNumber: 0}]); }""")
    frame.wait_for_selector("[data-figure=residency] .hoverlayer .hovertext")
    text = frame.text_content("[data-figure=residency] .hoverlayer .hovertext")
    assert "MHz" in text and "% of the time" in text and "sampled" in text


def test_run_against_run_is_hatched_in_the_same_colours(tab: Tab) -> None:
    frame = tab.open(run=SLOW, view="dvfs", compare="other")
    draw_all(frame)
    assert {row["number"] for row in table_rows(tab, "runs")} >= {"Core clock, MHz", "Energy per step, J"}
    assert frame.query_selector_all("[data-figure=lost] pattern"), "bars of the other run are hatched"
    texts = "all => all.map((e) => e.textContent)"
    names = frame.eval_on_selector_all("[data-figure=timeline] .annotation-text", texts)
    assert {SLOW, "other"} <= set(names), "one column per run"
    assert "against other" in frame.inner_text(".key-figures")


def test_a_core_may_draw_more(tab: Tab) -> None:
    frame = tab.open(run=SLOW, view="cpu")
    four = tab.number("Could move to GPUs")
    assert four == pytest.approx(4 * tab.number("Cores to spare"))
    frame.select_option("#select-core_draws", "8 W")
    frame.wait_for_selector("[data-table=hosts] .note:has-text('8 W')")
    assert tab.number("Could move to GPUs") == pytest.approx(2 * four)


def test_a_full_host_and_its_threads(tab: Tab) -> None:
    frame = tab.open(run="full", view="cpu")
    assert {"over_time", "siblings", "threads", "by_cpu"} <= set(draw_all(frame))
    assert "hardly any CPU time left" in frame.inner_text(".headline")
    assert tab.number("Threads of the training") == 5 and tab.number("Both siblings busy") == 1
    frame = tab.open(run="full", view="dvfs")
    assert "no GPU of this run is in it" in frame.inner_text(".missing")


@pytest.mark.parametrize("view", ["dvfs", "cpu"])
def test_what_adds_the_data_is_named(tab: Tab, view: str) -> None:
    frame = tab.open(run="bare", view=view)
    commands = frame.eval_on_selector_all(".missing code", "all => all.map((e) => e.textContent)")
    assert any("torch_ext.telemetry(" in c for c in commands) and "tb-chopper sample --out log/my_run" in commands


@pytest.mark.torch
def test_a_training_of_this_machine(browser: Any, tmp_path: Path) -> None:
    """The example records its own CPUs without being asked to."""
    pytest.importorskip("torch")
    if not Path("/proc/stat").exists():
        pytest.skip("the sampler's CPU source reads /proc")
    train = Path(__file__).resolve().parents[2] / "examples" / "train.py"
    command = [sys.executable, str(train), "--layers", "1", "--active", "2", "--logdir", str(tmp_path / "real")]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    server = TensorBoard(tmp_path)
    try:
        tab = Tab(browser, server)
        frame = tab.open(run="real", view="cpu")
        assert "over_time" in draw_all(frame)
        assert 0 < tab.number("Needed at least") <= tab.number("Active CPUs")
        assert "logical CPUs were active" in frame.inner_text(".headline")
        assert tab.complaints == []
        tab.context.close()
    finally:
        server.stop()
