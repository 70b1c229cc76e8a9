"""Small KERNELS and STEPS tables, written down by hand in microseconds."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.metrics.launch import with_gaps
from tb_chopper.backend.metrics.overlap import with_overlap


def kernels(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `start`, `end`, `launch` in µs and any column of KERNELS; compute on GPU 0 unless said otherwise."""
    full = []
    for i, row in enumerate(rows):
        kind = row.get("kind", "compute")
        full.append({
            "name": "k", "kind": kind, "activity": "memcpy" if kind == "memcpy" else "kernel", "device": "0", "gpu": 0,
            "capture": row.get("gpu", 0), "worker": "w", "span": 0, "correlation": i, "phase": "forward",
            "operation": "op", "op_type": "vector" if kind == "compute" else None,
            "start_ns": round(row["start"] * 1000), "end_ns": round(row["end"] * 1000),
            "launch_ns": round(row["launch"] * 1000) if row.get("launch") is not None else pd.NA,
            **{k: v for k, v in row.items() if k not in ("start", "end", "launch")},
        })
    return with_gaps(with_overlap(schema.conform(pd.DataFrame(full), schema.KERNELS)))


def steps(*windows: tuple[int, float, float], gpu: int = 0) -> pd.DataFrame:
    """(step, start, end) of each window on the GPU, µs."""
    return schema.conform(pd.DataFrame([
        {"capture": gpu, "gpu": gpu, "step": s, "gpu_start_ns": round(a * 1000), "gpu_end_ns": round(b * 1000)}
        for s, a, b in windows]), schema.STEPS) if windows else schema.empty(schema.STEPS)
