"""The DVFS tab: numbers against the planted truth of a simulated node and of logs written here; words; figures."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.run import Run, open_run
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import View
from tests.builders import TraceBuilder
from tests.unit import sampled_runs
from torch_ext import telemetry_format

PEAK_MHZ = 2100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three GPUs, the last one limited to four fifths of its clock."""
    return simulate(tmp_path_factory.mktemp("node"), Options(layers=6, seed=3, ranks=3, slow={2: 0.8}))[0]


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return open_run(folder)


@pytest.fixture(scope="module")
def view(run: Run) -> View:
    return run.view("dvfs")


@pytest.fixture(scope="module")
def truth(folder: Path) -> pd.DataFrame:
    kernels = pd.read_parquet(folder / "truth/kernels.parquet")
    return kernels.assign(duration=kernels["end_ns"] - kernels["start_ns"])


@pytest.fixture(scope="module")
def samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The log's lines by GPU, times since the epoch by the clock record (the simulated clocks do not drift)."""
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    shift = 0
    for line in (folder / "node0.telemetry.csv").read_text().splitlines()[1:]:
        row = dict(zip(telemetry_format.NAMES, line.split(","), strict=True))
        middle = (int(row["before_ns"]) + int(row["after_ns"])) // 2
        if row["record"] == "clock" and not shift:
            shift = int(row["realtime_ns"]) - middle
        if row["record"] == "gpu":
            rows[int(row["gpu"])].append({**row, "t": middle + shift})
    return rows


def figure(view: View, label: str) -> float:
    return next(k.value for k in view.key_figures if k.label == label)


def drawn(view: View) -> list[Any]:
    """The lines of the timeline."""
    return [t for t in view.figures["timeline"].data if t.type == "scatter" and t.mode == "lines"]


def compute(truth: pd.DataFrame, gpu: int | None = None) -> pd.DataFrame:
    rows = truth[truth["kind"] == "compute"]
    return rows if gpu is None else rows[rows["rank"] == gpu]


def mean_mhz(rows: pd.DataFrame) -> float:
    return float(np.average(rows["clock_mhz"], weights=rows["duration"]))


def joules(samples: dict[int, list[dict[str, Any]]], gpu: int, start_ns: int, end_ns: int) -> float:
    """Rise of the energy counter, by numpy."""
    t0 = samples[gpu][0]["t"]
    t = np.array([r["t"] - t0 for r in samples[gpu]], float)
    energy = np.array([float(r["energy_j"]) for r in samples[gpu]])
    return float(np.diff(np.interp(np.array([start_ns - t0, end_ns - t0], float), t, energy))[0])


# ---- numbers against the truth of the simulated node -----------------------------------------------------------------


def test_the_headline_names_the_slow_gpu_what_it_costs_and_why(view, truth):
    clocks = {gpu: mean_mhz(compute(truth, gpu)) for gpu in range(3)}
    slowest = min(clocks, key=clocks.get)
    assert slowest == 2
    lost = np.average(1 - compute(truth, 2)["clock_mhz"] / PEAK_MHZ, weights=compute(truth, 2)["duration"])
    words = re.match(r"GPU (\d+) ran at ([\d ]+) of 2 100 MHz \((\d+) %\): the clock costs up to (\d+) % of its "
                     r"compute time, because of the power limit 100 % of the time\.", view.headline)
    assert words and int(words[1]) == 2
    assert int(words[2].replace(" ", "")) == pytest.approx(clocks[2], rel=0.01)
    assert int(words[3]) == pytest.approx(100 * clocks[2] / PEAK_MHZ, abs=1)
    assert int(words[4]) == pytest.approx(100 * lost, abs=1)
    assert "It is the slowest of 3" in view.headline


def test_clock_of_each_gpu_and_its_lost_time(view, truth):
    rows = view.tables["gpus"].rows.set_index("gpu")
    for gpu in range(3):
        mine = compute(truth, gpu)
        lost = float(np.average(1 - mine["clock_mhz"] / PEAK_MHZ, weights=mine["duration"]))
        assert rows.loc[gpu, "clock_mhz"] == pytest.approx(mean_mhz(mine), rel=0.01)
        assert rows.loc[gpu, "lost_share"] == pytest.approx(lost, abs=0.01)
        assert rows.loc[gpu, "compute_us"] == pytest.approx(mine["duration"].sum() / 1000, rel=1e-6)
    assert rows["note"].tolist() == ["", "", "slow"] and rows["peak_mhz"].tolist() == [PEAK_MHZ] * 3
    assert figure(view, "Core clock") == pytest.approx(mean_mhz(compute(truth)), rel=0.01)


