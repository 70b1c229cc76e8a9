"""Idle time of real GPUs and what their hosts did meanwhile."""

from __future__ import annotations

import gzip
import json

import pytest

import tb_chopper
from tb_chopper.backend.rules import data_stall
from tb_chopper.backend.rules.diagnosis import step_ms
from tests.conftest import DATA

TRACES = DATA / "traces"
NAMES = sorted(p.name for p in TRACES.iterdir() if p.is_dir()) if TRACES.is_dir() else []


@pytest.mark.parametrize("name", NAMES)
def test_causes_add_up_to_the_idle_time_of_the_oracle(shared, name: str):
    """Every nanosecond of idle time has one cause; the total is the separate program's."""
    run = tb_chopper.open_run(TRACES / name)
    found = run.idle_causes(by=["gpu"]).groupby("gpu")["idle_us"].sum()
    assert (run.idle_causes()["idle_us"] > 0).all()
    total = run.timeline(by="gpu").set_index("gpu")["idle_us"]
    assert found.to_numpy() == pytest.approx(total.to_numpy(), abs=0.01)
    stored = json.loads((TRACES / "oracle.json").read_text())
    theirs = [gpu["idle"] for file in sorted(k for k in stored if k.startswith(f"{name}/"))
              for gpu in _numbers(stored[file])]
    assert sorted(found) == pytest.approx(sorted(theirs), abs=10)


def _numbers(entry: object) -> list[dict]:
    """The dictionaries with an idle time anywhere in an entry of oracle.json."""
    if isinstance(entry, dict):
        return [entry] if "idle" in entry else [n for v in entry.values() for n in _numbers(v)]
    return [n for v in entry for n in _numbers(v)] if isinstance(entry, list) else []


def test_torchrec_frees_memory_in_every_step(shared):
    """cudaMalloc and cudaFree, 15 to 55 ms each step, are why three of its GPUs idle; the fourth is held up by its
    program for a second a step."""
    run = tb_chopper.open_run(TRACES / "torchrec4_v100")
    most = run.idle_causes().drop_duplicates("gpu").set_index("gpu")["cause"]
    assert most.to_dict() == {0: "allocation", 1: "allocation", 2: "dispatch", 3: "allocation"}
    per_name = run.host_calls(by=["gpu", "name"], where={"gpu": 0}).set_index("name")
    assert per_name.loc["cudaFree", "n"] == 14
    assert per_name.loc["cudaMalloc", "n"] == 24


def test_a_training_without_loader_workers_stalls_for_data(shared):
    """The demonstration of torch-tb-profiler: num_workers=0. Against the file's events, counted here one by one."""
    folder = TRACES / "resnet50_v100"
    events = json.loads(gzip.decompress(next(folder.glob("*.gz")).read_bytes()))["traceEvents"]
    loading = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                     if str(e.get("name")).startswith("enumerate(DataLoader)") and e.get("ph") == "X")
    busy = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ("Kernel", "Memcpy", "Memset"))
    uncovered = [_uncovered(low, high, busy) for low, high in loading[1:]]  # nothing ran before the first
    run = tb_chopper.open_run(folder)
    stalls = run.step_stalls().query("kind == 'loader'")
    assert stalls["uncovered_us"].tolist()[1:] == pytest.approx(uncovered, abs=2)
    found, = data_stall.rule(run)
    assert found.gain_ms == pytest.approx(sum(uncovered) / len(uncovered) / 1000, rel=0.05)
    assert found.gain_ms / step_ms(run) == pytest.approx(0.22, abs=0.01)


def _uncovered(low: float, high: float, busy: list[tuple[float, float]]) -> float:
    """The part of a stretch of time in which nothing of `busy` (in order of start) runs."""
    at, out = low, 0.0
    for start, end in busy:
        if end > at and start < high:
            out += max(start - at, 0)
            at = max(at, end)
    return out + max(high - at, 0)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "resnet50_v100"])
def test_no_stall_is_invented(shared, name: str):
    """In the others the loader costs below 1 % of a step."""
    assert data_stall.rule(tb_chopper.open_run(TRACES / name)) == []


def test_a_loader_without_workers_keeps_the_gpu_of_2021_waiting(shared):
    """resnet50 with num_workers=0. Idle time of the GPU inside enumerate(DataLoader), counted from the file alone: 0 in
    the first step, then 32 to 35 ms, a fifth of each step."""
    run = tb_chopper.open_run(TRACES / "resnet50_v100")
    loading = run.step_stalls()[lambda t: t["kind"] == "loader"]
    assert loading["uncovered_us"].tolist() == [0, 32_394, 32_259, 31_878, 35_131, 35_270]
    first, *others = run.diagnosis
    assert first.code == "data_stall" and "num_workers" in first.remedy
    assert first.gain_ms == pytest.approx(33, abs=1)
    assert "low_utilization" not in {d.code for d in others}
