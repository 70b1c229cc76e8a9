"""The command line: exit codes, one line on errors, JSON as documented."""

from __future__ import annotations

import json

import pytest

from tb_chopper.cli import main
from tests.builders import TraceBuilder

GPU_TIME = {"compute", "communication", "memcpy", "overlap", "exposed_communication", "exposed_memcpy", "busy", "idle",
            "total"}
LAUNCH = {"prep", "call", "call_under_communication", "launch", "graph", "unattributed"}


@pytest.fixture
def log(tmp_path):
    trace = TraceBuilder("cuda", 0, 1).training_step(3, 0).training_step(4, 1000)
    trace.write(tmp_path / "run" / "rank0.pt.trace.json")
    return tmp_path


def test_analyze_json_has_the_documented_shape(log, capsys):
    assert main(["analyze", str(log), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema_version"] == 1
    [run] = result["runs"]
    assert set(run) == {"run", "workers", "step_ms", "diagnosis", "findings"} and run["run"] == "run"
    assert run["step_ms"] == 1.0
    [worker] = run["workers"]
    assert set(worker) == {"file", "rank", "host", "gpu_name", "device", "n_kernels", "n_steps", "gpu_time_us",
                           "launch_us", "steps", "findings"}
    assert (worker["file"], worker["rank"], worker["device"], worker["n_kernels"], worker["n_steps"]) == (
        "rank0.pt.trace.json", 0, "0", 12, 2)
    assert set(worker["gpu_time_us"]) == GPU_TIME and set(worker["launch_us"]) == LAUNCH
    assert [s["step"] for s in worker["steps"]] == [3, 4]
    # Worked out from the builder: per step 2 x 45 + 2 x 45.5 + 60.25 of compute and 100 of communication.
    assert worker["gpu_time_us"]["compute"] == 2 * 241.25
    assert worker["gpu_time_us"]["communication"] == 200


def test_analyze_says_what_costs_time(log, capsys):
    """The builder's step: 241.25 µs of compute, 100 of communication of which 35.5 under compute, of 1000."""
    assert main(["analyze", str(log), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["runs"][0]["diagnosis"]
    assert set(found) == {"code", "severity", "title", "message", "evidence", "cause", "remedy", "gain_ms", "gain_how",
                          "gpus", "steps", "view"}
    assert found["code"] == "low_utilization" and found["gain_ms"] == pytest.approx(0.69425)
    assert main(["analyze", str(log)]) == 0
    out = capsys.readouterr().out
    assert "What costs time in a step of 1.000 ms" in out
    assert "1. The GPUs are idle for much of the step: about 694.250 µs per step (69.4%) [low_utilization]" in out


@pytest.mark.parametrize(("asked", "code"), [
    (["warning"], 1), (["info"], 1), (["low_utilization"], 1), (["slow_gpu", "low_utilization"], 1), (["slow_gpu"], 0)])
def test_fail_on_is_an_exit_code(log, capsys, asked, code):
    assert main(["analyze", str(log), *(f"--fail-on={name}" for name in asked)]) == code
    assert ("found low_utilization" in capsys.readouterr().err) == bool(code)


def test_fail_on_knows_its_rules(log, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["analyze", str(log), "--fail-on", "slow"])
    assert ended.value.code == 2 and "slow_gpu" in capsys.readouterr().err


def test_analyze_prints_a_report(log, capsys):
    assert main(["analyze", str(log)]) == 0
    out = capsys.readouterr().out
    assert "Run run" in out and "rank 0, NVIDIA H100 80GB HBM3" in out


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b", b'{"nodes": []}', b"not json"])
def test_nothing_usable_is_exit_code_2_and_one_line(tmp_path, capsys, content):
    (tmp_path / "rank0.pt.trace.json").write_bytes(content)
    assert main(["analyze", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out.strip() == "" or "rank0" not in printed.out.splitlines()[0]
    assert printed.err.count("\n") == 1 and "rank0.pt.trace.json" in printed.err


def test_a_path_without_traces_is_exit_code_2_and_one_line(tmp_path, capsys):
    assert main(["analyze", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_markup_in_a_name_is_text(tmp_path, capsys):
    t = TraceBuilder("cuda", None)
    t.launch("<script>alert(1)</script>" + "x" * 5000, at=0, start=10, dur=10)
    t.write(tmp_path / "w.pt.trace.json")
    assert main(["analyze", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["workers"][0]["n_kernels"] == 1


def test_simulate_writes_runs_that_analyze_reads(tmp_path, capsys):
    assert main(["simulate", str(tmp_path), "--preset", "tiny"]) == 0
    assert main(["analyze", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert len(json.loads(out[out.index("{"):])["runs"][0]["workers"]) == 2
