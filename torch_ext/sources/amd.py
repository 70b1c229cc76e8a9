"""AMD GPUs through the `amdsmi` library, which comes with ROCm: one call per sample, the whole gpu_metrics table.

The firmware refreshes the table about once per millisecond. Field names are those of amdsmi 6 and 7; each release
and each device leaves some out, as "N/A" or with all bits set.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from statistics import fmean
from types import ModuleType
from typing import Any

from torch_ext.sources import Gpu, Sample, Unavailable, number, positive, scaled
from torch_ext.telemetry_format import throttle

RESIDENCIES = {
    "prochot_residency_acc": "prochot",
    "ppt_residency_acc": "power",
    "socket_thm_residency_acc": "thermal",
    "vr_thm_residency_acc": "vr_thermal",
    "hbm_thm_residency_acc": "memory_thermal",
}
"""accumulators, in the ticks of accumulation_counter, and the reason that each stands for"""

INDEPENDENT_BITS = (
    (range(32), "power"), ((34,), "memory_thermal"), ((38, 39, 40, 41, 44, 45), "vr_thermal"),
    ((46, 47), "prochot"), (range(32, 44), "thermal"),
)
"""bits of indep_throttle_status as the Linux driver defines them (SMU_THROTTLER_*_BIT); the first match counts"""

ENERGY_UNIT_UJ = 15.259
"""unit of energy_accumulator where the library does not tell"""


class AmdSmi:
    name = "amdsmi"

    def __init__(self) -> None:
        try:
            self._smi: ModuleType = importlib.import_module("amdsmi")
            self._smi.amdsmi_init()
            self._handles = list(self._smi.amdsmi_get_processor_handles())
        except (Exception, SystemExit) as error:
            raise Unavailable(f"amdsmi: {_brief(error)}") from error
        if not self._handles:
            self.close()
            raise Unavailable("amdsmi: no GPU")
        self.gpus = [Gpu(self._market_name(h), self._ask("amdsmi_get_gpu_device_bdf", h)) for h in self._handles]
        self._energy_unit_j = [self._energy_unit(h) * 1e-6 for h in self._handles]
        self._residency: list[dict[str, float]] = [{} for _ in self._handles]

    def read(self, i: int) -> Sample:
        metrics = self._smi.amdsmi_get_gpu_metrics_info(self._handles[i])
        previous, self._residency[i] = self._residency[i], residencies(metrics)
        return {**values(metrics, self._energy_unit_j[i]), "memory_used_bytes": self._memory_used(self._handles[i]),
                "throttle": reasons(metrics, previous, self._residency[i])}

    def limits(self, i: int) -> Sample:
        clock = self._ask("amdsmi_get_clock_info", self._handles[i], self._smi.AmdSmiClkType.GFX) or {}
        cap = self._ask("amdsmi_get_power_cap_info", self._handles[i]) or {}
        return {"clock_limit_mhz": positive(clock.get("max_clk")), "power_limit_w": watts(cap.get("power_cap"))}

    def close(self) -> None:
        self._ask("amdsmi_shut_down")

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What the library answers, None where it cannot."""
        try:
            return getattr(self._smi, function)(*arguments)
        except Exception:
            return None

    def _market_name(self, handle: Any) -> str | None:
        name = (self._ask("amdsmi_get_gpu_asic_info", handle) or {}).get("market_name")
        return None if name == "N/A" else name

    def _memory_used(self, handle: Any) -> float | None:
        kinds = getattr(self._smi, "AmdSmiMemoryType", None)
        return number(self._ask("amdsmi_get_gpu_memory_usage", handle, kinds.VRAM)) if kinds else None

    def _energy_unit(self, handle: Any) -> float:
        count = self._ask("amdsmi_get_energy_count", handle) or {}
        return positive(count.get("counter_resolution")) or ENERGY_UNIT_UJ


def values(metrics: dict[str, Any], energy_unit_j: float) -> Sample:
    """One gpu_metrics table as a sample. Multi-die parts fill current_gfxclks, others current_gfxclk, old ones
    average_gfxclk_frequency; MI300 and later report current_socket_power, older ones average_socket_power."""
    clocks = _valid(metrics.get("current_gfxclks"))
    hottest = _valid(metrics.get("temperature_hbm"))
    return {
        "clock_mhz": fmean(clocks) if clocks else _first(metrics, "current_gfxclk", "average_gfxclk_frequency"),
        "memory_clock_mhz": _first(metrics, "current_uclk", "average_uclk_frequency"),
        "power_w": _first(metrics, "current_socket_power", "average_socket_power"),
        "energy_j": scaled(positive(metrics.get("energy_accumulator")), energy_unit_j),
        "temperature_c": _first(metrics, "temperature_hotspot", "temperature_edge"),
        "memory_temperature_c": _first(metrics, "temperature_mem") or max(hottest, default=None),
        "activity_pct": number(metrics.get("average_gfx_activity")),
        "memory_activity_pct": number(metrics.get("average_umc_activity")),
    }


def residencies(metrics: dict[str, Any]) -> dict[str, float]:
    """Accumulated time per reason, and `total`, in firmware ticks; empty where the device does not count."""
    total = number(metrics.get("accumulation_counter"))
    counted = {reason: number(metrics.get(field)) for field, reason in RESIDENCIES.items()}
    known = {reason: ticks for reason, ticks in counted.items() if ticks is not None}
    return {"total": total, **known} if total is not None and known else {}


def reasons(metrics: dict[str, Any], previous: dict[str, float], now: dict[str, float]) -> str | None:
    """The throttle column: shares of the time between two tables, else the reasons in force now, else unknown."""
    if now:
        elapsed = now["total"] - previous.get("total", now["total"])
        if elapsed <= 0:
            return None
        return throttle({reason: min(100.0, round(100 * (ticks - previous[reason]) / elapsed, 2))
                         for reason, ticks in now.items() if reason != "total" and reason in previous})
    status = metrics.get("indep_throttle_status")
    if isinstance(status, bool):
        return throttle({"other": 100} if status else {})
    bits = number(status)
    return None if bits is None else throttle(dict.fromkeys(named_bits(int(bits)), 100))


def named_bits(status: int) -> list[str]:
    """The reasons of an indep_throttle_status."""
    found = []
    for bit in range(status.bit_length()):
        if status >> bit & 1:
            found.append(next((reason for bits, reason in INDEPENDENT_BITS if bit in bits), "other"))
    return found


def watts(power_cap: object) -> float | None:
    """A power cap: microwatts in amdsmi, watts in some releases of its tools."""
    value = positive(power_cap)
    return scaled(value, 1e-6) if value is not None and value > 100_000 else value


def _valid(values: object) -> list[float]:
    listed: Iterable[object] = values if isinstance(values, (list, tuple)) else ()
    return [v for v in map(positive, listed) if v is not None]


def _first(metrics: dict[str, Any], *names: str) -> float | None:
    return next((v for v in (positive(metrics.get(name)) for name in names) if v is not None), None)


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
