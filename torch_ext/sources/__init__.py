"""Where samples come from, behind one small interface: AMD SMI, NVML, the kernel's sysfs, and the CPUs' /proc."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch_ext.telemetry_format import Value

Sample = dict[str, Value]
"""Values of one record, by the column names of torch_ext.telemetry_format; what is unknown is left out or None."""


class Gpu(NamedTuple):
    name: str | None
    pci_address: str | None
    """0000:c1:00.0"""


class GpuSource(Protocol):
    """One library or interface that knows some of the host's GPUs."""

    name: str
    gpus: list[Gpu]

    def read(self, i: int) -> Sample:
        """The present values of the i-th of `gpus`. A value that cannot be read is left out; raises only when
        nothing can."""

    def limits(self, i: int) -> Sample:
        """clock_limit_mhz and power_limit_w, asked for now and then."""

    def close(self) -> None: ...


class Unavailable(Exception):
    """A source that does not work on this host; the message says why in a few words."""


def open_gpu_sources() -> tuple[list[GpuSource], list[str]]:
    """Every source that finds a GPU, and why the others do not. sysfs stands in for AMD SMI."""
    from torch_ext.sources.amd import AmdSmi
    from torch_ext.sources.nvml import Nvml
    from torch_ext.sources.sysfs import Sysfs

    found: list[GpuSource] = []
    reasons: list[str] = []
    alternatives: tuple[tuple[Callable[[], GpuSource], ...], ...] = ((AmdSmi, Sysfs), (Nvml,))
    for choices in alternatives:
        for choice in choices:
            try:
                found.append(choice())
                break
            except Unavailable as error:
                reasons.append(str(error))
    return found, reasons


SENTINELS = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


def number(value: object) -> float | None:
    """A reading, or None for what stands in for one: "N/A", all bits set, a negative value, no number at all."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return None if value in SENTINELS or value < 0 or value != value else value


def positive(value: object) -> float | None:
    """As `number`, where 0 also means unknown: the clock of an unused die, the power of a secondary die."""
    return number(value) or None


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
