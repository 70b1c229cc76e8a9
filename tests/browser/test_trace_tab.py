"""The Trace tab in a real browser inside a real TensorBoard: Perfetto's tracks, jumps from tables, nothing off the
machine."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend.simulate import Options, simulate
from tests.browser.page import CHROMIUM, Tab, TensorBoard
from tests.builders import TraceBuilder, ns

pytest.importorskip("viztracer")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

QUERY = """async (sql) => {
  const result = await window.app.trace.engine.query(sql), columns = result.columns(), rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) rows.push(columns.map(c => String(it.get(c))));
  return rows;
}"""
SELECTED = """() => {
  const { selection, timeline } = window.app.trace, { start, end } = timeline.visibleWindow.toTimeSpan();
  const event = selection.selection.kind === 'track_event' ? selection.selection.eventId : null;
  return { event, start: String(start), end: String(end) };
}"""
KERNEL = "gemm_bwd's \"longest\" <b>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorBoard]:
    folder = tmp_path_factory.mktemp("logs")
    for rank in range(2):
        trace = TraceBuilder("rocm", rank=rank, world_size=2)
        for step in range(3):
            trace.training_step(step, 1000 * step)
        trace.op("aten::mm", 2900, 30)
        trace.launch(KERNEL, 2905, 2910 + rank, 7.25)
        trace.launch(KERNEL, 2930, 2940 + rank, 7.5 + rank)
        trace.write(folder / "built" / f"rank{rank}.pt.trace.json.gz")
    simulate(folder, Options(preset="tiny"))
    server = TensorBoard(folder)
    yield server
    server.stop()


@pytest.fixture
def tab(browser: Any, server: TensorBoard) -> Iterator[Tab]:
    tab = Tab(browser, server)
    left = requests_off_the_machine(tab)
    yield tab
    tab.context.close()
    assert left == []


def requests_off_the_machine(tab: Tab) -> list[str]:
    """Filled with what asks another host. Perfetto's UI wants a script of its makers; the page's policy refuses it
    before anything is sent, which the browser reports as a failure of the kind `csp`."""
    left: list[str] = []

    def note(request: Any) -> None:
        if not request.url.startswith((tab.server.url, "data:", "blob:")) and request.failure != "csp":
            left.append(f"{request.url}: {request.failure}")

    tab.page.on("requestfinished", note)
    tab.page.on("requestfailed", note)
    tab.page.on("response", lambda r: note(r.request))
    return left


def perfetto(tab: Tab) -> Any:
    """The frame of the UI once it has read the trace."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for frame in tab.page.frames:
            if "/perfetto/" in frame.url and frame.evaluate("Boolean(window.app?.trace && !window.app.isLoadingTrace)"):
                return frame
        tab.page.wait_for_timeout(200)
    raise AssertionError("Perfetto did not open the trace")


def selected(tab: Tab) -> tuple[str, int, int]:
    """Name of the selected slice, and the visible window in ns of the file."""
    ui = perfetto(tab)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        now = ui.evaluate(SELECTED)
        if now["event"] is not None:
            ((name, ts),) = ui.evaluate(QUERY, f"select name, ts from slice where id = {now['event']}")
            return f"{name}@{ts}", int(now["start"]), int(now["end"])
        tab.page.wait_for_timeout(200)
    raise AssertionError("nothing is selected")


def test_the_tracks_of_two_streams(tab: Tab) -> None:
    tab.open(run="built", view="trace", gpus="1")
    ui = perfetto(tab)
    streams = ui.evaluate(QUERY, """
        select t.tid, count(*) from slice s join thread_track k on s.track_id = k.id join thread t using (utid)
        where s.category = 'kernel' group by 1 order by 1""")
    assert streams == [["7", "17"], ["20", "3"]]  # per step two forward, two backward, one update; two at the end
    starts = ui.evaluate(QUERY, "select ts, dur from slice where category = 'kernel' order by ts desc limit 1")
    assert starts == [[str(ns(2941)), str(ns(8.5))]]
    tracks = {row[0].split(" ")[0] for row in ui.evaluate(QUERY, "select distinct name from counter_track")}
    assert "Exposed" in tracks
    assert "rank1" in tab.frame("trace").inner_text(".headline")


