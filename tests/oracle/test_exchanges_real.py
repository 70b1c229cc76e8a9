"""Exchanges of tensor parallelism in a real job, against a separate program that reads its files with `json`."""

from __future__ import annotations

import gzip
import json

import pytest

import tb_chopper


def test_tensor_parallelism_of_megatron(shared):
    """84 all-reduces per rank and step, none of them hidden and none with metadata: most of their time is waiting."""
    folder = shared / "traces" / "megatron_tp8_a100"
    ranks, elapsed = [], 0.0
    for file in sorted(folder.glob("*.json.gz")):
        events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
                  if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        elapsed += max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
        ranks.append(sorted((e["ts"], e["ts"] + e["dur"]) for e in events if "nccl" in e["name"].lower()))
    total = sum(end - start for r in ranks for start, end in r)
    waiting = sum(max(s for s, _ in one) - s for one in zip(*ranks, strict=True) for s, _ in one)
    row = tb_chopper.open_run(folder).exchanges("role").iloc[0]
    assert (row["role"], row["n"], row["n_per_step"]) == ("tensor", 84, 84)
    assert row["duration_us"] == pytest.approx(total)
    assert row["exposed_us"] == pytest.approx(total)
    assert row["exposed_wait_us"] == pytest.approx(waiting, rel=1e-3)
    assert row["share"] == pytest.approx(total / elapsed, rel=1e-3)
    assert row["transfer_share"] == pytest.approx((total - waiting) / elapsed, rel=0.02)


def test_kernels_of_other_libraries_are_exchanges_too(shared):
    """Case 19: DeepEP's combine, custom and symmetric-memory all-reduces; 400 µs of communication, 50 µs each."""
    run = tb_chopper.open_run(shared / "cases/19_comm_names/run")
    by_group = run.exchanges(["group", "role", "name"])
    assert by_group["duration_us"].sum() == 400
    deep_ep = by_group[by_group["group"] == "DeepEP"]
    assert deep_ep[["role", "name", "duration_us"]].to_numpy().tolist() == [["expert", "combine", 50]]


@pytest.mark.parametrize("name, per_step", [("torchrec4_v100", 4), ("dlrm8_v100", 5)])
def test_all_to_alls_without_metadata_are_counted(shared, name: str, per_step: int):
    """NCCL runs an all-to-all as SendRecv; nothing tells what the group is for, and nothing is guessed."""
    run = tb_chopper.open_run(shared / "traces" / name)
    rows = run.exchanges(["role", "name"]).set_index("name")
    assert rows.loc["send_recv", "n_per_step"] == pytest.approx(per_step)
    assert rows.loc["send_recv", "role"] == "unknown"
    given = run.exchanges("role", roles={"unnamed group": "expert"})
    assert given["role"].tolist() == ["expert"]
