"""One trace file, from its bytes to attributed kernels, through the cache."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cache_once
from pathlib import Path
from typing import Any

import pandas as pd

from tb_chopper.backend import cache, schema
from tb_chopper.backend.attribution import attribute, host_calls
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.logdir import File, TraceFile
from tb_chopper.backend.metrics.launch import with_gaps
from tb_chopper.backend.metrics.overlap import with_overlap
from tb_chopper.backend.readers import kineto
from tb_chopper.backend.readers.byte_stream import open_binary
from torch_ext import sidecar as sidecars

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a short text."""


@dataclass
class Capture:
    """One trace file as tables. The run fills in what only it knows: gpu, and `capture` across files."""

    file: TraceFile
    kernels: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    calls: pd.DataFrame
    actions: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)
    sidecar: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    complete: bool = True

    @property
    def devices(self) -> list[str]:
        """Device labels of the file, those of its kernels."""
        return sorted(self.kernels["device"].dropna().unique())

    @property
    def rank(self) -> int | None:
        """From the trace, else from the sidecar, else from the file's name."""
        for value in (*self._told("rank"), self.file.rank):
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @property
    def world_size(self) -> int | None:
        """From the trace, else from the sidecar."""
        return next((v for v in self._told("world_size") if isinstance(v, int) and v > 0), None)

    @property
    def host(self) -> str | None:
        """From the sidecar, else from the trace, else from a worker name of the form <host>_<pid>."""
        named = self.sidecar.get("identity", {}).get("host") or self.meta.get("host_name")
        match = re.fullmatch(r"(.+?)(?:_r\d+)?_\d+", self.file.worker)
        return named or (match.group(1) if match else None)

    def gpu_name(self, device: str) -> str | None:
        """The device's name. On ROCm `device` is an HSA node id, so one that is not listed means little: then the
        one name that all listed devices share stands for it."""
        names = {str(p.get("id")): str(p.get("name") or "") for p in self.meta.get("deviceProperties") or []}
        if names.get(device):
            return names[device]
        different = {n for n in names.values() if n}
        return different.pop() if len(different) == 1 and device != "cpu" else None

    def units(self, device: str) -> int | None:
        """CUs or SMs of the device, by the trace, else the sidecar; as `gpu_name` where it is not listed."""
        return self._property(device, "numSms", "compute_units")

    def memory_bytes(self, device: str) -> int | None:
        """Memory of the device, as `units`."""
        return self._property(device, "totalGlobalMem", "memory_bytes")

    def _property(self, device: str, in_trace: str, in_sidecar: str) -> int | None:
        by_device = {str(p.get("id")): p.get(in_trace) for p in self.meta.get("deviceProperties") or []}
        told = self.sidecar.get("identity", {}).get("device", {}).get(in_sidecar)
        different = set(by_device.values())
        value = by_device.get(device) or (different.pop() if len(different) == 1 else None) or told
        return value if isinstance(value, int) and value > 0 else None

    def _told(self, key: str) -> tuple[Any, Any]:
        return self.meta.get("distributedInfo", {}).get(key), self.sidecar.get("identity", {}).get(key)


def load(file: TraceFile, communication: Sequence[str] = (), progress: Progress | None = None) -> Capture:
    """The tables of one trace file, from the cache where it is fresh.

    `communication`: regular expressions of further communication kernels. Raises UnreadableFile when nothing in
    the file is of use, FileNotFoundError when it is gone.
    """
    sidecar, findings = _read_sidecar(file.sidecar)
    key = repr((_code_state(), tuple(communication), file.sidecar and (file.sidecar.size, file.sidecar.mtime_ns)))
    is_local = isinstance(file.path, Path)
    cached = cache.load(Path(file.path), key) if is_local else None
    if cached is not None:
        frames, stored = cached
        return Capture(file, frames["kernels"], frames["steps"], frames["memory"],
                       frames["calls"], frames["actions"], stored["meta"], sidecar,
                       findings + [Finding(**f) for f in stored["findings"]], stored["complete"])
    trace = kineto.read(file.path, progress)
    attributed = attribute(trace, sidecar, communication)
    codes, _ = pd.factorize(attributed.kernels["device"], sort=True)
    kernels = with_gaps(with_overlap(attributed.kernels.assign(capture=codes.astype("int64"))))
    found = [replace(f, file=file.path.name) for f in (*findings, *trace.findings, *attributed.findings)]
    capture = Capture(file, schema.conform(kernels, schema.KERNELS), attributed.steps, trace.memory,
                      host_calls.find(trace.host, attributed.steps), attributed.actions, trace.meta, sidecar, found,
                      trace.complete)
    if is_local:
        cache.store(Path(file.path), key,
                    {"kernels": capture.kernels, "steps": capture.steps, "memory": capture.memory,
                     "calls": capture.calls, "actions": capture.actions},
                    {"meta": capture.meta, "findings": [f.as_dict() for f in found[len(findings):]],
                     "complete": capture.complete})
    return capture


@cache_once
def _code_state() -> str:
    """A digest of the code that makes the tables: what an older version made of a file is not shown by a newer."""
    here = Path(__file__).parent
    sources = [here / name for name in ("capture.py", "schema.py", "classify.py", "intervals.py", "metrics/launch.py",
                                        "metrics/overlap.py")]
    sources += sorted(p for folder in ("readers", "attribution") for p in (here / folder).glob("*.py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()


def _read_sidecar(file: File | None) -> tuple[dict[str, Any], list[Finding]]:
    if file is None:
        return {}, []
    try:
        with open_binary(file.path) as opened:
            return dict(sidecars.parse(opened.read(), file.path.name)), []
    except (OSError, ValueError, UnreadableFile) as error:
        return {}, [Finding("unreadable_sidecar", "warning", f"the sidecar is left aside: {error}")]
