"""The CPU tab: numbers against lists counted here from the log's own lines, and against planted logs."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tb_chopper.backend.run import Run, open_run
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import View
from tests.unit import sampled_runs
from torch_ext import telemetry_format

CORES = 192
"""physical cores of the simulated host; logical CPU n and n + 192 share core n"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("node"), Options(layers=6, seed=3, ranks=3))[0]


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return open_run(folder)


@pytest.fixture(scope="module")
def uses(folder: Path, run: Run) -> list[dict[int, float]]:
    """Percent by logical CPU of each sample within the capture, from the lines of the log."""
    start, end = run.workers["start_ns"].min(), run.workers["end_ns"].max()
    found, shift = [], 0
    for line in (folder / "node0.telemetry.csv").read_text().splitlines()[1:]:
        row = dict(zip(telemetry_format.NAMES, line.split(","), strict=True))
        middle = (int(row["before_ns"]) + int(row["after_ns"])) // 2
        if row["record"] == "clock" and not shift:
            shift = int(row["realtime_ns"]) - middle
        if row["record"] == "cpu" and start <= middle + shift <= end:
            pairs = (p.split(":") for p in row["cpu_pct"].split())
            found.append({int(c): float(v) for c, v in pairs})
    assert len(found) > 5
    return found


def figure(view: View, label: str) -> Any:
    return next(k.value for k in view.key_figures if k.label == label)


def awake(use: dict[int, float]) -> dict[int, int]:
    """Busy logical CPUs by physical core."""
    cores: dict[int, int] = {}
    for cpu in use:
        cores[cpu % CORES] = cores.get(cpu % CORES, 0) + 1
    return cores


def test_numbers_of_a_simulated_node(run, uses):
    view = run.view("cpu")
    active = statistics.median(len(u) for u in uses)
    needed = statistics.median(sum(u.values()) / 100 for u in uses)
    physical = statistics.median(len(awake(u)) for u in uses)
    both = sum(sum(n >= 2 for n in awake(u).values()) for u in uses) / sum(len(awake(u)) for u in uses)
    spare = statistics.median(max(0, len(awake(u)) - math.ceil(round(sum(u.values()) / 100, 6))) for u in uses)
    assert figure(view, "Active CPUs") == active
    assert figure(view, "Needed at least") == pytest.approx(needed)
    assert figure(view, "Awake cores") == pytest.approx(physical / CORES)
    assert figure(view, "Both siblings busy") == pytest.approx(both)
    assert figure(view, "Cores to spare") == spare
    assert figure(view, "Could move to GPUs") == pytest.approx(4 * spare)
    words = re.match(r"(\d+) logical CPUs were active where (\d+) would do \(C_min ([\d.]+), medians\); (\d+) of 192 ",
                     view.headline)
    assert words and [int(words[1]), int(words[2]), int(words[4])] == [active, math.ceil(needed), physical]
    assert float(words[3]) == pytest.approx(needed, abs=0.005)


def test_the_power_of_a_core_is_the_readers_choice_and_an_estimate(run, uses):
    for choice, watts in (("2 W", 2), ("8 W", 8)):
        view = run.view("cpu", core_draws=choice)
        key = next(k for k in view.key_figures if k.label == "Could move to GPUs")
        assert key.value == pytest.approx(watts * figure(view, "Cores to spare")) and key.source == "estimated"
        row = view.tables["hosts"].rows.iloc[0]
        assert row["limit_share"] == pytest.approx(key.value / row["limit_w"])
        assert f"{watts} W × max(0, awake cores − ⌈C_min⌉)" in view.tables["hosts"].note and "assumption" in (
            view.tables["hosts"].note)


def test_the_map_shows_every_awake_core(run, uses):
    heat = next(t for t in run.view("cpu").figures["over_time"].data if t.type == "heatmap")
    z = np.asarray(heat.z)
    assert z.shape[0] == CORES
    cores = sorted({c for u in uses for c in awake(u)})
    assert np.flatnonzero((z > 0).any(axis=1)).tolist() == cores
    both = sorted({c for u in uses for c, n in awake(u).items() if n > 1})
    assert np.flatnonzero((z == 2).any(axis=1)).tolist() == both


def test_use_of_each_logical_cpu(run, uses):
    rows = run.view("cpu").tables["cpus"].rows.set_index("cpu")
    for cpu in {c for u in uses for c in u}:
        values = [u.get(cpu, 0.0) for u in uses]
        assert rows.loc[cpu, "busy_share"] == pytest.approx(statistics.fmean(values) / 100)
        assert rows.loc[cpu, "active_share"] == pytest.approx(sum(v > 0 for v in values) / len(values))
        assert rows.loc[cpu, "core"] == cpu % CORES


# ---- planted logs ----------------------------------------------------------------------------------------------------

FOUR = {0: 0, 1: 1, 2: 0, 3: 1}
"""two cores of two logical CPUs"""


def planted(folder: Path, cpu: Any, cores: Any = FOUR, until_ms: float = 220, **options: Any) -> Run:
    sampled_runs.gpu_trace(folder, [(0, 100), (100, 200)])
    sampled_runs.log(folder, until_ms, None, cpu, cores, **options)
    return open_run(folder)


def test_threads_siblings_and_a_full_host(tmp_path):
    view = planted(tmp_path, lambda t: {0: 95.0, 1: 95.0, 2: 95.0, 3: 95.0}, threads={0: 3, 2: 2}).view("cpu")
    assert figure(view, "Threads of the training") == 5
    assert (figure(view, "Both siblings busy"), figure(view, "Cores to spare")) == (1.0, 0)
    assert "4 logical CPUs were active and as many are needed (C_min 3.80" in view.headline
    assert "100 % of them with both siblings busy" in view.headline and "hardly any CPU time left" in view.headline
    assert {"over_time", "siblings", "threads", "by_cpu"} <= set(view.figures)
    assert view.tables["cpus"].rows.set_index("cpu")["threads"].to_dict()[0] == 3


