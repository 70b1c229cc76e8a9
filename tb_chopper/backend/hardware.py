"""Peak rates of the GPUs, each with its clock and its source; what the user passes wins.

The theoretical peak and the clock it belongs to must be one pair: the overhead breakdown telescopes only then.
So the table stores operations per clock and unit (CU or SM) and the clock; the peak follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tb_chopper.backend.errors import InvalidSelection


class Peak(NamedTuple):
    """The dense peak of one data type and the clock at which the GPU reaches it."""

    flop_per_s: float
    clock_mhz: float


@dataclass(frozen=True)
class Hardware:
    """One logical GPU, as a process sees it: a GCD of an MI250X, a partition of an MI300X.

    `peaks` by data type: bf16, fp16, fp8, fp6, fp4, int8, tf32, fp32, fp64 (through the matrix cores where these
    have that type) and fp32_vector, fp64_vector. `xcc`: compute dies over which counters are summed.
    None: not known. Source says where the numbers come from and what in them is not the vendor's.
    """

    name: str
    arch: str
    units: int
    xcc: int
    max_clock_mhz: float
    peaks: Mapping[str, Peak]
    memory_bytes_per_s: float | None
    link_bytes_per_s: float | None
    """to all other GPUs of the host together, one direction"""
    power_cap_w: float | None
    source: str

    matrix_cores_per_unit = 4

    def peak(self, dtype: str = "bf16") -> Peak | None:
        """The peak of a data type, None where it is not known (or the hardware has none)."""
        return self.peaks.get(dtype)

    @property
    def f_peak_mhz(self) -> float:
        """The clock of the bf16 peak."""
        bf16 = self.peaks.get("bf16")
        return bf16.clock_mhz if bf16 else self.max_clock_mhz


class _Row(NamedTuple):
    name: str
    words: tuple[str, ...]  # in the device's name, upper case
    device_id: int  # PCI, 0: matched by name
    arch: str
    units: int
    xcc: int
    clock_mhz: float  # of the matrix cores' peak
    max_clock_mhz: float  # of the vector units' peak
    rates: str
    memory_gbs: float | None
    link_gbs: float | None  # both directions
    power_w: float | None
    source: str


# Dense operations per clock and unit: those of the matrix cores at their clock, the others at the maximum clock.
_RATES: dict[str, tuple[dict[str, int], dict[str, int]]] = {  # matrix cores, vector units
    "cdna2": ({"bf16": 1024, "fp16": 1024, "int8": 1024, "fp32": 256, "fp64": 256},
              {"fp32_vector": 128, "fp64_vector": 128}),
    "cdna3": ({"bf16": 2048, "fp16": 2048, "fp8": 4096, "int8": 4096, "tf32": 1024, "fp32": 256, "fp64": 256},
              {"fp32_vector": 256, "fp64_vector": 128}),
    "cdna4": ({"bf16": 4096, "fp16": 4096, "fp8": 8192, "int8": 8192, "fp6": 16384, "fp4": 16384, "fp32": 256,
               "fp64": 128}, {"fp32_vector": 256, "fp64_vector": 128}),
    "ampere": ({"bf16": 2048, "fp16": 2048, "int8": 4096, "tf32": 1024},
               {"fp32": 128, "fp32_vector": 128, "fp64": 128, "fp64_vector": 64}),
    "hopper": ({"bf16": 4096, "fp16": 4096, "fp8": 8192, "int8": 8192, "tf32": 2048},
               {"fp32": 256, "fp32_vector": 256, "fp64": 256, "fp64_vector": 128}),
    "h20": ({"bf16": 1024, "fp16": 1024, "fp8": 2048, "int8": 2048, "tf32": 512}, {}),
    "blackwell": ({"bf16": 8192, "fp16": 8192, "fp8": 16384, "int8": 16384, "fp4": 32768, "tf32": 4096}, {}),
}

_AMD = "AMD product page; operations per clock as in the CDNA{} white paper"
_NV = "NVIDIA {} data sheet, sparse values halved"
_BACK = "; clock computed back from the peak"
_TABLE = (
    # name, words in the device name, PCI id, arch, units, xcc, clocks MHz, rates, GB/s memory, links, W, source
    _Row("MI210", ("MI210",), 0x740F, "gfx90a", 104, 1, 1700, 1700, "cdna2", 1638, 300, 300, _AMD.format(2)),
    _Row("MI250X (one GCD)", ("MI250X",), 0x7408, "gfx90a", 110, 1, 1700, 1700, "cdna2", 1638, 400, 280,
         _AMD.format(2) + "; half a module"),
    _Row("MI300A", ("MI300A",), 29856, "gfx942", 228, 6, 2100, 2100, "cdna3", 5325, None, 760, _AMD.format(3)),
    _Row("MI300X", ("MI300X",), 29857, "gfx942", 304, 8, 2100, 2100, "cdna3", 5325, 896, 750, _AMD.format(3)),
    _Row("MI325X", ("MI325X",), 29861, "gfx942", 304, 8, 2100, 2100, "cdna3", 6000, 896, 1000, _AMD.format(3)),
    _Row("MI350X", ("MI350X",), 30112, "gfx950", 256, 8, 2200, 2200, "cdna4", 8000, 1075, 1000, _AMD.format(4)),
    _Row("MI355X", ("MI355X",), 30115, "gfx950", 256, 8, 2400, 2400, "cdna4", 8000, 1075, 1400, _AMD.format(4)),
    _Row("A100 80GB PCIe", ("A100 80GB PCIE",), 0, "sm_80", 108, 1, 1410, 1410, "ampere", 1935, 600, 300,
         _NV.format("A100")),
    _Row("A100 40GB PCIe", ("A100-PCIE-40GB",), 0, "sm_80", 108, 1, 1410, 1410, "ampere", 1555, 600, 250,
         _NV.format("A100")),
    _Row("A100 SXM 80GB", ("A100-SXM4-80GB", "A100-SXM-80GB"), 0, "sm_80", 108, 1, 1410, 1410, "ampere", 2039, 600,
         400, _NV.format("A100")),
    _Row("A100 SXM 40GB", ("A100-SXM4-40GB", "A100"), 0, "sm_80", 108, 1, 1410, 1410, "ampere", 1555, 600, 400,
         _NV.format("A100")),
    _Row("H100 SXM", ("H100 80GB HBM3", "H100 SXM", "H100"), 0, "sm_90", 132, 1, 1830, 1980, "hopper", 3350, 900, 700,
         _NV.format("H100")),
    _Row("H100 PCIe", ("H100 PCIE", "H100"), 0, "sm_90", 114, 1, 1620, 1755, "hopper", 2039, 600, 350,
         _NV.format("H100")),
    _Row("H100 NVL", ("H100 NVL",), 0, "sm_90", 132, 1, 1545, 1785, "hopper", 3938, 600, 400,
         _NV.format("H100 NVL") + _BACK),
    _Row("H20", ("H20",), 0, "sm_90", 78, 1, 1853, 1980, "h20", 4000, 900, 400, "torchtitan get_peak_flops" + _BACK),
    _Row("H200 NVL", ("H200 NVL",), 0, "sm_90", 132, 1, 1545, 1785, "hopper", 4800, 900, 600,
         _NV.format("H200") + _BACK),
    _Row("H200", ("H200",), 0, "sm_90", 132, 1, 1830, 1980, "hopper", 4800, 900, 700, _NV.format("H200")),
    _Row("B200", ("B200",), 0, "sm_100", 148, 1, 1855.8, 1965, "blackwell", 8000, 1800, 1000,
         _NV.format("Blackwell") + _BACK),
    _Row("GB200", ("GB200",), 0, "sm_100", 148, 1, 2062, 2062, "blackwell", 8000, 1800, 1200,
         _NV.format("Blackwell") + _BACK),
    _Row("GB200", ("GB200",), 0, "sm_100", 152, 1, 2007.7, 2062, "blackwell", 8000, 1800, 1200,
         _NV.format("Blackwell") + _BACK),
)
_MI308X = 29858
_GENERIC = {"", "AMD RADEON GRAPHICS", "AMD INSTINCT"}

OVERRIDES = {
    "peak_tflops": "dense bf16 and fp16 peak in TFLOP/s (peak_tflops_fp8=..., peak_tflops_tf32=... for others)",
    "f_peak_mhz": "the clock of that peak",
    "units": "CUs or SMs",
    "xcc": "compute dies",
    "hbm_gbs": "memory bandwidth in GB/s",
    "link_gbs": "bandwidth to the other GPUs of the host in GB/s, one direction",
    "power_cap_w": "power cap in W",
}


def find(name: str | None, device_id: int | None = None, units: int | None = None, max_clock_mhz: float | None = None,
         override: Mapping[str, float] | None = None) -> Hardware | None:
    """The GPU behind what a file says of it, or None: `what_to_pass` tells the user what would help.

    A PCI device id is exact; a name is matched by the product in it ("AMD Instinct MI300X VF"), `units` tells
    variants of one name apart; a nameless AMD device is found by units and clock where only one peak fits.
    A device of fewer units than the product is a partition (or MIG slice): its peak is its share.
    `override`: keys of OVERRIDES; enough of them make an unknown GPU known.
    """
    rows = _candidates((name or "").upper(), device_id, units, max_clock_mhz)
    known = _of_rows(rows, units) if rows else None
    return _overridden(known, name or "GPU", units, override) if override else known


def compute_dies(device_id: int, units: int) -> int | None:
    """Dies (XCCs) of a logical AMD GPU by its PCI device id, None where not known: tools report 1 for some of 4."""
    whole = {row.device_id: (row.units, row.xcc) for row in _TABLE if row.device_id} | {_MI308X: (80, 4)}
    all_units, all_dies = whole.get(device_id, (0, 0))
    dies, rest = divmod(all_dies * units, all_units) if all_units else (0, 0)
    return dies if dies and not rest else None


def what_to_pass(name: str | None) -> str:
    """One line for a GPU that `find` does not know."""
    return (f"no peak is known for {name or 'this GPU'}: pass its dense bf16 peak and the clock of that peak, "
            "e.g. peak_tflops=1307.4,f_peak_mhz=2100")


def parse_override(text: str) -> dict[str, float]:
    """`peak_tflops=1307,f_peak_mhz=2100` as a mapping; raises InvalidSelection naming the part that is wrong."""
    out = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in OVERRIDES and not key.startswith("peak_tflops_"):
            raise InvalidSelection(f"{key!r} is no property of a GPU; known: {', '.join(OVERRIDES)}")
        try:
            out[key] = float(value)
        except ValueError:
            raise InvalidSelection(f"{part!r}: {key} takes a number ({OVERRIDES.get(key, 'TFLOP/s')})") from None
        if not 0 < out[key] < float("inf"):
            raise InvalidSelection(f"{part!r}: {key} must be positive")
    return out


def _candidates(name: str, device_id: int | None, units: int | None, max_clock_mhz: float | None) -> list[_Row]:
    by_id = [row for row in _TABLE if row.device_id and row.device_id == device_id]
    if by_id:
        return by_id
    if name.strip() in _GENERIC:
        return [row for row in _TABLE if row.arch.startswith("gfx") and row.units == units
                and max_clock_mhz in (None, row.max_clock_mhz)]
    by_name = [(len(word), row) for row in _TABLE for word in row.words
               if re.search(rf"(?<![A-Z0-9]){re.escape(word)}(?![A-Z0-9])", name)]
    longest = sorted(by_name, key=lambda match: -match[0])
    fitting = [row for _, row in longest if units is None or units == row.units]
    smaller = [row for _, row in longest if units is not None and units < row.units]
    return (fitting or smaller)[:1]


def _of_rows(rows: list[_Row], units: int | None) -> Hardware | None:
    """What the rows have in common; None where they differ in a peak."""
    first, *others = (_hardware(row, units) for row in rows)
    if first is None or any(other is None or other.peaks != first.peaks for other in others):
        return None
    known = [h for h in others if h]
    return replace(
        first, name=" or ".join([first.name, *(h.name for h in known)]),
        memory_bytes_per_s=_same([first.memory_bytes_per_s, *(h.memory_bytes_per_s for h in known)]),
        link_bytes_per_s=_same([first.link_bytes_per_s, *(h.link_bytes_per_s for h in known)]),
        power_cap_w=_same([first.power_cap_w, *(h.power_cap_w for h in known)]))


def _same(values: list[float | None]) -> float | None:
    return values[0] if len(set(values)) == 1 else None


def _hardware(row: _Row, units: int | None) -> Hardware | None:
    units = units or row.units
    if units > row.units:
        return None
    whole = units == row.units
    parts, rest = divmod(row.units, units)
    # An equal share of dies is a partition with its own stacks of memory; any other size is a slice of unknown rights.
    partition = rest == 0 and row.xcc % parts == 0
    rates = _RATES[row.rates]
    peaks = {dtype: Peak(rate * units * clock * 1e6, clock)
             for clock, group in ((row.clock_mhz, rates[0]), (row.max_clock_mhz, rates[1]))
             for dtype, rate in group.items()}

    def share(value: float | None, scale: float) -> float | None:
        return value * scale / parts if value and partition else None

    return Hardware(
        row.name if whole else f"{row.name} ({units} of {row.units} units)", row.arch, units,
        row.xcc // parts if partition else 1, row.max_clock_mhz, peaks, share(row.memory_gbs, 1e9),
        share(row.link_gbs, 0.5e9), share(row.power_w, 1.0), row.source)


def _overridden(known: Hardware | None, name: str, units: int | None, override: Mapping[str, float]) -> Hardware | None:
    base = known or Hardware(name, "", units or 0, 1, 0.0, {}, None, None, None, "")
    clock = override.get("f_peak_mhz", base.f_peak_mhz)
    # A clock alone moves every peak with it: the pair stays one pair.
    scale = clock / base.f_peak_mhz if base.f_peak_mhz else 1.0
    peaks = {dtype: Peak(p.flop_per_s * scale, p.clock_mhz * scale) for dtype, p in base.peaks.items()}
    for key, value in override.items():
        if key.startswith("peak_tflops"):
            dtypes = ("bf16", "fp16") if key == "peak_tflops" else (key.removeprefix("peak_tflops_"),)
            peaks.update({dtype: Peak(value * 1e12, clock) for dtype in dtypes})
    if not peaks:
        return None

    def given(key: str, otherwise: float | None, scale: float = 1.0) -> float | None:
        return override[key] * scale if key in override else otherwise

    return replace(
        base, peaks=peaks, max_clock_mhz=max(base.max_clock_mhz, clock), units=int(override.get("units", base.units)),
        xcc=int(override.get("xcc", base.xcc)), memory_bytes_per_s=given("hbm_gbs", base.memory_bytes_per_s, 1e9),
        link_bytes_per_s=given("link_gbs", base.link_bytes_per_s, 1e9),
        power_cap_w=given("power_cap_w", base.power_cap_w),
        source="; ".join(filter(None, (base.source, "given by the user: " + ", ".join(sorted(override))))))
