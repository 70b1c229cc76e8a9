"""Idle time of real GPUs and what their hosts did meanwhile."""

from __future__ import annotations

import json

import pytest

import tb_chopper
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
