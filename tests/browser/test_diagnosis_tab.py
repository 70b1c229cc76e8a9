"""The Diagnosis tab: cards with gain, evidence and remedy, and buttons that lead to what shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page import CHROMIUM, Tab, TensorBoard, table_rows
from tests.builders import TraceBuilder

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

IDLE_US = 694.25
"""of the builder's step of 1000 µs: 241.25 µs compute, 100 of communication, of which 35.5 under compute"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    """`idle`: two GPUs that wait for their hosts; `busy`: one that never does."""
    folder = tmp_path_factory.mktemp("logs")
    for rank in range(2):
        trace = TraceBuilder("rocm", rank=rank, world_size=2)
        for step in range(6):
            trace.training_step(step, 1000 * step)
        trace.write(folder / "idle" / f"rank{rank}.pt.trace.json")
    busy = TraceBuilder()
    for step in range(6):
        busy.step(step, 1000 * step, 990)
        busy.op("aten::mm", 1000 * step + 5, 20)
        busy.launch("gemm", 1000 * step + 8, 1000 * step + 20, 1000)
    busy.write(folder / "busy" / "rank0.pt.trace.json")
    server = TensorBoard(folder)
    yield server
    server.stop()


def test_a_card_has_the_numbers_of_its_rule(tab: Tab) -> None:
    frame = tab.open(run="idle", view="diagnosis")
    assert frame.inner_text(".headline").replace("\xa0", " ") == (
        "The GPUs are idle for much of the step: about 694 µs of a step of 1.00 ms.")
    [card] = frame.query_selector_all(".diagnosis")
    assert float(card.query_selector(".gain").get_attribute("data-gain-ms")) == pytest.approx(IDLE_US / 1000)
    assert "idle time of a step" in card.query_selector(".gain .term").get_attribute("data-tip")
    assert {"busy", "idle"} <= {dt.inner_text() for dt in card.query_selector_all(".evidence dt")}
    assert "torch.compile" in card.query_selector(".advice").inner_text()
    [row] = table_rows(tab, "diagnoses")
    assert row["code"] == "low_utilization" and float(row["gain_us"]) == pytest.approx(IDLE_US)
    assert tab.complaints == []


def test_a_card_leads_to_the_tab_that_shows_it(tab: Tab) -> None:
    frame = tab.open(run="idle", view="diagnosis")
    frame.click(".diagnosis button:text-is('Show in Host')")
    tab.frame("host", "idle")
    assert "p.chopper.view=host" in tab.page.url
    tab.page.go_back()
    tab.frame("diagnosis", "idle")


def test_a_healthy_run_says_so(tab: Tab) -> None:
    frame = tab.open(run="busy", view="diagnosis")
    assert frame.inner_text(".headline").startswith("No rule found anything worth changing in this run")
    assert frame.query_selector_all(".diagnosis") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [900, 1440])
def test_cards_fit_the_page(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    tab = Tab(browser, server, theme, width)
    frame = tab.open(run="idle", view="diagnosis")
    assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert tab.complaints == []
    tab.context.close()
