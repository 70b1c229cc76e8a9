"""Memory snapshots of PyTorch (`torch.cuda.memory._dump_snapshot`, CUDA and HIP alike) as MEMORY tables.

A snapshot is a pickle. Pickles can run code, so this reader takes only those that hold nothing but numbers, texts and
containers, which is all that PyTorch writes; any other is refused.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.logdir import Url
from tb_chopper.backend.readers.byte_stream import open_binary

MAX_BYTES = 2 * 2**30
DEVICE_TYPE = 1
ALLOCATED = {"alloc": 1, "free_requested": -1}
"""A block counts until it is freed by the program, even while a stream still uses it: as the allocator counts."""
RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True)
class Snapshot:
    """`events`: MEMORY, in order of time within each device; `findings`: what is to be known about them."""

    events: pd.DataFrame
    findings: list[Finding] = field(default_factory=list)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise UnreadableFile(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise UnreadableFile("it refers to objects outside itself")


def read(path: Path | Url) -> Snapshot:
    """The history of a snapshot. Raises UnreadableFile for a pickle that asks for code, and for anything else."""
    name = path.name
    if isinstance(path, Path) and path.stat().st_size > MAX_BYTES:
        raise UnreadableFile(f"{name}: larger than {MAX_BYTES >> 30} GiB; record with fewer entries (max_entries=)")
    try:
        with open_binary(path) as file:
            content = _Plain(file).load()
    except UnreadableFile as error:
        raise UnreadableFile(f"{name}: refused, no plain memory snapshot: {error}; write it with "
                             "torch.cuda.memory._dump_snapshot") from None
    except Exception as error:  # a damaged pickle fails in many ways
        raise UnreadableFile(f"{name}: no whole pickle ({type(error).__name__}); write it again with "
                             "torch.cuda.memory._dump_snapshot") from None
    if not (isinstance(content, dict) and isinstance(content.get("segments"), list)):
        raise UnreadableFile(f"{name}: no memory snapshot: it has no list of segments")
    return _snapshot(content, name)


def _snapshot(content: dict[str, Any], name: str) -> Snapshot:
    segments = [s for s in content["segments"] if isinstance(s, dict)]
    traces = content.get("device_traces")
    traces = traces if isinstance(traces, list) else []
    parts, findings = [], []
    for device, trace in enumerate(traces):
        entries = [e for e in trace if isinstance(e, dict)] if isinstance(trace, list) else []
        own = [s for s in segments if s.get("device", 0) == device]
        if entries:
            part, out_of_memory = _history(entries, own, device)
            parts.append(part)
            if out_of_memory:
                findings.append(Finding("out_of_memory", "warning",
                                        f"device {device} ran out of memory {out_of_memory} times", out_of_memory))
    if not any(len(p) for p in parts):
        findings.append(Finding("memory_without_history", "warning", "the snapshot holds no history: call "
                                "torch.cuda.memory._record_memory_history() before the steps of interest"))
    elif any((p["t_ns"] < 0).any() for p in parts):
        findings.append(Finding("memory_without_times", "warning", "the history has no times (PyTorch before 2.2): its "
                                "events are shown in order"))
    return Snapshot(schema.concat(parts, schema.MEMORY), [f.at(name) for f in findings])


def _history(entries: list[dict[str, Any]], segments: list[dict[str, Any]], device: int) -> tuple[pd.DataFrame, int]:
    """MEMORY rows of one device, and how often it ran out. Totals are counted back from the final state, because the
    history is a ring that may have lost its beginning."""
    actions = [str(e.get("action")) for e in entries]
    sizes = np.array([_integer(e.get("size")) for e in entries], np.int64)
    allocated, reserved = (np.array([sign.get(a, 0) for a in actions], np.int64) * sizes
                           for sign in (ALLOCATED, RESERVED))
    final = [sum(_integer(s.get(key)) for s in segments) for key in ("allocated_size", "total_size")]
    times = np.array([_integer(e.get("time_us"), -1) for e in entries], np.int64)
    rows = schema.conform(pd.DataFrame({
        "t_ns": np.where(times >= 0, times * 1000, -1), "bytes": allocated,
        "allocated_bytes": final[0] - allocated.sum() + np.cumsum(allocated),
        "reserved_bytes": final[1] - reserved.sum() + np.cumsum(reserved),
        "device_type": DEVICE_TYPE, "device_id": device}), schema.MEMORY)
    return rows[(allocated != 0) | (reserved != 0)].reset_index(drop=True), actions.count("oom")


def _integer(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) and abs(value) < 2**62 else otherwise
