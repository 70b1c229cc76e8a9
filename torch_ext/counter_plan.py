"""Which counters go into which run of the program.

A pass is one run: few counters, because the hardware has few registers per block, and GRBM_GUI_ACTIVE in every one,
because only ratios within a pass can be trusted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CYCLES = "GRBM_GUI_ACTIVE"

PRESETS: dict[str, tuple[str, ...]] = {
    "breakdown": (
        "SQ_VALU_MFMA_BUSY_CYCLES", "SQ_INSTS_VALU_MFMA_MOPS_BF16", "SQ_INSTS_VALU_MFMA_MOPS_F16",
        "SQ_INSTS_VALU_MFMA_MOPS_F8", "SQ_WAVES", "SQ_BUSY_CU_CYCLES"),
    "memory": ("FETCH_SIZE", "WRITE_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"),
    "occupancy": ("SQ_WAVES", "SQ_WAVE_CYCLES", "SQ_BUSY_CU_CYCLES"),
    "full": (
        "SQ_VALU_MFMA_BUSY_CYCLES", "SQ_INSTS_VALU_MFMA_MOPS_BF16", "SQ_INSTS_VALU_MFMA_MOPS_F16",
        "SQ_INSTS_VALU_MFMA_MOPS_F8", "SQ_WAVES", "SQ_BUSY_CU_CYCLES", "SQ_WAVE_CYCLES",
        "SQ_INSTS_VALU_MFMA_MOPS_F32", "FETCH_SIZE", "WRITE_SIZE", "TCC_HIT_sum", "TCC_MISS_sum"),
}
"""Sets of counters for one question each; the first two answer most."""

NCU_METRICS: tuple[str, ...] = (
    "gpu__time_duration.sum", "gpc__cycles_elapsed.max", "gpc__cycles_elapsed.avg.per_second",
    "sm__cycles_elapsed.avg", "sm__cycles_active.avg", "sm__pipe_tensor_cycles_active.avg",
    "sm__inst_executed_pipe_tensor.sum", "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct",
    "device__attribute_multiprocessor_count")
"""The same for NVIDIA: Nsight Compute replays kernels, so one run of the program takes them all."""

LIMITS = {"SQ": 8, "TCC": 4, "TCP": 4, "TA": 2, "TD": 2, "SPI": 6, "CPC": 2, "CPF": 2, "GRBM": 2, "GDS": 4}
"""Counters of a block per pass on gfx90a, gfx942 and gfx950; one more aborts the program on some releases."""

# Blocks that a derived counter counts in, once per counter.
_DERIVED = {
    "FETCH_SIZE": ("TCC",) * 3, "WRITE_SIZE": ("TCC",) * 2, "L2CacheHit": ("TCC",) * 2, "MfmaUtil": ("SQ", "GRBM"),
    "OccupancyPercent": ("SQ", "GRBM"), "MeanOccupancyPerCU": ("SQ", "SQ", "GRBM"), "GPU_UTIL": ("GRBM", "GRBM"),
    "VALUBusy": ("SQ", "GRBM"), "SALUBusy": ("SQ", "GRBM"), "LDSBankConflict": ("SQ", "GRBM"),
    "VALUUtilization": ("SQ", "SQ"), "MemUnitBusy": ("TA", "GRBM"), "MemUnitStalled": ("TCP", "GRBM"),
}
_BLOCK = re.compile(r"^(SQC?|TCC|TCP|TA|TD|SPI|CPC|CPF|GRBM|GDS)_")
# Counters that only some architectures have.
_ONLY = (
    (re.compile(r"MOPS_F8$"), ("gfx942", "gfx950")),
    (re.compile(r"MOPS_(XF32|F6F4)$"), ("gfx950",)),
    (re.compile(r"^TCC_EA0_|^TCC_BUBBLE"), ("gfx942", "gfx950")),
    (re.compile(r"^TCC_EA_|^L2CacheHit$"), ("gfx90a",)),
)
_KNOWN = ("gfx90a", "gfx942", "gfx950")


class PlanError(ValueError):
    """Counters that cannot be collected, in one line."""


@dataclass(frozen=True)
class Plan:
    """`passes`: the counters of each run of the program; `notes`: what was left out and why."""

    passes: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def plan(counters: Sequence[str] = (), preset: str = "breakdown", arch: str | None = None, per_pass: int = 3) -> Plan:
    """The fewest passes, in the order asked for: at most `per_pass` counters each, GRBM_GUI_ACTIVE included, within
    the limits of the blocks. Counters that `arch` (gfx942) does not have are left out and named.

    Raises PlanError for a preset that does not exist, a `per_pass` below 2, a counter that no pass can hold, or when
    nothing is left.
    """
    if per_pass < 2:
        raise PlanError(f"a pass holds {CYCLES} and at least one more counter, so at least 2, not {per_pass}")
    if not counters and preset not in PRESETS:
        raise PlanError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    wanted = [c for c in dict.fromkeys(counters or PRESETS[preset]) if c != CYCLES]
    missing = [c for c in wanted if not _has(arch, c)]
    passes: list[list[str]] = []
    for counter in (c for c in wanted if c not in missing):
        if not _fits([CYCLES, counter]):
            raise PlanError(f"{counter} needs more counters of a block than the hardware has")
        home = next((p for p in passes if len(p) < per_pass and _fits([*p, counter])), None)
        if home is None:
            passes.append([CYCLES, counter])
        else:
            home.append(counter)
    if not passes and not wanted and counters:
        passes = [[CYCLES]]
    if not passes:
        raise PlanError(f"none of these counters exists on {arch}: {', '.join(missing)}")
    note = f"{arch} has no {', '.join(missing)}: left out"
    return Plan(tuple(tuple(p) for p in passes), (note,) if missing else ())


def architecture(topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> str | None:
    """The architecture of the first GPU of this host (gfx942), by the kernel driver; None without an AMD GPU."""
    for properties in sorted(topology.glob("*/properties")):
        try:
            text = properties.read_text()
        except OSError:
            continue
        match = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        if match and int(match.group(1)):
            version = int(match.group(1))  # 90402: major 9, minor 4, stepping 2
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return None


def _has(arch: str | None, counter: str) -> bool:
    """True also where the architecture is not one of those whose counters are known."""
    return arch not in _KNOWN or all(arch in archs for pattern, archs in _ONLY if pattern.search(counter))


def _fits(counters: Sequence[str]) -> bool:
    used = [block for c in counters for block in _blocks(c)]
    # GRBM_GUI_ACTIVE inside a derived counter is the one that is collected anyway.
    return all(used.count(block) <= limit for block, limit in LIMITS.items() if block != "GRBM") and (
        len({c for c in counters if c.startswith("GRBM_")}) <= LIMITS["GRBM"])


def _blocks(counter: str) -> tuple[str, ...]:
    if counter in _DERIVED:
        return _DERIVED[counter]
    match = _BLOCK.match(counter)
    return (match.group(1).replace("SQC", "SQ"),) if match else ()
