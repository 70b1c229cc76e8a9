"""Links between the GPUs of a host, as `nvidia-smi topo -m`, `amd-smi topology` (text, JSON) and `rocm-smi --showtopo`
print them. The format is told by the text (docs/topology.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.logdir import TOPOLOGY_PATTERN, Url
from tb_chopper.backend.readers.byte_stream import open_binary
from tb_chopper.backend.readers.text_table import decoded

MAX_BYTES = 2**20
MAX_GPUS = 512
FAST = ("NVLink", "XGMI")
"""Links that make an island."""
WORDS = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "NODE", "SYS": "SYS", "SOC": "SYS", "XGMI": "XGMI",
         "PCIE": "PCIe"}
"""The tools' words for a link and ours; NV# is NVLink."""
UNKNOWN = "unknown"
LINK_COLUMNS = ("gpu_a", "gpu_b", "link", "n_links", "weight", "hops")
REMEDY = "write it with `nvidia-smi topo -m` or `amd-smi topology`"

Cells = dict[tuple[str, str], str]
"""One matrix: what stands for two devices, by their labels."""


class Device(NamedTuple):
    """A GPU of a matrix: its label there, its number on the host and its PCI address."""

    label: str
    number: int
    address: str | None


_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.IGNORECASE)
_GPU = re.compile(r"GPU(\d+)")
_TITLE = re.compile(r"\s*(?:([A-Z][A-Z /-]*) TABLE:|=+ (\S.*?) =+)\s*$")
_LISTED = re.compile(rf"\s*(\d+)\s*,\s*({_ADDRESS.pattern})\s*$", re.IGNORECASE)
_QUANTITIES = {"link type": "link", "weight": "weight", "hops": "hops"}


@dataclass(frozen=True)
class HostTopology:
    """`host`: by the file's name, "" for one that holds for every host. `gpus`: PCI address (None: not told) by the
    GPU's number on the host. `links`: one row per pair, LINK_COLUMNS; n_links, weight and hops are missing where the
    tool does not tell them."""

    name: str
    host: str
    gpus: dict[int, str | None]
    links: pd.DataFrame
    findings: list[Finding] = field(default_factory=list)


def read(path: Path | Url) -> HostTopology:
    """The links that a file tells of. Raises UnreadableFile where it tells of none."""
    name = path.name
    try:
        with open_binary(path) as stream:
            content = stream.read(MAX_BYTES)
    except OSError as error:
        raise UnreadableFile(f"{name}: {error.strerror or error}") from None
    text = _ESCAPE.sub("", decoded(content))
    devices, matrices = _of_json(text) if text.lstrip()[:1] in ("[", "{") else _of_text(text)
    if not 0 < len(devices) <= MAX_GPUS or "link" not in matrices:
        raise UnreadableFile(f"{name}: no table of links between GPUs in it; {REMEDY}")
    links, findings = _links(name, devices, matrices)
    gpus = {d.number: d.address for d in devices}
    return HostTopology(name, re.sub(TOPOLOGY_PATTERN, "", name), gpus, links, findings)


def pci_address(text: str) -> str:
    """`00000000:C1:00.0` as `0000:c1:00.0`."""
    domain, rest = text.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


# ---- from text to matrices -------------------------------------------------------------------------------------------


def _of_text(text: str) -> tuple[list[Device], dict[str, Cells]]:
    """The devices in order of their numbers, and the matrices by quantity. A last line without an end is left out: it
    may be cut within a word, and every pair stands in two rows."""
    matrices: dict[str, Cells] = {}
    listed: dict[int, str] = {}
    quantity: str | None = "link"  # nvidia-smi gives its one table no title
    columns: list[str] = []
    labels: dict[str, None] = {}
    for line in text.split("\n")[:-1]:
        words = line.split()
        if title := _TITLE.match(line):
            told = (title[1] or title[2]).lower().removesuffix(" between two gpus")
            quantity, columns = _QUANTITIES.get(told), []
        elif match := _LISTED.match(line):
            listed[int(match[1])] = pci_address(match[2])
        elif words and _is_device(words[0]):
            if len(words) == 1 or _is_device(words[1]) or words[1].startswith(("NIC", "mlx", "CPU")):
                columns = list(takewhile(lambda w: w != "CPU", words))  # affinities follow
            elif columns and quantity:
                cells = matrices.setdefault(quantity, {})
                named = [words[0], *filter(_is_device, columns)]
                labels |= dict.fromkeys(named)
                cells |= {(words[0], c): cell for c, cell in zip(columns, words[1:], strict=False)}
    if all(map(_ADDRESS.fullmatch, labels)):
        return [Device(d, i, pci_address(d)) for i, d in enumerate(labels)], matrices
    numbers = {d: int(match[1]) for d in labels if (match := _GPU.fullmatch(d))}
    return [Device(d, n, listed.get(n)) for d, n in sorted(numbers.items(), key=lambda item: item[1])], matrices


