"""Collecting under a profiler that the test itself provides: one that works, hangs, crashes, or leaves a rank out."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.readers import counter_files
from torch_ext import counters
from torch_ext.counters import CollectError, Profiler, collect, command_of, environment_of, find_profiler

FAKE = '''#!{python}
"""A stand-in for rocprofv3: understands its command line, runs the command once per rank, writes its files."""
import os, signal, subprocess, sys, time
args = sys.argv[1:]
own, command = args[:args.index("--")], args[args.index("--") + 1:]
counters = own[own.index("--pmc") + 1:own.index("--kernel-trace")]
folder, pattern = own[own.index("-d") + 1], own[own.index("-o") + 1]
behaviour = os.environ.get("FAKE", "")
number = os.environ["TB_CHOPPER_PASS"].rpartition("_")[2]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"{{number}} {{os.environ.get('LD_PRELOAD', '')}} {{os.getpid()}}\\n")
def wanted(what):
    return what in behaviour.split(",") or f"{{what}}@{{number}}" in behaviour.split(",")
if wanted("crash"):
    print("Segmentation fault"); sys.exit(139)
if wanted("silent"):
    sys.exit(0)
if wanted("locked"):
    print("Device 2 has a profiler attached to it. PMC Counters may be inaccurate")
if wanted("hang"):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, 1); "
                              "signal.signal(signal.SIGTERM, 1); time.sleep(600)"])
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"child {{child.pid}}\\n")
    time.sleep(600)
if wanted("slow"):
    for _ in range(400):
        print("step", flush=True); time.sleep(0.05)
code = subprocess.run(command).returncode
header = ("Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,"
          "Workgroup_Size,LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,Counter_Name,"
          "Counter_Value,Start_Timestamp,End_Timestamp")
for rank in range(1 if wanted("lost") else 2):
    pid = 1000 * int(number) + rank
    path = pattern.replace("%hostname%", "node7").replace("%env{{RANK}}%", str(rank)).replace("%pid%", str(pid))
    path = os.path.join(folder, path) + "_counter_collection.csv"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as out:
        out.write(",".join(f'"{{h}}"' for h in header.split(",")) + "\\n")
        for dispatch in range(1, 4):
            for counter in counters[:-1] if wanted("half") else counters:
                out.write(f'{{dispatch}},{{dispatch}},"Agent {{rank + 2}}",1,{{pid}},{{pid}},256,1,"k",256,0,0,8,0,16,'
                          f'"{{counter}}",4.0,{{dispatch * 1000}},{{dispatch * 1000 + 500}}\\n')
sys.exit(code)
'''


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Profiler:
    path = tmp_path / "bin" / "rocprofv3"
    path.parent.mkdir()
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls"))
    return Profiler("rocprofv3", str(path))


COMMAND = [sys.executable, "-c", "pass"]
QUICK = {"counters": ["SQ_WAVES", "SQ_BUSY_CYCLES", "SQ_CYCLES"], "grace_s": 0.2}


def run(fake: Profiler, tmp_path: Path, **options) -> counters.Report:
    said: list[str] = []
    report = collect(COMMAND, tmp_path / "run", profiler=fake, progress=said.append, **{**QUICK, **options})
    report.notes += said
    return report


def test_every_pass_of_every_rank_reads_back(fake, tmp_path):
    report = run(fake, tmp_path)
    assert report.ok and [p.status for p in report.passes] == ["done", "done"]
    read = counter_files.read(tmp_path / "run")
    assert set(schema.counter_names(read.counters)) == {"GRBM_GUI_ACTIVE", "SQ_WAVES", "SQ_BUSY_CYCLES", "SQ_CYCLES"}
    groups = read.counters.groupby(["pass", "rank"])
    assert {key: len(rows) for key, rows in groups} == {(1, 0): 3, (1, 1): 3, (2, 0): 3, (2, 1): 3}
    assert read.counters.loc[read.counters["pass"] == 2, "SQ_WAVES"].isna().all()


@pytest.mark.parametrize(("behaviour", "statuses", "note"), [
    ("crash@1", ["failed", "done"], "log.txt"),
    ("silent@2", ["done", "empty"], "log.txt"),
    ("lost@2", ["done", "done"], "1 of 2 processes"),
    ("half@1", ["done", "done"], "no values of SQ_BUSY_CYCLES"),
    ("locked@1", ["done", "done"], "another profiler"),
])
def test_what_goes_wrong_in_one_pass_is_said_and_costs_no_other(fake, tmp_path, monkeypatch, behaviour, statuses, note):
    monkeypatch.setenv("FAKE", behaviour)
    report = run(fake, tmp_path)
    assert [p.status for p in report.passes] == statuses and not report.ok
    concerned = report.passes[int(behaviour[-1]) - 1]
    assert any(note in n for n in concerned.notes)


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_pass_that_hangs_is_stopped_with_all_its_children_and_the_next_one_runs(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "hang@1")
    started = time.monotonic()
    report = run(fake, tmp_path, stall_limit_s=0.5)
    assert [p.status for p in report.passes] == ["stalled", "done"] and time.monotonic() - started < 20
    child = next(int(line.split()[1]) for line in (tmp_path / "calls").read_text().splitlines() if "child" in line)
    assert gone(child)


def test_a_pass_that_gets_on_is_not_stalled_but_has_a_time_limit(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "slow@1")
    report = run(fake, tmp_path, stall_limit_s=1.0, time_limit_s=2.5)
    assert report.passes[0].status == "timed_out" and 2.0 < report.passes[0].seconds < 10


def test_resume_runs_only_what_is_missing(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE", "silent@2")
    run(fake, tmp_path)
    monkeypatch.setenv("FAKE", "")
    report = run(fake, tmp_path, resume=True)
    assert report.ok
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == ["1", "2", "2"]
    state = (tmp_path / "run" / "counters" / "collection.json").read_text()
    assert json.loads(state)["passes"][1]["status"] == "done" and sys.executable not in state
    other = collect([*COMMAND, "--other"], tmp_path / "run", profiler=fake, resume=True, progress=lambda t: None,
                    **QUICK)
    assert len((tmp_path / "calls").read_text().splitlines()) == 5 and other.ok


def test_a_dry_run_prints_what_it_would_run_and_writes_nothing(fake, tmp_path):
    report = run(fake, tmp_path, dry_run=True)
    lines = [n for n in report.notes if "--pmc" in n]
    assert len(lines) == 2 and "GRBM_GUI_ACTIVE SQ_WAVES SQ_BUSY_CYCLES" in lines[0]
    assert not (tmp_path / "run").exists() and not (tmp_path / "calls").exists()


def test_the_environment_is_clean_and_says_which_pass_it_is():
    inherited = {"LD_PRELOAD": "x.so", "ROCP_TOOL_LIB": "y", "ROCPROF_OUTPUT": "z", "HSA_TOOLS_LIB": "w",
                 "KINETO_CONFIG": "k", "PATH": "/bin", "TORCH_NCCL_ENABLE_MONITORING": "1"}
    env = environment_of(Path("/log/counters/pass_3"), inherited)
    assert env.pop("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    assert env == {"PATH": "/bin", "TB_CHOPPER_PASS": "/log/counters/pass_3", "TORCH_NCCL_ENABLE_MONITORING": "1"}


def test_files_of_ranks_cannot_collide():
    line = command_of(Profiler("rocprofv3", "rocprofv3"), ["A", "B"], Path("out/pass_1"), ["python", "t.py"])
    pattern = line[line.index("-o") + 1]
    assert all(part in pattern for part in ("%hostname%", "%env{RANK}%", "%pid%"))
    assert line[line.index("-f") + 1] == "csv" and line[-3:] == ["--", "python", "t.py"]
    ncu = command_of(Profiler("ncu", "ncu"), ["m.sum"], Path("out/pass_1"), ["python"])
    assert "%p" in ncu[ncu.index("--log-file") + 1] and ncu[ncu.index("--clock-control") + 1] == "none"


def test_communicators_that_may_deadlock_are_warned_of(fake, tmp_path):
    said: list[str] = []
    collect(["torchrun", "train.py"], tmp_path, profiler=fake, dry_run=True, progress=said.append, **QUICK)
    assert any("deadlock" in s for s in said)
    assert not any("deadlock" in s for s in run(fake, tmp_path, dry_run=True).notes)


def executable(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_a_profiler_is_found_where_it_is_installed(tmp_path):
    none = {"PATH": str(tmp_path / "nowhere")}
    with pytest.raises(CollectError, match="ROCM_PATH"):
        find_profiler(none, tmp_path)
    ncu = executable(tmp_path / "opt/nvidia/nsight-compute/2025.1.0/ncu")
    assert find_profiler(none, tmp_path) == Profiler("ncu", ncu)
    executable(tmp_path / "opt/rocm-6.4.1/bin/rocprofv3")
    newer = executable(tmp_path / "opt/rocm-7.0.0/bin/rocprofv3")
    assert find_profiler(none, tmp_path) == Profiler("rocprofv3", newer)
    named = executable(tmp_path / "custom/bin/rocprofv3")
    assert find_profiler({**none, "ROCM_PATH": str(tmp_path / "custom")}, tmp_path).path == named
    first = executable(tmp_path / "path/rocprofv3")
    assert find_profiler({"PATH": os.path.dirname(first)}, tmp_path).path == first


@pytest.mark.parametrize("profiler", [Profiler("rocprofv3", "/nowhere/rocprofv3")])
def test_what_does_not_start_is_one_line(tmp_path, profiler):
    with pytest.raises(CollectError, match="does not start"):
        collect(COMMAND, tmp_path, profiler=profiler, progress=lambda t: None, **QUICK)
    with pytest.raises(CollectError, match="no command"):
        collect([], tmp_path, profiler=profiler)


# ---- tb-chopper collect


def collected(*arguments: str) -> int:
    from tb_chopper import cli

    return cli.main(["collect", *arguments])


def test_the_command_line_collects_and_says_where(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{Path(fake.path).parent}:{os.environ['PATH']}")
    out = ["--out", str(tmp_path / "run"), "--counters", "SQ_WAVES,SQ_BUSY_CYCLES,SQ_CYCLES"]
    assert collected(*out, "--dry-run", "--", *COMMAND) == 0
    assert "--pmc GRBM_GUI_ACTIVE SQ_WAVES" in capsys.readouterr().err and not (tmp_path / "run").exists()
    monkeypatch.setenv("FAKE", "silent@2")
    assert collected(*out, "--", *COMMAND) == 1
    monkeypatch.setenv("FAKE", "")
    assert collected(*out, "--resume", "--", *COMMAND) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "run" / "counters")
    assert len((tmp_path / "calls").read_text().splitlines()) == 3
    assert counter_files.read(tmp_path / "run").counters["SQ_CYCLES"].notna().any()


@pytest.mark.parametrize(("arguments", "says"), [
    (["--counters", "SQ_WAVES"], "no command to run"), (["--per-pass", "1", "--", "python"], "at least 2")])
def test_what_cannot_be_collected_is_one_line(fake, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.setenv("PATH", f"{Path(fake.path).parent}:{os.environ['PATH']}")
    assert collected("--out", str(tmp_path), *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line
