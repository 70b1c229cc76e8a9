"""The plugin as TensorBoard sees it: its real WSGI application, strict about security, without a socket."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend import application, security_validator
from tensorboard.plugins import base_plugin
from werkzeug.test import Client, TestResponse
from werkzeug.wrappers import Response

from tb_chopper import run_store
from tb_chopper.backend import logdir, views
from tb_chopper.plugin import ChopperPlugin
from tests.builders import TraceBuilder

BASE = "/data/plugin/chopper"
HOSTILE = "<img src=x onerror=alert(1)>&<b>%{x}" + "k" * 5000


@pytest.fixture(autouse=True)
def strict():
    """What TensorBoard 3.0 would refuse fails the test."""

    def refuse(message: str) -> None:
        raise AssertionError(message)

    with mock.patch.object(security_validator, "_maybe_raise_value_error", refuse):
        yield


class Server:
    """A TensorBoard with this plugin alone over one log directory."""

    def __init__(self, folder: Path | str, spec: str = "") -> None:
        context = base_plugin.TBContext(logdir=str(folder), flags=argparse.Namespace(logdir_spec=spec))
        self.plugin = ChopperPlugin(context)
        self.client = Client(application.TensorBoardWSGI([self.plugin]), Response)

    def get(self, route: str, **arguments: Any) -> TestResponse:
        return self.client.get(f"{BASE}/{route}", query_string=arguments)

    def settled(self, route: str, **arguments: Any) -> TestResponse:
        """The reply once it is no progress report."""
        for _ in range(60):
            reply = self.get(route, **arguments)
            if reply.status_code != 200 or reply.get_json().get("state") != "loading":
                return reply
        raise AssertionError(f"{route} {arguments} is not ready")

    def json(self, route: str, **arguments: Any) -> Any:
        reply = self.settled(route, **arguments)
        assert reply.status_code == 200, reply.get_data(as_text=True)
        return reply.get_json()

    def view(self, **arguments: Any) -> Any:
        return self.json("view", **arguments)["value"]

    def rescan(self) -> Any:
        self.plugin._store.scan()
        return self.json("runs")


def gpu_run(folder: Path, ranks: int = 2, steps: int = 3) -> Path:
    """A run of `ranks` GPUs. Rank r has a third, exposed collective of 10 (r + 1) µs at the end of each step."""
    for rank in range(ranks):
        trace = TraceBuilder("rocm", rank=rank, world_size=ranks)
        for step in range(steps):
            trace.training_step(step, 1000 * step)
            trace.collective("ncclDevKernel_AllGather", 1000 * step + 850, 1000 * step + 900, 10 * (rank + 1))
        trace.write(folder / f"rank{rank}.pt.trace.json.gz")
    return folder


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: two GPUs, only a CPU, no activity, damaged, hostile names."""
    folder = tmp_path_factory.mktemp("logs")
    gpu_run(folder / "gpus")
    gpu_run(folder / "before", steps=2)
    cpu = TraceBuilder(rank=None)
    for step in range(2):
        cpu.step(step, 1000 * step, 900)
        cpu.op("aten::mm", 1000 * step + 10, 200)
        cpu.op("aten::add", 1000 * step + 300, 50)
    cpu.write(folder / "cpu" / "host_1.pt.trace.json")
    TraceBuilder().annotation("nothing", 0, 10)
    TraceBuilder().write(folder / "empty" / "w.pt.trace.json")
    whole = TraceBuilder().training_step(0, 0).text()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "w.pt.trace.json").write_text(whole[: len(whole) // 2])
    (folder / "garbage").mkdir()
    (folder / "garbage" / "w.pt.trace.json").write_bytes(b"\x00\x01nothing")
    hostile = TraceBuilder().training_step(0, 0)
    hostile.op(HOSTILE, 800, 50)
    hostile.launch(HOSTILE, 810, 880, 30)
    hostile.write(folder / "hostile" / "w.pt.trace.json")
    return folder


@pytest.fixture(scope="module")
def server(logs: Path) -> Server:
    return Server(logs)


# ---- loading --------------------------------------------------------------------------------------------------------


def test_import_is_light() -> None:
    """TensorBoard pays for the import of every plugin at its start."""
    code = (
        "import tensorboard.main, time, sys; before = set(sys.modules); t = time.perf_counter();"
        "import tb_chopper.plugin; print(time.perf_counter() - t);"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    seconds = min(float(r.stdout.splitlines()[0]) for r in runs)
    packages = runs[0].stdout.splitlines()[1]
    assert not {"pandas", "numpy", "plotly", "torch", "pyarrow"} & set(eval(packages))
    assert seconds < 0.1


def test_entry_point() -> None:
    from importlib.metadata import entry_points

    found = [e.load() for e in entry_points(group="tensorboard_plugins") if e.name == "chopper"]
    assert found == [ChopperPlugin]


def test_active_never_waits_for_the_disk(tmp_path: Path) -> None:
    asked = []

    def slow(roots: Any) -> list[Any]:
        asked.append(threading.current_thread().name)
        time.sleep(2.5)
        return []

    with mock.patch.object(logdir, "find_runs", slow):
        plugin = Server(tmp_path).plugin
        started = time.monotonic()
        assert [plugin.is_active() for _ in range(50)] == [False] * 50
        assert time.monotonic() - started < 1.5, "one second for the first scan, then none"
    assert set(asked) == {"chopper-scan"}


def test_active_once_a_run_is_there(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.rescan()["runs"] == []
    assert not server.plugin.is_active()
    gpu_run(tmp_path / "late", ranks=1, steps=1)
    server.rescan()
    assert server.plugin.is_active()


# ---- static files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index.js", "style.css", "table.js"])
def test_static_files(server: Server, name: str) -> None:
    reply = server.get(f"static/{name}")
    assert reply.status_code == 200
    assert reply.mimetype == ("text/css" if name.endswith("css") else "text/javascript")
    assert reply.get_data() == (Path(run_store.__file__).parent / "frontend" / name).read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "../plugin.py", "..%2fplugin.py", "%2e%2e/plugin.py", "....//plugin.py", "/etc/passwd", "//etc/passwd",
        "static/../../plugin.py", "..\\plugin.py", "%5c..%5cplugin.py", "index.js/../../plugin.py", "index.js%00.css",
        "", ".", "..", "missing.js", "../../tests/builders.py",
    ],
)  # fmt: skip
def test_static_files_stay_inside(server: Server, path: str) -> None:
    reply = server.client.get(f"{BASE}/static/{path}")
    assert reply.status_code in (400, 404)
    assert b"ChopperPlugin" not in reply.get_data() and b"root:" not in reply.get_data()


def test_plotly_is_local_and_cached(server: Server) -> None:
    path = server.json("config")["plotly"]
    reply = server.client.get(f"{BASE}/{path}")
    assert reply.mimetype == "text/javascript" and len(reply.get_data()) > 1_000_000
    assert "max-age=31536000" in reply.headers["Cache-Control"] and "v=" in path


def test_answers_are_gzipped_when_asked(server: Server) -> None:
    reply = server.client.get(f"{BASE}/config", headers={"Accept-Encoding": "gzip"})
    assert reply.headers["Content-Encoding"] == "gzip"


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ({"view": "overview"}, 404, "not in the log directory"),
        ({"view": "overview", "run": "../gpus"}, 404, "not in the log directory"),
        ({"view": "overview", "run": "/etc"}, 404, "not in the log directory"),
        ({"view": "overview", "run": "gpus", "compare": "../../etc"}, 404, "not in the log directory"),
        ({"view": "../overview", "run": "gpus"}, 404, "no view of that name"),
        ({"view": "view", "run": "gpus"}, 404, "no view of that name"),
        ({"run": "gpus"}, 404, "no view of that name"),
        ({"view": "overview", "run": "gpus", "gpus": "0,x"}, 400, "not a whole number"),
        ({"view": "overview", "run": "gpus", "steps": "5-2"}, 400, "after the last"),
        ({"view": "overview", "run": "gpus", "steps": "a"}, 400, "not a whole number"),
        ({"view": "overview", "run": "gpus", "span": "1.5"}, 400, "not a whole number"),
        ({"view": "overview", "run": "gpus", "gpus": "77"}, 400, "nothing in this run matches"),
        ({"view": "launch", "run": "gpus", "scope": "sideways"}, 400, "one of across, within"),
        ({"view": "operations", "run": "gpus", "by": "colour"}, 400, "colour"),
        ({"view": "overview", "run": "gpus", "by": "__class__"}, 400, "__class__"),
    ],
)
def test_errors_are_one_line_of_text(server: Server, arguments: dict[str, str], status: int, words: str) -> None:
    reply = server.settled("view", **arguments)
    text = reply.get_data(as_text=True)
    assert (reply.status_code, reply.mimetype) == (status, "text/plain")
    assert words in text and len(text.strip().splitlines()) == 1


