"""The handler on real captures of a tiny model on CPU."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from torch_ext import annotate, chopper_trace_handler, handler, sidecar

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*Profiler clears events.*")]

FILE = re.compile(r"(?P<worker>.+)\.(?P<span_ns>\d+)\.(pt\.trace\.json(\.gz)?|chopper\.json)")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def samplers(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a sampler was asked for; none is started."""
    asked: list[Path] = []
    monkeypatch.setattr(handler, "start_telemetry", lambda folder: asked.append(Path(folder)))
    return asked


def test_one_sampler_is_asked_for_when_the_handler_is_made(tmp_path: Path, samplers: list[Path]) -> None:
    train(chopper_trace_handler(tmp_path))
    assert samplers == [tmp_path]
    chopper_trace_handler(tmp_path, telemetry=False)
    assert samplers == [tmp_path]


def train(
    on_trace_ready: Callable[[Any], None],
    steps: int = 4,
    scope: str = "work",
    plan: Mapping[str, int] | None = MappingProxyType({"wait": 1, "warmup": 1, "active": 2}),
    stop_in_step: bool = False,
) -> int:
    """Trains a tiny model under the profiler; returns the number of steps it got through."""
    model = torch.nn.Linear(4, 4)
    options = {"schedule": schedule(**plan)} if plan else {}
    done = 0
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=on_trace_ready, record_shapes=True, **options) as p:
        for step in range(steps):
            with record_function(scope):
                model(torch.ones(2, 4)).sum().backward()
            if not (stop_in_step and step == steps - 1):
                p.step()
            done += 1
    return done


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Traces and sidecars in order of time; nothing else may lie there."""
    traces = sorted(folder.glob("*.pt.trace.json*"))
    sidecars = sorted(folder.glob("*.chopper.json"))
    assert {*traces, *sidecars} == set(folder.iterdir())
    return traces, sidecars


def names(trace: Path) -> list[str]:
    return [e["name"] for e in load(trace)["traceEvents"] if e.get("ph") == "X"]


@pytest.mark.parametrize("use_gzip", [True, False])
def test_each_cycle_is_a_span_with_trace_and_sidecar(tmp_path: Path, use_gzip: bool) -> None:
    before = time.time_ns()
    train(chopper_trace_handler(tmp_path / "log", "w", use_gzip=use_gzip), steps=8)
    traces, sidecars = files(tmp_path / "log")
    assert len(traces) == len(sidecars) == 2
    assert all(t.name.endswith(".pt.trace.json.gz" if use_gzip else ".pt.trace.json") for t in traces)
    for trace, path, steps in zip(traces, sidecars, [(2, 3), (6, 7)], strict=True):
        record = sidecar.read(path)
        named = FILE.fullmatch(trace.name)
        assert named and sidecar.path_for(trace) == path
        assert (record["worker"], record["span_ns"]) == (named["worker"], int(named["span_ns"]))
        assert before < record["span_ns"] < time.time_ns()
        assert (record["profiler"]["first_step"], record["profiler"]["last_step"]) == steps
        assert {f"ProfilerStep#{i}" for i in steps} == {n for n in names(trace) if n.startswith("ProfilerStep")}
        assert record["notes"] == []


def test_the_default_name_tells_host_rank_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node 7.lab")
    for variable, value in (("RANK", "13"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "5")):
        monkeypatch.setenv(variable, value)
    train(chopper_trace_handler(tmp_path))
    (trace,), (path,) = files(tmp_path)
    assert trace.name.startswith(f"node_7.lab_r13_{os.getpid()}.")
    identity = sidecar.read(path)["identity"]
    assert (identity["host"], identity["rank"], identity["world_size"], identity["local_rank"]) == (
        "node 7.lab", 13, 16, 5,
    )  # fmt: skip
    assert identity["pid"] == os.getpid()
    assert identity["device"]["type"] == ("cuda" if torch.cuda.is_initialized() else "cpu")


def test_a_process_on_its_own_claims_no_rank(tmp_path: Path) -> None:
    train(chopper_trace_handler(tmp_path))
    _, (path,) = files(tmp_path)
    identity = sidecar.read(path)["identity"]
    assert (identity["rank"], identity["world_size"]) == (None, None)


def test_torch_distributed_knows_better_than_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        train(chopper_trace_handler(tmp_path))
    finally:
        torch.distributed.destroy_process_group()
    (trace,), (path,) = files(tmp_path)
    assert "_r0_" in trace.name
    assert (sidecar.read(path)["identity"]["rank"], sidecar.read(path)["identity"]["world_size"]) == (0, 1)


def test_what_the_user_tells_is_kept(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    train(
        chopper_trace_handler(
            tmp_path, tokens_per_step=4096, model_flops_per_step=2.5e14, parallel={"dp_shard": 4, "tp": 2}, model=model
        )
    )
    _, (path,) = files(tmp_path)
    record = sidecar.read(path)
    assert record["training"] == {
        "tokens_per_step": 4096, "model_flops_per_step": 2.5e14, "parallel": {"dp_shard": 4, "tp": 2},
    }  # fmt: skip
    assert record["modules"] == [
        {"fqn": "", "cls": "Sequential", "params": 3 * 5 + 5, "order": 0},
        {"fqn": "0", "cls": "Linear", "params": 3 * 5 + 5, "order": 1},
    ]
    assert record["profiler"]["record_shapes"] is True
    assert record["profiler"]["with_stack"] is False
    assert record["versions"]["torch"] == str(torch.__version__)
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["simulated"] is False


def test_annotated_models_need_not_be_passed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    with annotate(model, "student"):
        train(chopper_trace_handler(tmp_path))
    _, (path,) = files(tmp_path)
    assert [row["fqn"] for row in sidecar.read(path)["modules"]] == ["student", "student.0"]


def test_clocks_are_read_together(tmp_path: Path) -> None:
    offset = time.time_ns() - time.monotonic_ns()
    before = time.monotonic_ns()
    train(chopper_trace_handler(tmp_path))
    after = time.monotonic_ns()
    _, (path,) = files(tmp_path)
    start, stop = sidecar.read(path)["clocks"]
    assert (start["where"], stop["where"]) == ("start", "stop")
    assert before <= start["monotonic_ns"] < stop["monotonic_ns"] <= after
    for pair in (start, stop):
        assert abs(pair["realtime_ns"] - pair["monotonic_ns"] - offset) < 5_000_000
        assert 0 <= pair["uncertainty_ns"] < 5_000_000


@pytest.mark.parametrize("name", ['say "hi"', '{"layer": "3"}', 'ends"', "back\\slash", "new\nline"])
def test_the_trace_is_valid_whatever_scopes_are_called(tmp_path: Path, name: str) -> None:
    train(chopper_trace_handler(tmp_path), scope=name)
    (trace,), _ = files(tmp_path)
    found = names(trace)
    as_exported = name.replace("\\", "/").replace("\n", "")  # torch up to 2.13 changes these two itself
    assert sum(n in (name, as_exported) for n in found) == 2
    assert found.count("aten::linear") == 2, "the events around it are all there"


def test_the_python_exporter_keeps_names_that_are_not_ascii(tmp_path: Path) -> None:
    train(chopper_trace_handler(tmp_path, use_python_export=True), scope='层0 "fwd"')
    (trace,), _ = files(tmp_path)
    offered = "use_python_export" in profile.export_chrome_trace.__code__.co_varnames
    assert names(trace).count('层0 "fwd"') == (2 if offered else 0)


def test_torchs_own_validator_is_content(tmp_path: Path) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator")
    train(chopper_trace_handler(tmp_path))
    (trace,), _ = files(tmp_path)
    passed, violations = validator.validate_trace(str(trace))
    assert passed, violations


def test_it_takes_the_standard_handlers_arguments(tmp_path: Path) -> None:
    import inspect

    from torch.profiler import tensorboard_trace_handler

    ours = inspect.signature(chopper_trace_handler).parameters
    assert list(inspect.signature(tensorboard_trace_handler).parameters) == list(ours)[:4]
    train(chopper_trace_handler(str(tmp_path), "w", False, False))
    assert len(files(tmp_path)[0]) == 1


def test_without_a_schedule_there_are_no_steps(tmp_path: Path) -> None:
    train(chopper_trace_handler(tmp_path), plan=None)
    _, (path,) = files(tmp_path)
    profiler = sidecar.read(path)["profiler"]
    assert (profiler["first_step"], profiler["last_step"]) == (None, None)


@pytest.mark.parametrize(
    ("plan", "steps", "stop_in_step", "expected"),
    [
        ({"wait": 1, "warmup": 1, "active": 4}, 4, True, [(2, 3)]),
        ({"wait": 0, "warmup": 0, "active": 2}, 4, True, [(0, 1), (2, 3)]),
        ({"wait": 1, "warmup": 1, "active": 3, "skip_first": 2, "repeat": 1}, 9, False, [(4, 6)]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*won't be using warmup.*")
def test_captured_steps_are_those_of_the_trace(
    tmp_path: Path, plan: Mapping[str, int], steps: int, stop_in_step: bool, expected: list[tuple[int, int]]
) -> None:
    train(chopper_trace_handler(tmp_path), steps=steps, plan=plan, stop_in_step=stop_in_step)
    traces, sidecars = files(tmp_path)
    told = [sidecar.read(path)["profiler"] for path in sidecars]
    assert [(p["first_step"], p["last_step"]) for p in told] == expected
    for trace, (first, last) in zip(traces, expected, strict=True):
        found = {int(n.split("#")[1]) for n in names(trace) if n.startswith("ProfilerStep#")}
        assert found == set(range(first, last + 1))


@pytest.fixture
def one_warning() -> Iterator[None]:
    """The block gives exactly one warning, of ours, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if "chopper_trace_handler" in str(w.message)]
    assert len(ours) == 1
    assert "\n" not in ours[0]
    assert "the training goes on" in ours[0]


