"""The links of a simulated host, as its vendor's tool prints them: all GPUs linked, or two islands of them."""

from __future__ import annotations

from pathlib import Path

from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.sidecar import pci_address
from torch_ext import topology as recorded

SUFFIX = recorded.SUFFIX


def island(config: Config, rank: int) -> int:
    """Island of a rank's GPU, counted over all hosts: with the fault, the halves of each host."""
    host, local = divmod(rank, config.gpus_per_host)
    if config.faults.islands is None:
        return host
    return 2 * host + (local >= config.gpus_per_host // 2)


def write(directory: Path, config: Config, host: str, first_rank: int) -> Path:
    """Write what the tool would print on a host; returns the file."""
    path = directory / f"{host}{SUFFIX}"
    islands = [island(config, first_rank + i) for i in range(config.gpus_per_host)]
    text = _amd_smi(islands) if config.gpu.dialect == "rocm" else _nvidia_smi(islands)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def _amd_smi(islands: list[int]) -> str:
    """`amd-smi topology`: its table of link types."""
    names = [pci_address(i) for i in range(len(islands))]
    rows = [" " * 13 + " ".join(names)]
    for i, name in enumerate(names):
        links = ["SELF" if i == j else "XGMI" if islands[i] == islands[j] else "PCIE" for j in range(len(names))]
        rows.append(f"{name} " + " ".join(link.ljust(12) for link in links).rstrip())
    return "LINK TYPE TABLE:\n" + "\n".join(rows) + "\n"


def _nvidia_smi(islands: list[int]) -> str:
    """`nvidia-smi topo -m`, and the addresses as `--query-gpu=index,pci.bus_id` lists them."""
    names = [f"GPU{i}" for i in range(len(islands))]
    rows = ["\t" + "\t".join(names)]
    for i, name in enumerate(names):
        links = [" X " if i == j else "NV18" if islands[i] == islands[j] else "SYS" for j in range(len(names))]
        rows.append("\t".join([name, *links]))
    return "\n".join([*rows, "", *(f"{i}, {pci_address(i)}" for i in range(len(islands)))]) + "\n"