def test_only_get(server: Server) -> None:
    assert server.client.post(f"{BASE}/runs").status_code == 400


def test_a_fault_of_ours_is_one_line(server: Server) -> None:
    with mock.patch.object(views, "build", side_effect=RuntimeError("first\nsecond")):
        reply = server.settled("view", view="overview", run="gpus", gpus="0")
    assert (reply.status_code, reply.mimetype) == (500, "text/plain")
    assert reply.get_data(as_text=True).startswith("RuntimeError: first second")
    assert server.view(view="overview", run="gpus", gpus="0")["headline"]  # it is not remembered


@pytest.mark.parametrize("run", ["gpus", "cpu", "empty", "damaged", "garbage", "hostile"])
@pytest.mark.parametrize("view", list(views.REGISTRY))
def test_every_view_of_every_run(server: Server, run: str, view: str) -> None:
    """Damage and emptiness are said, never raised; what comes is strict JSON."""
    text = server.settled("view", view=view, run=run).get_data(as_text=True)
    value = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))["value"]
    assert value["name"] == view and len(value["headline"]) > 10
    for figure in value["figures"].values():
        assert figure["layout"]["title"]["text"] and figure["layout"]["meta"]["description"] and figure["data"]
    for table in value["tables"].values():
        assert len(table["data"]) == len(table["columns"]) and len({len(c) for c in table["data"]}) == 1
    for figure in value["key_figures"]:
        assert figure["definition"] and figure["source"] in ("measured", "sampled", "estimated", "unavailable")
        assert (figure["source"] == "unavailable") <= (figure["value"] is None)
    if run in ("garbage", "damaged"):
        assert value["findings"]
    if run == "cpu":
        assert any("CPU operations" in b for b in value["banners"])


