"""The Breakdown tab in a browser: simulated nodes with counters, without, and one against the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tb_chopper.backend.run import open_run
from tb_chopper.backend.simulate import Options, simulate
from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    folder = tmp_path_factory.mktemp("logs")
    for version in (1, 2):
        simulate(folder, Options("tiny", fsdp=version))[0].rename(folder / f"fsdp{version}")
    shutil.copytree(folder / "fsdp2", folder / "uncounted", ignore=shutil.ignore_patterns("counters", "*telemetry*"))
    made = TensorBoard(folder)
    yield made
    made.stop()


def run_of(server: TensorBoard, name: str) -> Path:
    return server.folder / name


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1920)])
def test_numbers_figures_and_themes(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    tab = Tab(browser, server, theme, width)
    frame = tab.open(view="breakdown", run="fsdp2")
    right = open_run(run_of(server, "fsdp2")).overhead_breakdown(["operation", "phase"])
    shown = {(r["operation"], r["phase"]): r for r in table_rows(tab, "operations")}
    for row in right[right["d_thr_us"] > 0].to_dict("records"):
        mine = shown[row["operation"], row["phase"]]
        for column in ("ovr_inst", "ovr_util", "ovr_overlap", "ovr_freq", "d_act_us"):
            assert float(mine[column]) == pytest.approx(row[column], rel=1e-9)
        assert mine["source"] == "measured"
    assert tab.number("Compute with counters") == 1
    for plot in frame.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
        plot.wait_for_selector("svg.main-svg")
    assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert frame.evaluate(CONTRAST) >= 4.5
    complaints = list(tab.complaints)
    tab.context.close()
    assert complaints == []


def test_run_against_run_is_hatched_and_told(tab: Tab) -> None:
    frame = tab.open(view="breakdown", run="fsdp2", compare="fsdp1")
    plot = frame.query_selector(".plot")
    plot.scroll_into_view_if_needed()
    plot.wait_for_selector("svg.main-svg pattern", state="attached")
    assert "fsdp1 needs" in frame.text_content(".headline")
    rows = table_rows(tab, "difference")
    assert sum(float(r["frequency_us_more"] or 0) for r in rows) > 0  # FSDP1 loses more to the clock


def test_bars_as_shares_and_a_row_that_selects(tab: Tab) -> None:
    frame = tab.open(view="breakdown", run="fsdp2")
    frame.select_option("#select-bars", "share")
    tab.page.wait_for_function("location.hash.includes('p.chopper.bars=share')")
    frame = tab.frame("breakdown")
    frame.wait_for_selector("text=Share of each one's actual time")
    frame.click("[data-table=operations] td:text-is('mlp_dp')")
    tab.page.wait_for_function("location.hash.includes('focus=mlp_dp')")


def test_peaks_told_in_the_bar(tab: Tab) -> None:
    tab.open(view="breakdown", run="fsdp2")
    before = tab.number("Theoretical")
    frame = tab.frame()
    frame.fill("#select-hardware", "peak_tflops=2614.9,f_peak_mhz=2100")
    frame.press("#select-hardware", "Enter")
    tab.page.wait_for_function("location.hash.includes('p.chopper.hardware=')")
    tab.frame("breakdown")
    shown = "Number(document.querySelector(\"dd[data-label='Theoretical']\").dataset.value)"
    frame.wait_for_function(f"{shown} < {before}")
    assert tab.number("Theoretical") == pytest.approx(before / 2, rel=1e-3)


def test_without_counters_the_command_to_add_them(tab: Tab) -> None:
    frame = tab.open(view="breakdown", run="uncounted")
    assert "utilization and clock together" in frame.text_content(".headline")
    text = frame.inner_text("main")
    assert "tb-chopper collect --out" in text and "estimated" in text and "unavailable" in text
