"""The tab Parallelism on pipelines whose answer is known (µs)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tests.builders import TraceBuilder
from tests.unit.test_pipeline import INTERLEAVED, UNEVEN, played, traced
from tests.unit.test_rule_pipeline_bubble import record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """UNEVEN, times 10, in four steps; the second stage is twice as slow."""
    return record(tmp_path_factory.mktemp("pp"), UNEVEN)


def test_headline_and_key_figures(run: Run) -> None:
    """1500 µs, of which 1200 of bubble on both ranks together; at best 1350 with a third."""
    view = run.view("parallelism")
    assert view.headline == (
        "GPipe over 2 GPUs, 2 microbatches: 40 % of the time is bubble; a perfect schedule would have 33 %. "
        "150 µs of a step are above that, mostly by unequal stages, stage 1 is the slowest.")
    values = {k.label: k.value for k in view.key_figures}
    assert values["Schedule"] == "GPipe"
    assert values["Bubble"] == pytest.approx(1200 / 3000)
    assert values["Perfect schedule"] == pytest.approx(1 / 3)
    assert values["Above it, per step"] == pytest.approx(150)
    assert values["By unequal stages"] == pytest.approx(150)
    assert values["By messages, launches"] == pytest.approx(0)
    assert values["Slowest stage"] == pytest.approx(1 / 3)


def test_the_schedule_is_drawn_as_it_ran(run: Run) -> None:
    """A bar per action with the number of its microbatch, and one per bubble that says who is waited for."""
    view = run.view("parallelism")
    parts = {trace.name: trace for trace in view.figures["pipeline"].data}
    assert view.figures["pipeline"].layout.title.text == "Schedule of step 2"
    assert list(parts["Forward"].y) == [0, 0, 1, 1]
    assert list(parts["Forward"].base) == pytest.approx([0, 0.1, 0.1, 0.3])
    assert list(parts["Backward"].x) == pytest.approx([0.2, 0.2, 0.4, 0.4])
    assert list(parts["Forward"].text) == ["0", "1", "0", "1"]
    assert list(parts["Bubble"].x) == pytest.approx([0.7, 0.2, 0.1, 0.2])
    first, *_, last = parts["Bubble"].hovertext
    assert "700 µs</b> (fill) on GPU 0" in first and "next stage's gradient, computed by GPU 1" in first
    assert "before backward of microbatch 0" in first
    assert "nothing: it is done" in last
    assert not list(parts["Message and launch"].x)


def test_parts_of_a_rank_add_up_to_the_length(run: Run) -> None:
    view = run.view("parallelism")
    bars = [t for t in view.figures["times"].data if t.type == "bar"]
    assert [sum(t.x[i] for t in bars) for i in range(2)] == pytest.approx([1.5, 1.5])
    (line,) = [t for t in view.figures["times"].data if t.type == "scatter"]
    assert line.x[0] == pytest.approx(1.35)


def test_tables(run: Run) -> None:
    view = run.view("parallelism")
    ranks = view.tables["ranks"].rows
    assert ranks[["gpu", "fill_us", "drain_us", "wait_next_us"]].to_numpy().tolist() == [
        [0, 700, 200, 900], [1, 100, 200, 0]]
    # The Trace tab opens where the largest bubble ends.
    assert trace_link.find(run.kernels, ranks["at"].iloc[0])["name"] == "gemm"
    assert view.tables["stages"].rows["microbatch_us"].tolist() == pytest.approx([300, 600])
    assert view.tables["steps"].rows["total_us"].tolist() == [1500] * 4
    assert run.view("parallelism", gpu=1).tables["ranks"].rows["gpu"].tolist() == [1]
    assert run.view("parallelism", step=3).figures["pipeline"].layout.title.text == "Schedule of step 3"


def test_ranks_with_several_stages(tmp_path: Path) -> None:
    run = record(tmp_path, played(INTERLEAVED, 10, 20))
    view = run.view("parallelism")
    assert view.headline.endswith("The schedule runs as well as it can.")
    assert list(view.figures["pipeline"].layout.yaxis.ticktext) == ["GPU 0 · stages 0, 2", "GPU 1 · stages 1, 3"]


def unnamed(folder: Path) -> Path:
    """Two ranks that send to each other, without scopes."""
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        trace.step(0, 0, 100)
        trace.collective("ncclDevKernel_SendRecv(...)", 5, 10, 30, **{
            "Collective name": "send", "Dst Rank": 1 - rank, "Process Group Description": "mesh_pp"})
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return folder


def test_without_scopes_the_command_is_named(tmp_path: Path) -> None:
    view = tb_chopper.open_run(unnamed(tmp_path)).view("parallelism")
    assert view.headline == "A pipeline runs here, and no scope tells what its stages do."
    assert "torch_ext.annotate_pipeline(schedule)" in view.missing[0].command


def test_without_steps_that_is_what_is_missing(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.annotation("chopper::pp::F::stage0::mb0", 1, 50)
    trace.launch("gemm", 5, 10, 30)
    view = tb_chopper.open_run(trace.write(tmp_path / "w.pt.trace.json")).view("parallelism")
    assert "profiler.step()" in view.missing[0].command


def test_missing_stages_are_told(tmp_path: Path) -> None:
    (traced(tmp_path) / "rank1.pt.trace.json").unlink()
    view = tb_chopper.open_run(tmp_path).view("parallelism")
    assert [m.what for m in view.missing] == ["The whole pipeline"]
    assert "of the stages that are here" in view.headline
    assert {k.label for k in view.key_figures if k.source == "unavailable"} == {
        "Perfect schedule", "Above it, per step", "By unequal stages", "By messages, launches"}
    json.dumps(view.as_dict(), allow_nan=False)


def test_one_gpu_alone(tmp_path: Path) -> None:
    TraceBuilder().training_step(0, 0).write(tmp_path / "w.pt.trace.json")
    assert tb_chopper.open_run(tmp_path).view("parallelism").headline.startswith("One GPU alone is here")


def test_data_parallelism_alone(tmp_path: Path) -> None:
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        trace.step(0, 0, 100)
        trace.collective("ncclDevKernel_AllReduce", 5, 10, 30, **{"Process Group Description": "mesh_dp"})
        trace.write(tmp_path / f"rank{rank}.pt.trace.json")
    line = tb_chopper.open_run(tmp_path).view("parallelism").headline
    assert line == "The GPUs share no layers: no pipeline, and no tensor, context or expert parallelism."


@pytest.mark.parametrize("selection", [{}, {"gpu": 1}, {"step": 1}, {"gpu": [0], "step": (1, 2), "span": 0}])
def test_it_travels_with_any_selection(run: Run, selection: dict[str, object]) -> None:
    made = run.view("parallelism", **selection).as_dict()
    json.dumps(made, allow_nan=False)
    assert made["figures"]["pipeline"]["data"]


def test_an_empty_selection_is_said(run: Run) -> None:
    assert run.view("parallelism", step=99).headline == "No pipeline runs in the selected GPUs and steps."
