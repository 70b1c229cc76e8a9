"""Faults of a training, planted with a known size: what they change, and what the truth says of them.

A slow GPU has a lower power cap and clock limit (`physics`), a storm of small kernels another optimizer (`workload`),
islands slower links (`physics`), growing memory blocks that stay (`memory`); late loaders and stalls are time that one
host loses here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.program import Program


def delays(config: Config, program: Program, rank: int, index: int) -> Iterator[tuple[int, float]]:
    """(point, ns): what the host of a rank loses before points of its index-th program, of which 0 is the warm-up."""
    faults, step = config.faults, config.first_step + index - 1
    if rank in faults.late_loader and step % faults.late_every == 0:
        yield program.loader_point, faults.late_loader[rank]
    if faults.stall is not None and faults.stall[:2] == (step, rank):
        yield program.stall_point, faults.stall[2]


def planted(config: Config) -> list[dict[str, Any]]:
    """What was planted, with its size, for the truth; empty for a healthy training."""
    faults = config.faults
    found: list[dict[str, Any]] = []
    if faults.slow:
        found.append({"fault": "slow_gpu", "clock_factor_by_rank": faults.slow})
    if faults.late_loader:
        found.append({"fault": "late_loader", "ms_by_rank": {r: ns / 1e6 for r, ns in faults.late_loader.items()},
                      "every_steps": faults.late_every})
    if faults.stall is not None:
        step, rank, ns = faults.stall
        found.append({"fault": "outlier_step", "step": step, "rank": rank, "ms": ns / 1e6})
    if faults.islands is not None:
        found.append({"fault": "islands", "bandwidth_factor": faults.islands})
    if faults.growth:
        found.append({"fault": "memory_growth", "bytes_per_step_by_rank": faults.growth})
    if faults.storm:
        found.append({"fault": "storm", "kernels_per_step": faults.storm})
    return found
