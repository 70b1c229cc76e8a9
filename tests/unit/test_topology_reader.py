"""Links between GPUs from what the vendors' tools print; the texts are written by hand in their formats."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import topology

NVIDIA = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV4\tSYS\tPHB\tPIX\tSYS\t0-23,48-71\t0\t\tN/A
GPU1\tNV4\t X \tNODE\tPXB\tPIX\tSYS\t0-23,48-71\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tNV12\tSYS\tPIX\t24-47,72-95\t1\t\tN/A
GPU3\tPHB\tPXB\tNV12\t X \tSYS\tPIX\t24-47,72-95\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPIX\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1

"""
NVIDIA_LINKS = [(0, 1, "NVLink", 4), (0, 2, "SYS", None), (0, 3, "PHB", None), (1, 2, "NODE", None),
                (1, 3, "PXB", None), (2, 3, "NVLink", 12)]

AMD = """ACCESS TABLE:
             0000:05:00.0 0000:26:00.0 0000:46:00.0
0000:05:00.0 ENABLED      ENABLED      ENABLED
0000:26:00.0 ENABLED      ENABLED      ENABLED
0000:46:00.0 ENABLED      ENABLED      ENABLED

WEIGHT TABLE:
             0000:05:00.0 0000:26:00.0 0000:46:00.0
0000:05:00.0 0            15           40
0000:26:00.0 15           0            40
0000:46:00.0 40           40           0

HOPS TABLE:
             0000:05:00.0 0000:26:00.0 0000:46:00.0
0000:05:00.0 0            1            2
0000:26:00.0 1            0            2
0000:46:00.0 2            2            0

LINK TYPE TABLE:
             0000:05:00.0 0000:26:00.0 0000:46:00.0
0000:05:00.0 SELF         XGMI         PCIE
0000:26:00.0 XGMI         SELF         PCIE
0000:46:00.0 PCIE         PCIE         SELF

NUMA BW TABLE:
             0000:05:00.0 0000:26:00.0 0000:46:00.0
0000:05:00.0 N/A          50000-100000 N/A
0000:26:00.0 50000-100000 N/A          N/A
0000:46:00.0 N/A          N/A          N/A
"""
AMD_ADDRESSES = ["0000:05:00.0", "0000:26:00.0", "0000:46:00.0"]
AMD_ROWS = [(0, 1, "XGMI", 15, 1), (0, 2, "PCIe", 40, 2), (1, 2, "PCIe", 40, 2)]

ROCM_SMI = """

============================ ROCm System Management Interface ============================
================================= Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           40
GPU1   15           0            40
GPU2   40           40           0

================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU2
GPU0   0            1            2
GPU1   1            0            2
GPU2   2            2            0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            PCIE
GPU2   PCIE         PCIE         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
================================== End of ROCm SMI Log ===================================
"""


def read(folder: Path, text: str | bytes, name: str = "node0.topology.txt") -> topology.HostTopology:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return topology.read(path)


def rows(found: topology.HostTopology, *columns: str) -> list[tuple]:
    return [tuple(None if pd.isna(v) else v for v in row)
            for row in found.links[["gpu_a", "gpu_b", "link", *columns]].itertuples(index=False)]


def test_nvidia_smi(tmp_path: Path):
    found = read(tmp_path, NVIDIA)
    assert rows(found, "n_links") == NVIDIA_LINKS
    assert found.gpus == dict.fromkeys(range(4))
    assert (found.host, found.findings) == ("node0", [])


@pytest.mark.parametrize("change", [
    lambda t: t.replace("\t", "    "),  # as pasted from a terminal
    lambda t: t.replace("\n", "\r\n"),
    lambda t: "".join(line.strip() + "\n" for line in t.splitlines()),
    lambda t: t.replace("NIC0\tNIC1", "mlx5_0\tmlx5_1"),  # drivers before 520
    lambda t: "Mon Nov 30 10:00:00 2026\n$ nvidia-smi topo -m\n" + t,
    lambda t: t[:t.index("GPU3\tPHB") + 5],  # cut: what is left stands above the diagonal
    lambda t: t.encode("utf-16"),
])
def test_nvidia_smi_however_it_was_saved(tmp_path: Path, change):
    found = read(tmp_path, change(NVIDIA))
    assert rows(found, "n_links") == NVIDIA_LINKS
    assert found.findings == []


