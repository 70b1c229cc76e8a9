"""The tabs Collectives, Stragglers, Memory and Host: what they say of runs whose answer is known (µs)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tb_chopper.backend.views.view import View
from tests.builders import TraceBuilder

LATE, STEP = 40, 1000
VIEWS = ("collectives", "stragglers", "memory", "host")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three ranks and six steps; rank 2's loader makes it 40 µs late for the collective of each step."""
    folder = tmp_path_factory.mktemp("late")
    for rank in range(3):
        trace = TraceBuilder(rank=rank, world_size=3)
        trace.head["deviceProperties"][0]["totalGlobalMem"] = 4000
        for step in range(6):
            at, late = STEP * step, LATE if rank == 2 else 0
            trace.step(step, at, 990)
            trace.op("aten::mm", at + 10, 20, seq=step)
            trace.launch("gemm", at + 15, at + 20, 100)
            trace.op("autograd::engine::evaluate_function: MmBackward0", at + 30, 20, seq=step, fwd_thread=1)
            trace.launch("gemm_bwd", at + 35, at + 120, 100)
            if late:
                trace.annotation("enumerate(DataLoader)#__next__", at + 225, 35)
            trace.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", at + 218 + late, 40)
            trace.collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 219 + late, at + 220 + late, 100 - late,
                             Seq=step + 1, **{"Group size": 3, "In msg nelems": 250_000})
            trace.memory(at + 40, 500, 1000 + 500 * rank, 2000)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return tb_chopper.open_run(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("alone")
    TraceBuilder().training_step(0, 0).training_step(1, 1000).write(folder / "w.pt.trace.json")
    return tb_chopper.open_run(folder)


def figure(view: View, label: str) -> object:
    return next(k.value for k in view.key_figures if k.label == label)


def test_collectives(run: Run):
    view = run.view("collectives")
    assert view.headline.endswith("GPU 2 arrives last in 6 of 6 collectives.")
    assert figure(view, "Exposed waiting") == 2 * 6 * LATE
    assert figure(view, "Exposed") == 6 * (100 + 100 + 60)
    assert figure(view, "Skew, median") == LATE
    assert figure(view, "Transfer, median") == 60
    # 1 MB in 60 µs, 2 · 2 / 3.
    assert figure(view, "Best bus bandwidth") == f"{1e6 / 60e-6 * 4 / 3 / 1e9:.1f} GB/s"
    parts = {t.name: t.x for t in view.figures["by_gpu"].data}
    assert [sum(x) for x in zip(*parts.values(), strict=True)] == pytest.approx([600, 600, 360])
    assert view.tables["process_groups"].rows["role"].tolist() == ["data"]
    assert view.tables["barrier"].rows["late_gpu"].tolist() == [2] * 6


def test_collectives_by_step_and_gpu(run: Run):
    view = run.view("collectives", by="step", step=(2, 3))
    assert view.tables["groups"].rows["step"].tolist() == [2, 3]
    assert figure(run.view("collectives", gpu=0), "Exposed waiting") == 6 * LATE


def test_stragglers(run: Run):
    view = run.view("stragglers")
    assert view.tables["gpus"].rows["gpu"].iloc[0] == 2
    assert view.tables["gpus"].rows["last_share"].tolist() == [1, 0, 0]
    assert view.tables["steps"].rows["outlier"].sum() == 0
    assert "Step" not in view.headline
    assert "GPU 2" in view.headline


def test_memory(run: Run):
    view = run.view("memory")
    assert view.headline.startswith("GPU 0 holds 50 % of its memory at most")
    assert figure(view, "Peak allocated") == 2000
    assert figure(view, "Headroom") == 2000
    assert view.tables["gpus"].rows["of_peers"].tolist() == pytest.approx([2 / 3, 1, 4 / 3])
    assert run.view("memory", gpu=1).tables["gpus"].rows["gpu"].tolist() == [1]


def test_host(run: Run):
    view = run.view("host", by="gpu")
    causes = view.tables["causes"].rows.query("gpu == 2").set_index("cause")["idle_us"]
    assert causes["Data loading"] == 6 * 34  # from 225 to 259, when the launch began: the gap began at 220
    path = view.tables["path"].rows
    assert path["share"].sum() == pytest.approx(1)
    assert path.groupby("gpu")["time_us"].sum().idxmax() == 2  # the late one
    calls = view.tables["calls"].rows[["gpu", "kind", "n", "time_us"]]
    assert calls.to_numpy().tolist() == [[2, "Data loading", 6, 210]]


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_travels_and_takes_a_selection(run: Run, alone: Run, name: str):
    for opened in (run, alone):
        for selection in ({}, {"gpu": 0}, {"step": 1}, {"gpu": [0], "step": (0, 1), "span": 0}):
            made = opened.view(name, **selection).as_dict()
            json.dumps(made, allow_nan=False)
            assert made["headline"]


def test_one_rank_alone_says_what_is_missing(alone: Run):
    assert "the traces of the others" in alone.view("collectives").headline
    assert [m.what for m in alone.view("collectives").missing] == ["Waiting for other ranks"]
    assert [m.what for m in alone.view("stragglers").missing] == ["Comparison of GPUs"]
    assert [m.what for m in alone.view("memory").missing] == [
        "Memory over time", "Memory as the driver counts", "Expected state of the model"]


def test_ranks_whose_messages_cannot_be_matched_are_not_called_alone(tmp_path: Path):
    """gloo on the CPU tells neither peer nor sequence number of a message."""
    for rank in (0, 1):
        trace = TraceBuilder(rank=rank, world_size=2)
        trace.step(0, 0, 900)
        for i in range(2 + rank):
            trace.collective("ncclDevKernel_SendRecv", 10 + 50 * i, 12 + 50 * i, 20,
                             **{"Collective name": "send", "In msg nelems": 0, "Out msg nelems": 0})
        trace.write(tmp_path / f"rank{rank}.pt.trace.json")
    view = tb_chopper.open_run(tmp_path).view("collectives")
    assert "these traces do not tell" in view.headline and "bandwidth" not in view.figures
    assert "do not tell which" in view.missing[0].why


@pytest.mark.parametrize("name", VIEWS)
def test_a_run_without_kernels(tmp_path: Path, name: str):
    trace = TraceBuilder()
    trace.annotation("x", 0, 10)
    view = tb_chopper.open_run(trace.write(tmp_path / "w.pt.trace.json")).view(name)
    assert view.headline
