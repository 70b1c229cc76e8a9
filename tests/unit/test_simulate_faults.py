"""Faults planted in the simulated node: each changes what it should by the size it was given, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import tb_chopper
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
        "growth": replace(PLAIN, memory_growth={1: 3.0}),
        "islands": replace(PLAIN, ranks=4, tensor=2, islands=0.25),
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


def memory(run: Path, rank: int) -> pd.DataFrame:
    """The allocator's events, with the step that they lie in."""
    found = pd.DataFrame([{"ts": e["ts"], **e["args"]} for e in events(run, rank) if e["name"] == "[memory]"])
    steps = [e for e in events(run, rank) if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"]
    for e in steps:
        found.loc[found["ts"].between(e["ts"], e["ts"] + e["dur"]), "step"] = int(e["name"].split("#")[1])
    return found.sort_values("ts", kind="stable", ignore_index=True)


def test_memory_follows_the_model(runs):
    """Parameters and two moments in bf16, a shard of them each; nothing of a step remains, but for the planted block.
    Gradients of the warm-up step, which has no optimizer, end with the first one's."""
    found = memory(runs["growth"], 0)
    dim, hidden, vocab = 4096, 14336, 16_000
    layer = dim * (dim + 2 * 1024) + dim * dim + 3 * dim * hidden + 2 * dim
    params = layer + 2 * vocab * dim + dim
    assert found["Total Allocated"].min() == pytest.approx(3 * 2 * params / 2, abs=2048)
    by_step = found.groupby("step")["Bytes"].sum()
    assert by_step[10] == pytest.approx(-2 * params / 2, abs=2048)
    assert by_step.loc[11:].tolist() == [0, 0, 0]
    change = found["Total Allocated"].diff().dropna()
    assert (change == found["Bytes"].iloc[1:]).all()
    assert (found["Total Reserved"] >= found["Total Allocated"]).all()
    assert (found["Total Reserved"] % (2 << 20) == 0).all()
    assert (found[["Device Id", "Device Type"]].drop_duplicates().to_numpy() == [[0, 1]]).all()


def test_activations_rise_in_the_forward_and_fall_in_the_backward(runs):
    """The largest tensors are the logits: once as bf16 and once in float32, of 16384 tokens."""
    found = memory(runs["growth"], 0)
    found = found[found["step"] == 12]
    peak = found["Total Allocated"].idxmax()
    logits = 4 * 4096 * 16_000
    assert found.loc[peak, "Bytes"] == 4 * logits
    assert {2 * logits, 4 * logits} <= set(found["Bytes"])
    table = pd.read_parquet(runs["growth"] / "truth/kernels.parquet")
    backward = table[(table["rank"] == 0) & (table["step"] == 12) & (table["phase"] == "backward")]["launch_ns"].min()
    first = min(e["ts"] for e in events(runs["growth"], 0) if e.get("cat") == "cpu_op" and "evaluate_function" in
                e["name"] and e["ts"] > found["ts"].min())
    assert found.loc[peak, "ts"] <= first and backward > 0
    assert found["Total Allocated"].iloc[-1] < 0.2 * found["Total Allocated"].max()


def test_growing_memory_grows_by_its_size(runs):
    assert memory(runs["growth"], 1).groupby("step")["Bytes"].sum().loc[11:].tolist() == [3 << 20] * 3
    assert truth(runs["growth"])["planted"] == [{"fault": "memory_growth", "bytes_per_step_by_rank": {"1": 3 << 20}}]
    assert memory(runs["growth"], 1)["Addr"].nunique() == memory(runs["growth"], 0)["Addr"].nunique() + 4


def test_memory_is_recorded_where_it_is_asked_for(runs):
    assert not [e for e in events(runs["clean"], 0) if e["name"] == "[memory]"]
    heads = [json.loads((runs[name] / truth(runs[name])["ranks"][0]["trace"]).read_text())
             for name in ("clean", "growth")]
    assert [h.get("profile_memory") for h in heads] == [None, 1]


def test_islands_slow_the_groups_that_span_them(runs):
    """Tensor-parallel groups inside the islands 0-1 and 2-3, data-parallel ones across, at a quarter of 285 GB/s."""
    table = pd.read_parquet(runs["islands"] / "truth/kernels.parquet")
    table = table[(table["kind"] == "communication") & table["launched"] & (table["bytes"] > 1e6)]
    transfer = table["end_ns"] - table["start_ns"] - table["wait_ns"]
    across = table["cpu_op"].str.contains("_allgather_base|reduce_scatter")
    ring = table["bytes"] * 0.5 / (transfer - 24_000)  # both kinds have two ranks; all-reduces move twice that
    assert ring[across].median() == pytest.approx(0.25 * 285, rel=0.01)
    assert 2 * ring[~across].median() == pytest.approx(285, rel=0.01)


def test_links_of_islands(runs):
    run = tb_chopper.open_run(runs["islands"])
    assert run.topology.islands["island"].tolist() == [0, 0, 1, 1]
    assert set(run.topology.links["link"]) == {"XGMI", "PCIe"}
    whole = tb_chopper.open_run(runs["clean"])
    assert whole.topology.islands["island"].nunique() == 1


def test_links_as_nvidia_smi_prints_them(tmp_path):
    run = simulate(tmp_path, replace(PLAIN, ranks=4, islands=0.5, steps=1, dialect="cuda"))[0]
    found = tb_chopper.open_run(run)
    assert found.topology.islands["island"].tolist() == [0, 0, 1, 1]
    assert not found.topology.findings


def test_a_healthy_run_has_nothing_planted(runs):
    assert truth(runs["clean"])["planted"] == []


@pytest.mark.parametrize("wrong, what", [
    ({"slow": {0: 0.0}}, "slow GPU 0"), ({"slow": {0: 1.5}}, "slow GPU 0"), ({"slow": {9: 0.5}}, "rank 9"),
    ({"islands": 0.0}, "islands"), ({"islands": 0.5, "ranks": 3}, "islands"), ({"memory_growth": {9: 1.0}}, "rank 9"),
    ({"memory_growth": {0: -1.0}}, "above 0"), ({"late_loader": {9: 5.0}}, "rank 9"),
    ({"late_loader": {0: -5.0}}, "above 0"), ({"late_every": 0}, "above 0"),
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
