"""Files that are valid JSON and hold what no profiler means: each costs itself at most, never a traceback."""

from __future__ import annotations

import os
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend.analyze import analyze, text
from tb_chopper.backend.errors import InvalidSelection
from tests.builders import TraceBuilder


def good(rank: int = 0, world_size: int = 2) -> TraceBuilder:
    return TraceBuilder("rocm", rank, world_size).training_step(4, 0).training_step(5, 1000)


def findings(run: tb_chopper.Run) -> dict[str, str]:
    return {f.code: f.message for f in run.findings}


HEADS: dict[str, dict[str, Any]] = {
    "rank beyond int64": {"distributedInfo": {"rank": 2**63, "world_size": 2}},
    "world size of digits": {"distributedInfo": {"rank": 0, "world_size": 10**30}},
    "world size of millions": {"distributedInfo": {"rank": 0, "world_size": 200_000_000}},
    "rank as text": {"distributedInfo": {"rank": "0", "world_size": None}},
    "devices that are none": {"deviceProperties": [None, "x", [], {"id": 2, "name": {}, "numSms": []}]},
    "host as a list": {"host_name": ["x"]},
    "host as an object": {"host_name": {}},
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_metadata(tmp_path, head):
    t = good()
    t.head |= head
    t.write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert run.workers["n_kernels"].tolist() == [12]
    assert run.efficiency()["time_us"].iloc[0] > 0
    assert len(run.findings) < 10


@pytest.mark.parametrize("base", ["Infinity", "1e999", '"soon"', "[]", "-5"])
def test_base_time(tmp_path, base):
    path = good().write(tmp_path / "rank0.pt.trace.json")
    written = f'"baseTimeNanoseconds": {good().zero_ns}'
    path.write_text(path.read_text().replace(written, f'"baseTimeNanoseconds": {base}'))
    assert tb_chopper.open_run(tmp_path).workers["n_kernels"].tolist() == [12]


@pytest.mark.parametrize("where", ["args", "metadata", "event"])
def test_nesting_without_end(tmp_path, where):
    deep = "[" * 100_000
    content = good().text("compact")
    damaged = {
        "args": content.replace('"correlation":101', f'"correlation":{deep}', 1),
        "metadata": content.replace('"schemaVersion":1', f'"schemaVersion":{deep}', 1),
        "event": content.replace('"traceEvents":[', f'"traceEvents":[{deep}', 1),
    }[where]
    (tmp_path / "rank1.pt.trace.json").write_text(damaged)
    good(0).write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert 0 in run.workers["rank"].tolist()
    severity = "warning" if where == "metadata" else "error"
    assert any(f.severity == severity and "rank1" in f.file for f in run.findings)


@pytest.mark.parametrize("shape", ['"x"', "true", "Infinity", "[[1]]", "[]", "[1,-2]", "null", '{"x":1}'])
def test_grids(tmp_path, shape):
    t = good()
    t.launch("gemm", at=900, start=905, dur=20, grid=[1, 2, 3], block=[4, 5, 6])
    path = t.write(tmp_path / "rank0.pt.trace.json", "compact")
    path.write_text(path.read_text().replace("[1,2,3]", shape).replace("[4,5,6]", shape))
    assert len(tb_chopper.open_run(tmp_path).efficiency()) == 1


def test_a_step_number_beyond_int64(tmp_path):
    t = good()
    t.annotation("ProfilerStep#99999999999999999999", 2000, 10)
    t.write(tmp_path / "rank0.pt.trace.json")
    assert tb_chopper.open_run(tmp_path).steps["step"].tolist() == [4, 5]


@pytest.mark.parametrize("at", [-9e12, 9e12], ids=["long before", "long after"])
def test_one_time_far_from_all_others_is_left_out(tmp_path, at):
    t = good()
    t.kernel("gemm", at, 5)
    t.write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert run.workers["n_kernels"].tolist() == [12]
    assert "implausible_time" in findings(run)
    assert run.timeline()["total_us"].iloc[0] < 3000


def test_two_devices_with_steps(tmp_path):
    t = good()
    t.device = 5
    t.training_step(6, 2000)
    t.kernel("gemm", 2900, 5, device="5")
    t.write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert run.workers["device"].tolist() == ["2", "5"]
    assert set(run.steps.groupby("device", observed=True).size()) == {3}
    assert run.view("overview").figures


def test_the_same_capture_twice_is_told(tmp_path):
    for name in ("w.1", "w.2"):
        good(0, 1).write(tmp_path / f"{name}.pt.trace.json")
    assert "w.2.pt.trace.json" in findings(tb_chopper.open_run(tmp_path))["capture_twice"]


def test_an_incomplete_step_is_told(tmp_path):
    t = good(0, 1)
    t.step(6, 2000, 990)
    t.launch("gemm_fwd", 2010, 2060, 45)
    t.write(tmp_path / "rank0.pt.trace.json")
    assert findings(tb_chopper.open_run(tmp_path))["incomplete_step"].startswith("possibly incomplete steps")


def test_kernels_taken_as_communication_are_named(tmp_path):
    good(0, 1).write(tmp_path / "rank0.pt.trace.json")
    assert "ncclDevKernel_AllReduce" in findings(tb_chopper.open_run(tmp_path))["communication_kernels"]


def test_a_file_written_again_with_the_old_time_is_read_again(tmp_path):
    path = good(0, 1).write(tmp_path / "rank0.pt.trace.json")
    stat, before = path.stat(), tb_chopper.open_run(tmp_path).timeline()["compute_us"].iloc[0]
    path.write_text(path.read_text().replace('"dur": 60.250', '"dur": 61.250'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert tb_chopper.open_run(tmp_path).timeline()["compute_us"].iloc[0] == before + 2


def test_a_folder_whose_name_is_no_text(tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), b"bad\xff")
    os.mkdir(folder)
    good(0, 1).write(tmp_path / "a.pt.trace.json").rename(os.path.join(os.fsdecode(folder), "a.pt.trace.json"))
    assert len(analyze(tmp_path)["runs"][0]["workers"]) == 1


def test_names_do_not_steer_the_terminal(tmp_path):
    good(0, 1).write(tmp_path / "run\x1b[31m\nx" / "rank0.pt.trace.json")
    printed = text(analyze(tmp_path))
    assert "\x1b" not in printed and "run\\x1b" in printed


SELECTIONS: list[dict[str, Any]] = [
    {"by": None}, {"by": 5}, {"by": [["gpu"]]}, {"where": "gpu"}, {"where": ["gpu"]}, {"where": {"step": {1: 2}}},
    {"where": {"step": "4"}}, {"where": {"gpu": "0"}}, {"where": {"step": True}}, {"where": {"colour": 1}},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=map(repr, SELECTIONS))
def test_a_selection_that_means_nothing_is_refused(tmp_path, selection):
    good(0, 1).write(tmp_path / "rank0.pt.trace.json")
    with pytest.raises(InvalidSelection):
        tb_chopper.open_run(tmp_path).timeline(**selection)


def test_selections_of_any_kind_of_list(tmp_path):
    good(0, 1).write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    whole = run.timeline("step", {"step": [4]})
    for wanted in (4, (4,), range(4, 5), iter([4]), {4}, run.steps["step"].iloc[:1], 4.0):
        assert run.timeline("step", {"step": wanted}).equals(whole), wanted
    assert run.timeline("step", {"step": range(10**18)})["step"].tolist() == [4, 5]
    assert run.timeline("kernel", {"layer": None})["kernel"].notna().all()
    with pytest.raises(InvalidSelection):
        run.view("launch", step=(0, 2**70))


def test_a_pattern_that_is_none(tmp_path):
    good(0, 1).write(tmp_path / "rank0.pt.trace.json")
    with pytest.raises(InvalidSelection, match="no regular expression"):
        tb_chopper.open_run(tmp_path, communication=["("]).timeline()