def _is_device(word: str) -> bool:
    return bool(_GPU.fullmatch(word) or _ADDRESS.fullmatch(word))


def _of_json(text: str) -> tuple[list[Device], dict[str, Cells]]:
    """As _of_text, of both forms of `amd-smi topology --json`; nothing where it is neither."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return [], {}
    if isinstance(parsed, dict):
        parsed = next((v for v in parsed.values() if isinstance(v, list)), [])
    rows = {int(r["gpu"]): r for r in parsed if isinstance(r, dict) and isinstance(r.get("gpu"), int)}
    devices: list[Device] = []
    matrices: dict[str, Cells] = {}
    for number, row in sorted(rows.items()):
        label, address = f"GPU{number}", str(row.get("bdf"))
        devices.append(Device(label, number, pci_address(address) if _ADDRESS.fullmatch(address) else None))
        for other, told in _told(row):
            for quantity, cell in told.items():
                matrices.setdefault(quantity, {})[label, other] = str(cell)
    return devices, matrices


def _told(row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What a GPU's entry says of each other GPU, by label."""
    names = {"link_type": "link", "weight": "weight", "num_hops": "hops", "hops": "hops"}
    links = row.get("links")
    if isinstance(links, list):
        return [(f"GPU{link.get('gpu')}", {q: link[n] for n, q in names.items() if n in link})
                for link in links if isinstance(link, dict)]
    return [(str(other).upper().replace("_", ""), {quantity: cell})
            for name, quantity in names.items() if isinstance(row.get(name), dict)
            for other, cell in row[name].items()]


# ---- from matrices to links ------------------------------------------------------------------------------------------


def _links(file: str, devices: list[Device], matrices: Mapping[str, Cells]) -> tuple[pd.DataFrame, list[Finding]]:
    rows, lost, odd = [], [], set()
    for a, b in combinations(devices, 2):
        cell = _of_pair(matrices["link"], a.label, b.label)
        link, n_links = _link(cell)
        if link == UNKNOWN:
            lost.append((a.number, b.number))
            odd |= {cell} - {None}
        rows.append((a.number, b.number, link, n_links, *(_number(_of_pair(matrices.get(q, {}), a.label, b.label))
                                                          for q in ("weight", "hops"))))
    frame = pd.DataFrame(rows, columns=list(LINK_COLUMNS)).astype(
        {"gpu_a": "int64", "gpu_b": "int64", "link": object, "n_links": "Int64", "weight": "Int64", "hops": "Int64"})
    findings = []
    if lost:
        pairs = ", ".join(f"{a}-{b}" for a, b in lost[:4]) + (", …" if len(lost) > 4 else "")
        what = f" ({', '.join(sorted(map(str, odd)))})" if odd else ""
        findings.append(Finding(
            "topology_incomplete", "warning", f"{file}: the links of {len(lost)} pairs of GPUs cannot be told{what}: "
            f"{pairs}; they count as no fast link; {REMEDY} again", len(lost), file))
    return frame, findings


def _of_pair(cells: Cells, a: str, b: str) -> str | None:
    """What stands for two devices, on either side of the diagonal: a row may be cut."""
    return cells.get((a, b), cells.get((b, a)))


def _link(cell: str | None) -> tuple[str, int | None]:
    word = (cell or "").upper()
    if match := re.fullmatch(r"NV(\d{1,3})", word):
        return "NVLink", int(match[1])
    return WORDS.get(word, UNKNOWN), None


def _number(cell: str | None) -> int | None:
    return int(cell) if cell is not None and re.fullmatch(r"[0-9]{1,9}", cell) else None
