"""The Parallelism tab on a pipeline: bars, hover, selection, the way to the trace, both themes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows
from tests.unit.test_parallelism_view import unnamed
from tests.unit.test_pipeline import UNEVEN
from tests.unit.test_rule_pipeline_bubble import record

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    folder = tmp_path_factory.mktemp("runs")
    record(folder / "uneven", UNEVEN)
    unnamed(folder / "unnamed")
    server = TensorBoard(folder)
    yield server
    server.stop()


def drawn(frame: Any, name: str) -> Any:
    figure = frame.wait_for_selector(f"[data-figure={name}]")
    figure.scroll_into_view_if_needed()
    frame.wait_for_selector(f"[data-figure={name}] .plot[data-drawn=yes]")
    return figure


def test_a_bar_per_action_and_bubble(tab: Tab) -> None:
    frame = tab.open(run="uneven", view="parallelism")
    figure = drawn(frame, "pipeline")
    assert len(figure.query_selector_all("g.points path")) == 8 + 4
    numbers = [t.text_content() for t in figure.query_selector_all("g.points text")]
    assert sorted(n for n in numbers if n) == ["0"] * 4 + ["1"] * 4
    assert [li.inner_text().strip() for li in figure.query_selector_all(".legend li")] == [
        "Forward", "Backward", "Bubble", "Message and launch"]
    assert tab.number("Bubble") == pytest.approx(0.4)
    assert tab.number("Perfect schedule") == pytest.approx(1 / 3)


def test_rows_and_selection(tab: Tab) -> None:
    frame = tab.open(run="uneven", view="parallelism")
    assert [(r["gpu"], float(r["fill_us"])) for r in table_rows(tab, "ranks")] == [("0", 700), ("1", 100)]
    tab.open(run="uneven", view="parallelism", gpus="1")
    frame = tab.frame("parallelism")
    assert [r["gpu"] for r in table_rows(tab, "ranks")] == ["1"]
    # The chart keeps all ranks of the pipeline.
    assert len(drawn(frame, "pipeline").query_selector_all("g.points path")) == 12


def test_without_scopes_the_tab_names_the_line(tab: Tab) -> None:
    frame = tab.open(run="unnamed", view="parallelism")
    assert not frame.query_selector("[data-figure=pipeline]")
    assert "torch_ext.annotate_pipeline(schedule)" in frame.inner_text("main")


@pytest.mark.parametrize("theme, width", [("light", 1440), ("dark", 900)])
def test_readable_in_both_themes(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    tab = Tab(browser, server, theme, width)
    frame = tab.open(run="uneven", view="parallelism")
    drawn(frame, "times")
    assert frame.evaluate(CONTRAST) >= 4.5
    assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.complaints == []
    tab.context.close()