def test_clock_and_lost_time_per_operation(view, truth, samples):
    period = np.median(np.diff([r["t"] for r in samples[0]]))
    rows = view.tables["operations"].rows.set_index("operation")
    checked = 0
    launched = truth[truth["launched"] & (truth["kind"] == "compute")]
    for operation, mine in launched.groupby("operation", observed=True):
        if mine["duration"].sum() > 6 * period and operation in rows.index:
            lost = (mine["duration"] * (1 - mine["clock_mhz"] / PEAK_MHZ)).sum() / 1000
            assert rows.loc[operation, "time_us"] == pytest.approx(mine["duration"].sum() / 1000, rel=1e-6)
            assert rows.loc[operation, "clock_mhz"] == pytest.approx(mean_mhz(mine), rel=0.01)
            assert rows.loc[operation, "lost_to_clock_us"] == pytest.approx(lost, rel=0.06)
            checked += 1
    assert checked > 6
    assert set(rows["source"]) == {"sampled"}


def test_energy_per_step_and_token(view, run, samples, folder):
    steps = view.tables["steps"].rows
    windows = run.steps.set_index(["gpu", "step"])
    last = min(r[-1]["t"] for r in samples.values())
    whole = 0
    for row in steps.to_dict("records"):
        start, end = windows.loc[(row["gpu"], row["step"]), ["gpu_start_ns", "gpu_end_ns"]]
        if end <= last:
            assert row["energy_j"] == pytest.approx(joules(samples, row["gpu"], start, end), rel=1e-4)
            whole += 1
    assert whole >= 6
    sidecar = json.loads(next(folder.glob("*.chopper.json")).read_text())
    per_gpu = steps.groupby("gpu")["energy_j"].mean()
    assert figure(view, "Energy per step") == pytest.approx(per_gpu.sum(), rel=1e-9)
    assert figure(view, "Energy per token") == pytest.approx(
        per_gpu.mean() / sidecar["training"]["tokens_per_step"], rel=1e-9)


def test_energy_in_collectives(view, truth, samples):
    """Time of communication without compute, on a grid of 2 µs, times the energy counter's rise over it."""
    spent, total = 0.0, 0.0
    for gpu in range(3):
        mine = truth[truth["rank"] == gpu]
        zero, end = int(mine["start_ns"].min()), int(mine["end_ns"].max())
        grid = np.arange(0, end - zero, 2000)
        busy = {kind: np.zeros(len(grid) + 1, int) for kind in ("compute", "communication")}
        for kind, marks in busy.items():
            rows = mine[mine["kind"] == kind]
            np.add.at(marks, ((rows["start_ns"] - zero) / 2000).round().astype(int), 1)
            np.add.at(marks, ((rows["end_ns"] - zero) / 2000).round().astype(int).clip(upper=len(grid)), -1)
        alone = (busy["communication"].cumsum() > 0) & (busy["compute"].cumsum() == 0)
        t = np.array([r["t"] - zero for r in samples[gpu]], float)
        counter = np.interp(grid, t, [float(r["energy_j"]) for r in samples[gpu]])
        spent += np.diff(counter)[alone[:len(grid) - 1]].sum()
        total += counter[-1] - counter[0]
    assert figure(view, "Energy in collectives") == pytest.approx(spent / total, rel=0.03)


def test_throttle_shares(view, samples, run):
    """Sum over the log's lines: a line speaks for the time since the one before, as far as it lies in the capture."""
    window = run.workers.set_index("gpu")
    held, known = 0.0, 0.0
    for gpu, rows in samples.items():
        start, end = window.loc[gpu, "start_ns"], window.loc[gpu, "end_ns"]
        for before, now in pairwise(rows):
            span = max(0, min(now["t"], end) - max(before["t"], start))
            percent = 0.0 if now["throttle"] == "none" else float(now["throttle"].removeprefix("power:"))
            held, known = held + span * percent / 100, known + span
    assert figure(view, "Throttled") == pytest.approx(held / known, abs=1e-9)
    reasons = view.tables["throttle"].rows
    assert set(reasons["reason"]) <= {"power limit", "no reason"}


