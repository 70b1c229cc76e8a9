"""The diagnosis: one file per rule, `rule(run) -> list[Finding]`. No evidence, no finding (docs/diagnosis.md)."""

from __future__ import annotations

import importlib
import logging
import math
from typing import TYPE_CHECKING

from tb_chopper.backend.findings import Finding
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

LOG = logging.getLogger(__name__)

RULES: tuple[str, ...] = (
    "slow_gpu",
    "outlier_step",
    "exposed_communication",
    "low_utilization",
    "clock",
    "late_host",
    "gradient_barrier",
    "slow_link",
    "small_messages",
    "data_stall",
    "synchronizing_calls",
    "allocator_calls",
    "garbage_collection",
    "profiler_overhead",
    "islands",
    "over_sharding",
    "pipeline_bubble",
    "memory_limit",
    "memory_growth",
    "memory_imbalance",
    "busy_not_efficient",
    "low_precision",
    "small_kernels",
    "fusion",
    "graph_breaks",
)
"""Modules of this package. A diagnosis has the name of its rule as `code`."""


def diagnose(run: Run) -> list[Finding]:
    """What every rule finds in a run, the largest gain first; without a known gain, warnings before infos.

    A rule that fails costs only itself: the finding `rule_failed` names it.
    """
    found: list[Finding] = []
    for name in RULES:
        try:
            found += importlib.import_module(f"{__name__}.{name}").rule(run)
        except Exception as error:
            LOG.exception("rule %s", name)
            found.append(Finding("rule_failed", "warning", f"the rule {name} failed with {type(error).__name__}: "
                                 f"{error}; the other rules are not concerned"))
    return sorted((f for f in found if not _explained(f, found)), key=_rank)


def _explained(finding: Finding, found: list[Finding]) -> bool:
    """Whether others name the causes of what this one sees: of half of its gain at least."""
    if not isinstance(finding, Diagnosis) or not finding.explained_by:
        return False
    causes = [f.gain_ms or 0.0 for f in found if isinstance(f, Diagnosis) and f.code in finding.explained_by]
    return bool(causes) and sum(causes) >= thresholds.EXPLAINED * (finding.gain_ms or 0.0)


def _rank(finding: Finding) -> tuple[float, int]:
    gain = finding.gain_ms if isinstance(finding, Diagnosis) else None
    return (-gain if gain is not None and math.isfinite(gain) else 0.0, finding.severity != "warning")
