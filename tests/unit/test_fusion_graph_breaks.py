"""Graph breaks: counted, and timed by hand; and those of a program that torch compiles here."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.metrics.graph_breaks import BETWEEN, INSIDE
from tests.builders import TraceBuilder


def region(trace: TraceBuilder, name: str, start: float, dur: float) -> None:
    trace.op(f"Torch-Compiled Region: {name}", start, dur)


def graph(trace: TraceBuilder, start: float, kernels: list[tuple[float, float]]) -> None:
    """A compiled graph from `start` on the host, with kernels (start, duration) launched in it, 2 µs apart."""
    trace.op("CompiledFunction", start, 2 + 2 * len(kernels))
    for i, (at, dur) in enumerate(kernels):
        trace.launch("triton_poi_fused_add_0", at=start + 1 + 2 * i, start=at, dur=dur, call=1)


def broken(trace: TraceBuilder, start: float) -> None:
    """One step: a graph, an eager kernel in its break, the resumed region with its graph, another region."""
    region(trace, "0/0", start + 10, 100)
    graph(trace, start + 12, [(start + 20, 10)])
    trace.op("aten::nonzero", start + 40, 10, dims=[[8]])
    trace.launch("nonzero_kernel", at=start + 42, start=start + 50, dur=5)  # idle 30 to 50
    region(trace, "1/0", start + 70, 30)
    graph(trace, start + 72, [(start + 80, 10), (start + 90, 10)])  # idle 55 to 80, then none
    trace.op("aten::relu", start + 120, 5, dims=[[8]])
    trace.launch("relu_kernel", at=start + 121, start=start + 130, dur=20)
    region(trace, "2/1", start + 150, 20)
    graph(trace, start + 152, [(start + 160, 40)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trace = TraceBuilder()
    for step in range(2):
        trace.step(step, 1000 * step, 990)
        broken(trace, 1000 * step)
    path = tmp_path_factory.mktemp("breaks")
    trace.write(path / "w.pt.trace.json")
    return tb_chopper.open_run(path)


def test_a_region_inside_another_is_a_break_and_the_gpu_waits_there(run):
    rows = run.graph_breaks()
    assert rows["step"].tolist() == [0, 1]
    for row in rows.itertuples():
        assert (row.n_regions, row.n_breaks, row.n_codes, row.n_variants) == (3, 1, 3, 3)
        assert (row.eager_kernels, row.eager_us) == (1, 5)
        assert row.idle_us == 20 + 25  # before the eager kernel, and before the first one after the break
        assert (row.between_kernels, row.between_us) == (1, 20)


def test_what_runs_eagerly(run):
    rows = run.eager_in_breaks().set_index("place")
    assert rows.loc[INSIDE, "operation"] == "aten::nonzero" and rows.loc[INSIDE, "n"] == 2
    assert rows.loc[INSIDE, "time_us"] == 10 and rows.loc[INSIDE, "idle_us"] == 40
    assert rows.loc[BETWEEN, "operation"] == "aten::relu" and rows.loc[BETWEEN, "time_us"] == 40
    assert rows.loc[INSIDE, "at"] in {f"0@{s}" for s in run.kernels["start_ns"]}


def test_regions_are_not_among_the_calls_that_keep_a_gpu_waiting(run):
    assert len(run.calls) == 0 and len(run.host_calls()) == 0
    assert sorted(run.compiled["kind"]) == ["compiled"] * 6 + ["region"] * 6


def test_layers_of_regions(tmp_path):
    trace = TraceBuilder()
    trace.step(0, 0, 990)
    broken(trace, 0)
    trace.annotation("Layer3", 5, 108)
    trace.write(tmp_path / "w.pt.trace.json")
    rows = tb_chopper.open_run(tmp_path).graph_breaks(by=["layer"]).set_index("layer")
    assert rows.loc["Layer3", "n_regions"] == 2 and rows.loc["Layer3", "n_breaks"] == 1


def test_old_traces_without_graphs_count_their_regions_as_compiled(tmp_path):
    trace = TraceBuilder()
    for i in range(2):
        trace.annotation("Torch-Compiled Region", 100 * i, 50)
        trace.op("triton_poi_fused_add_0", 100 * i + 5, 20)
        trace.launch("triton__0d1d2d3de", at=100 * i + 10, start=100 * i + 60, dur=10)
    trace.write(tmp_path / "w.pt.trace.json")
    rows = tb_chopper.open_run(tmp_path).graph_breaks(by=["gpu"])
    assert rows.iloc[0][["n_regions", "n_breaks", "n_codes", "eager_kernels"]].tolist() == [2, 0, 0, 0]


def test_no_regions_no_rows():
    from tb_chopper.backend import schema
    from tb_chopper.backend.metrics import graph_breaks
    calls, kernels = schema.empty(schema.CALLS), schema.empty(schema.KERNELS)
    assert not len(graph_breaks.graph_breaks(calls, kernels)) and not len(graph_breaks.eager(calls, kernels))


PROGRAM = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule

class Layer(torch.nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.linear, self.breaks = torch.nn.Linear(16, 16), breaks

    def forward(self, x):
        x = torch.nn.functional.gelu(self.linear(x))
        if self.breaks > 0:
            torch._dynamo.graph_break()
            x = x * 2
        if self.breaks > 1:
            torch._dynamo.graph_break()
            x = x * 3
        return x

model = torch.nn.Sequential(*(torch.compile(Layer(int(b)), backend="aot_eager") for b in sys.argv[2]))
x = torch.randn(4, 16)
for _ in range(2):
    model(x).sum().backward()
done = lambda p: p.export_chrome_trace(sys.argv[1])
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2),
             on_trace_ready=done) as profiler:
    for _ in range(3):
        model(x).sum().backward()
        profiler.step()
"""


@pytest.mark.torch
def test_breaks_of_a_program_are_found_as_many_as_it_has(tmp_path: Path):
    pytest.importorskip("torch")
    import subprocess
    import sys
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "w.pt.trace.json"), "021"],
                          capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"torch.compile does not run here: {done.stderr.strip()[-200:]}")
    rows = tb_chopper.open_run(tmp_path).graph_breaks()
    # Three layers with no, two and one break: each break adds a region inside that of its layer.
    assert rows["n_regions"].tolist() == [6, 6] and rows["n_breaks"].tolist() == [3, 3]
    assert (rows["idle_us"] == 0).all()  # no GPU
