"""Links and islands on the GPUs of a run, and what groups lose that span them; islands and times computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend import schema
from tb_chopper.backend.alignment.topology import Topology, join
from tb_chopper.backend.metrics import collectives
from tb_chopper.backend.metrics.process_groups import process_groups
from tb_chopper.backend.metrics.topology import as_text, group_islands
from tb_chopper.backend.readers import topology as reader
from tests.builders import TraceBuilder
from tests.unit.test_collectives import arrived, collective

FOUR = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-63
GPU1\tNV4\t X \tSYS\tSYS\t0-63
GPU2\tSYS\tSYS\t X \tNV4\t64-127
GPU3\tSYS\tSYS\tNV4\t X \t64-127
"""
ADDRESSES = [f"0000:{bus}:00.0" for bus in ("05", "26", "46", "65")]
CHAIN = "LINK TYPE TABLE:\n" + "".join(
    " ".join([("" if i < 0 else ADDRESSES[i]), *(ADDRESSES[j] if i < 0 else "SELF" if i == j else
              "XGMI" if abs(i - j) == 1 else "PCIE" for j in range(4))]) + "\n" for i in (-1, 0, 1, 2, 3))
"""0-1-2-3: one island, though 0 and 3 have no link of their own"""


def host_file(folder: Path, text: str, name: str = "topology.txt") -> reader.HostTopology:
    (folder / name).write_text(text)
    return reader.read(folder / name)


def workers(*hosts: str | None) -> pd.DataFrame:
    """One GPU per entry: the host that it is on."""
    return schema.conform(pd.DataFrame({"capture": range(len(hosts)), "gpu": range(len(hosts)), "host": hosts}),
                          schema.WORKERS)


def sidecars(**devices: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(k.lstrip("c")): {"identity": {"device": d}} for k, d in devices.items()}


def islands(found: Topology) -> dict[int, int]:
    return dict(zip(found.islands["gpu"], found.islands["island"], strict=True))


def codes(found: Topology) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in found.findings]


def test_two_islands(tmp_path: Path):
    found = join([host_file(tmp_path, FOUR)], workers("a", "a", "a", "a"), {})
    assert islands(found) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert found.links[["gpu_a", "gpu_b", "link", "fast"]].to_numpy().tolist() == [
        [0, 1, "NVLink", True], [0, 2, "SYS", False], [0, 3, "SYS", False], [1, 2, "SYS", False],
        [1, 3, "SYS", False], [2, 3, "NVLink", True]]
    assert set(found.links["host"]) == {"a"}
    assert codes(found) == [("topology_gpus", "info")]  # matched by order, and that is said


def test_a_chain_of_links_is_one_island(tmp_path: Path):
    found = join([host_file(tmp_path, CHAIN)], workers("a", "a", "a", "a"), {})
    assert set(islands(found).values()) == {0}


def test_gpus_are_known_by_their_address(tmp_path: Path):
    """The ranks 0 to 3 run on the GPUs 2, 0, 3, 1 of the host."""
    order = (2, 0, 3, 1)
    given = sidecars(**{f"c{rank}": {"index": 0, "pci_address": ADDRESSES[g]} for rank, g in enumerate(order)})
    text = FOUR + "".join(f"{i}, 0000{a}\n" for i, a in enumerate(ADDRESSES))
    found = join([host_file(tmp_path, text)], workers("a", "a", "a", "a"), given)
    assert islands(found) == {0: 0, 2: 0, 1: 1, 3: 1}
    assert found.findings == []
    pairs = found.links.set_index(["gpu_a", "gpu_b"])["link"]
    assert pairs[0, 2] == "NVLink"
    assert pairs[1, 3] == "NVLink"


def test_a_job_on_half_of_the_host(tmp_path: Path):
    given = sidecars(c0={"index": 2, "pci_address": None}, c1={"index": 3, "pci_address": None})
    found = join([host_file(tmp_path, FOUR)], workers("a", "a"), given)
    assert islands(found) == {0: 0, 1: 0}
    assert found.links[["gpu_a", "gpu_b", "link"]].to_numpy().tolist() == [[0, 1, "NVLink"]]
    nothing_told = join([host_file(tmp_path, FOUR)], workers("a", "a"), {})
    assert len(nothing_told.islands) == 0
    assert codes(nothing_told) == [("topology_gpus", "warning")]