def test_samples_in_which_no_cpu_was_busy_count(tmp_path):
    """Three of four samples are idle: the median is idle, the mean use a quarter."""
    view = planted(tmp_path, lambda t: {0: 80.0} if round(t / 10) % 4 == 0 else {}).view("cpu")
    assert figure(view, "Active CPUs") == 0 and figure(view, "Cores to spare") == 0
    assert view.tables["cpus"].rows["active_share"].tolist() == [pytest.approx(0.25)]
    assert view.tables["cpus"].rows["busy_share"].tolist() == [pytest.approx(0.2)]


def test_without_the_cores_nothing_physical_is_told(tmp_path):
    view = planted(tmp_path, lambda t: {0: 50.0, 1: 50.0}, cores=None).view("cpu")
    assert view.headline == "2 logical CPUs were active where 1 would do (C_min 1.00, medians)."
    physical = ("Awake cores", "Both siblings busy", "Cores to spare", "Could move to GPUs")
    for label in (*physical, "Threads of the training"):
        key = next(k for k in view.key_figures if k.label == label)
        assert (key.value, key.source) == (None, "unavailable"), label
    assert [m.what for m in view.missing] == ["Physical cores and siblings", "Threads of the training"]
    assert not any(t.type == "heatmap" for t in view.figures["over_time"].data)


def test_only_the_selected_time_counts(tmp_path):
    """One CPU is busy in the first step, three in the second, four after the capture."""
    def use(t: float) -> dict[int, float]:
        return dict.fromkeys(range(1 if t <= 100 else 3 if t <= 200 else 4), 10.0)
    run = planted(tmp_path, use, until_ms=2000)
    assert figure(run.view("cpu", step=0), "Active CPUs") == 1
    assert figure(run.view("cpu", step=1), "Active CPUs") == 3
    assert figure(run.view("cpu", time="around"), "Active CPUs") == 4


def test_a_capture_shorter_than_the_samples_is_seen_in_the_log_around_it(tmp_path):
    view = planted(tmp_path, lambda t: {0: 100.0}, until_ms=3000, cpu_period_ms=200).view("cpu")
    assert view.tables["hosts"].rows["over"].tolist() == ["log around it"]
    assert view.tables["hosts"].rows["n"].tolist() == [15]
    assert "log around the selected time" in view.figures["over_time"].layout.meta["description"]


def test_several_hosts_are_told_apart(tmp_path):
    folder = simulate(tmp_path, Options(hosts=2, ranks=1, steps=2))[0]
    run = open_run(folder)
    view = run.view("cpu")
    rows = view.tables["hosts"].rows
    assert sorted(rows["host"]) == ["node0", "node1"]
    most = rows.loc[rows["spare"].idxmax()]
    assert view.headline.startswith(f"On {most['host']}, ") and "of 2 hosts" in view.headline
    one = run.view("cpu", gpu=1)
    assert one.tables["hosts"].rows["host"].tolist() == ["node1"]
    assert one.headline.startswith(str(int(one.tables["hosts"].rows["c_active"].iloc[0])))


def test_nothing_sampled(tmp_path):
    sampled_runs.gpu_trace(tmp_path, [(0, 100)])
    view = open_run(tmp_path).view("cpu")
    assert not view.figures and not view.key_figures
    commands = [m.command for m in view.missing]
    assert any("torch_ext.telemetry(" in c for c in commands) and any("tb-chopper sample --out" in c for c in commands)


def test_a_long_log_is_thinned(tmp_path):
    """20 000 samples of up to four CPUs; the one moment with none at all and the one with four stay visible."""
    def use(t: float) -> dict[int, float]:
        return {} if t == 50_000 else dict.fromkeys(range(4 if t == 70_000 else 2), 50.0)
    sampled_runs.gpu_trace(tmp_path, [(0, 50_000), (50_000, 100_000)])
    sampled_runs.log(tmp_path, 100_000, None, use, FOUR, cpu_period_ms=5)
    view = open_run(tmp_path).view("cpu")
    traces = [t for f in view.figures.values() for t in f.data]
    assert max(len(t.x) for t in traces if t.type == "scatter") <= 4000
    active = view.figures["over_time"].data[0]
    assert (np.nanmin(active.y), np.nanmax(active.y)) == (0, 4)
    assert figure(view, "Active CPUs") == 2 and view.tables["hosts"].rows["n"].iloc[0] >= 19_990
    heat = next(t for t in view.figures["over_time"].data if t.type == "heatmap")
    assert np.asarray(heat.z).shape[1] <= 500 and (np.asarray(heat.z) == 2).any()


# ---- form ------------------------------------------------------------------------------------------------------------


def test_every_number_has_a_source_and_colours_are_the_palettes(run):
    view = run.view("cpu", compare=run)
    sent = json.dumps(view.as_dict(), allow_nan=False)
    assert set(re.findall(r'"(#[0-9A-Fa-f]{6})"', sent)) <= set(COLORS.values())
    for key in view.key_figures:
        assert key.definition and key.source in ("sampled", "estimated", "unavailable")
    for table in view.tables.values():
        assert all(c.name in table.rows for c in table.columns)
    assert len(view.tables["hosts"].rows) == 2, "this run and the one compared with"
