"""What the Memory and Host tabs say of runs whose memory and stalls are known (tests.unit.memory_runs)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tb_chopper.backend.views.view import View
from tests.builders import TraceBuilder
from tests.unit import memory_runs
from tests.unit.memory_runs import GIB, LATE, MIB, PARAMETERS


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tb_chopper.open_run(memory_runs.write(tmp_path_factory.mktemp("full")))


def numbers(view: View) -> dict[str, tuple[object, str]]:
    return {k.label: (k.value, k.source) for k in view.key_figures}


def test_memory_with_everything(full: Run) -> None:
    view = full.view("memory")
    assert view.headline == (
        "GPU 3 holds 96 % of its memory at most; 3.00 GiB are left. Its peak is in backward, for MmBackward0. The "
        "floor of GPU 1 grows by 200 MiB in every step: full after 49 more steps.")
    shown = numbers(view)
    assert shown["Peak allocated"] == (74 * GIB, "measured") and shown["Reserved"] == (77 * GIB, "measured")
    assert shown["Used"] == (79 * GIB, "sampled") and shown["Headroom"] == (3 * GIB, "measured")
    assert shown["Growth per step"] == (200 * MIB, "measured")
    assert shown["Model state"] == (2 * PARAMETERS, "estimated")
    assert list(view.figures) == ["curve", "by_gpu", "model_state", "floors"]
    assert view.missing == ()


def test_the_expected_state_beside_what_was_measured(full: Run) -> None:
    """An eighth of the parameters in float32 (the products are): 4 + 4 + 8 bytes each."""
    rows = full.view("memory").tables["model_state"].rows.set_index("gpu")
    assert (rows["parameter_bytes"] == PARAMETERS / 8 * 4).all() and (rows["optimizer_bytes"] == PARAMETERS).all()
    assert rows["floor_ratio"].to_dict() == pytest.approx(dict.fromkeys(range(4), 12 * GIB / (PARAMETERS / 8 * 12)))
    assert rows["activation_bytes"].tolist() == [(50 + 4 * rank) * GIB for rank in range(4)]
    figure = full.view("memory").figures["model_state"]
    marks = {t.name: list(t.x) for t in figure.data if t.type == "scatter"}
    assert marks["floor"] == [12] * 4 and marks["Memory of the device"] == [80] * 4
    assert marks["peak"] == pytest.approx([62, 66 + 7 * 200 / 1024, 70, 74])


def test_memory_of_the_driver_alone(tmp_path: Path) -> None:
    view = tb_chopper.open_run(memory_runs.write(tmp_path, events=False, modules=False)).view("memory")
    assert "GPU 3 uses 99 % of its memory at most; 1.00 GiB are left." in view.headline
    assert "grows by 200 MiB in every step" in view.headline
    assert {source for _, source in numbers(view).values()} == {"sampled"}
    assert [m.what for m in view.missing] == ["Memory over time", "Expected state of the model"]
    assert view.tables["steps"].rows["n"].tolist() == [4] * 32  # at 100, 350, 600 and 850 of 990


def test_memory_without_any_measurement(tmp_path: Path) -> None:
    view = tb_chopper.open_run(memory_runs.write(tmp_path, events=False, telemetry=False)).view("memory")
    assert view.headline.startswith("Parameters, gradients and optimizer states should take 15.0 GiB of GPU 0, 19 %")
    assert list(view.figures) == ["model_state"] and numbers(view)["Headroom"] == (None, "unavailable")
    bare = memory_runs.write(tmp_path / "bare", events=False, telemetry=False, modules=False)
    assert [m.what for m in tb_chopper.open_run(bare).view("memory").missing] == [
        "Memory over time", "Memory as the driver counts", "Expected state of the model"]


def test_memory_of_one_gpu_and_some_steps(full: Run) -> None:
    view = full.view("memory", gpu=1, step=(2, 4))
    assert view.tables["steps"].rows["step"].tolist() == [2, 3, 4]
    assert view.tables["gpus"].rows["gpu"].tolist() == [1] == view.tables["model_state"].rows["gpu"].tolist()


def test_stalls_of_the_host(full: Run) -> None:
    """Of eight loads the last one has no kernel after it: seven are idle time."""
    view = full.view("host")
    stalls = view.tables["stalls"].rows.set_index(["gpu", "kind"])
    late = stalls.loc[(LATE, "Data loading")]
    assert late["idle_us"] == pytest.approx(7 * 400 / 8) and late["uncovered_us"] == pytest.approx(7 * 400 / 8)
    assert stalls.loc[(0, "Data loading"), "idle_us"] == pytest.approx(7 * 30 / 8)
    # Of GPU 1 the collections in steps 1, 4 and 7: the last one has no kernel after it.
    assert stalls.loc[(1, "Garbage collection"), "idle_us"] == pytest.approx(2 * 120 / 8)
    length = full.timeline(by="gpu", where={"step": range(8)}).set_index("gpu")["total_us"][LATE]
    data_stall = {k.label: k for k in view.key_figures}["Data stall"]
    assert data_stall.value == pytest.approx(7 * 400 / length)
    assert data_stall.note == "GPU 2: 350 µs a step"
    assert late["at"] == full.stalls.query("gpu == @LATE and kind == 'loader'")["at"].iloc[0]


def test_stalls_by_step_add_up_to_the_causes(full: Run) -> None:
    rows = full.view("host").tables["stall_steps"].rows
    causes = full.idle_causes(by="gpu").groupby("cause")["idle_us"].sum()
    assert rows["loader"].sum() == pytest.approx(causes["loader"]) and rows["gc"].sum() == pytest.approx(causes["gc"])
    calls = full.view("host").tables["calls"].rows
    assert calls["caused_us"].sum() == pytest.approx(causes["loader"] + causes["gc"])


def test_hosts_without_gpus_show_what_they_did(tmp_path: Path) -> None:
    cpu = TraceBuilder(rank=None)
    for number in range(4):
        cpu.step(number, 1000 * number, 900)
        cpu.annotation(memory_runs.LOADER, 1000 * number + 1, 400)
        cpu.op("aten::mm", 1000 * number + 410, 200)
    cpu.write(tmp_path / "host_1.pt.trace.json")
    view = tb_chopper.open_run(tmp_path).view("host")
    rows = view.tables["calls"].rows
    assert rows[["n", "time_us", "step_us"]].to_numpy().tolist() == [[4, 1600, 400]]
    assert "caused_us" not in {c.name for c in view.tables["calls"].columns}
    assert [m.what for m in view.missing] == ["Launch calls"]