def test_hosts_and_their_files(tmp_path: Path):
    two = "\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n"
    apart = two.replace("NV4", "PHB")
    first = host_file(tmp_path, two, "node_0.topology.txt")
    second = host_file(tmp_path, apart, "node1.topology.txt")
    found = join([first, second], workers("node 0", "node 0", "node1", "node1"), {})
    assert islands(found) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert found.islands["host"].tolist() == ["node 0", "node 0", "node1", "node1"]
    one = join([first, second], workers("node 0", "node 0"), {})
    assert islands(one) == {0: 0, 1: 0}
    assert ("topology_other_host", "info") in codes(one)
    every = join([host_file(tmp_path, apart)], workers("x", "x", "y", "y"), {})
    assert islands(every) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_file_of_another_name_on_the_only_host(tmp_path: Path):
    file = host_file(tmp_path, FOUR, "login1.topology.txt")
    assert islands(join([file], workers(*"aaaa"), {})) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert ("topology_other_host", "warning") in codes(join([file], workers(*"aaaa"), {}))
    assert islands(join([file], workers(*[None] * 4), {})) == {0: 0, 1: 0, 2: 1, 3: 1}
    both = join([file, host_file(tmp_path, FOUR, "login2.topology.txt")], workers(*[None] * 4), {})
    assert len(both.islands) == 0
    assert ("topology_no_host", "warning") in codes(both)


def test_nothing_recorded():
    found = join([], workers("a", "a"), {})
    assert (len(found.links), len(found.islands), found.findings) == (0, 0, [])


# ---- groups on islands -----------------------------------------------------------------------------------------------

ALL, LEFT, RIGHT = "all", "left", "right"
MEMBERS = {ALL: (0, 1, 2, 3), LEFT: (0, 1), RIGHT: (2, 3)}
ISLANDS = pd.DataFrame({"host": "a", "gpu": range(4), "island": [0, 0, 1, 1]})
HOSTS: dict[int, str | None] = dict.fromkeys(range(4), "a")


def rows(group: str, start: float, took: float, mb: float, step: int = 0, **more: Any) -> list[dict]:
    """An all-reduce of so many MB of bfloat16 that all ranks of the group enter at once."""
    members = MEMBERS[group]
    n = round(mb * 1e6 / 2)
    return [collective(gpu, start, start + took, group=group, group_desc=group, group_size=len(members), step=step,
                       group_seq=round(start), in_nelems=n, out_nelems=n, **more) for gpu in members]


def grouped(all_rows: list[dict], link: float | None = 400e9, island: pd.DataFrame = ISLANDS,
            hosts: dict[int, str | None] = HOSTS, contention: float = np.nan) -> pd.DataFrame:
    table = arrived(all_rows)
    return group_islands(table, collectives.collectives(table, link_bytes_per_s=link), process_groups(table), island,
                         hosts, link, contention=contention).set_index("group")


def test_bandwidth_across_islands_against_within():
    """Within: 40 MB · 2 · 1/2 in 200 µs is 200 GB/s. Across: 40 MB · 2 · 3/4 in 1200 µs is 50 GB/s, a quarter."""
    found = grouped([*rows(LEFT, 0, 200, 40), *rows(RIGHT, 0, 200, 40), *rows(ALL, 1000, 1200, 40)])
    assert found.index.tolist() == [ALL, LEFT, RIGHT]
    assert found["n_islands"].tolist() == [2, 1, 1]
    assert found["spans"].tolist() == [True, False, False]
    assert found.loc[ALL, "islands"] == [[0, 1], [2, 3]]
    assert found["busbw_gbs"].tolist() == pytest.approx([50, 200, 200])
    assert set(found["within_source"]) == {"measured"}
    assert found.loc[ALL, "ratio"] == pytest.approx(0.25)
    assert found.loc[ALL, ["transfer_us", "saved_us"]].tolist() == pytest.approx([1200, 900])
    assert found.loc[[LEFT, RIGHT], "saved_us"].isna().all()


def test_without_a_group_inside_an_island_the_links_peak_stands_in():
    """Of 400 GB/s a ring reaches 280."""
    found = grouped(rows(ALL, 0, 1200, 40)).loc[ALL]
    assert (found["within_gbs"], found["within_source"]) == (pytest.approx(280), "estimated")
    assert found["ratio"] == pytest.approx(50 / 280)
    unknown = grouped(rows(ALL, 0, 1200, 40), link=None).loc[ALL]
    assert np.isnan(unknown["ratio"])
    assert np.isnan(unknown["saved_us"])
    assert unknown["busbw_gbs"] == pytest.approx(50)


