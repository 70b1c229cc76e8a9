"""The Breakdown tab's numbers: parts that add up to the time, the right words, what is said when data is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.run import Run, open_run
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.views.breakdown_parts import COLUMNS, PARTS, grouped, other_methods, with_parts
from tests.builders import TraceBuilder

STACK = [p.column for p in PARTS]


def table(**columns: object) -> pd.DataFrame:
    """One row of overhead_breakdown: 100 µs of theory, factors 1.1, 2, 1.25 and 1.2, so 330 µs."""
    row = {"operation": "mm", "phase": "forward", "n_instances": 6, "d_thr_us": 100.0, "ovr_inst": 1.1, "ovr_util": 2.0,
           "ovr_overlap": 1.25, "ovr_freq": 1.2, "d_peak_us": 220.0, "d_act_us": 330.0, "total_us": 1980.0,
           "source": "measured", "overlap_method": "clock"}
    return pd.DataFrame([row | columns])


def parts(frame: pd.DataFrame, windows: int = 6) -> dict[str, float]:
    row = with_parts(frame, windows).iloc[0]
    return {c.removesuffix("_us"): pytest.approx(row[c]) for c in COLUMNS}


def test_each_part_is_what_its_factor_adds():
    assert parts(table()) == {"theoretical": 100, "vector": 0, "instruction": 10, "utilization": 110, "overlap": 55,
                              "frequency": 55, "act": 330, "lost": 230}
    assert parts(table(), windows=2)["act"] == 990  # three instances in a step


def test_the_work_itself_is_that_of_the_instances_and_the_rest_goes_to_overlap_and_clock():
    assert parts(table(total_us=6 * 385.0)) == {
        "theoretical": 100, "vector": 0, "instruction": 10, "utilization": 110, "overlap": 82.5, "frequency": 82.5,
        "act": 385, "lost": 285}
    odd = parts(table(total_us=6 * 165.0))  # most instances are smaller than the median one
    assert (odd["theoretical"], odd["frequency"], odd["act"]) == (50, 27.5, 165)


def test_a_factor_below_1_takes_nothing_away():
    shown = parts(table(ovr_overlap=0.9, ovr_freq=330 / 198))
    assert (shown["overlap"], shown["frequency"]) == (0, 110) and shown["act"] == 330
    assert parts(table(ovr_inst=0.9, ovr_util=220 / 90))["instruction"] == 0


def test_without_a_clock_utilization_and_clock_are_one_block():
    shown = parts(table(ovr_freq=np.nan, ovr_util=2.4, d_peak_us=264.0, source="estimated"))
    assert (shown["utilization"], shown["overlap"], shown["frequency"]) == (154, 66, 0)


def test_vector_work_has_no_theory_and_loses_to_contention_and_clock_alone():
    vector = table(d_thr_us=0.0, ovr_inst=np.nan, ovr_util=np.nan)
    assert parts(vector) == {"theoretical": 0, "vector": 220, "instruction": 0, "utilization": 0, "overlap": 55,
                             "frequency": 55, "act": 330, "lost": 110}


def test_groups_are_sums_and_the_unknown_stays_apart():
    units = pd.concat([table(), table(operation="odd", d_thr_us=np.nan, source="unavailable"),
                       table(operation="b", ovr_util=1.0, ovr_freq=2.4, d_peak_us=110.0)], ignore_index=True)
    rows = grouped(with_parts(units, 6), ["phase"])
    assert rows["act_us"].tolist() == [660] and rows["unknown_us"].tolist() == [330]
    assert rows[STACK].sum(axis=1).tolist() == [pytest.approx(660)]
    each = grouped(with_parts(units, 6), ["operation"]).set_index("operation")
    assert each["dominant"].to_dict() == {"mm": "utilization", "b": "frequency", "odd": ""}
    assert "power" in each["help"]["b"] and each["help"]["odd"] == ""


def test_other_methods_are_named_where_they_differ():
    row = {"ovr_overlap": 1.2, "overlap_method": "clock", "ovr_overlap_clock": 1.2, "ovr_overlap_percentile": 1.0,
           "ovr_overlap_regression": 1.22}
    assert other_methods(row) == "percentile 1.00"
    assert other_methods({**row, "ovr_overlap_percentile": np.nan, "ovr_overlap_regression": 1.5}) == "regression 1.50"


# ---- whole views


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    made = {f"fsdp{v}": simulate(out, Options("tiny", fsdp=v))[0] for v in (1, 2)}
    made["uncounted"] = shutil.copytree(made["fsdp2"], out / "uncounted", ignore=shutil.ignore_patterns("counters"))
    made["blind"] = shutil.copytree(made["uncounted"], out / "blind", ignore=shutil.ignore_patterns("*.telemetry.csv"))
    return made


@pytest.fixture(scope="module")
def runs(directories: dict[str, Path]) -> dict[str, Run]:
    return {name: open_run(path) for name, path in directories.items()}


@pytest.mark.parametrize("by", ["operation", "layer", "phase"])
def test_parts_add_up_to_the_kernel_time_of_a_step(runs, by):
    run = runs["fsdp2"]
    rows = run.view("breakdown", by=by).tables["operations"].rows
    known = rows[rows["lost_us"].notna()]
    shown = known[[c for c in STACK if c in rows]].sum(axis=1)
    np.testing.assert_allclose(shown, known["act_us"], rtol=1e-9)
    compute = run.kernels[(run.kernels["kind"] == "compute") & run.kernels["step"].notna()]
    time = (compute["end_ns"] - compute["start_ns"]).sum() / 1000 / 2 / 3  # two GPUs, three steps
    assert known["act_us"].sum() == pytest.approx(time)


def test_what_the_view_says_is_what_the_breakdown_holds(runs):
    view, table_ = runs["fsdp2"].view("breakdown"), runs["fsdp2"].overhead_breakdown(["operation", "phase"])
    rows = view.tables["operations"].rows.set_index(["operation", "phase"])
    table_ = table_.set_index(["operation", "phase"]).loc[rows.index]
    for column in ("ovr_inst", "ovr_util", "ovr_overlap", "ovr_freq", "d_act_us"):
        np.testing.assert_array_equal(rows[column], table_[column])
    figures = {k.label: k for k in view.key_figures}
    assert figures["Utilization"].source == "measured" and figures["Frequency"].source == "sampled"
    assert figures["Compute with counters"].value == 1 and figures["Overlap method"].value == "clock"
    assert not view.missing and "costs most" in view.headline
    assert set(view.figures) == {"stack", "roofline"} and {"help", "coverage", "ratios"} <= set(view.tables)
    bars = {bar.name: sum(bar.x) for bar in view.figures["stack"].data}
    share = runs["fsdp2"].view("breakdown", bars="share").figures["stack"]
    n = len(share.layout.yaxis.tickvals)
    assert sum(sum(bar.x) for bar in share.data) == pytest.approx(100 * n)
    assert "Frequency" in bars


def test_run_against_run_says_what_each_factor_costs_more(runs):
    view = runs["fsdp2"].view("breakdown", compare=runs["fsdp1"])
    mine, other = (runs[r].view("breakdown").tables["operations"].rows.set_index(["operation", "phase"])
                   for r in ("fsdp2", "fsdp1"))
    rows = view.tables["difference"].rows.set_index(["operation", "phase"])
    for key in (("mlp_up", "forward"), ("mlp_dp", "backward")):
        assert rows.loc[key, "theoretical_us_more"] == pytest.approx(0, abs=1e-9)
        for column in ("act_us", "frequency_us", "overlap_us"):
            assert rows.loc[key, f"{column}_more"] == pytest.approx(other.loc[key, column] - mine.loc[key, column])
    assert any("/" in (bar.marker.pattern.shape or ()) for bar in view.figures["stack"].data)
    assert "fsdp1 needs" in view.headline


def test_without_counters_it_is_estimated_and_the_command_is_there(runs):
    view = runs["uncounted"].view("breakdown")
    assert {k.source for k in view.key_figures if k.label in ("Instruction", "Utilization")} == {"estimated"}
    assert "coverage" not in view.tables and set(view.tables["operations"].rows["source"]) == {"estimated"}
    [missing] = view.missing
    assert missing.command.startswith("tb-chopper collect --out ")
    blind = runs["blind"].view("breakdown")
    assert {k.label: k.source for k in blind.key_figures}["Frequency"] == "unavailable"
    assert len(blind.missing) == 2 and "utilization and clock together" in blind.headline
    assert not any(bar.name == "Frequency" for bar in blind.figures["stack"].data)


def test_few_counters_are_said_at_the_top(directories, tmp_path):
    folder = shutil.copytree(directories["fsdp2"], tmp_path / "run")
    for path in folder.glob("counters/*/*/*_counter_collection.csv"):
        rows = pd.read_csv(path)
        rows[~rows["Kernel_Name"].str.contains("Cijk_A")].to_csv(path, index=False)
    view = open_run(folder).view("breakdown")
    assert any("of the compute time has counters" in b and "Cijk" in b for b in view.banners)
    assert "counters_partly_matched" in {f.code for f in view.findings}
    told = open_run(folder).view("findings")
    assert "counters_partly_matched" in set(told.tables["findings"].rows["code"])
    assert "counters_partly_matched" in {f.code for f in told.findings} and "warning" in told.headline
    first = view.tables["coverage"].rows.iloc[0]
    assert first["name"].startswith("Cijk") and first["n_missing"] == first["n_kernels"]


def test_the_bar_takes_peaks(runs):
    told = runs["fsdp2"].view("breakdown", hardware="peak_tflops=2614.9,f_peak_mhz=2100")
    plain = runs["fsdp2"].view("breakdown")
    value = [next(k.value for k in v.key_figures if k.label == "Theoretical") for v in (told, plain)]
    assert value[0] == pytest.approx(value[1] / 2, rel=1e-3)
    assert len(told.banners) == len(plain.banners) == 1  # it is simulated
    slow = runs["fsdp2"].view("breakdown", hardware="peak_tflops=600,f_peak_mhz=2100")
    assert "faster than the peak allows" in slow.banners[1]
    with pytest.raises(InvalidSelection, match="no property of a GPU"):
        runs["fsdp2"].view("breakdown", hardware="speed=1")


@pytest.mark.parametrize("by", ["operation", "layer", "phase"])
def test_a_run_without_layers_steps_or_counters(tmp_path, by):
    trace = TraceBuilder("rocm")
    for i in range(3):
        trace.op("aten::mm", 100 * i, 50, dims=[[512, 512], [512, 512]])
        trace.launch("Cijk_gemm", 100 * i + 1, 100 * i + 20, 40)
    run = open_run(trace.write(tmp_path / "w.pt.trace.json"))
    view = run.view("breakdown", by=by, compare=run)
    view.as_dict()
    assert view.figures["stack"].data and set(view.tables["difference"].rows["act_us_more"]) == {0.0}


def test_a_trace_without_shapes_keeps_its_durations(tmp_path):
    trace = TraceBuilder("rocm").training_step(0, 0)
    for event in trace.events:
        event.get("args", {}).pop("Input Dims", None)
    view = open_run(trace.write(tmp_path / "w.pt.trace.json")).view("breakdown")
    assert "actual" in view.figures and any("record_shapes" in m.command for m in view.missing)
