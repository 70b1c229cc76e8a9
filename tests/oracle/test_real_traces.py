"""`tb-chopper analyze` on real traces against totals of a separate program (oracle.py, oracle.json beside the data).

24 of the traces have whole microseconds since the epoch as timestamps. There the program's `round(float(ts) * 1000)`
leaves the range in which a float64 holds every integer: it is off by up to 128 ns an event, and its totals of whole
microseconds are fractional, off by up to 9 µs. So the same program runs here with exact decimals: all 38 files must
equal that. The stored totals must agree to 1 µs where no rounding is involved.
"""

from __future__ import annotations

import importlib.util
import json
from decimal import Decimal
from functools import cache, partial
from types import SimpleNamespace

import pytest

from tb_chopper.backend.analyze import analyze
from tests.conftest import DATA

ORACLE = DATA / "traces" / "oracle.json"
FILES = sorted(json.loads(ORACLE.read_text())) if ORACLE.is_file() else []
GPU_TIME = ("compute", "communication", "memcpy", "overlap", "exposed_communication", "exposed_memcpy", "busy", "idle",
            "total")
LAUNCH = ("prep", "call", "launch", "graph", "unattributed")

pytestmark = pytest.mark.skipif(not FILES, reason="the folder of real files is not beside this checkout")


@cache
def workers(file: str) -> dict[str, dict]:
    """Analyzed workers of one file, by device."""
    result = analyze(ORACLE.parent / file)
    assert len(result["runs"]) == 1
    return {w["device"]: w for w in result["runs"][0]["workers"]}


@cache
def oracle() -> dict[str, dict]:
    return json.loads(ORACLE.read_text())


@cache
def exact(file: str) -> dict:
    """The separate program's totals of one file, with decimals in place of floats."""
    spec = importlib.util.spec_from_file_location("oracle", DATA.parent / "tools" / "oracle.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.ns = lambda x: round(Decimal(x) * 1000)
    program.json = SimpleNamespace(loads=partial(json.loads, parse_float=Decimal))
    return program.totals(str(ORACLE.parent / file))


def is_rounded(file: str) -> bool:
    """Whether float arithmetic of the stored totals has left the whole numbers of the file's own timestamps."""
    totals = [v for gpu in exact(file)["gpus"].values() for v in gpu.values()]
    stored = [v for gpu in oracle()[file]["gpus"].values() for v in gpu.values()]
    return all(float(v).is_integer() for v in totals) and not all(float(v).is_integer() for v in stored)


@pytest.mark.parametrize("file", FILES)
def test_totals(file):
    compare(file, exact(file), within_us=0.002)


@pytest.mark.parametrize("file", FILES)
def test_stored_totals(file):
    compare(file, oracle()[file], within_us=10 if is_rounded(file) else 1)


def compare(file: str, expected: dict, within_us: float) -> None:
    got = workers(file)
    assert sorted(got) == sorted(expected["gpus"])
    for device, totals in expected["gpus"].items():
        totals["launch_launch"] = totals["launch_prep"] + totals["launch_call"]
        for name in GPU_TIME:
            assert got[device]["gpu_time_us"][name] == pytest.approx(float(totals[name]), abs=within_us), name
        for name in LAUNCH:
            assert got[device]["launch_us"][name] == pytest.approx(float(totals[f"launch_{name}"]), abs=within_us), name
    assert sum(w["n_kernels"] for w in got.values()) == expected["n_kernels"]


@pytest.mark.parametrize("file", FILES)
def test_steps(file):
    expected = oracle()[file]["n_steps"]
    for worker in workers(file).values():
        if expected:
            assert worker["n_steps"] == expected
        for step in worker["steps"]:
            t = step["gpu_time_us"]
            assert t["compute"] + t["exposed_communication"] + t["exposed_memcpy"] + t["idle"] == pytest.approx(
                t["total"], abs=0.01)


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("ddp4_mi300x/rank0")])
def test_published_figures(file):
    """Compute, communication, idle and total of this run as published with it, ms."""
    t = next(iter(workers(file).values()))["gpu_time_us"]
    published = {"compute": 47.634, "communication": 64.471, "idle": 48.853, "total": 140.042}
    assert {k: round(t[k] / 1000, 3) for k in published} == published
