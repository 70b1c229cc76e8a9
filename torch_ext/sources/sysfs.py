"""AMD GPUs without any library: what the amdgpu driver publishes under /sys, readable by everyone."""

from __future__ import annotations

import os
from pathlib import Path

from torch_ext.sources import Gpu, Sample, Unavailable, number, positive, scaled

AMD = "0x1002"
ROOT = Path("/sys/class/drm")


class Sysfs:
    name = "sysfs"

    def __init__(self, root: Path = ROOT) -> None:
        cards = sorted(root.glob("card[0-9]*/device"), key=lambda p: int(p.parent.name.removeprefix("card"))
                       if p.parent.name.removeprefix("card").isdigit() else -1)
        self._cards = [_Card(p) for p in cards if p.parent.name[4:].isdigit() and _text(p / "vendor") == AMD]
        if not self._cards:
            raise Unavailable("sysfs: no AMD GPU")
        self.gpus = [Gpu(card.name, card.pci_address) for card in self._cards]

    def read(self, i: int) -> Sample:
        return self._cards[i].read()

    def limits(self, i: int) -> Sample:
        return self._cards[i].limits()

    def close(self) -> None:
        for card in self._cards:
            card.close()


class _Card:
    """One GPU's files, kept open: reading them again at offset 0 asks the driver anew."""

    def __init__(self, device: Path) -> None:
        hwmon = next(iter(sorted(device.glob("hwmon/hwmon*"))), device)
        labels = {_text(p): p.with_name(p.name.replace("_label", "_input")) for p in sorted(hwmon.glob("*_label"))}
        # hwmon labels: sclk and mclk (Hz), edge, junction and mem (m°C), PPT (µW)
        self._files = {
            "clock": _open(labels.get("sclk", hwmon / "freq1_input")),
            "memory_clock": _open(labels.get("mclk", hwmon / "freq2_input")),
            "power": _open(hwmon / "power1_input") or _open(hwmon / "power1_average"),
            "temperature": _open(labels.get("junction", labels.get("edge", hwmon / "temp1_input"))),
            "memory_temperature": _open(labels.get("mem", hwmon / "temp3_input")),
            "activity": _open(device / "gpu_busy_percent"),
            "memory_activity": _open(device / "mem_busy_percent"),
            "memory_used": _open(device / "mem_info_vram_used"),
            "power_cap": _open(hwmon / "power1_cap"),
            "clock_levels": _open(device / "pp_dpm_sclk"),
            "memory_clock_levels": _open(device / "pp_dpm_mclk"),
        }
        self.name = _text(device / "product_name") or None
        self.pci_address = device.resolve().name.lower()

    def read(self) -> Sample:
        clock = scaled(positive(self._value("clock")), 1e-6)
        memory_clock = scaled(positive(self._value("memory_clock")), 1e-6)
        return {
            "clock_mhz": clock or present_level(self._content("clock_levels")),
            "memory_clock_mhz": memory_clock or present_level(self._content("memory_clock_levels")),
            "power_w": scaled(positive(self._value("power")), 1e-6),
            "temperature_c": scaled(positive(self._value("temperature")), 1e-3),
            "memory_temperature_c": scaled(positive(self._value("memory_temperature")), 1e-3),
            "activity_pct": self._value("activity"),
            "memory_activity_pct": self._value("memory_activity"),
            "memory_used_bytes": self._value("memory_used"),
        }

    def limits(self) -> Sample:
        return {
            "clock_limit_mhz": max((mhz for mhz, _ in levels(self._content("clock_levels"))), default=None),
            "power_limit_w": scaled(positive(self._value("power_cap")), 1e-6),
        }

    def close(self) -> None:
        for descriptor in self._files.values():
            if descriptor is not None:
                os.close(descriptor)

    def _value(self, file: str) -> float | None:
        content = self._content(file).strip()
        return number(int(content)) if content.isdecimal() else None

    def _content(self, file: str) -> str:
        descriptor = self._files[file]
        if descriptor is None:
            return ""
        try:
            return os.pread(descriptor, 4096, 0).decode(errors="replace")
        except OSError:  # the driver answers EPERM or EINVAL for a sensor that sleeps
            return ""


def levels(listing: str) -> list[tuple[float, bool]]:
    """`0: 132Mhz` / `1: 2100Mhz *` as (MHz, is the present one)."""
    found = []
    for row in listing.splitlines():
        value = row.partition(":")[2].strip().lower()
        mhz, unit, rest = value.partition("mhz")
        if unit and mhz.strip().isdecimal():
            found.append((float(mhz), "*" in rest))
    return found


def present_level(listing: str) -> float | None:
    return next((mhz for mhz, present in levels(listing) if present), None)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