def test_residency_is_the_share_of_time(view, samples, run):
    """Each sample stands half way to its neighbours; with equal distances, counting the samples is as good."""
    counted: dict[float, int] = defaultdict(int)
    window = run.workers.set_index("gpu")
    bars = view.figures["residency"].data[0]
    width = 2 * min(abs(b - a) for a, b in zip(sorted(bars.x), sorted(bars.x)[1:], strict=False)) / 2
    for gpu, rows in samples.items():
        for r in rows:
            if window.loc[gpu, "start_ns"] <= r["t"] < window.loc[gpu, "end_ns"]:
                counted[np.floor(float(r["clock_mhz"]) / width) * width + width / 2] += 1
    total = sum(counted.values())
    shown = dict(zip(bars.x, bars.y, strict=True))
    assert sum(shown.values()) == pytest.approx(100)
    for middle, n in counted.items():
        assert shown[middle] == pytest.approx(100 * n / total, abs=0.6)


def test_a_selection_changes_the_numbers_to_its_own(run, truth):
    step = sorted(truth.loc[truth["launched"], "step"].unique())[1]
    view = run.view("dvfs", gpu=1, step=int(step))
    windows = run.steps[(run.steps["gpu"] == 1) & (run.steps["step"] == step)].iloc[0]
    mine = compute(truth, 1)
    mine = mine[(mine["step"] == step) & mine["launched"]]
    assert figure(view, "Core clock") == pytest.approx(mean_mhz(mine), rel=0.01)
    assert view.headline.startswith("GPU 1 ran at") and "slowest" not in view.headline
    x = np.concatenate([np.asarray(t.x, float) for t in drawn(view)])
    length_ms = (windows["gpu_end_ns"] - windows["gpu_start_ns"]) / 1e6
    assert np.nanmin(x) >= 0 and np.nanmax(x) <= length_ms + 1e-3
    assert len(view.tables["gpus"].rows) == 1 and "spread" not in view.figures


# ---- planted logs ----------------------------------------------------------------------------------------------------


def planted(folder: Path, samples: Any = None, steps: Any = ((0, 100), (100, 200)), **options: Any) -> Run:
    sampled_runs.gpu_trace(folder, steps)
    sampled_runs.log(folder, max(e for _, e in steps) + 20, {0: samples} if samples else None, **options)
    return open_run(folder)


def test_step_time_against_the_clock(tmp_path):
    """A step takes 20 ms and 60 ms × GHz / clock: a third of a mean step does not scale."""
    clocks = [1.0, 1.2, 1.5, 2.0, 1.6, 1.1]
    edges = np.concatenate(([0], np.cumsum([20 + 60 / c for c in clocks])))
    steps = list(pairwise(edges))

    def sample(t: float) -> dict[str, Any]:
        return {"clock_mhz": 1000 * clocks[min(int(np.searchsorted(edges, t, side="right")) - 1, 5)], "power_w": 500}

    view = planted(tmp_path, sample, steps, period_ms=0.1).view("dvfs")
    words = view.figures["step_time"].layout.meta["description"]
    per = 60 / np.mean(clocks)
    scales = int(re.match(r"(\d+) % of a step scales", words)[1])
    assert scales == pytest.approx(100 * per / np.diff(edges).mean(), abs=1)
    assert "6 steps" in words and len(view.figures["step_time"].data) == 2, "points and the line through them"


def test_steps_that_do_not_tell_get_no_line(tmp_path):
    rng = np.random.default_rng(1)
    edges = np.concatenate(([0], np.cumsum(50 + 10 * rng.random(8))))
    clocks = 1500 + 100 * rng.random(9)
    view = planted(tmp_path, lambda t: {"clock_mhz": clocks[min(int(np.searchsorted(edges, t)), 8)]},
                   list(pairwise(edges))).view("dvfs")
    assert "8 steps do not tell" in view.figures["step_time"].layout.meta["description"]
    assert len(view.figures["step_time"].data) == 1


def test_reasons_and_no_reason_are_told_apart(tmp_path):
    def sample(t: float) -> dict[str, Any]:
        return {"clock_mhz": 1680, "throttle": "thermal:80" if t > 100 else "none"}
    view = planted(tmp_path, sample).view("dvfs")
    assert "GPU 0 ran at 1 680 of 2 100 MHz (80 %): the clock costs up to 20 % of its compute time, because of the " \
           "temperature 40 % of the time." in view.headline
    assert figure(view, "Throttled") == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("throttle", "words"), [
    ("none", "and no throttle reason was in force"), (None, "the log does not say why")])  # fmt: skip
def test_what_is_not_known_is_said(tmp_path, throttle, words):
    view = planted(tmp_path, lambda t: {"clock_mhz": 1680, "throttle": throttle}).view("dvfs")
    assert words in view.headline
    power = next(k for k in view.key_figures if k.label == "Power")
    assert power.value is None and power.source == "unavailable"
    assert any("token" in m.what for m in view.missing)
    assert ("Throttle reasons" in [m.what for m in view.missing]) == (throttle is None)


