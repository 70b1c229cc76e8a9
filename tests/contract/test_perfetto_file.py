"""The .pftrace read back against the tables."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tb_chopper
from tb_chopper.backend.export import chrome, perfetto
from tb_chopper.backend.export.slices import edges, lanes
from tb_chopper.backend.readers import kineto
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate
from tests.builders import TraceBuilder
from tests.contract import pftrace
from tests.contract.test_augmented_trace import NAMES

pytest.importorskip("perfetto.protos")

REAL = ["ddp4_mi300x", "resnet50_v100", "sglang_decode_graph_mi300x", "nccl_a100"]


def exported(run: Run, tmp_path: Path) -> pftrace.Content:
    perfetto.export(run, tmp_path / "out.pftrace")
    return pftrace.read(tmp_path / "out.pftrace")


def on_streams(found: pftrace.Content) -> list[pftrace.Slice]:
    return [s for path, slices in found.slices.items() if "/stream " in path for s in slices]


@pytest.mark.parametrize("name", REAL)
def test_kernels_are_those_of_the_table(shared: Path, tmp_path: Path, name: str) -> None:
    run = tb_chopper.open_run(shared / "traces" / name)
    slices = on_streams(exported(run, tmp_path))
    k = run.kernels
    expected = Counter(zip(
        "GPU " + k["gpu"].astype(str) + " stream " + k["stream"].astype(str), k["name"], k["start_ns"], k["end_ns"],
        k["operation"], k["step"].astype(object).where(k["step"].notna(), None), strict=True))

    def place(s: pftrace.Slice) -> str:
        gpu, stream = s.track.split("/")[-2:]
        return f"{gpu.split(' · ')[0]} {stream}"

    assert Counter((place(s), s.name, s.start_ns, s.end_ns, s.args["operation"], s.args.get("step"))
                   for s in slices) == expected
    assert sum(s.args.get("prep_us", 0) for s in slices) == pytest.approx(k["prep_ns"].sum() / 1000)
    assert sum(s.args.get("call_us", 0) for s in slices) == pytest.approx(k["call_ns"].sum() / 1000)


@pytest.mark.parametrize("name", ["ddp4_mi300x/rank0.pt.trace.json.gz", "nccl_a100/rank0.pt.trace.json.gz"])
def test_host_events_are_those_of_the_file(shared: Path, tmp_path: Path, name: str) -> None:
    run = tb_chopper.open_run(shared / "traces" / name)
    found = exported(run, tmp_path)
    host = kineto.read(shared / "traces" / name).host
    slices = [s for path, own in found.slices.items() if "/GPU " not in path for s in own]
    assert Counter((s.name, s.start_ns, s.end_ns) for s in slices) == Counter(
        zip(host["name"], host["start_ns"], host["end_ns"], strict=True))


def test_flows_lead_from_launch_to_kernel(tmp_path: Path) -> None:
    for rank in range(2):
        t = TraceBuilder(rank=rank, world_size=2)
        t.training_step(0, 0)
        t.write(tmp_path / f"rank{rank}.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    found = exported(run, tmp_path)
    launches = {s.flows[0]: s for path, own in found.slices.items() if "/GPU " not in path for s in own if s.flows}
    kernels = [s for s in on_streams(found) if s.flows]
    assert len(kernels) == len(launches) == len(run.kernels)
    for kernel in kernels:
        launch = launches[kernel.flows[0]]
        assert launch.track.split("/")[0] == kernel.track.split("/")[0] and launch.start_ns < kernel.start_ns


def test_ranks_are_processes_on_one_clock(tmp_path: Path) -> None:
    for rank, zero in enumerate((10**18, 10**18 + 5_000)):
        t = TraceBuilder(rank=rank, world_size=2, zero_ns=zero)
        t.training_step(0, 0)
        t.write(tmp_path / f"rank{rank}.pt.trace.json")
    found = exported(tb_chopper.open_run(tmp_path), tmp_path)
    assert [name.split(" · ")[0] for _, name in found.processes] == ["rank 0", "rank 1"]
    assert len({pid for pid, _ in found.processes}) == 2  # both are process 4711 on their hosts
    first = [min(s.start_ns for s in on_streams(found) if s.track.startswith(f"rank {r}")) for r in (0, 1)]
    assert first[1] - first[0] == 5_000


def test_a_simulated_node_shows_its_clocks(tmp_path: Path) -> None:
    (folder,) = simulate(tmp_path / "sim", Options(preset="tiny"))
    run = tb_chopper.open_run(folder)
    found = exported(run, tmp_path)
    samples = run.telemetry.samples
    for gpu in samples["gpu"].unique():
        (track,) = (c for path, c in found.counters.items()
                    if f"/GPU {gpu} " in path and path.endswith("/Engine clock"))
        mine = samples[(samples["gpu"] == gpu) & samples["clock_mhz"].notna()]
        assert set(track) <= set(zip(mine["t_ns"], mine["clock_mhz"], strict=True)) and track
    assert {"Step", "Phase", "Layer"} <= {path.rsplit("/", 1)[-1] for path in found.slices}


def test_hosts_whose_clocks_differ_are_put_on_the_first_ones(tmp_path: Path) -> None:
    (folder,) = simulate(tmp_path / "sim", Options(preset="tiny", hosts=2, ranks=1, clock_skew_us=500))
    run = tb_chopper.open_run(folder)
    slices = on_streams(exported(run, tmp_path))
    for gpu, planted_ns in ((0, 0), (1, 500_000)):
        table = run.kernels[run.kernels["gpu"] == gpu]
        first = min(s.start_ns for s in slices if f"/GPU {gpu} " in s.track)
        assert table["start_ns"].min() - first == pytest.approx(planted_ns, abs=50_000)
        total = sum(s.end_ns - s.start_ns for s in slices if f"/GPU {gpu} " in s.track)
        assert total == (table["end_ns"] - table["start_ns"]).sum()


def test_any_name_survives(tmp_path: Path) -> None:
    t = TraceBuilder()
    for i, text in enumerate(NAMES):
        t.op(text, 20 * i, 10)
        t.launch(text, 20 * i, 5 + 20 * i, 7)
    found = exported(tb_chopper.open_run(t.write(tmp_path / "a.json")), tmp_path)
    assert sorted(s.name for s in on_streams(found)) == sorted(NAMES)
    assert sorted(s.args["operation"] for s in on_streams(found)) == sorted(NAMES)


@pytest.mark.parametrize("name", REAL)
def test_at_most_a_third_of_the_gzipped_json(shared: Path, tmp_path: Path, name: str) -> None:
    run = tb_chopper.open_run(shared / "traces" / name)
    exported(run, tmp_path)
    total = 0
    for capture in run.captures:
        chrome.export(run, capture, tmp_path / "out.json.gz")
        total += os.path.getsize(tmp_path / "out.json.gz")
    assert os.path.getsize(tmp_path / "out.pftrace") <= total / 3


def test_lanes_nest_and_lose_nothing() -> None:
    random = np.random.default_rng(0)
    start = random.integers(0, 1000, 400)
    end = start + random.integers(0, 60, 400)
    found = lanes(start, end)
    assert sorted(np.concatenate(found)) == list(range(400))
    for rows in found:
        stack: list[int] = []
        last = -1
        for t, row in edges(rows, start, end):
            assert t >= last
            last = t
            if row >= 0:
                assert t == start[row] and all(end[other] >= end[row] for other in stack)
                stack.append(row)
            else:
                assert end[stack.pop()] == t
        assert not stack


def test_a_cpu_profile_has_no_gpu(tmp_path: Path) -> None:
    t = TraceBuilder(rank=None)
    t.op("aten::mm", 0, 10)
    found = exported(tb_chopper.open_run(t.write(tmp_path / "a.json")), tmp_path)
    assert [s.name for own in found.slices.values() for s in own] == ["aten::mm"]