def test_bad_files_leave_the_others_alone(tmp_path: Path) -> None:
    gpu_run(tmp_path / "run", ranks=1)
    (tmp_path / "run" / "broken.pt.trace.json.gz").write_bytes(b"\x1f\x8b\x08broken")
    value = Server(tmp_path).view(view="overview", run="run")
    assert "step takes" in value["headline"]
    assert any(f["severity"] == "error" and f["file"] == "broken.pt.trace.json.gz" for f in value["findings"])


# ---- numbers --------------------------------------------------------------------------------------------------------


def figures_of(value: Any) -> dict[str, float]:
    return {k["label"]: k["value"] for k in value["key_figures"]}


def column(table: Any, name: str) -> list[Any]:
    return table["data"][[c["name"] for c in table["columns"]].index(name)]


def test_overview_against_hand_counted_times(server: Server) -> None:
    """Per step: GEMMs 2 x 45 and 2 x 45.5 µs, AdamW 60.25; allreduce [520, 620) overlaps no GEMM (last ends 555.5:
    35.5 µs of it do); allgather 10 (r + 1) µs stands alone. Steps start with the first GEMM, at 70 µs."""
    value = server.view(view="overview", run="gpus", gpus="0")
    gemm = 2 * 45 + 2 * 45.5
    overlap = 555.5 - 520
    table = value["tables"]["steps"]
    assert column(table, "compute_us") == pytest.approx([gemm + 60.25] * 3)
    assert column(table, "exposed_communication_us") == pytest.approx([100 - overlap + 10] * 3)
    assert sorted(column(table, "total_us")) == pytest.approx([840, 1000, 1000])
    numbers = figures_of(value)
    assert numbers["Step time"] == pytest.approx((1000 + 1000 + 840) / 3)
    assert numbers["Compute"] == pytest.approx(gemm + 60.25)
    assert numbers["Exposed communication"] == pytest.approx(110 - overlap)
    assert numbers["Steps / s"] == pytest.approx(1000)
    parts = [numbers[k] for k in ("Compute", "Exposed communication", "Exposed copies", "Idle")]
    assert sum(parts) == pytest.approx(numbers["Step time"])


