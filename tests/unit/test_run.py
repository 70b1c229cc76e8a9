"""A run of several files: who is who, what is missing, and what one bad file does to the others."""

from __future__ import annotations

import threading

import pytest

import tb_chopper
from tb_chopper.backend.analyze import analyze
from tb_chopper.backend.errors import InvalidSelection, NotFound
from tests.builders import TraceBuilder


def trace(rank: int | None = 0, world_size: int = 1, dialect: str = "rocm", **options) -> TraceBuilder:
    t = TraceBuilder(dialect, rank, world_size, **options)
    return t.training_step(4, 0).training_step(5, 1000)


def codes(run: tb_chopper.Run) -> set[str]:
    return {f.code for f in run.findings}


def test_gpu_is_the_rank_whatever_the_files_are_called(tmp_path):
    trace(1, 2).write(tmp_path / "a.pt.trace.json.gz")
    trace(0, 2).write(tmp_path / "b.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert run.name == tmp_path.name
    assert run.workers[["file", "gpu"]].values.tolist() == [["a.pt.trace.json.gz", 1], ["b.pt.trace.json", 0]]
    assert run.timeline()["gpu"].tolist() == [0, 1]
    assert run.workers["gpu_name"].unique().tolist() == ["AMD Instinct MI300X"]


def test_without_a_rank_the_order_counts(tmp_path):
    for name in ("alpha", "beta"):
        trace(None).write(tmp_path / f"{name}.pt.trace.json")
    assert tb_chopper.open_run(tmp_path).workers[["worker", "gpu"]].values.tolist() == [["alpha", 0], ["beta", 1]]


def test_missing_ranks_are_named(tmp_path):
    for rank in (0, 4, 5):
        trace(rank, 8).write(tmp_path / f"rank{rank}.pt.trace.json")
    [missing] = [f for f in tb_chopper.open_run(tmp_path).findings if f.code == "missing_rank"]
    assert missing.count == 5
    assert "1-3, 6-7" in missing.message


def test_a_rank_that_is_claimed_twice_is_two_gpus_none_of_them_a_missing_rank(tmp_path):
    trace(0, 2).write(tmp_path / "hostA_10.1.pt.trace.json")
    trace(0, 2).write(tmp_path / "hostA_10.2.pt.trace.json")
    trace(0, 2).write(tmp_path / "hostB_20.1.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert run.workers[["host", "span", "gpu"]].values.tolist() == [["hostA", 0, 0], ["hostA", 1, 0], ["hostB", 0, 2]]
    assert {"duplicate_rank", "missing_rank"} <= codes(run)


def test_two_devices_of_one_process_are_two_workers(tmp_path):
    t = trace(3, 4)
    t.device = 5
    t.training_step(6, 2000)
    t.write(tmp_path / "rank3.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert run.workers[["device", "gpu", "n_steps"]].values.tolist()[0][:2] == ["2", 3]
    assert run.workers["gpu"].tolist() == [3, 4]
    assert run.kernels.groupby("gpu").size().tolist() == [12, 6]


def test_spans_of_one_worker_add_up_and_stay_apart(tmp_path):
    trace().write(tmp_path / "w.1.pt.trace.json")
    TraceBuilder("rocm").training_step(9, 0).write(tmp_path / "w.2.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    total = run.timeline("gpu")["total_us"].tolist()
    assert total == [sum(run.timeline("span")["total_us"])]
    assert run.timeline("step")["step"].tolist() == [4, 5, 9]
    assert run.timeline("gpu", {"span": 1})["total_us"].iloc[0] < total[0] / 2


def test_a_bad_file_costs_only_itself(tmp_path):
    trace(0, 2).write(tmp_path / "rank0.pt.trace.json")
    (tmp_path / "rank1.pt.trace.json").write_bytes(b"")
    run = tb_chopper.open_run(tmp_path)
    assert run.workers["rank"].tolist() == [0]
    [bad] = [f for f in run.findings if f.code == "unreadable_file"]
    assert (bad.severity, bad.file) == ("error", "rank1.pt.trace.json")
    result = analyze(tmp_path)["runs"][0]
    assert len(result["workers"]) == 1 and any("rank1.pt.trace.json" in f["message"] for f in result["findings"])


def test_a_file_that_is_removed_while_the_run_is_open(tmp_path):
    trace(0, 2).write(tmp_path / "rank0.pt.trace.json")
    gone = trace(1, 2).write(tmp_path / "rank1.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    gone.unlink()
    assert run.workers["rank"].tolist() == [0]
    assert "unreadable_file" in codes(run)


def test_the_second_open_gives_the_same_tables(tmp_path):
    trace().write(tmp_path / "rank0.pt.trace.json")
    first, second = tb_chopper.open_run(tmp_path), tb_chopper.open_run(tmp_path)
    kernels = first.kernels
    assert (tmp_path / ".chopper-cache").is_dir()
    assert second.kernels.equals(kernels) and second.steps.equals(first.steps)
    assert second.kernels.dtypes.equals(kernels.dtypes)
    assert second.findings == first.findings


def test_a_run_may_be_asked_by_several_threads(tmp_path):
    trace().write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(id(run.captures[0]))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(seen)) == 1


def test_more_communication_patterns(tmp_path):
    t = trace()
    t.launch("my_allreduce_kernel", at=900, start=910, dur=20)
    t.write(tmp_path / "rank0.pt.trace.json")
    plain = tb_chopper.open_run(tmp_path).timeline()
    told = tb_chopper.open_run(tmp_path, communication=["my_allreduce"]).timeline()
    assert told["communication_us"].iloc[0] - plain["communication_us"].iloc[0] == 20


def test_what_cannot_be_opened_is_said_in_one_line(tmp_path):
    with pytest.raises(NotFound, match="no such file or directory"):
        tb_chopper.open_run(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"no \*\.pt\.trace\.json"):
        tb_chopper.open_run(tmp_path)
    for name in ("a", "b"):
        trace().write(tmp_path / name / "rank0.pt.trace.json")
    with pytest.raises(NotFound, match="2 runs; open one of them: a, b"):
        tb_chopper.open_run(tmp_path)


def test_a_wrong_column_is_said_with_the_right_ones(tmp_path):
    trace().write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    for metric in (run.timeline, run.overlap, run.launch_overhead, run.hidden_communication, run.frequency):
        with pytest.raises(InvalidSelection, match="operation"):
            metric(by="opration")
