"""The Efficiency tab: what it says of runs whose answer is known (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tb_chopper.backend.views.view import View
from tests.builders import TraceBuilder
from tests.unit import sampled_runs

BIG = [[4096, 4096], [4096, 4096]]
AT_PEAK = 2 * 4096**3 / 989.43e12 * 1e6
"""µs that this product needs on an H100"""


def product(trace: TraceBuilder, start: float, dur: float, blocks: float, op: str = "aten::mm",
            kernel: str = "nvjet_tst", kind: str = "c10::BFloat16") -> None:
    trace.op(op, start - 8, 6, dims=BIG, **{"Input type": [kind] * 2})
    trace.launch(kernel, start - 6, start, dur, **{"blocks per SM": blocks, "est. achieved occupancy %": 25})


def write(folder: Path) -> None:
    """Two GPUs, two steps of 1000: a product at 75 % of the peak, one that fills half of the SMs, one in fp32; idle."""
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        trace.head["deviceProperties"][0]["numSms"] = 132
        for step in range(2):
            start = 1000 * step
            trace.step(step, start, 995)
            product(trace, start + 10, AT_PEAK / 0.75, 4.0)
            product(trace, start + 300, 300, 0.5, "aten::bmm")
            product(trace, start + 600, 200, 2.0, "aten::addmm", "ampere_sgemm_128x64_nn", "float")
        trace.write(folder / f"rank{rank}.pt.trace.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("efficiency")
    write(folder)
    return tb_chopper.open_run(folder)


def figure(view: View, label: str) -> object:
    return next(k.value for k in view.key_figures if k.label == label)


def test_key_figures(run: Run) -> None:
    view = run.view("efficiency", step=(0, 0))
    first = AT_PEAK / 0.75
    assert figure(view, "GPU utilization") == pytest.approx((first + 500) / 1000)
    assert figure(view, "SM efficiency") == pytest.approx((first + 150 + 200) / 1000)
    assert figure(view, "Occupancy") == pytest.approx(0.25)
    assert figure(view, "Matrix cores") == pytest.approx((first + 300) / (first + 500))
    assert figure(view, "SMs without work") == pytest.approx(2 * 150)
    assert all(k.source in ("measured", "estimated") and k.definition for k in view.key_figures)
    assert view.missing == ()


def test_groups_by_lost_time_lead_to_a_kernel(run: Run) -> None:
    table = run.view("efficiency").tables["groups"]
    rows = table.rows.set_index("operation")
    assert table.sort == "wasted_us"
    assert rows.loc["aten::bmm", "lost_us"] == pytest.approx(4 * 150)
    assert rows.loc["aten::mm", "lost_us"] == 0
    assert rows.loc["aten::mm", "below_us"] == pytest.approx(4 * (AT_PEAK / 0.75 - AT_PEAK), rel=1e-3)
    assert rows.loc["aten::mm", "mfu"] == pytest.approx(0.75, rel=1e-3)
    for operation, at in rows["at"].items():
        assert trace_link.find(run.kernels, at)["operation"] == operation


@pytest.mark.parametrize("by", ["operation", "layer", "phase", "gpu", "kernel"])
def test_every_granularity_loses_the_same(run: Run, by: str) -> None:
    view = run.view("efficiency", by=by)
    assert view.tables["groups"].rows["lost_us"].sum() == pytest.approx(4 * 150)
    sums = {t.name: sum(t.x) for t in view.figures["lost"].data}
    assert sums["SMs without work"] == pytest.approx(0.6)  # ms
    assert sum(sums.values()) == pytest.approx(4 * (AT_PEAK / 0.75 + 500) / 1000)


def test_precision(run: Run) -> None:
    view = run.view("efficiency", gpu=0)
    rows = view.tables["precision"].rows.set_index("dtype")
    assert rows["time_us"].to_dict() == pytest.approx({"bf16": 2 * (AT_PEAK / 0.75 + 300), "fp32": 400})
    assert [t.name for t in view.figures["precision"].data] == ["fp32", "bf16"]


def test_the_kernels_of_a_chosen_operation(run: Run) -> None:
    view = run.view("efficiency", focus="aten::bmm")
    assert view.tables["kernels"].rows["kernel"].tolist() == ["nvjet_tst"]
    assert view.tables["kernels"].rows["lost_us"].sum() == pytest.approx(4 * 150)


def test_gpus_side_by_side(run: Run) -> None:
    view = run.view("efficiency")
    assert view.tables["gpus"].rows["gpu"].tolist() == [0, 1]
    marks = {t.name: t.x for t in view.figures["by_gpu"].data}
    assert marks["SM efficiency"][0] == marks["SM efficiency"][1]
    assert "HFU" not in marks  # nothing was computed again


def test_what_is_missing_is_said_with_what_adds_it(tmp_path: Path) -> None:
    trace = TraceBuilder("rocm")
    trace.head["deviceProperties"] = [{"id": 2, "name": "Unheard 9000"}]
    trace.op("aten::mm", 0, 10)
    trace.launch("Cijk_Alik_Bljk_BBS_BH_MT64x32x64_MI16x16x1_SN", at=2, start=20, dur=100)
    trace.write(tmp_path / "w.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    view = run.view("efficiency")
    assert {m.what for m in view.missing} == {"FLOPs, HFU and MFU", "Peaks of this GPU", "SM efficiency", "Occupancy"}
    assert all(m.why for m in view.missing) and "record_shapes=True" in view.missing[0].command
    assert figure(view, "SM efficiency") is None and figure(view, "Matrix cores") == 1
    assert {k.label: k.source for k in view.key_figures}["MFU"] == "unavailable"
    told = run.view("efficiency", hardware="peak_tflops=100,f_peak_mhz=1000,units=64")
    assert "Peaks of this GPU" not in {m.what for m in told.missing}


def test_a_profile_without_gpu_says_so(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.op("aten::mm", 0, 10)
    trace.write(tmp_path / "w.pt.trace.json")
    view = tb_chopper.open_run(tmp_path).view("efficiency")
    assert view.missing and not view.tables


def test_the_sampled_twins_stand_beside_the_estimates(tmp_path: Path) -> None:
    """Two steps of 10 ms; the hardware counts 40 % and then 60 % of the SMs, and before and after something else."""
    sampled_runs.gpu_trace(tmp_path, [(20, 30), (30, 40)])
    sampled_runs.log(tmp_path, 60, {0: lambda ms: {
        "sm_activity_pct": 40 if 20 <= ms < 30 else 60 if 30 <= ms < 40 else 5, "tensor_activity_pct": 30}})
    view = tb_chopper.open_run(tmp_path).view("efficiency")
    row = view.tables["gpus"].rows.iloc[0]
    # The first kernel starts 10 µs after the reading at 20 ms: 9 readings of the first step, 10 of the second.
    assert row["sm_active"] == pytest.approx((9 * 0.4 + 10 * 0.6) / 19) and row["tensor_active"] == pytest.approx(0.3)
    assert "sm_occupancy" not in [c.name for c in view.tables["gpus"].columns]
    assert next(k.note for k in view.key_figures if k.label == "SM efficiency") == "sampled: 51 %"
    second = tb_chopper.open_run(tmp_path).view("efficiency", step=1)
    assert second.tables["gpus"].rows["sm_active"].iloc[0] == pytest.approx(0.6)


def test_another_run_stands_beside_hatched(run: Run, tmp_path: Path) -> None:
    """The other run fills all SMs with its second product, in half of the time."""
    trace = TraceBuilder()
    trace.head["deviceProperties"][0]["numSms"] = 132
    trace.step(0, 0, 995)
    product(trace, 300, 150, 2.0, "aten::bmm")
    trace.write(tmp_path / "filled" / "w.pt.trace.json")
    other = tb_chopper.open_run(tmp_path / "filled")
    view = run.view("efficiency", compare=other)
    below = next(t for t in view.figures["lost"].data if t.name == "Below the peak")
    lost = next(t for t in view.figures["lost"].data if t.name == "SMs without work")
    first = [i for i, label in enumerate(view.figures["lost"].layout.yaxis.ticktext) if label.startswith("aten::bmm")]
    assert [lost.x[i] for i in first] == pytest.approx([0.6, 0])
    assert [below.x[i] for i in first] == pytest.approx([4 * (150 - AT_PEAK) / 1000, (150 - AT_PEAK) / 1000], rel=1e-3)
    assert [bool(below.marker.pattern.shape[i]) for i in first] == [False, True]
    assert "filled: GPU utilization 100 %" in view.headline