def test_selection_of_gpus_and_steps(server: Server) -> None:
    one = server.view(view="overview", run="gpus", gpus="1", steps="1-2")["tables"]["steps"]
    assert set(column(one, "gpu")) == {1} and set(column(one, "step")) == {1, 2}
    both = server.view(view="overlap", run="gpus")["tables"]["gpus"]
    assert column(both, "exposed_communication_us") == pytest.approx([3 * (64.5 + 10), 3 * (64.5 + 20)])


def test_comparison_shows_both_runs(server: Server) -> None:
    value = server.view(view="overview", run="gpus", compare="before")
    assert "before" in value["headline"]
    patterns = [p for trace in value["figures"]["step_time"]["data"] for p in trace["marker"]["pattern"]["shape"]]
    assert "/" in patterns and "" in patterns


def test_drill_down_to_kernels(server: Server) -> None:
    value = server.view(view="operations", run="gpus", gpus="0", focus="AdamW.step")
    assert column(value["tables"]["kernels"], "kernel") == ["fused_adamw"]
    assert column(value["tables"]["kernels"], "time_us") == pytest.approx([3 * 60.25])


def test_launch_scopes(server: Server) -> None:
    across, within = (
        server.view(view="launch", run="gpus", gpus="0", scope=s)["tables"]["groups"] for s in ("across", "within")
    )
    # Between steps the GPU waits from 820.25 (AdamW) to 1070 (first GEMM): 249.75 µs, twice.
    assert sum(column(across, "gaps_us")) - sum(column(within, "gaps_us")) == pytest.approx(2 * 249.75)


def test_names_are_text(server: Server) -> None:
    """In tables a name is what it is; Plotly gets it escaped and short."""
    value = server.view(view="operations", run="hostile", by="kernel")
    assert HOSTILE in column(value["tables"]["groups"], "kernel")
    drawn = json.dumps(value["figures"])
    assert "<img" not in drawn and "&lt;img" in drawn and "%{x}" not in drawn
    ticks = value["figures"]["top"]["layout"]["yaxis"]["ticktext"]
    assert max(map(len, ticks)) < 100


# ---- change ---------------------------------------------------------------------------------------------------------


def test_new_runs_spans_and_removal_without_a_restart(tmp_path: Path) -> None:
    gpu_run(tmp_path / "a", ranks=1, steps=1)
    server = Server(tmp_path)
    first = server.rescan()
    assert [r["name"] for r in first["runs"]] == ["a"] and server.rescan()["generation"] == first["generation"]
    before = server.json("view", view="findings", run="a")
    gpu_run(tmp_path / "b", ranks=1, steps=1)
    TraceBuilder("rocm", rank=0).training_step(5, 0).write(
        tmp_path / "a" / "rank0.1764400000000000000.pt.trace.json.gz"
    )
    second = server.rescan()
    assert second["generation"] > first["generation"] and {r["name"] for r in second["runs"]} == {"a", "b"}
    after = server.json("view", view="findings", run="a")
    assert after["signature"] != before["signature"]
    assert len(after["value"]["tables"]["files"]["data"][0]) == len(before["value"]["tables"]["files"]["data"][0]) + 1
    for file in (tmp_path / "b").iterdir():
        file.unlink()
    server.rescan()
    assert server.get("view", view="overview", run="b").status_code == 404
    assert server.get("view", view="overview", run="a").status_code == 200


