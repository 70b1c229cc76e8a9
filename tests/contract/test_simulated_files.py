"""Other tools read the simulated files: torch's trace validator, torch-tb-profiler, HTA; and the sampler's schema."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tb_chopper.backend.simulate import Options, simulate
from torch_ext import sidecar, telemetry_format


@pytest.fixture(scope="module", params=[("rocm", 2), ("rocm", 1), ("cuda", 2)], ids=lambda p: f"{p[0]}-fsdp{p[1]}")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dialect, fsdp = request.param
    return simulate(tmp_path_factory.mktemp("log"), Options(dialect=dialect, fsdp=fsdp))[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("plain"), Options())[0]


@pytest.mark.torch
def test_torch_validates_the_traces(run: Path):
    validator = pytest.importorskip("torch.profiler._trace_validator")
    for trace in run.glob("*.pt.trace.json.gz"):
        passed, violations = validator.validate_trace(str(trace))
        assert passed, violations


def test_torch_tb_profiler_reads_the_run(run: Path):
    loader = pytest.importorskip("torch_tb_profiler.profiler.loader")
    io = pytest.importorskip("torch_tb_profiler.io")
    read = loader.RunLoader(run.name, str(run), io.Cache()).load()
    assert set(read.workers) >= {p.name.split(".")[0] for p in run.glob("*.pt.trace.json.gz")}
    names = [name for name in read.workers if name != "All"]
    workers = [read.get_profile(name, read.get_spans(name)[0]) for name in names]
    assert len(workers) == 2
    for worker in workers:
        assert worker.has_kernel
        assert {view.display_name for view in worker.views} >= {"Overview", "Operator", "Kernel", "Trace"}
    distributed = read.get_profile("All", read.get_spans("All")[0])
    assert all(step for step in distributed.steps_to_overlap["data"])


def test_hta_reads_the_run(run: Path):
    trace_analysis = pytest.importorskip("hta.trace_analysis")
    truth = pd.read_parquet(run / "truth/kernels.parquet")
    files = {rank: str(next(run.glob(f"*_r{rank}_*.pt.trace.json.gz"))) for rank in (0, 1)}
    analyzer = trace_analysis.TraceAnalysis(trace_files=files)
    breakdown = analyzer.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = analyzer.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    for rank in (0, 1):
        mine = truth[(truth["rank"] == rank) & truth["launched"]]  # HTA leaves out what was launched before
        total = (mine["end_ns"].max() - mine["start_ns"].min()) / 1000
        assert breakdown.loc[rank, "kernel_time(us)"] == pytest.approx(total, rel=0.001)
        communication = mine[mine["kind"] == "communication"]
        waiting = (communication["end_ns"] - communication["start_ns"]).sum()
        compute = _union(mine[mine["kind"] == "compute"])
        hidden = waiting + compute - _union(mine[mine["kind"] != "memcpy"])
        # HTA rounds every time to whole microseconds
        assert overlap[rank] == pytest.approx(100 * hidden / waiting, abs=2.0)


def _union(rows: pd.DataFrame) -> int:
    total, reached = 0, 0
    for start, end in sorted(zip(rows["start_ns"], rows["end_ns"], strict=True)):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def test_sidecars_follow_the_schema(run: Path):
    for trace in run.glob("*.pt.trace.json.gz"):
        content = sidecar.read(sidecar.path_for(trace))
        assert content["simulated"]
        assert not [n for n in content["notes"] if not n.startswith("simulated:")]
        assert content["identity"]["rank"] is not None


def test_the_log_follows_the_samplers_schema(run: Path):
    text = (run / telemetry_format.file_name("node0")).read_text()
    header, *lines = text.splitlines(keepends=True)
    assert header == telemetry_format.header()
    commas = header.count(",")
    assert all(line.endswith("\n") and line.count(",") == commas for line in lines)
    kinds = {line.partition(",")[0] for line in lines}
    assert kinds == {"start", "cpu_info", "gpu_info", "clock", "gpu", "cpu", "stop"}


COLUMNS = (
    "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,Workgroup_Size,"
    "LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,Counter_Name,Counter_Value,Start_Timestamp,"
    "End_Timestamp")
"""rocprofv3 of ROCm 6.4 and 7.0."""
COLUMNS_6_2 = (
    "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Name,Workgroup_Size,"
    "LDS_Block_Size,Scratch_Size,VGPR_Count,SGPR_Count,Counter_Name,Counter_Value")


@pytest.mark.parametrize(("version", "columns"), [("6.2", COLUMNS_6_2), ("6.4", COLUMNS), ("7.0", COLUMNS)])
def test_counter_files_have_the_columns_of_their_version(tmp_path: Path, version: str, columns: str):
    run = simulate(tmp_path, Options(counter_columns=version))[0]
    files = sorted(run.glob("counters/pass_*/node0/r*_counter_collection.csv"))
    assert len(files) == 3 * 2
    for file in files:
        head, first = file.read_text().splitlines()[:2]
        assert head == ",".join(f'"{c}"' for c in columns.split(","))
        assert ('"Agent 2"' in first or '"Agent 3"' in first) == (version == "7.0")


def test_agents_have_the_columns_of_a_real_file(shared: Path, plain: Path):
    real = next((shared / "counters" / "rocprofv3_mi355x").rglob("*_agent_info.csv"))
    ours = next(plain.glob("counters/pass_1/node0/r0_*_agent_info.csv"))
    assert ours.read_text().splitlines()[0] == real.read_text().splitlines()[0]


def test_the_trace_has_the_layout_of_a_real_file(shared: Path, plain: Path):
    """Keys and their order, per kind of event, as in a trace that torch wrote on the same GPU."""
    import gzip
    import json

    real = json.loads(gzip.decompress((shared / "traces/resnet_ac_ddp_mi300x/rank0.pt.trace.json.gz").read_bytes()))
    ours = json.loads(gzip.decompress(next(plain.glob("*_r0_*.pt.trace.json.gz")).read_bytes()))
    for name in ("hipLaunchKernel", "hipExtModuleLaunchKernel", "hipExtLaunchKernel", "hipStreamWaitEvent"):
        assert _layout(ours, name=name) == _layout(real, name=name)
    for category in ("kernel", "ac2g", "fwdbwd", "Trace", "gpu_user_annotation"):
        kinds = {k[:2] for k in _layouts(real, category)}
        assert {k[:2] for k in _layouts(ours, category)} <= kinds
    assert ours["deviceProperties"][0] == real["deviceProperties"][0]


def _layout(trace: dict, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    event = next(e for e in trace["traceEvents"] if e["name"] == name)
    return tuple(event), tuple(event["args"])


def _layouts(trace: dict, category: str) -> set[tuple]:
    return {(tuple(e), e["ph"]) for e in trace["traceEvents"] if e.get("cat") == category}
