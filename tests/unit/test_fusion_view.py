"""The Fusion tab: what it says of runs whose answer is known (µs)."""

from __future__ import annotations

import pytest

import tb_chopper
from tb_chopper.backend.metrics import fusion
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tb_chopper.backend.views.view import View
from tests.builders import TraceBuilder
from tests.unit.test_fusion import BANDWIDTH, SIZE, Stream, X, products, run_of, trace_of
from tests.unit.test_fusion_graph_breaks import broken

SWIGLU = 60 - 3 * SIZE / BANDWIDTH
STEP = 1000


def trace_of_patterns() -> TraceBuilder:
    """Three steps: SwiGLU in pieces, attention in pieces, a sum that cat feeds, and a Triton kernel."""
    trace = trace_of()
    for step in range(3):
        trace.step(step, STEP * step, 990)
        stream = Stream(trace, STEP * step + 1)
        stream.op("aten::silu", 25, X).op("aten::mul", 35, X, X)
        products(stream, 1)
        stream.op("aten::cat", 20, shapes=False).op("aten::add", 20, X, X)
        stream.op("triton_poi_fused_add_0", 100, kernel="triton_poi_fused_add_0", shapes=False)
    return trace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(trace_of_patterns(), tmp_path_factory.mktemp("fusion"))


def figure(view: View, label: str) -> object:
    return next(k.value for k in view.key_figures if k.label == label)


def test_what_it_says(run: Run) -> None:
    view = run.view("fusion")
    assert view.headline.startswith("Fusing memory-bound kernels that follow each other would save about 80.0 µs")
    assert "scaled_dot_product_attention" in view.headline and "is in fused kernels already" in view.headline
    assert figure(view, "Saved by fusion") == pytest.approx(SWIGLU + 50, rel=1e-3)
    assert figure(view, "Candidates") == 9
    total = 60 + 250 + 40 + 100
    assert figure(view, "Fused already") == pytest.approx(100 / total)
    assert all(k.source in ("measured", "estimated") for k in view.key_figures)


def test_the_chart_adds_up_to_the_time_of_the_candidates(run: Run) -> None:
    parts = {t.name: t.x for t in run.view("fusion").figures["saving"].data}
    assert [sum(p[i] for p in parts.values()) for i in range(3)] == pytest.approx([50, 60, 40])
    assert parts["Not known"] == pytest.approx([0, 0, 40])
    assert parts["Saved by fusion"] == pytest.approx([50, SWIGLU, 0])


def test_tables_lead_to_kernels_and_say_what_fuses(run: Run) -> None:
    tables = run.view("fusion").tables
    chains = tables["chains"].rows.set_index("pattern")
    assert chains.loc[fusion.GATED, "operations"] == "silu → mul" and chains.loc[fusion.GATED, "n"] == 3
    assert chains["per_step_us"].isna().tolist() == [False, False, True]
    for at in tables["chains"].rows["at"]:
        trace_link.find(run.kernels, at)
    assert set(chains.index) <= set(fusion.REMEDIES) and chains["remedy"].str.len().gt(0).all()
    assert tables["fused"].rows["kernel"].tolist() == ["triton_poi_fused_add_0"]


@pytest.mark.parametrize("by", ["layer", "phase", "step", "gpu"])
def test_every_granularity_saves_the_same(run: Run, by: str) -> None:
    rows = run.view("fusion", by=by).tables["groups"].rows
    assert rows["saved_us"].sum() == pytest.approx(3 * (SWIGLU + 50)) and by in rows


def test_a_step_saves_what_a_step_saves(run: Run) -> None:
    assert figure(run.view("fusion", step=1), "Saved by fusion") == pytest.approx(SWIGLU + 50, rel=1e-3)


def test_another_bandwidth_saves_something_else(run: Run) -> None:
    view = run.view("fusion", hardware="hbm_gbs=10000")
    assert figure(view, "Saved by fusion") == pytest.approx(50 + min(60 - 3 * SIZE / 1e7, 60 - 25), rel=1e-3)
    assert figure(run.view("fusion"), "Saved by fusion") == pytest.approx(SWIGLU + 50, rel=1e-3)


def test_without_shapes_nothing_is_claimed(tmp_path) -> None:
    stream = Stream(trace_of()).op("aten::silu", 25, shapes=False).op("aten::mul", 35, shapes=False)
    view = run_of(stream.trace, tmp_path).view("fusion")
    assert "not known without their shapes" in view.headline and figure(view, "Saved by fusion") is None
    assert view.missing[0].command.startswith("torch.profiler.profile(record_shapes=True")


def test_graph_breaks(tmp_path) -> None:
    trace = trace_of()
    for step in range(2):
        trace.step(step, STEP * step, 990)
        broken(trace, STEP * step)
    trace.write(tmp_path / "w.pt.trace.json")
    view = tb_chopper.open_run(tmp_path).view("fusion")
    assert figure(view, "Graph breaks") == 1 and figure(view, "Idle in breaks") == 45
    assert "leaves its graphs 2 times" in view.headline
    assert view.tables["graph_breaks"].rows["n_breaks"].tolist() == [1, 1]
    assert set(view.tables["eager"].rows["operation"]) == {"aten::nonzero", "aten::relu"}


def test_nothing_to_fuse(tmp_path) -> None:
    stream = Stream(trace_of()).op("aten::mm", 25, X, X, kernel="gemm")
    view = run_of(stream.trace, tmp_path).view("fusion")
    assert view.headline.startswith("No memory-bound kernels follow each other") and not view.figures


def test_another_run_stands_beside_hatched(run: Run, tmp_path) -> None:
    """There SwiGLU is still in pieces, and takes longer; attention is fused."""
    trace = trace_of()
    trace.step(0, 0, 990)
    Stream(trace, 1).op("aten::silu", 45, X).op("aten::mul", 55, X, X)
    other = run_of(trace, tmp_path / "fused")
    view = run.view("fusion", compare=other)
    saved = next(t for t in view.figures["saving"].data if t.name == "Saved by fusion")
    labels = view.figures["saving"].layout.yaxis.ticktext
    mine = [i for i, label in enumerate(labels) if label.startswith("SwiGLU")]
    there = 100 - max(3 * SIZE / BANDWIDTH, 45)
    assert [saved.x[i] for i in mine] == pytest.approx([SWIGLU, there])
    assert [bool(saved.marker.pattern.shape[i]) for i in mine] == [False, True] and len(labels) == 4
    assert view.headline.endswith(f"In fused: {there:.1f} µs.")
