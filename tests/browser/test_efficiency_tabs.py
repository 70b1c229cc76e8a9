"""The tabs Efficiency and Fusion in a browser: numbers, charts, rows that lead to the trace, both themes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tb_chopper.backend.run import open_run
from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows
from tests.unit import test_efficiency_view, test_fusion_graph_breaks, test_fusion_view
from tests.unit.test_fusion import trace_of

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

REAL = ("timesformer_h100", "megatron_tp8_a100", "vit_mi300x")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    from tests.conftest import DATA

    folder = tmp_path_factory.mktemp("logs")
    test_efficiency_view.write(folder / "efficiency")
    test_fusion_view.trace_of_patterns().write(folder / "fusion" / "w.pt.trace.json")
    breaks = trace_of()
    for step in range(2):
        breaks.step(step, 1000 * step, 990)
        test_fusion_graph_breaks.broken(breaks, 1000 * step)
    breaks.write(folder / "breaks" / "w.pt.trace.json")
    for name in REAL if DATA.is_dir() else ():
        shutil.copytree(DATA / "traces" / name, folder / name)
    made = TensorBoard(folder)
    yield made
    made.stop()


def drawn(frame: Any) -> int:
    """Draws every figure; how many there are."""
    plots = frame.query_selector_all(".plot")
    for plot in plots:
        plot.scroll_into_view_if_needed()
        plot.wait_for_selector("svg.main-svg")
    return len(plots)


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 900)])
@pytest.mark.parametrize(("view", "run", "figures"), [
    ("efficiency", "efficiency", 3), ("fusion", "fusion", 1), ("fusion", "breaks", 0), ("efficiency", REAL[0], 3),
    ("fusion", REAL[1], 1), ("efficiency", REAL[2], 3)])
def test_in_both_themes(browser: Any, server: TensorBoard, view: str, run: str, figures: int, theme: str,
                        width: int) -> None:
    if not (server.folder / run).is_dir():
        pytest.skip("the folder of real files is not beside this checkout")
    tab = Tab(browser, server, theme, width)
    frame = tab.open(view=view, run=run)
    assert drawn(frame) == figures
    assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert frame.evaluate(CONTRAST) >= 4.5
    complaints = list(tab.complaints)
    tab.context.close()
    assert complaints == []


def test_numbers_are_those_of_the_metrics(tab: Tab) -> None:
    tab.open(view="efficiency", run="efficiency")
    run = open_run(tab.server.folder / "efficiency")
    whole = run.efficiency(by=[]).iloc[0]
    for label, column in (("GPU utilization", "gpu_utilization"), ("SM efficiency", "sm_efficiency"),
                          ("Occupancy", "occupancy"), ("Matrix cores", "tensor_share"), ("MFU", "mfu")):
        assert tab.number(label) == pytest.approx(whole[column])
    shown = {r["operation"]: r for r in table_rows(tab, "groups")}
    for row in run.efficiency(by="operation").to_dict("records"):
        for column in ("lost_us", "below_us", "sm_efficiency"):
            assert float(shown[row["operation"]][column]) == pytest.approx(row[column], rel=1e-9)
    assert next(iter(shown)) == "aten::bmm"  # loses most


def test_an_operation_opens_its_kernels_and_a_row_the_trace(tab: Tab) -> None:
    frame = tab.open(view="efficiency", run="efficiency")
    frame.click("[data-table=groups] tbody tr[data-place='0'] td:nth-child(2)")
    frame.wait_for_selector("[data-table=kernels]")
    assert "p.chopper.focus=aten%3A%3Abmm" in tab.page.url
    assert [r["kernel"] for r in table_rows(tab, "kernels")] == ["nvjet_tst"]
    frame.click("[data-table=groups] tbody tr[data-place='0'] .to-trace")
    tab.page.wait_for_function("location.hash.includes('p.chopper.at=')")
    assert "p.chopper.view=trace" in tab.page.url


def test_the_granularity_changes_what_is_listed(tab: Tab) -> None:
    frame = tab.open(view="efficiency", run="efficiency")
    for by in ("layer", "phase", "gpu", "kernel"):
        frame.select_option("#select-by", by)
        frame.wait_for_selector(f"[data-table=groups] h3:has-text('by {by}')")
        rows = table_rows(tab, "groups")
        assert sum(float(r["lost_us"]) for r in rows) == pytest.approx(4 * 150)


def test_what_fusion_saves(tab: Tab) -> None:
    tab.open(view="fusion", run="fusion")
    run = open_run(tab.server.folder / "fusion")
    assert tab.number("Saved by fusion") == pytest.approx(run.fusion()["per_step_us"].sum())
    rows = table_rows(tab, "chains")
    assert [r["pattern"] for r in rows][:2] == ["attention in pieces", "SwiGLU"]
    assert rows[0]["operations"] == "mul → _softmax" and "scaled_dot_product_attention" in rows[0]["remedy"]
    assert rows[2]["per_step_us"] == ""  # not known is not 0
    frame = tab.open(view="fusion", run="fusion", hardware="hbm_gbs=10000")
    assert frame.input_value("#select-hardware") == "hbm_gbs=10000"
    assert tab.number("Saved by fusion") > run.fusion()["per_step_us"].sum()


def test_graph_breaks(tab: Tab) -> None:
    frame = tab.open(view="fusion", run="breaks")
    assert "leaves its graphs 2 times" in frame.text_content(".headline")
    assert tab.number("Graph breaks") == 1 and tab.number("Idle in breaks") == 45
    assert {r["operation"] for r in table_rows(tab, "eager")} == {"aten::nonzero", "aten::relu"}
    frame.click("[data-table=eager] tbody tr[data-place='0'] .to-trace")
    tab.page.wait_for_function("location.hash.includes('p.chopper.at=')")
