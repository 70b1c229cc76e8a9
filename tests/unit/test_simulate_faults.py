"""Faults planted in the simulated node: each changes what it should by the size it was given, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.simulate.arguments import _of_rank, _stall

PLAIN = Options("healthy", ranks=2, layers=1, steps=4, jitter=0.0, compress=False)
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    options = {
        "clean": PLAIN,
        "late": replace(PLAIN, late_loader={1: 15.0}, late_every=2),
        "stall": replace(PLAIN, stall=(12, 0, 40.0)),
        "storm": replace(PLAIN, storm=400),
    }
    return {name: simulate(tmp_path_factory.mktemp(name), o)[0] for name, o in options.items()}


def truth(run: Path) -> dict:
    return json.loads((run / "truth/truth.json").read_text())


def events(run: Path, rank: int) -> list[dict]:
    return json.loads((run / truth(run)["ranks"][rank]["trace"]).read_text())["traceEvents"]


def lengths_ms(run: Path) -> pd.DataFrame:
    """Length of the steps on the host, by rank."""
    return pd.DataFrame({r["rank"]: {s["step"]: (s["end_ns"] - s["start_ns"]) / 1e6 for s in r["steps"]}
                         for r in truth(run)["ranks"]})


def loader_ms(run: Path, rank: int) -> list[float]:
    return [e["dur"] / 1000 for e in events(run, rank) if e["name"] == LOADER]


def test_a_late_loader_is_late_by_its_size(runs):
    late, clean = (loader_ms(runs[name], 1) for name in ("late", "clean"))
    assert [a - b for a, b in zip(late, clean, strict=True)] == pytest.approx([15, 0, 15, 0], abs=1e-5)  # 10, 12
    assert loader_ms(runs["late"], 0) == pytest.approx(loader_ms(runs["clean"], 0), abs=1e-5)
    assert truth(runs["late"])["planted"] == [{"fault": "late_loader", "ms_by_rank": {"1": 15.0}, "every_steps": 2}]


def test_all_wait_for_a_late_loader(runs):
    longer = lengths_ms(runs["late"]) - lengths_ms(runs["clean"])
    assert longer.loc[12].tolist() == pytest.approx([15, 15], abs=0.5)
    assert longer.loc[13].tolist() == pytest.approx([0, 0], abs=0.5)


def test_a_stall_lengthens_its_step(runs):
    longer = lengths_ms(runs["stall"]) - lengths_ms(runs["clean"])
    assert longer.loc[12].tolist() == pytest.approx([40, 40], abs=0.5)
    assert longer.drop(12).abs().to_numpy().max() < 0.5
    assert truth(runs["stall"])["planted"] == [{"fault": "outlier_step", "step": 12, "rank": 0, "ms": 40.0}]


def test_a_storm_is_a_number_of_small_kernels(runs):
    tables = {name: pd.read_parquet(runs[name] / "truth/kernels.parquet") for name in ("storm", "clean")}
    step = {name: t[(t["rank"] == 0) & (t["step"] == 12)] for name, t in tables.items()}
    inside = step["storm"][step["storm"]["operation"] == "opt_step"]
    assert len(inside) == 400
    # Fused AdamW moves 7 values of an element, the plain one 2+3+2+4+2+2+2+4 in eight kernels.
    fused = step["clean"].loc[step["clean"]["cpu_op"] == "aten::_fused_adamw_", "bytes"].sum()
    elements = fused / 14
    assert inside["bytes"].sum() == pytest.approx(elements * 2 * 21, rel=1e-6)
    longer = lengths_ms(runs["storm"]) - lengths_ms(runs["clean"])
    assert (longer > 0).all().all()


def test_a_small_kernel_has_a_least_size(tmp_path):
    """2 µs at the peak of its memory and 70 %, whatever the number of them."""
    run = simulate(tmp_path, replace(PLAIN, storm=4000, steps=2))[0]
    table = pd.read_parquet(run / "truth/kernels.parquet")
    small = table[table["operation"] == "opt_step"]
    assert (small["end_ns"] - small["start_ns"]).min() == pytest.approx(2000, abs=2)
    assert small["bytes"].min() == pytest.approx(2e-6 * 5.3248e12 * 0.7, rel=1e-6)


def test_a_healthy_run_has_nothing_planted(runs):
    assert truth(runs["clean"])["planted"] == []


@pytest.mark.parametrize("wrong, what", [
    ({"slow": {0: 0.0}}, "slow GPU 0"), ({"slow": {0: 1.5}}, "slow GPU 0"), ({"slow": {9: 0.5}}, "rank 9"),
    ({"late_loader": {9: 5.0}}, "rank 9"), ({"late_loader": {0: -5.0}}, "above 0"), ({"late_every": 0}, "above 0"),
    ({"stall": (99, 0, 5.0)}, "step 99"), ({"stall": (12, 9, 5.0)}, "rank 9"), ({"storm": -1}, "above 0")])
def test_impossible_faults(wrong: dict, what: str, tmp_path):
    with pytest.raises(InvalidSelection, match=what):
        simulate(tmp_path, replace(PLAIN, **wrong))


def test_arguments_of_faults():
    assert _of_rank("3:0.8") == (3, 0.8)
    assert _stall("13:0:80") == (13, 0, 80.0)
    for parse, text in ((_of_rank, "3"), (_stall, "13:0")):
        with pytest.raises(Exception, match="is not like"):
            parse(text)
