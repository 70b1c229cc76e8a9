"""NVIDIA GPUs through NVML (package nvidia-ml-py), with GPM metrics on Hopper and later."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_ext.sources import Gpu, Sample, Unavailable, number, positive, scaled
from torch_ext.telemetry_format import throttle

EVENT_REASONS = {
    0x002: "application_clocks", 0x004: "power", 0x008: "hw_slowdown", 0x010: "sync_boost", 0x020: "thermal",
    0x040: "thermal", 0x080: "power_brake", 0x100: "display_clocks",
}
"""bits of nvmlDeviceGetCurrentClocksEventReasons; 1 means idle and holds nothing back"""

FIELDS = {"power_w": (186, 1e-3), "energy_j": (83, 1e-3), "memory_temperature_c": (82, 1.0)}
"""field ids with the factor to our unit: POWER_INSTANT mW, TOTAL_ENERGY_CONSUMPTION mJ, MEMORY_TEMP"""

GPM_METRICS = {"sm_activity_pct": 2, "sm_occupancy_pct": 3, "tensor_activity_pct": 5, "memory_activity_pct": 10}
GPM_PERIOD_NS = 100_000_000
"""shorter windows make GPM's averages noisy"""

_VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""member of the value union by valueType"""
_GIVE_UP = 3


class Nvml:
    name = "nvml"

    def __init__(self) -> None:
        try:
            self._nvml: ModuleType = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception as error:
            raise Unavailable(f"nvml: {' '.join(str(error).split())[:120]}") from error
        if not handles:
            self.close()
            raise Unavailable("nvml: no GPU")
        self._devices = [_Device(self._nvml, handle) for handle in handles]
        self.gpus = [d.describe() for d in self._devices]

    def read(self, i: int) -> Sample:
        return self._devices[i].read()

    def limits(self, i: int) -> Sample:
        return self._devices[i].limits()

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class _Device:
    """One GPU. A query that failed three times in a row is not asked again: drivers differ in what they know."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._failures: dict[str, int] = {}
        self._gpm = _Gpm(nvml, handle) if self._ask("gpm", self._knows_gpm) else None

    def describe(self) -> Gpu:
        name = self._ask("name", lambda: self._nvml.nvmlDeviceGetName(self._handle))
        pci = self._ask("pci", lambda: self._nvml.nvmlDeviceGetPciInfo(self._handle).busId)
        return Gpu(_decoded(name), pci_address(_decoded(pci)))

    def read(self) -> Sample:
        nvml, handle, ask = self._nvml, self._handle, self._ask
        sample: Sample = dict(self._fields())
        if sample.get("power_w") is None:
            sample["power_w"] = scaled(positive(ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))), 1e-3)
        sample["clock_mhz"] = positive(ask("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
        sample["memory_clock_mhz"] = positive(
            ask("mclock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)))
        sample["temperature_c"] = positive(
            ask("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)))
        rates = ask("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        if rates is not None:
            sample["activity_pct"], sample["memory_activity_pct"] = number(rates.gpu), number(rates.memory)
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        sample["memory_used_bytes"] = None if memory is None else number(memory.used)
        sample["throttle"] = self._throttle()
        if self._gpm is not None:
            sample.update(ask("gpm", self._gpm.read) or {})
        return sample

    def limits(self) -> Sample:
        nvml, handle, ask = self._nvml, self._handle, self._ask
        clock = ask("max_clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        power = ask("power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        return {"clock_limit_mhz": positive(clock), "power_limit_w": scaled(positive(power), 1e-3)}

    def _fields(self) -> Sample:
        ids = [field for field, _ in FIELDS.values()]
        found = self._ask("fields", lambda: self._nvml.nvmlDeviceGetFieldValues(self._handle, ids)) or ()
        values = {f.fieldId: getattr(f.value, _VALUE_FIELDS[f.valueType]) for f in found if f.nvmlReturn == 0}
        return {name: scaled(positive(values.get(field)), factor) for name, (field, factor) in FIELDS.items()}

    def _throttle(self) -> str | None:
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) \
            or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = self._ask("reasons", lambda: ask(self._handle))
        return None if bits is None else throttle({name: 100 for bit, name in EVENT_REASONS.items() if bits & bit})

    def _knows_gpm(self) -> bool:
        return bool(self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)

    def _ask(self, query: str, call: Callable[[], Any]) -> Any:
        """The answer, None where there is none. A lost GPU raises."""
        if self._failures.get(query, 0) >= _GIVE_UP:
            return None
        try:
            answer = call()
        except (self._nvml.NVMLError, AttributeError) as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            self._failures[query] = self._failures.get(query, 0) + 1
            return None
        self._failures[query] = 0
        return answer


class _Gpm:
    """Averages between two GPM samples, at most one per GPM_PERIOD_NS."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._previous, self._next = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._taken_ns: int | None = None

    def read(self) -> Sample:
        now_ns = time.monotonic_ns()
        if self._taken_ns is not None and now_ns - self._taken_ns < GPM_PERIOD_NS:
            return {}
        first = self._taken_ns is None
        self._nvml.nvmlGpmSampleGet(self._handle, self._next)
        self._previous, self._next, self._taken_ns = self._next, self._previous, now_ns
        return {} if first else self._averages()

    def _averages(self) -> Sample:
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(GPM_METRICS)
        query.sample1, query.sample2 = self._next, self._previous
        for i, metric in enumerate(GPM_METRICS.values()):
            query.metrics[i].metricId = metric
        self._nvml.nvmlGpmMetricsGet(query)
        results = zip(GPM_METRICS, query.metrics, strict=False)
        return {name: number(m.value) for name, m in results if m.nvmlReturn == 0}


def pci_address(bus_id: str | None) -> str | None:
    """`00000000:C1:00.0` as `0000:c1:00.0`."""
    if not bus_id or bus_id.count(":") != 2:
        return None
    domain, bus, device = bus_id.lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


def _decoded(text: str | bytes | None) -> str | None:
    return text.decode(errors="replace") if isinstance(text, bytes) else text
