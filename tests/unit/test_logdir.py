"""Runs, workers, spans and files by their names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tb_chopper.backend.errors import NotFound
from tb_chopper.backend.logdir import find_runs, rank_hint, why_no_run


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")


def test_a_run_is_a_directory_with_traces(tmp_path: Path) -> None:
    touch(tmp_path, "top.pt.trace.json", "a/w.pt.trace.json.gz", "a/b/w.5.pt.trace.json", "empty/readme.txt",
          "events/events.out.tfevents.1", ".hidden/w.pt.trace.json", "a/.chopper-cache/w.pt.trace.json", "a/w.json.tmp")
    assert [r.name for r in find_runs(tmp_path)] == [".", "a", "a/b"]


def test_workers_and_spans(tmp_path: Path) -> None:
    touch(tmp_path, "rank10.200.pt.trace.json", "rank2.1000.pt.trace.json.gz", "rank2.300.pt.trace.json",
          "rank2.pt.trace.json")
    traces = find_runs(tmp_path)[0].traces
    assert [(t.worker, t.span, t.path.name) for t in traces] == [
        ("rank2", 0, "rank2.pt.trace.json"), ("rank2", 1, "rank2.300.pt.trace.json"),
        ("rank2", 2, "rank2.1000.pt.trace.json.gz"), ("rank10", 0, "rank10.200.pt.trace.json")]
    assert {t.size for t in traces} == {2}


@pytest.mark.parametrize(("name", "worker"), [
    ("host_4711.1764400000000000000.pt.trace.json.gz", "host_4711"),
    ("rank3_trace.json", "rank3"),
    ("rank3_trace.json.gz", "rank3"),
    ("step10_trace.json.gz", "step10"),
    ("libkineto_activities_812.json", "libkineto_activities_812"),
    ("pytorch_trace_gpu0.json", "pytorch_trace_gpu0"),
])
def test_names_of_traces(tmp_path: Path, name: str, worker: str) -> None:
    touch(tmp_path, name)
    assert [t.worker for t in find_runs(tmp_path)[0].traces] == [worker]


@pytest.mark.parametrize("name", [
    "host.trace.json.gz", "trace.json", "w.pt.trace.json.gz.tmp", "w.chopper.json", "w.pt.trace.json.bak",
    "x_trace.json",
])
def test_names_of_others(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)
    assert find_runs(tmp_path) == []


@pytest.mark.parametrize(("name", "rank"), [
    ("rank3", 3), ("node0_rank12", 12), ("rank-4", 4), ("rank_5", 5), ("host_r7_4711", 7), ("host_r7", 7),
    ("host_4711", None), ("frank3", None), ("worker0", None),
])
def test_rank_hints(name: str, rank: int | None) -> None:
    assert rank_hint(name) == rank


def test_files_beside_the_traces(tmp_path: Path) -> None:
    touch(tmp_path, "r/w.7.pt.trace.json.gz", "r/w.7.chopper.json", "r/w.8.pt.trace.json", "r/node0.telemetry.csv",
          "r/counters/pass_1/node0/r0_counter_collection.csv", "r/counters/notes.txt", "r/other.csv")
    (run,) = find_runs(tmp_path)
    assert [t.sidecar.path.name if t.sidecar else None for t in run.traces] == ["w.7.chopper.json", None]
    assert [f.path.name for f in run.telemetry] == ["node0.telemetry.csv"]
    assert [f.path.name for f in run.counters] == ["notes.txt", "r0_counter_collection.csv"]
    assert len(run.files) == 6


def test_a_named_file_is_a_run_whatever_its_name(tmp_path: Path) -> None:
    touch(tmp_path, "odd name.json", "odd name.chopper.json")
    (run,) = find_runs(tmp_path / "odd name.json")
    assert (run.name, run.traces[0].worker) == ("odd name.json", "odd name")
    assert run.traces[0].sidecar is not None


def test_roots_by_name(tmp_path: Path) -> None:
    touch(tmp_path, "x/w.pt.trace.json", "y/deep/w.pt.trace.json")
    roots = {"a": tmp_path / "x", "b": tmp_path / "y", "": tmp_path / "y"}
    assert [r.name for r in find_runs(roots)] == ["a", "b/deep", "deep"]


def test_a_url_gives_the_same_runs(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    touch(tmp_path, "a/rank0.7.pt.trace.json.gz", "a/rank0.7.chopper.json", "a/counters/p/c.csv", "b/c/w.pt.trace.json",
          ".hidden/w.pt.trace.json")
    local, remote = find_runs(tmp_path), find_runs(f"file://{tmp_path}")
    assert [r.name for r in remote] == [r.name for r in local] == ["a", "b/c"]
    for one, other in zip(local, remote, strict=True):
        assert [(f.path.name, f.size) for f in one.files] == [(f.path.name, f.size) for f in other.files]
        assert [str(f.path) for f in other.files] == [f"file://{f.path}" for f in one.files]
    (single,) = find_runs(f"file://{tmp_path}/a/rank0.7.pt.trace.json.gz")
    assert single.traces[0].sidecar is not None


def test_a_link_back_up_ends(tmp_path: Path) -> None:
    touch(tmp_path, "a/w.pt.trace.json")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert [r.name for r in find_runs(tmp_path)] == ["a"]


def test_a_linked_run_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "elsewhere/w.pt.trace.json")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "run").symlink_to(tmp_path / "elsewhere")
    assert [r.name for r in find_runs(tmp_path / "log")] == ["run"]


def test_what_goes_away_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a/w.pt.trace.json", "b/w.pt.trace.json")
    scandir = os.scandir

    def vanish(path: Path) -> object:
        if Path(path).name == "a":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanish)
    assert [r.name for r in find_runs(tmp_path)] == ["b"]


def test_no_run(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "nowhere") == []
    assert "no such file" in why_no_run(tmp_path / "nowhere")
    assert "chopper_trace_handler" in why_no_run(tmp_path)
    with pytest.raises(NotFound):
        find_runs("nosuchstore://x")


def test_topology_files(tmp_path: Path) -> None:
    """One file per host, by either ending; what only sounds like it is none."""
    touch(tmp_path, "w.pt.trace.json", "node0.topology.txt", "node1.topology.json", "topology.txt", "mytopology.txt",
          "topology.csv", ".node0.topology.txt.17")
    run = find_runs(tmp_path)[0]
    assert [f.path.name for f in run.topology] == ["node0.topology.txt", "node1.topology.json", "topology.txt"]
    assert set(run.topology) <= set(run.files)
