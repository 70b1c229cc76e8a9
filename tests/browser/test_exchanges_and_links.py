"""Exchanges in the Parallelism tab, links and islands in the Collectives tab."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows
from tests.unit.test_parallelism_exchanges import record

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    """Four ranks in two islands, all in one tensor group; the same without recorded links."""
    folder = tmp_path_factory.mktemp("logs")
    record(folder / "islands")
    record(folder / "unknown", links=None)
    server = TensorBoard(folder)
    yield server
    server.stop()


def drawn(frame: Any, name: str) -> Any:
    figure = frame.wait_for_selector(f"[data-figure={name}]")
    figure.scroll_into_view_if_needed()
    frame.wait_for_selector(f"[data-figure={name}] .plot[data-drawn=yes]")
    return figure


def test_exchanges_by_layer(tab: Tab) -> None:
    frame = tab.open(run="islands", view="parallelism")
    figure = drawn(frame, "exchanges")
    assert [li.inner_text().strip() for li in figure.query_selector_all(".legend li")] == [
        "Exposed waiting", "Exposed transfer", "Hidden communication"]
    assert len(figure.query_selector_all("g.points path")) == 3 * 2  # three parts of two layers
    rows = table_rows(tab, "exchanges")
    assert sorted((r["role"], r["layer"], r["n"]) for r in rows) == [("tensor", "layers.0", "3"),
                                                                    ("tensor", "layers.1", "3")]


def test_links_and_islands(tab: Tab) -> None:
    frame = tab.open(run="islands", view="collectives")
    figure = drawn(frame, "links")
    assert "2 islands" in figure.inner_text()
    assert figure.query_selector_all("g.hm image") or figure.query_selector_all("g.heatmaplayer image")
    assert len(figure.query_selector_all("g.shapelayer path")) == 2  # the frames
    [row] = table_rows(tab, "islands")
    assert (row["islands"], row["spans"]) == ("0-1 | 2-3", "yes")


def test_what_is_not_recorded_names_the_command(tab: Tab) -> None:
    frame = tab.open(run="unknown", view="collectives")
    assert not frame.query_selector("[data-figure=links]")
    assert "nvidia-smi topo -m >" in frame.inner_text("main")


@pytest.mark.parametrize("theme, width", [("light", 1440), ("dark", 900)])
def test_readable_in_both_themes(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    tab = Tab(browser, server, theme, width)
    for view in ("parallelism", "collectives"):
        frame = tab.open(run="islands", view=view)
        assert frame.evaluate(CONTRAST) >= 4.5
        assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.complaints == []
    tab.context.close()
