"""The Memory and Host tabs in a real browser: what is drawn, said, selected and offered instead of data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows
from tests.unit import memory_runs

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

FIGURES = {"memory": ["curve", "by_gpu", "model_state", "floors"], "host": ["by_gpu", "stalls", "queue"]}
CUT = """() => [...document.querySelectorAll(".key-figure dd:first-of-type")]
  .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    folder = tmp_path_factory.mktemp("logs")
    memory_runs.write(folder / "full")
    memory_runs.write(folder / "sampled", events=False, modules=False)
    memory_runs.write(folder / "bare", events=False, telemetry=False, modules=False)
    server = TensorBoard(folder)
    yield server
    server.stop()


def draw_all(frame: Any) -> list[str]:
    """Scrolls every figure into sight; their names."""
    for plot in frame.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
        plot.wait_for_selector("svg.main-svg")
    return [f.get_attribute("data-figure") for f in frame.query_selector_all("[data-figure]")]


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 900)])
def test_both_tabs_in_both_themes(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    tab = Tab(browser, server, theme, width)
    for view, expected in FIGURES.items():
        frame = tab.open(run="full", view=view)
        assert draw_all(frame) == expected
        assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        assert frame.evaluate(CONTRAST) >= 4.5, view
        assert frame.evaluate(CUT) == [], "no key figure is cut off"
    complaints = list(tab.complaints)
    tab.context.close()
    assert complaints == []


def test_memory_says_what_grows_and_what_should_be_there(tab: Tab) -> None:
    frame = tab.open(run="full", view="memory")
    assert "The floor of GPU 1 grows by 200 MiB in every step" in frame.inner_text(".headline")
    assert tab.number("Used") == 79 * memory_runs.GIB
    assert tab.number("Model state") == 2 * memory_runs.PARAMETERS
    rows = {row["gpu"]: row for row in table_rows(tab, "gpus")}
    assert float(rows["1"]["steps_left"]) == 49 and rows["0"]["steps_left"] == ""
    assert {row["plan"] for row in table_rows(tab, "model_state")} == {"dp_shard 8"}


def test_memory_names_what_is_missing(tab: Tab) -> None:
    frame = tab.open(run="sampled", view="memory")
    assert draw_all(frame) == ["curve", "by_gpu", "floors"]
    assert "as the driver counts" in frame.inner_text("[data-figure=curve]")
    text = frame.inner_text("main")
    assert "profile_memory=True" in text and "parallel=" in text
    frame = tab.open(run="bare", view="memory")
    assert draw_all(frame) == [] and "tb-chopper sample" in frame.inner_text("main")


def test_host_shows_each_stall_and_leads_to_the_trace(tab: Tab) -> None:
    frame = tab.open(run="full", view="host")
    rows = table_rows(tab, "stalls")
    assert (rows[0]["gpu"], rows[0]["kind"], float(rows[0]["idle_us"])) == ("2", "Data loading", 350)
    frame.click("[data-table=stalls] .to-trace >> nth=0")
    tab.frame("trace", "full")
