"""Who waits for whom in the collectives of real jobs.

The totals were computed by a separate program that reads each file with `json`, sorts the kernels whose name holds
"nccl" by start and compares the k-th of every rank; those of `ddp4_mi300x` and `megatron_tp8_a100` were known before.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run

WAITS_MS = {
    "ddp4_mi300x": [76.9, 43.8, 46.7, 0.0],
    "megatron_tp8_a100": [191, 431, 363, 422, 445, 441, 214, 432],
    "dlrm8_v100": [5.6, 11.1, 3.3, 9.6, 6.4, 6.0, 3.3, 1.5],
    "resnet18_ddp2_v100": [7.2, 0.0],
}
LAST = {
    "ddp4_mi300x": {3: 21},
    "megatron_tp8_a100": {0: 32, 6: 28, 3: 15, 1: 4, 2: 4, 5: 1},
    "dlrm8_v100": {7: 5, 5: 2, 4: 1},
    "resnet18_ddp2_v100": {1: 12},
}


@cache
def opened(folder: Path) -> Run:
    return tb_chopper.open_run(folder)


@pytest.mark.parametrize("name", WAITS_MS)
def test_waits_and_last_arrivals(shared, name: str):
    by_gpu = opened(shared / "traces" / name).collectives(by="gpu")
    known = WAITS_MS[name]
    assert (by_gpu["wait_us"] / 1000).tolist() == pytest.approx(known, abs=0.5 if max(known) > 100 else 0.05)
    assert {int(g): int(n) for g, n in zip(by_gpu["gpu"], by_gpu["n_last"], strict=True) if n} == LAST[name]


@pytest.mark.parametrize("name", WAITS_MS)
def test_against_a_separate_calculation(shared, name: str):
    """The k-th communication kernel of every rank is one collective in these runs, whose ranks have equally many."""
    ranks = []
    for file in sorted((shared / "traces" / name).glob("*.json.gz")):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
        ranks.append(sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels))
    assert len({len(r) for r in ranks}) == 1
    run = opened(shared / "traces" / name)
    each = run.collectives()
    together = list(zip(*ranks, strict=True))
    assert len(each) == len(together)
    skew = [max(s for s, _ in one) - min(s for s, _ in one) for one in together]
    transfer = [min(e for _, e in one) - max(s for s, _ in one) for one in together]
    exact = 0.3 if name == "ddp4_mi300x" else 1e-6  # its times are binary fractions of a µs
    assert each["skew_us"].tolist() == pytest.approx(skew, abs=exact)
    assert [t if t == t else None for t in each["transfer_us"]] == [
        pytest.approx(t, abs=exact) if t >= 0 else None for t in transfer]


def test_every_communication_kernel_of_megatron_counts_though_none_has_metadata(shared):
    run = opened(shared / "traces" / "megatron_tp8_a100")
    assert run.kernels["collective"].isna().all()
    arrived = run.arrivals()
    assert Counter(arrived["gpu"].tolist()) == dict.fromkeys(range(8), 84)
    ends = arrived.groupby("instance")["end_ns"]
    assert (ends.max() - ends.min()).max() == 49_000
    groups = run.process_groups()
    assert groups[["role", "role_source", "size"]].to_numpy().tolist() == [["tensor", "pattern", 8]]


def test_a_rank_that_lost_a_collective_does_not_shift_the_others(shared):
    """Rank 2 of torchrec4 has 12 of 13: the first began before its capture."""
    by_gpu = opened(shared / "traces" / "torchrec4_v100").collectives(by="gpu").set_index("gpu")
    assert by_gpu["n"].tolist() == [13, 13, 12, 13]
    assert by_gpu["wait_us"].idxmin() == 2
    assert by_gpu.loc[2, "wait_us"] == 0
    assert by_gpu.loc[2, "n_last"] == 12
    ends = opened(shared / "traces" / "torchrec4_v100").arrivals().groupby("instance")["end_ns"]
    assert (ends.max() - ends.min()).max() < 120_000  # after waits of a whole second


def test_gradients_of_ddp(shared):
    run = opened(shared / "traces" / "ddp4_mi300x")
    groups = run.process_groups()
    assert groups[["group", "role", "role_source"]].to_numpy().tolist() == [["0", "data", "pattern"]]
    barrier = run.gradient_barrier()
    assert barrier["late_gpu"].tolist() == [3, 3, 3]
    assert barrier["limited_by"].tolist() == ["imbalance"] * 3
    reduced = run.collectives(where={"name": "all_reduce"})
    # 2 (n − 1) / n of 4 ranks; 6 822 912 floats.
    row = reduced[reduced["bytes"] == 6_822_912 * 4].iloc[0]
    assert row["busbw_gbs"] == pytest.approx(1.5 * 6_822_912 * 4 / row["transfer_us"] / 1000)
    assert run.collectives(by="name").set_index("name").loc["broadcast", "n"] == 6


def test_two_nodes_whose_clocks_differ(shared):
    """Case 29: node 1 is 5 ms ahead, rank 3 is 300 µs late."""
    expected = json.loads((shared / "cases/29_clock_skew_between_nodes/expected.json").read_text())
    run = opened(shared / "cases/29_clock_skew_between_nodes/run")
    clocks = run.clock_offsets
    assert clocks["gpus"].tolist() == [[0, 1], [2, 3]]
    assert clocks["offset_us"].tolist() == [0, expected["offset_node1"]]
    assert clocks["residual_us"].tolist() == [0, 0]
    waits = run.collectives(by="gpu")
    each = expected["wait_per_collective"] * expected["collectives"]
    assert waits["wait_us"].tolist() == [each, each, each, 0]
    assert run.collectives()["last_rank"].tolist() == [expected["straggler"]] * expected["collectives"]
    assert any(f.code == "clocks_of_hosts" and "5.000 ms" in f.message for f in run.findings)
    uncorrected = run.collectives(by="gpu", correct_clocks=False)["wait_us"].tolist()
    assert uncorrected == [(5000 + 300) * 5, (5000 + 300) * 5, 300 * 5, 0]


def test_why_the_last_rank_is_last(shared):
    """Rank 3 of ddp4 and rank 2 of torchrec4 compute as fast as the others and idle longer; waiting costs one second a
    step there."""
    for name, rank in (("ddp4_mi300x", 3), ("torchrec4_v100", 2)):
        first = opened(shared / "traces" / name).stragglers().iloc[0]
        assert first["gpu"] == rank
        assert first["explained_by"] == "host"
    megatron = opened(shared / "traces" / "megatron_tp8_a100").stragglers()
    assert megatron["gpu"].tolist()[:2] == [0, 6]
    assert megatron["explained_by"].tolist()[:2] == ["host", "host"]
    cost = opened(shared / "traces" / "torchrec4_v100").what_if().set_index("gpu")
    assert cost["gain_us"].iloc[-1] == pytest.approx(1e6, rel=0.03)
