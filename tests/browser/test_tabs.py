"""The tab in a real browser, inside a real TensorBoard: what people see, touch and take away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tb_chopper.backend import views
from tests.browser.page import CHROMIUM, CONTRAST, Tab, TensorBoard, table_rows
from tests.builders import TraceBuilder

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

REAL = ("ddp4_mi300x", "megatron_tp8_a100", "sglang_decode_graph_mi300x", "resnet_ac_ddp_mi300x")
OWN = ("built", "cpu", "hostile", "long")
HOSTILE = "<img src=x onerror=window.parent.document.title='broken'>&<b>" + "k" * 5000
LONG_NAMES = 4000
SOURCES = {"measured", "sampled", "estimated", "unavailable"}


def build_own_runs(folder: Path) -> None:
    """Runs that need no file of anyone else: two GPUs, a CPU, hostile names, thousands of operations."""
    for rank in range(2):
        trace = TraceBuilder("rocm", rank=rank, world_size=2)
        for step in range(3):
            trace.training_step(step, 1000 * step)
        trace.write(folder / "built" / f"rank{rank}.pt.trace.json.gz")
    cpu = TraceBuilder(rank=None)
    for step in range(2):
        cpu.step(step, 1000 * step, 900)
        cpu.op("aten::mm", 1000 * step + 10, 200)
    cpu.write(folder / "cpu" / "host_1.pt.trace.json")
    hostile = TraceBuilder().training_step(0, 0)
    hostile.op(HOSTILE, 800, 50)
    hostile.launch(HOSTILE, 810, 880, 30)
    hostile.write(folder / "hostile" / "w.pt.trace.json")
    long = TraceBuilder()
    long.step(0, 0, 20 * LONG_NAMES)
    for i in range(LONG_NAMES):
        long.op(f"op_{i:05}", 20 * i + 1, 15)
        long.launch(f"kernel_{i:05}", 20 * i + 2, 20 * i + 10, 1 + i / 1000)
    long.write(folder / "long" / "w.pt.trace.json", layout="compact")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    """Over our own runs, and the real ones where they are at hand."""
    from tests.conftest import DATA

    folder = tmp_path_factory.mktemp("logs")
    build_own_runs(folder)
    for name in REAL if DATA.is_dir() else ():
        shutil.copytree(DATA / "traces" / name, folder / name)
    server = TensorBoard(folder)
    yield server
    server.stop()


def run_names(server: TensorBoard) -> list[str]:
    return [r["name"] for r in json.loads(server.get("/data/plugin/chopper/runs"))["runs"]]


# ---- everything, everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1920)])
def test_every_view_in_both_themes(browser: Any, server: TensorBoard, theme: str, width: int) -> None:
    """All views by clicks: figures drawn, no overflow, readable, a silent console, nothing off the machine."""
    run = "ddp4_mi300x" if "ddp4_mi300x" in run_names(server) else "built"
    tab = Tab(browser, server, theme, width)
    frame = tab.open(run=run)
    assert frame.evaluate("document.documentElement.dataset.theme") == theme
    for view in views.REGISTRY:
        frame.click(f"[role=tab][data-view={view}]")
        frame = tab.frame(view, run)
        assert len(frame.inner_text(".headline")) > 20
        for plot in frame.query_selector_all(".plot"):
            plot.scroll_into_view_if_needed()
            plot.wait_for_selector("svg.main-svg")
        assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        assert frame.evaluate(CONTRAST) >= 4.5, view
        # Every figure on top says where it comes from and what it is.
        for figure in frame.query_selector_all(".key-figure"):
            assert figure.query_selector(".source").inner_text() in SOURCES, view
            assert figure.query_selector(".term").get_attribute("data-tip"), view
    complaints = list(tab.complaints)
    tab.context.close()
    assert complaints == []


@pytest.mark.parametrize("run", [*OWN, *REAL[1:]])  # the first: in both themes
def test_every_run_opens(tab: Tab, run: str) -> None:
    if run not in run_names(tab.server):
        pytest.skip("the folder of real files is not beside this checkout")
    frame = tab.open(run=run)
    for view in views.REGISTRY:
        frame.click(f"[role=tab][data-view={view}]")
        frame = tab.frame(view, run)
        assert frame.inner_text(".headline")


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["built", "ddp4_mi300x", "megatron_tp8_a100"])
def test_numbers_equal_the_command_line(tab: Tab, run: str) -> None:
    """What the tab shows is what `tb-chopper analyze --json` prints for the same directory."""
    if run not in run_names(tab.server):
        pytest.skip("the folder of real files is not beside this checkout")
    cli = "import sys; from tb_chopper.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", cli, "analyze", str(tab.server.folder / run), "--json"]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    workers = printed["runs"][0]["workers"]
    tab.open(run=run, view="overview")
    rows = table_rows(tab, "gpus")
    assert len(rows) == len(workers)
    by_gpu = {row["gpu"]: row for row in rows}
    names = (
        "compute",
        "communication",
        "memcpy",
        "overlap",
        "exposed_communication",
        "exposed_memcpy",
        "busy",
        "idle",
        "total",
    )
    for worker in workers:
        shown = by_gpu[str(worker["rank"])]
        for name in names:
            assert float(shown[f"{name}_us"]) == pytest.approx(worker["gpu_time_us"][name], abs=0.002), name
    tab.open(run=run, view="launch")
    for label, name in (("Launch overhead", "launch"), ("Preparation", "prep"), ("Call", "call")):
        assert tab.number(label) == pytest.approx(sum(w["launch_us"][name] for w in workers), abs=0.01)
    tab.open(run=run, view="overlap")
    for label, name in (
        ("Communication", "communication"),
        ("Hidden", "overlap"),
        ("Exposed", "exposed_communication"),
    ):
        assert tab.number(label) == pytest.approx(sum(w["gpu_time_us"][name] for w in workers), abs=0.01)


def test_hidden_share_of_the_published_run(tab: Tab) -> None:
    if "resnet_ac_ddp_mi300x" not in run_names(tab.server):
        pytest.skip("the folder of real files is not beside this checkout")
    frame = tab.open(run="resnet_ac_ddp_mi300x", view="overlap")
    assert "hides 22\u00a0% of its communication; the rest costs 55.6 of 86.6\u00a0ms" in frame.text_content(
        ".headline"
    )


# ---- state ---------------------------------------------------------------------------------------------------------


def test_a_link_shows_the_same_thing(tab: Tab, browser: Any) -> None:
    frame = tab.open(run="built")
    frame.click("[role=tab][data-view=operations]")
    frame = tab.frame("operations")
    frame.select_option("#select-by", "kernel")
    frame.wait_for_selector("[data-table=groups] h3:has-text('by kernel')")
    frame.select_option("#select-steps", "1")
    frame.select_option("#select-steps-last", "1")
    tab.frame("operations")
    tab.page.wait_for_function("location.hash.includes('p.chopper.steps=1-1')")
    headline, link = tab.frame().text_content(".headline"), tab.page.url
    other = Tab(browser, tab.server)
    other.page.goto(link)
    frame = other.frame("operations", "built")
    assert frame.text_content(".headline") == headline
    assert [frame.input_value(f"#select-{s}") for s in ("run", "by", "steps", "steps-last")] == [
        "built",
        "kernel",
        "1",
        "1",
    ]
    other.context.close()


def test_back_and_forward(tab: Tab) -> None:
    frame = tab.open(run="built", view="overview")
    frame.click("[role=tab][data-view=launch]")
    tab.frame("launch")
    tab.page.go_back()
    tab.frame("overview")
    tab.page.go_forward()
    tab.frame("launch")


def test_theme_is_followed_live(tab: Tab) -> None:
    frame = tab.open(run="built", view="overview")
    light = frame.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.page.evaluate("document.body.classList.add('dark-mode')")
    frame.wait_for_selector("html[data-theme=dark]")
    assert frame.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_a_new_run_appears_without_reload(browser: Any, tmp_path: Path) -> None:
    build_own_runs(tmp_path)
    server = TensorBoard(tmp_path)
    try:
        tab = Tab(browser, server)
        frame = tab.open(run="built", view="overview")
        TraceBuilder().training_step(0, 0).write(tmp_path / "late" / "w.pt.trace.json")
        frame.wait_for_selector("#select-run option[value=late]", state="attached", timeout=30_000)
        assert tab.complaints == []
        shutil.rmtree(tmp_path / "built")
        frame.wait_for_selector(".empty:has-text('not in the log directory')", timeout=30_000)
        frame.select_option("#select-run", "late")
        tab.frame("overview", "late")
        tab.context.close()
    finally:
        server.stop()


# ---- hands ---------------------------------------------------------------------------------------------------------


def test_everything_by_keyboard(tab: Tab) -> None:
    """Selectors, tabs, definitions, sorting and rows are reached and used without a mouse."""
    frame = tab.open(run="built", view="operations")
    frame.focus("#select-run")
    seen = set()
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        seen.add(
            frame.evaluate(
                "(document.activeElement.id || document.activeElement.className || "
                "document.activeElement.tagName).split(' ')[0]"
            )
        )
    assert {
        "select-compare",
        "select-gpus",
        "select-steps",
        "select-by",
        "tab-operations",
        "term",
        "sort",
        "link",
    } <= seen
    frame.focus(".term")
    assert frame.is_visible("#tooltip") and len(frame.inner_text("#tooltip")) > 20
    tab.page.keyboard.press("Escape")
    assert not frame.is_visible("#tooltip")
    frame.focus("#tab-operations")
    tabs = [*views.REGISTRY, "trace"]
    tab.page.keyboard.press("ArrowRight")
    tab.frame(tabs[tabs.index("operations") + 1])
    tab.page.keyboard.press("ArrowLeft")
    frame = tab.frame("operations")
    frame.focus("[data-table=groups] tbody tr[tabindex='0']")
    first = frame.evaluate("document.activeElement.textContent")
    tab.page.keyboard.press("ArrowDown")
    assert frame.evaluate("document.activeElement.textContent") != first
    tab.page.keyboard.press("Enter")
    frame.wait_for_selector("[data-table=kernels]")
    assert "p.chopper.focus=" in tab.page.url


def test_gpus_are_chosen_in_a_menu(tab: Tab) -> None:
    frame = tab.open(run="built", view="overview")
    frame.click("#select-gpus")
    frame.uncheck(".menu input[value='0']")
    frame.click(".menu .primary")
    tab.page.wait_for_function("location.hash.includes('p.chopper.gpus=1')")
    frame = tab.frame("overview")
    assert {row["gpu"] for row in table_rows(tab, "steps")} == {"1"}


def test_a_long_table_is_searched_sorted_and_scrolled_without_lag(tab: Tab) -> None:
    frame = tab.open(run="long", view="operations", by="kernel")
    table = "[data-table=groups]"
    assert frame.eval_on_selector_all(f"{table} tbody tr", "rows => rows.length") < 60
    assert f"{LONG_NAMES:,} rows" in frame.inner_text(f"{table} .table-head")
    assert frame.inner_text(f"{table} tbody tr[data-place='0'] td") == f"kernel_{LONG_NAMES - 1:05}"  # the longest
    frame.click(f"{table} th:first-child .sort")
    assert frame.inner_text(f"{table} tbody tr[data-place='0'] td") == "kernel_00000"
    frame.eval_on_selector(f"{table} .scroller", "e => { e.scrollTop = 30 * 3000; }")
    frame.wait_for_selector(f"{table} tbody tr[data-place='3005']")
    assert frame.inner_text(f"{table} tbody tr[data-place='3005'] td") == "kernel_03005"
    took = frame.evaluate("""() => {
      const box = document.querySelector("[data-table=groups] input"); const t = performance.now();
      box.value = "kernel_0123"; box.dispatchEvent(new Event("input")); return performance.now() - t;
    }""")
    assert took < 200
    assert f"10 of {LONG_NAMES:,}" in frame.inner_text(f"{table} .table-head")
    assert [row["kernel"] for row in table_rows(tab, "groups")] == [f"kernel_0123{i}" for i in range(10)]


def test_names_never_become_markup(tab: Tab) -> None:
    for view in ("operations", "launch", "breakdown"):
        frame = tab.open(run="hostile", view=view)
        for plot in frame.query_selector_all(".plot"):
            plot.scroll_into_view_if_needed()
            plot.wait_for_selector("svg.main-svg")
        assert frame.query_selector("main img, main svg image[href=x]") is None
    frame = tab.open(run="hostile", view="operations", by="kernel")
    assert any(row["kernel"] == HOSTILE for row in table_rows(tab, "groups"))
    assert frame.query_selector(".ytick text:has-text('<img src=x')") is not None
    assert tab.page.title() != "broken"


# ---- neighbours ----------------------------------------------------------------------------------------------------


def test_the_other_profiler_plugin_still_opens_the_directory(tmp_path: Path) -> None:
    """torch-tb-profiler beside us lists the same runs, and both tabs are there."""
    pytest.importorskip("torch_tb_profiler")
    build_own_runs(tmp_path)
    for name in ("long", "hostile"):
        shutil.rmtree(tmp_path / name)
    server = TensorBoard(tmp_path, alone=False)
    try:
        listed = {"built", "cpu"}
        server.wait_for(
            "/data/plugin/pytorch_profiler/runs", lambda t: listed <= set(json.loads(t)["runs"]), seconds=150
        )
        active = json.loads(server.get("/data/plugins_listing"))
        assert active["chopper"]["enabled"] and active["pytorch_profiler"]["enabled"]
        assert set(run_names(server)) == listed
    finally:
        server.stop()
