"""A run and its counters: read when asked for, on the kernels of its trace; peaks by the trace or by the user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tb_chopper.backend.readers import counter_files
from tb_chopper.backend.run import open_run
from tb_chopper.backend.simulate import Options, simulate
from tests.builders import TraceBuilder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("run"), Options(preset="tiny"))[0]


def test_counters_are_read_when_asked_for_and_not_for_the_overview(directory, monkeypatch):
    asked = []
    real = counter_files.read
    monkeypatch.setattr(counter_files, "read", lambda folder: asked.append(folder) or real(folder))
    run = open_run(directory)
    run.view("overview")
    run.view("launch")
    assert run.findings is not None and not asked
    table = run.overhead_breakdown(by=["operation", "phase"])
    run.overhead_breakdown(by="phase")
    assert asked == [directory / "counters"]
    assert (table["source"] == "measured").sum() > 10
    assert run.counter_alignment.matched_share == 1 and not run.counter_findings
    assert run.counter_ratios()["matrix_utilization"].notna().any()
    gemm = run.roofline(by="op_type").set_index("op_type").loc["gemm"]
    assert gemm["bound"] == "compute" and 0.2 < gemm["share_of_attainable"] < 1


def test_the_second_open_reads_no_text_and_a_changed_file_is_read_again(directory, tmp_path, monkeypatch):
    folder = shutil.copytree(directory, tmp_path / "run")
    first = open_run(folder)
    table = first.overhead_breakdown(["gpu", "operation", "phase"])
    asked = []
    real = counter_files.read
    monkeypatch.setattr(counter_files, "read", lambda path: asked.append(path) or real(path))
    second = open_run(folder)
    pd.testing.assert_frame_equal(second.overhead_breakdown(["gpu", "operation", "phase"]), table)
    pd.testing.assert_frame_equal(second.counters.counters, first.counters.counters)
    assert not asked and second.counters.findings == first.counters.findings
    path = next(folder.glob("counters/pass_2/*/r0_*_counter_collection.csv"))
    path.write_text("\n".join(path.read_text().splitlines()[:-60]))
    third = open_run(folder)
    assert len(third.counters.counters) < len(first.counters.counters) and len(asked) == 1


def test_a_run_without_counters_has_empty_tables(directory, tmp_path):
    folder = shutil.copytree(directory, tmp_path / "run", ignore=shutil.ignore_patterns("counters"))
    run = open_run(folder)
    assert len(run.counters.counters) == 0 and run.counter_findings == []
    assert set(run.overhead_breakdown()["source"]) <= {"estimated", "unavailable"}
    assert run.counter_ratios()["matrix_utilization"].isna().all()


def test_counters_of_another_program_are_a_finding_of_their_own(directory, tmp_path):
    folder = shutil.copytree(directory, tmp_path / "run")
    for path in folder.glob("counters/*/*/*_counter_collection.csv"):
        frame = pd.read_csv(path)
        frame.assign(Kernel_Name="another_kernel").to_csv(path, index=False)
    run = open_run(folder)
    assert "counters_unmatched" in {f.code for f in run.counter_findings}
    assert "counters_unmatched" not in {f.code for f in run.findings}
    assert "measured" not in set(run.overhead_breakdown()["source"])


def test_the_ranks_that_processes_told_win_over_names(directory, tmp_path):
    """Files named by a launcher without RANK: only the identity tells whose they are."""
    folder = shutil.copytree(directory, tmp_path / "run")
    for path in folder.glob("counters/*/*/r*_*.csv"):
        rank, pid = path.name.split("_")[0][1:], path.name.split("_")[1]
        path.rename(path.with_name(path.name.replace(f"r{rank}_", "r_", 1)))
        told = {"host": "node0", "pid": int(pid), "rank": int(rank)}
        (path.parents[1] / f"node0_{pid}.identity.json").write_text(json.dumps(told))
    run = open_run(folder)
    assert len(run.counters.ranks) == 6 and run.counter_alignment.matched_share == 1
    assert not {f.code for f in run.counter_findings}


@pytest.mark.parametrize(("properties", "name", "units"), [
    ({"name": "AMD Instinct MI300X", "numSms": 304}, "MI300X", 304),
    ({"name": "", "numSms": 304}, "MI300X or MI325X", 304),  # one peak
    ({"name": "AMD Instinct MI300X", "numSms": 38}, "MI300X (38 of 304 units)", 38),  # a partition
    ({"name": "NVIDIA H100", "numSms": 114}, "H100 PCIe", 114),
    ({"name": "AMD Instinct MI300X"}, "MI300X", 304),
    ({"name": "", "numSms": 7}, None, None),
])
def test_the_hardware_by_name_and_units(tmp_path, properties, name, units):
    trace = TraceBuilder("rocm").training_step(0, 0)
    trace.head["deviceProperties"] = [{"id": trace.device, **properties}]
    found = open_run(trace.write(tmp_path / "w.pt.trace.json")).hardware[0]
    assert (found and found.name, found and found.units) == (name, units)


def test_the_user_tells_the_peaks(directory):
    run = open_run(directory, hardware={"peak_tflops": 1000.0, "f_peak_mhz": 2000.0})
    default = open_run(directory)
    assert run.hardware[0].peak("bf16") == (1e15, 2000.0)
    mine, table = (r.overhead_breakdown().set_index("operation")["d_thr_us"]["mlp_up"] for r in (run, default))
    assert mine / table == pytest.approx(1307.4432 / 1000)


def test_peaks_on_the_command_line(directory, tmp_path, capsys):
    from tb_chopper import cli

    out = tmp_path / "report.md"
    assert cli.main(["report", str(directory), "-o", str(out), "--hardware", "units=304,peak_tflops=2614.9"]) == 0
    assert "would be faster than the peak" not in out.read_text()
    assert cli.main(["report", str(directory), "-o", str(out), "--hardware", "peak_tflops=600,f_peak_mhz=2100"]) == 0
    assert "faster than the peak allows" in out.read_text()
    assert cli.main(["report", str(directory), "-o", str(out), "--hardware", "peak=600"]) == 2
    assert "no property of a GPU" in capsys.readouterr().err