@pytest.mark.usefixtures("one_warning")
def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert train(chopper_trace_handler(tmp_path / "file" / "log")) == 4
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("broken", ["identity", "annotated_modules", "profiler_flags"])
def test_an_error_of_ours_costs_the_sidecar_not_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("several\nlines")

    monkeypatch.setattr(handler, broken, fail)
    assert train(chopper_trace_handler(tmp_path)) == 4
    (trace,), sidecars = files(tmp_path)
    assert sidecars == []
    assert "aten::linear" in names(trace)


@pytest.mark.usefixtures("one_warning")
@pytest.mark.parametrize("use_gzip", [True, False])
@pytest.mark.parametrize("export_first", [True, False])
def test_where_our_export_fails_torch_writes_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_gzip: bool, export_first: bool
) -> None:
    def fail(prof: Any, path: Path, use_python_export: bool) -> None:
        if export_first:
            prof.export_chrome_trace(str(tmp_path / "lost.json"))
            (tmp_path / "lost.json").unlink()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handler, "export", fail)
    assert train(chopper_trace_handler(tmp_path, use_gzip=use_gzip)) == 4
    (trace,), (path,) = files(tmp_path)
    assert "aten::linear" in names(trace)
    assert "No space left on device" in sidecar.read(path)["notes"][0]


def test_nothing_of_environment_or_command_line_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "s3cr3t-in-the-environment")
    monkeypatch.setattr(sys, "argv", ["train.py", "--password", "s3cr3t-on-the-command-line"])
    with annotate(torch.nn.Linear(2, 2)):
        train(chopper_trace_handler(tmp_path))
    traces, sidecars = files(tmp_path)
    assert traces and sidecars
    for path in (*traces, *sidecars):
        data = path.read_bytes()
        assert b"s3cr3t" not in (gzip.decompress(data) if path.suffix == ".gz" else data)