def test_small_messages_tell_nothing_of_the_links():
    """4 MB at 400 GB/s · 4/6 need 15 µs; 1 MB is below LARGE_BYTES where no peak is known."""
    both = [*rows(ALL, 0, 1200, 40), *rows(ALL, 2000, 500, 1)]
    assert grouped(both).loc[ALL, "busbw_gbs"] == pytest.approx(50)
    assert grouped(both, link=None).loc[ALL, "busbw_gbs"] == pytest.approx(50)
    assert np.isnan(grouped(rows(ALL, 0, 500, 1)).loc[ALL, "busbw_gbs"])


def test_only_what_is_exposed_can_be_saved():
    """1200 µs of which 1000 are hidden: 200 are exposed, and all of them go where 900 µs of transfer do. Two steps."""
    hidden = [{"gpu": g, "start": 0, "end": 1000, "step": 0, "group_seq": -1, "group_size": -1, "in_nelems": -1,
               "out_nelems": -1} for g in range(4)]
    all_rows = [*rows(LEFT, 5000, 200, 40, step=1), *rows(ALL, 0, 1200, 40), *hidden,
                *rows(ALL, 7000, 1200, 40, step=1)]
    found = grouped(all_rows).loc[ALL]
    assert found["transfer_us"] == pytest.approx((200 + 1200) / 2)
    assert found["saved_us"] == pytest.approx((200 + 900) / 2)
    # Where computation loses a fifth beside communication: of the 1000 beside it 700 would go.
    assert grouped(all_rows, contention=0.2).loc[ALL, "saved_us"] == pytest.approx((200 + 0.2 * 700 + 900) / 2)


def test_what_runs_beside_another_transfer_is_not_saved():
    """Another group's 800 µs run beside the first 1200: 400 are bare."""
    found = grouped([*rows(LEFT, 0, 800, 160), *rows(RIGHT, 0, 800, 160), *rows(ALL, 0, 1200, 40)])
    assert found.loc[ALL, ["transfer_us", "saved_us"]].tolist() == pytest.approx([400, 400])
    assert found.loc[LEFT, "transfer_us"] == pytest.approx(0)


def test_waiting_is_not_saved():
    late = rows(ALL, 0, 1500, 40)
    late[3]["start"] = 300
    found = grouped([*rows(LEFT, 5000, 200, 40), *late]).loc[ALL]
    assert found["transfer_us"] == pytest.approx(1200)
    assert found["saved_us"] == pytest.approx(900)


def test_hosts_are_no_islands_of_one_host():
    two: dict[int, str | None] = {0: "a", 1: "a", 2: "b", 3: "b"}
    found = grouped(rows(ALL, 0, 1200, 40), hosts=two).loc[ALL]
    assert (found["n_hosts"], found["n_islands"], found["spans"]) == (2, 2, False)


def test_islands_that_are_not_known():
    found = grouped(rows(ALL, 0, 1200, 40), island=ISLANDS.iloc[:3]).loc[ALL]
    assert pd.isna(found["n_islands"])
    assert not found["spans"]
    assert len(grouped([*rows(LEFT, 0, 100, 40)], island=ISLANDS.iloc[:0])) == 1


@pytest.mark.parametrize("islands_, text", [
    ([[0, 1, 2, 3], [4, 5, 6, 7]], "0-3 | 4-7"), ([[0], [2, 1, 5]], "0 | 1-2, 5"), ([], "")])
def test_islands_as_text(islands_: list[list[int]], text: str):
    assert as_text(islands_) == text


# ---- in a run --------------------------------------------------------------------------------------------------------

def test_a_run_finds_its_file(tmp_path: Path):
    for rank in range(4):
        trace = TraceBuilder(rank=rank, world_size=4)
        trace.head["deviceProperties"][0]["numSms"] = 132
        trace.step(0, 0, 2000)
        trace.op("aten::mm", 10, 20)
        trace.launch("gemm", 15, 20, 100)
        trace.collective("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 130, 200, 1200,
                         **{"Group size": 4, "In msg nelems": 20_000_000, "dtype": "BFloat16"})
        trace.write(tmp_path / f"rank{rank}.pt.trace.json")
    (tmp_path / "node7.topology.txt").write_text(FOUR)
    run = tb_chopper.open_run(tmp_path)
    assert islands(run.topology) == {0: 0, 1: 0, 2: 1, 3: 1}
    group = run.group_islands().iloc[0]
    assert (group["n_islands"], group["spans"], group["within_gbs"]) == (2, True, 315)  # 0.7 of an H100's 450
    assert group["busbw_gbs"] == pytest.approx(50)
    (tmp_path / "node7.topology.txt").write_text("no devices were found\n")
    damaged = tb_chopper.open_run(tmp_path)
    assert [f.code for f in damaged.findings if "topology" in f.code] == ["unreadable_topology"]
    assert len(damaged.topology.islands) == 0