def test_a_log_without_clocks_still_shows_power(tmp_path):
    view = planted(tmp_path, lambda t: {"power_w": 600, "temperature_c": 55}).view("dvfs")
    assert view.headline == (
        "The telemetry holds no engine clock for as much as half of the compute time; a GPU drew 600 W on average.")
    assert figure(view, "Power") == pytest.approx(600) and figure(view, "Core clock") is None
    assert figure(view, "Energy per step") == pytest.approx(60, rel=0.01)
    assert "lost" not in view.figures and "timeline" in view.figures


def test_a_gpu_whose_log_ends_early_has_no_clock_and_the_others_keep_theirs(tmp_path):
    """GPU 1 is sampled for 40 of 200 ms, at a clock that would make it the slowest."""
    for gpu in range(2):
        sampled_runs.gpu_trace(tmp_path, [(0, 100), (100, 200)], gpu, 2)
    path = sampled_runs.log(tmp_path, 220, {0: lambda t: {"clock_mhz": 1680}, 1: lambda t: {"clock_mhz": 1000}})
    end = sampled_runs.BOOT_NS + 40e6
    kept = [line for line in path.read_text().splitlines(keepends=True) if not (
        line.startswith("gpu,") and line.split(",")[3] == "1" and int(line.split(",")[1]) > end)]
    path.write_text("".join(kept))
    view = open_run(tmp_path).view("dvfs")
    assert view.headline.startswith("GPU 0 ran at 1 680 of 2 100 MHz") and "–" not in view.headline
    rows = view.tables["gpus"].rows.set_index("gpu")
    assert np.isnan(rows.loc[1, "clock_mhz"]) and rows["note"].tolist() == ["", ""]
    assert figure(view, "Core clock") == pytest.approx(1680) and figure(view, "Lost to the clock") is None
    assert "Clock of GPU 1" in [m.what for m in view.missing]


def test_a_peak_that_nobody_knows(tmp_path):
    trace = TraceBuilder("rocm")
    trace.head["deviceProperties"][0]["name"] = "Prototype"
    trace.step(0, 0, 100_000)
    trace.launch("Cijk_gemm", 2, 10, 99_000)
    trace.write(tmp_path / "w.pt.trace.json")
    sampled_runs.log(tmp_path, 120, {0: lambda t: {"clock_mhz": 1500}})
    view = open_run(tmp_path).view("dvfs")
    assert view.headline.startswith("GPU 0 ran at 1 500 MHz; its peak clock is not known")
    assert figure(view, "Lost to the clock") is None and view.figures["lost"].data


def test_a_log_of_another_time_is_said(tmp_path):
    sampled_runs.gpu_trace(tmp_path, [(0, 100)])
    sampled_runs.log(tmp_path, 4000, {0: lambda t: {"clock_mhz": 1500}}, from_ms=1000, period_ms=100)
    view = open_run(tmp_path).view("dvfs")
    assert [m.what for m in view.missing] == ["Samples of this window"]
    assert all(k.source != "sampled" for k in view.key_figures)


def test_a_host_without_gpus_in_the_log(tmp_path):
    view = planted(tmp_path, None, cpu=lambda t: {0: 50.0}).view("dvfs")
    assert "no GPU of this run is in it" in view.missing[0].why


def test_without_telemetry_the_command_is_named(tmp_path):
    sampled_runs.gpu_trace(tmp_path, [(0, 100)])
    view = open_run(tmp_path).view("dvfs")
    commands = [m.command for m in view.missing]
    assert any("torch_ext.telemetry(" in c for c in commands) and any("tb-chopper sample --out" in c for c in commands)


# ---- long logs -------------------------------------------------------------------------------------------------------


def test_a_long_log_is_thinned_and_its_extremes_stay(tmp_path):
    """100 000 samples, one of them low, one high: both are drawn, and no trace has more than 4 000 points."""
    def sample(t: float) -> dict[str, Any]:
        return {"clock_mhz": 900 if t == 41_234 else 2090 if t == 61_234 else 1500 + (t % 7), "power_w": 500}
    run = planted(tmp_path, sample, [(0, 50_000), (50_000, 99_900)])
    view = run.view("dvfs")
    traces = [t for f in view.figures.values() for t in f.data]
    assert max(len(t.x) for t in traces if t.x is not None) <= 4000
    clock = drawn(view)[0]
    assert (np.nanmin(clock.y), np.nanmax(clock.y)) == (900, 2090)
    place = int(np.nanargmin(clock.y))
    assert clock.x[place] == pytest.approx(41.234, abs=1e-3), "seconds since the start of the window"
    exact = np.mean([sample(t)["clock_mhz"] for t in range(99_900)])
    assert figure(view, "Core clock") == pytest.approx(exact, rel=1e-4), "numbers are of all samples"
    assert "samples" in view.figures["power_clock"].layout.meta["description"]