def test_a_run_removed_while_it_is_listed(tmp_path: Path) -> None:
    gpu_run(tmp_path / "a", ranks=1, steps=1)
    server = Server(tmp_path)
    server.rescan()
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    reply = server.settled("view", view="overview", run="a")
    assert reply.status_code in (200, 404)
    assert "removed" in reply.get_data(as_text=True) or "not in the log directory" in reply.get_data(as_text=True)


def test_a_missing_log_directory(tmp_path: Path) -> None:
    assert Server(tmp_path / "nowhere").json("runs")["runs"] == []


def test_logdir_spec(tmp_path: Path) -> None:
    gpu_run(tmp_path / "one" / "x", ranks=1, steps=1)
    gpu_run(tmp_path / "two", ranks=1, steps=1)
    server = Server("", spec=f"first:{tmp_path}/one,second:{tmp_path}/two")
    assert {r["name"] for r in server.json("runs")["runs"]} == {"first/x", "second"}
    assert server.view(view="overview", run="second")["headline"]


@pytest.mark.parametrize(
    ("logdir_", "spec", "roots"),
    [
        ("", "", {}), ("/log", "", {"": "/log"}), ("", "a:/x,b:/y", {"a": "/x", "b": "/y"}), ("", "/x", {"/x": "/x"}),
        ("", "a:s3://bucket/x", {"a": "s3://bucket/x"}), ("", "s3://bucket/x", {"s3://bucket/x": "s3://bucket/x"}),
        ("", "/a:b", {"/a:b": "/a:b"}), ("", "a:/x, ,", {"a": "/x"}), ("", "a:/x:y", {"a": "/x:y"}),
    ],
)  # fmt: skip
def test_split_logdir(logdir_: str, spec: str, roots: dict[str, str]) -> None:
    assert run_store.split_logdir(logdir_, spec) == roots


# ---- long reads -----------------------------------------------------------------------------------------------------


def test_a_long_read_reports_progress_and_blocks_nobody(tmp_path: Path) -> None:
    from tb_chopper.backend import capture

    gpu_run(tmp_path / "slow", ranks=1, steps=1)
    gpu_run(tmp_path / "fast", ranks=1, steps=1)
    load, go_on = capture.load, threading.Event()

    def slow(file: Any, communication: Any = (), progress: Any = None, *more: Any) -> Any:
        if "slow" in str(file.path):
            progress(0.4, "reading events")
            assert go_on.wait(20)
        return load(file, communication, progress, *more)

    server = Server(tmp_path)
    with mock.patch.object(capture, "load", slow):
        started = time.monotonic()
        answer = server.get("view", view="overview", run="slow").get_json()
        assert time.monotonic() - started < 5
        assert answer["state"] == "loading" and 0.3 < answer["done"] < 0.5 and "reading events" in answer["doing"]
        assert server.view(view="overview", run="fast")["headline"]
        go_on.set()
        assert server.view(view="overview", run="slow")["headline"]


def test_many_threads_ask_for_the_same_thing(logs: Path) -> None:
    server, built = Server(logs), []
    build = views.build

    def counted(*arguments: Any, **named: Any) -> Any:
        built.append(1)
        return build(*arguments, **named)

    with mock.patch.object(views, "build", counted):
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(server.view(view="launch", run="gpus"))) for _ in range(8)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert len(answers) == 8 and all(a == answers[0] for a in answers) and len(built) == 1


def test_comparisons_in_both_directions_do_not_block_each_other(logs: Path) -> None:
    server = Server(logs)
    done: list[Any] = []
    pairs = [("gpus", "before"), ("before", "gpus")] * 3
    threads = [
        threading.Thread(target=lambda p=p: done.append(server.view(view="overview", run=p[0], compare=p[1])))
        for p in pairs
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert len(done) == len(pairs)
