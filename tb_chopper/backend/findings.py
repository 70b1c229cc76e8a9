"""What a user must know about the data: damage, repairs, gaps, and later the diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One statement about a file, a worker or a run.

    `code` is stable and machine-readable (snake_case), `message` is one sentence for a person: what, where,
    and what to do. `error`: part of the data is missing or wrong; `warning`: a repair or an assumption;
    `info`: good to know. `count` is the number of events concerned.
    """

    code: str
    severity: Severity
    message: str
    count: int = 1
    file: str = ""

    def at(self, file: str) -> Finding:
        """The same finding, tied to a file unless it names one already."""
        return self if self.file else replace(self, file=file)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then infos; the order within a severity stays."""
    return sorted(findings, key=lambda f: SEVERITIES.index(f.severity))