def test_clocks_of_a_simulated_node_at_the_selected_step(tab: Tab) -> None:
    (name,) = [p.name for p in tab.server.folder.iterdir() if p.name != "built"]
    run = tb_chopper.open_run(tab.server.folder / name)
    step = int(run.steps["step"].max())
    tab.open(run=name, view="trace", steps=f"{step}-{step}")
    ui = perfetto(tab)
    (clock,) = ui.evaluate(QUERY, """
        select max(c.value) from counter c join counter_track t on c.track_id = t.id where t.name like 'Engine clock%'
        """)
    gpu = run.telemetry.samples
    assert float(clock[0]) in set(gpu["clock_mhz"].round(3))
    row = run.steps[(run.steps["step"] == step) & (run.steps["gpu"] == 0)].iloc[0]
    base = int(json.loads(gzip.decompress(next((tab.server.folder / name).glob("*.json.gz")).read_bytes()))
               ["baseTimeNanoseconds"])
    start, end = int(row["start_ns"]) - base, int(max(row["end_ns"], row["gpu_end_ns"])) - base
    ui.wait_for_function(
        f"""() => {{ const s = window.app.trace.timeline.visibleWindow.toTimeSpan();
        return Math.abs(Number(s.start) - {start}) < 0.1 * {end - start}
            && Math.abs(Number(s.end) - {end}) < 0.1 * {end - start}; }}""", timeout=60_000)


def test_a_row_of_a_table_leads_to_its_longest_kernel(tab: Tab) -> None:
    frame = tab.open(run="built", view="operations", by="kernel")
    frame.click(f"[data-table=groups] tr:has-text({json.dumps(KERNEL)}) .to-trace")
    frame = tab.frame("trace", "built")
    name, start, end = selected(tab)
    assert name == f"{KERNEL}@{ns(2941)}"  # the longest is the second one of rank 1
    assert start < ns(2941) and ns(2941 + 8.5) < end and end - start < ns(100)
    assert "GPU 1" in frame.inner_text(".headline")
    # A second jump in the same file keeps the UI as it is.
    perfetto(tab).evaluate("window.sameAsBefore = true")
    tab.page.evaluate("history.back()")
    frame = tab.frame("operations", "built")
    assert not frame.is_visible("iframe")
    tab.page.evaluate("history.forward()")
    frame = tab.frame("trace", "built")
    assert selected(tab)[0] == name and perfetto(tab).evaluate("window.sameAsBefore")
    frame.click("[role=tab][data-view=operations]")
    frame = tab.frame("operations", "built")
    frame.select_option("#select-by", "kernel")
    frame.wait_for_selector("[data-table=groups] h3:has-text('by kernel')")
    frame.focus("[data-table=groups] tr:has-text('AllReduce')")
    tab.page.keyboard.press("t")
    frame = tab.frame("trace", "built")
    assert "GPU 0" in frame.inner_text(".headline")
    assert selected(tab)[0].endswith(f"@{ns(520)}")


def test_the_augmented_trace_is_saved(tab: Tab) -> None:
    frame = tab.open(run="built", view="trace")
    with tab.page.expect_download() as waiting:
        frame.click("a.download")
    assert waiting.value.suggested_filename == "augmented.rank0.chrome.json.gz"
    saved = json.loads(gzip.decompress(Path(waiting.value.path()).read_bytes()))
    assert "chopper_augmented" in saved


def test_without_the_ui_the_page_says_what_to_install(tab: Tab) -> None:
    def without(route: Any) -> None:
        reply = route.fetch()
        route.fulfill(response=reply, json=reply.json() | {"perfetto": None})

    tab.page.route("**/data/plugin/chopper/config", without)
    frame = tab.open(run="built", view="trace")
    assert "pip install tb-chopper[trace]" in frame.inner_text(".banner")
    assert frame.is_visible("a.download") and not frame.query_selector("iframe")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fills_the_window_in_both_themes(browser: Any, server: TensorBoard, theme: str) -> None:
    tab = Tab(browser, server, theme)
    left = requests_off_the_machine(tab)
    frame = tab.open(run="built", view="trace")
    perfetto(tab)
    tab.page.wait_for_timeout(1500)
    if folder := os.environ.get("SCREENSHOTS"):
        tab.page.screenshot(path=f"{folder}/trace_{theme}.png")
    assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    box = frame.query_selector("iframe").bounding_box()
    assert box["width"] > 1000 and box["height"] >= 420
    tab.context.close()
    print(tab.complaints)
    assert left == [] and not [c for c in tab.complaints if c.startswith("exception")]
