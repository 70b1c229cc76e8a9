"""One trace file, from its bytes to attributed kernels, through the cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tb_chopper.backend import cache, schema
from tb_chopper.backend.attribution import attribute
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.metrics.launch import with_gaps
from tb_chopper.backend.metrics.overlap import with_overlap
from tb_chopper.backend.readers import kineto
from torch_ext import sidecar as sidecars

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a short text."""


@dataclass
class Capture:
    """One trace file as tables. `kernels.capture` numbers the devices of this file from 0; gpu is not set yet."""

    path: Path
    kernels: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)
    sidecar: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    complete: bool = True


def load(path: Path, sidecar_path: Path | None = None, communication: Sequence[str] = (),
         progress: Progress | None = None) -> Capture:
    """The tables of one trace file, from the cache where it is fresh.

    `communication`: regular expressions of further communication kernels. Raises UnreadableFile when nothing in
    the file is of use.
    """
    sidecar, findings = _read_sidecar(sidecar_path)
    key = repr((tuple(communication), sidecar_path and sidecar_path.stat().st_mtime_ns))
    cached = cache.load(path, key)
    if cached is not None:
        frames, stored = cached
        return Capture(path, frames["kernels"], frames["steps"], frames["memory"], stored["meta"], sidecar,
                       findings + [Finding(**f) for f in stored["findings"]], stored["complete"])
    trace = kineto.read(path, progress)
    attributed = attribute(trace, sidecar, communication)
    found = [f.at(path.name) for f in (*trace.findings, *attributed.findings)]
    kernels = with_gaps(with_overlap(_number_devices(attributed.kernels)))
    capture = Capture(path, schema.conform(kernels, schema.KERNELS), attributed.steps, trace.memory, trace.meta, sidecar,
                      findings + found, trace.complete)
    cache.store(path, key, {"kernels": capture.kernels, "steps": capture.steps, "memory": capture.memory},
                {"meta": capture.meta, "findings": [f.as_dict() for f in found], "complete": capture.complete})
    return capture


def _read_sidecar(path: Path | None) -> tuple[dict[str, Any], list[Finding]]:
    if path is None:
        return {}, []
    try:
        return dict(sidecars.read(path)), []
    except (OSError, ValueError) as error:
        return {}, [Finding("unreadable_sidecar", "warning", f"{path.name} is left aside: {error}", file=path.name)]


def _number_devices(kernels: pd.DataFrame) -> pd.DataFrame:
    """Each device of a file is a capture of its own."""
    codes, _ = pd.factorize(kernels["device"], sort=True)
    return kernels.assign(capture=codes.astype("int64"))


def gpu_name(device: str, properties: Sequence[dict[str, Any]]) -> str | None:
    """The device's name. `device` is an HSA node id on ROCm, so an id that is not listed means little:

    exact id, else the one name that all devices share, else the smallest listed id stands for the first device.
    """
    names = {str(p.get("id")): str(p.get("name") or "") for p in properties}
    if names.get(device):
        return names[device]
    different = {n for n in names.values() if n}
    return different.pop() if len(different) == 1 else None


def rank_of(capture: Capture, hint: int | None) -> int | None:
    """Rank from the trace, else from the sidecar, else from the file name."""
    for value in (capture.meta.get("distributedInfo", {}).get("rank"), capture.sidecar.get("identity", {}).get("rank"), hint):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def world_size_of(capture: Capture) -> int | None:
    """World size from the trace, else from the sidecar."""
    for info in (capture.meta.get("distributedInfo", {}), capture.sidecar.get("identity", {})):
        if isinstance(size := info.get("world_size"), int) and size > 0:
            return size
    return None


def host_of(capture: Capture, worker: str) -> str | None:
    """Host name from the sidecar, the trace, or a worker name of the form <host>_<pid>."""
    named = capture.sidecar.get("identity", {}).get("host") or capture.meta.get("host_name")
    match = re.fullmatch(r"(.+?)(?:_r\d+)?_\d+", worker)
    return named or (match.group(1) if match else None)
