"""The links that hosts tell of onto a run: between which of its GPUs, and the islands that fast links make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from tb_chopper.backend.alignment import devices
from tb_chopper.backend.alignment.devices import Sidecars
from tb_chopper.backend.findings import Finding, Severity
from tb_chopper.backend.readers.topology import FAST, HostTopology
from torch_ext.topology import SUFFIX, file_name

LINKS = ("host", "gpu_a", "gpu_b", "link", "n_links", "weight", "hops", "fast")
ISLANDS = ("host", "gpu", "island")


@dataclass(frozen=True)
class Topology:
    """`links`: one row per pair of the run's GPUs of a host, gpu_a < gpu_b; LINKS (link: NVLink, XGMI, PIX, PXB, PHB,
    NODE, SYS, PCIe, unknown; n_links: NVLinks of the pair, weight and hops as AMD's tools count them, missing where not
    told; fast: it makes an island).
    `islands`: one row per GPU whose links are told; island: numbers over the whole run, in order of their first GPU.
    """

    links: pd.DataFrame
    islands: pd.DataFrame
    findings: list[Finding] = field(default_factory=list)


def join(files: Sequence[HostTopology], workers: pd.DataFrame, sidecars: Sidecars) -> Topology:
    """Files onto the GPUs of a run. workers: WORKERS. What cannot be placed is left aside with a finding."""
    findings = [f for file in files for f in file.findings]
    links, islands = [], []
    used: set[str] = set()
    hosts = _hosts(workers)
    for host, mine in hosts.items():
        file, found = _file_of(host, files, len(hosts) == 1)
        findings += found
        if file is None:
            continue
        used.add(file.name)
        gpus, found = _gpus(file, mine, sidecars)
        findings += found
        own = file.links[file.links["gpu_a"].isin(list(gpus)) & file.links["gpu_b"].isin(list(gpus))]
        a, b = own["gpu_a"].map(gpus), own["gpu_b"].map(gpus)
        links.append(own.assign(host=host, gpu_a=a.where(a < b, b), gpu_b=b.where(a < b, a),
                                fast=own["link"].isin(FAST)))
        of = _components(list(file.gpus), file.links)
        islands += [(host, gpu, (host, of[number])) for number, gpu in gpus.items()]
    findings += [_finding(f, "topology_other_host", "info", "left aside: none of the run's GPUs is on this host")
                 for f in files if f.name not in used]
    table = pd.concat(links, ignore_index=True) if links else pd.DataFrame(columns=list(LINKS))
    ordered = sorted(islands, key=lambda row: row[1])
    number = {key: i for i, key in enumerate(dict.fromkeys(key for _, _, key in ordered))}
    placed = pd.DataFrame([(host, gpu, number[key]) for host, gpu, key in ordered], columns=list(ISLANDS))
    return Topology(table.sort_values(["gpu_a", "gpu_b"], kind="stable", ignore_index=True)[list(LINKS)], placed,
                    findings)


def _finding(file: HostTopology, code: str, severity: Severity, text: str) -> Finding:
    return Finding(code, severity, f"{file.name}: {text}", file=file.name)


def _hosts(workers: pd.DataFrame) -> dict[str | None, pd.DataFrame]:
    """The workers of each host; None where the traces name none."""
    host = workers["host"].astype(object).where(workers["host"].notna(), None)
    return {name: workers[(host == name) if name is not None else host.isna()] for name in dict.fromkeys(host)}


def _file_of(host: str | None, files: Sequence[HostTopology],
             only_host: bool) -> tuple[HostTopology | None, list[Finding]]:
    named = [f for f in files if host is not None and f.host and f.host == file_name(host).removesuffix(SUFFIX)]
    if chosen := named or [f for f in files if not f.host]:
        return chosen[0], []
    if not only_host or not files:
        return None, []
    if len(files) > 1:
        names = ", ".join(f.name for f in files)
        return None, [Finding("topology_no_host", "warning", f"{names}: left aside: the run is of one host, "
                              f"{host or 'which its traces do not name'}; remove those of other hosts", len(files))]
    other = [] if host is None else [_finding(files[0], "topology_other_host", "warning", "named after another host, "
                                              f"the traces are of {host}: read as the same")]
    return files[0], other


def _gpus(file: HostTopology, workers: pd.DataFrame, sidecars: Sidecars) -> tuple[dict[int, int], list[Finding]]:
    """The run's gpu by its number on the host."""
    found, how = devices.matched(list(file.gpus), file.gpus, workers, sidecars)
    if not how:
        return {}, [_finding(file, "topology_gpus", "warning", f"left aside: {len(file.gpus)} GPUs in it, "
                             f"{workers['gpu'].nunique()} of that host in the run, and no PCI address to tell which is "
                             "which")]
    if how != devices.ADDRESS and len(file.gpus) > 1:
        return found, [_finding(file, "topology_gpus", "info", "no PCI address: its GPUs are matched to the run's by "
                                f"{how}")]
    return found, []


def _components(gpus: list[int], links: pd.DataFrame) -> dict[int, int]:
    """The first GPU of each GPU's island: connected components over fast links."""
    of = {gpu: gpu for gpu in gpus}
    fast = links[links["link"].isin(FAST)]
    for a, b in zip(fast["gpu_a"].tolist(), fast["gpu_b"].tolist(), strict=True):
        low, high = sorted((of[a], of[b]))
        of = {gpu: low if first == high else first for gpu, first in of.items()}
    return of