def test_addresses_below_the_matrix_of_nvidia_smi(tmp_path: Path):
    found = read(tmp_path, NVIDIA + "0, 00000000:18:00.0\n1, 00000000:2A:00.0\n2, 00010000:9A:00.0\n")
    assert found.gpus == {0: "0000:18:00.0", 1: "0000:2a:00.0", 2: "10000:9a:00.0", 3: None}


def test_one_gpu(tmp_path: Path):
    found = read(tmp_path, "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-31\t0\n")
    assert (len(found.links), found.gpus, found.findings) == (0, {0: None}, [])


def test_amd_smi(tmp_path: Path):
    found = read(tmp_path, AMD)
    assert rows(found, "weight", "hops") == AMD_ROWS
    assert list(found.gpus.values()) == AMD_ADDRESSES
    assert found.links["n_links"].isna().all()
    assert found.findings == []


@pytest.mark.parametrize("form", ["links", "tables"])
def test_amd_smi_json(tmp_path: Path, form: str):
    link = [["SELF", "XGMI", "PCIE"], ["XGMI", "SELF", "PCIE"], ["PCIE", "PCIE", "SELF"]]
    weight, hops = [[0, 15, 40], [15, 0, 40], [40, 40, 0]], [[0, 1, 2], [1, 0, 2], [2, 2, 0]]
    if form == "links":
        told = [{"gpu": i, "bdf": AMD_ADDRESSES[i], "links": [
            {"gpu": j, "bdf": AMD_ADDRESSES[j], "weight": weight[i][j], "link_status": "ENABLED",
             "link_type": link[i][j], "num_hops": hops[i][j], "bandwidth": "N/A"} for j in (2, 1, 0)]}
            for i in (1, 0, 2)]
    else:
        told = [{"gpu": i, "bdf": AMD_ADDRESSES[i], **{
            name: {f"gpu_{j}": values[i][j] for j in range(3)}
            for name, values in (("weight", weight), ("hops", hops), ("link_type", link))}} for i in range(3)]
    found = read(tmp_path, json.dumps(told), "node0.topology.json")
    assert rows(found, "weight", "hops") == AMD_ROWS
    assert list(found.gpus.values()) == AMD_ADDRESSES
    assert found.host == "node0"


def test_rocm_smi(tmp_path: Path):
    found = read(tmp_path, ROCM_SMI, "topology.txt")
    assert rows(found, "weight", "hops") == AMD_ROWS
    assert (found.host, found.gpus) == ("", dict.fromkeys(range(3)))


def test_pairs_that_cannot_be_told_are_one_finding(tmp_path: Path):
    cut = NVIDIA[:NVIDIA.index("GPU2\tSYS")].replace("NODE", "WAT")
    found = read(tmp_path, cut)
    assert [r[:3] for r in rows(found)][3:] == [(1, 2, "unknown"), (1, 3, "PXB"), (2, 3, "unknown")]
    assert len(found.findings) == 1
    assert found.findings[0].code == "topology_incomplete"
    assert found.findings[0].count == 2
    assert "(WAT): 1-2, 2-3;" in found.findings[0].message


@pytest.mark.parametrize("text", [
    "", "\n", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "[]", "[1, 2]", "{",
    '{"gpu_data": [{"gpu": "0"}]}', '[{"gpu": 0, "links": [3]}]', "\tGPU0\tGPU1\tCPU Affinity\n",
    "WEIGHT TABLE:\n 0000:05:00.0 0000:26:00.0\n0000:05:00.0 0 15\n", "[" * 100_000, b"\x00\xff\xfe" * 50,
    "GPU[0]\t\t: (Topology) Numa Node: 0\n", " ".join(f"GPU{i}" for i in range(2000)) + "\nGPU0 X\n",
])
def test_other_texts_are_refused_in_one_line(tmp_path: Path, text: str | bytes):
    with pytest.raises(UnreadableFile) as error:
        read(tmp_path, text)
    assert str(error.value).startswith("node0.topology.txt: no table of links between GPUs in it; write it with")


@pytest.mark.parametrize("text", [NVIDIA, AMD, ROCM_SMI])
def test_cut_anywhere_it_is_read_or_refused(tmp_path: Path, text: str):
    """A link that is told is never told wrong."""
    whole = {r[:2]: r[2:] for r in rows(read(tmp_path, text), "n_links", "weight", "hops")}
    for end in range(0, len(text), 7):
        try:
            found = read(tmp_path, text[:end])
        except UnreadableFile:
            continue
        for a, b, link, *numbers in rows(found, "n_links", "weight", "hops"):
            assert link in (whole[a, b][0], "unknown")
            assert all(n is None or n == w for n, w in zip(numbers, whole[a, b][1:], strict=True))
