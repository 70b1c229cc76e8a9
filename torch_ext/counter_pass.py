"""What a training does while its counters are collected: no trace, and a file that says which rank it is.

torch_ext.counters runs the training once per pass and names the pass's folder in the environment. The GPU side of
torch.profiler and the counting profiler collide in one process, so torch.profiler records the CPU alone there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from torch_ext.counters import PASS_VARIABLE

IDENTITY_SUFFIX = ".identity.json"


def folder() -> Path | None:
    """Where the files of the pass lie that this process is part of; None in a training as usual."""
    told = os.environ.get(PASS_VARIABLE)
    return Path(told) if told else None


def leave_gpu_to_counters() -> None:
    """From now on torch.profiler, however it is asked, records CPU activities only. Can be called repeatedly."""
    if getattr(profile.__init__, "_cpu_only", False):
        return
    original = profile.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        options.pop("use_cuda", None)
        original(self, *args, **{**options, "activities": [ProfilerActivity.CPU]})

    init._cpu_only = True  # type: ignore[attr-defined]
    profile.__init__ = init  # type: ignore[method-assign]


def write_identity(identity: Mapping[str, Any]) -> None:
    """Host, process id and rank, beside the counters that this process is about to write. Never fails."""
    at = folder()
    if at is None or identity["rank"] is None:
        return
    told = {key: identity[key] for key in ("host", "pid", "rank")}
    try:
        (at / f"{told['host']}_{told['pid']}{IDENTITY_SUFFIX}").write_text(json.dumps(told), encoding="utf-8")
    except OSError:
        return