def test_a_pause_breaks_the_line(tmp_path):
    sampled_runs.gpu_trace(tmp_path, [(0, 400)])
    path = sampled_runs.log(tmp_path, 420, {0: lambda t: {"clock_mhz": 1500.0}})
    kept = [line for line in path.read_text().splitlines(keepends=True) if not (
        line.startswith("gpu,") and 100e6 < int(line.split(",")[1]) - sampled_runs.BOOT_NS < 300e6)]
    path.write_text("".join(kept))
    clock = drawn(open_run(tmp_path).view("dvfs"))[0]
    assert np.isnan(clock.y).sum() == 1
    place = int(np.flatnonzero(np.isnan(clock.y))[0])
    assert clock.x[place - 1] == pytest.approx(100, abs=0.1) and clock.x[place + 1] == pytest.approx(300, abs=0.1)


def test_the_log_around_the_capture_is_shown_when_asked_for_and_the_numbers_stay(tmp_path):
    run = planted(tmp_path, lambda t: {"clock_mhz": 1500 if t < 210 else 500}, [(0, 100), (100, 200)])
    sampled_runs.log(tmp_path, 2000, {0: lambda t: {"clock_mhz": 1500 if t < 210 else 500}})
    run = open_run(tmp_path)
    short, whole = run.view("dvfs"), run.view("dvfs", time="around")
    longest = {name: max(np.nanmax(t.x) for t in drawn(v))
               for name, v in (("short", short), ("whole", whole))}
    assert longest["short"] == pytest.approx(200, abs=1) and longest["whole"] == pytest.approx(2.0, abs=0.01)
    assert figure(short, "Core clock") == figure(whole, "Core clock") == pytest.approx(1500)
    lines = [s for s in whole.figures["timeline"].layout.shapes if s.type == "line"]
    assert [s.x0 for s in lines] == [pytest.approx(0.0, abs=1e-3), pytest.approx(0.2, abs=1e-3)]


# ---- form ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(simulate(tmp_path_factory.mktemp("other"), Options(layers=6, seed=4, ranks=3, fsdp=1))[0])


def test_another_run_is_hatched_or_hollow_and_brings_no_colour(run, other):
    view = run.view("dvfs", compare=other)
    sent = json.dumps(view.as_dict()["figures"])
    used = set(re.findall(r'"#[0-9A-Fa-f]{6}"', sent))
    assert used <= {f'"{c}"' for c in COLORS.values()} and '"/"' in sent and "diamond-open" in sent
    rows = view.tables["runs"].rows.set_index("number")
    alone = other.view("dvfs")
    assert rows.loc["Core clock, MHz", "other"] == pytest.approx(figure(alone, "Core clock"))
    assert rows.loc["Energy per step, J", "other"] == pytest.approx(figure(alone, "Energy per step"))
    assert rows.loc["Core clock, MHz", "this"] == pytest.approx(figure(run.view("dvfs"), "Core clock"))
    assert other.name in view.headline


@pytest.mark.parametrize("by", ["layer", "phase", "kernel"])
def test_every_granularity_adds_up(run, view, by):
    rows = run.view("dvfs", by=by).tables["operations"].rows
    assert by in rows and rows["time_us"].sum() == pytest.approx(view.tables["operations"].rows["time_us"].sum())
    assert rows["lost_to_clock_us"].sum() == pytest.approx(view.tables["gpus"].rows["lost_us"].sum(), rel=1e-6)


def test_every_axis_has_a_unit_and_every_number_a_source(view):
    for name, shown in view.figures.items():
        assert shown.layout.meta["description"]
        axes = [a for k, a in shown.layout.to_plotly_json().items() if re.match("xaxis|yaxis", k)]
        titled = [a["title"]["text"] for a in axes if a.get("title", {}).get("text")]
        assert titled, name
        for title in titled:
            assert re.search(r"(MHz|W|°C|J|%|s|ms|µs)$", title), (name, title)
    for key in view.key_figures:
        assert key.definition and key.source in ("sampled", "estimated")
    for table in view.tables.values():
        for column in table.columns:
            assert column.name in table.rows, column.name
    json.dumps(view.as_dict(), allow_nan=False)
