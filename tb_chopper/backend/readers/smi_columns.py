"""What the columns of foreign logs mean: names of AMD SMI, ROCm SMI, nvidia-smi, dmon and the paper's own tables,
as columns of TELEMETRY with a factor to their unit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.readers import log_times, telemetry_checks
from tb_chopper.backend.readers.log_times import TimeBase

TIMES = ("timestamp", "timestamp_ns", "timestamp_us", "timestamp_ms", "timestamp_s", "time", "ts", "ts_ns", "datetime",
         "t_ns", "time_ns", "time_us", "time_ms", "time_s")
GPUS = ("gpu", "index", "device", "gpu_id", "gpu_index", "idx", "card", "device_id", "id")
ADDRESSES = ("pci.bus_id", "gpu_bus_id", "pci_address", "bdf", "gpu_bdf", "uuid", "gpu_uuid")
"""tell GPUs apart where nothing numbers them"""
ENERGY_UNIT_UJ = 15.259
"""AMD's energy accumulator, where the log does not tell its unit"""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_VALUE = r"^\(?([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ%°/]*)\)?$"
SCALES = {"mw": 1e-3, "kw": 1e3, "ghz": 1e3, "khz": 1e-3, "mj": 1e-3, "kj": 1e3,
          "b": 1.0, "kib": 2.0**10, "kb": 2.0**10, "mib": 2.0**20, "mb": 2.0**20, "gib": 2.0**30, "gb": 2.0**30}
"""Factors to the unit of a column; the tools' MB of memory are powers of 1024."""
_UNIT = re.compile(r"\s*[\[(]([^\])]*)[\])]\s*:?$|:$")

# In order of preference: several names of a column may stand side by side.
NAMES: dict[str, tuple[str, ...]] = {
    "clock_mhz": (
        r"current_gfxclks", r"gfx_[0-9]+_clk", r"clocks\.current\.sm", r"clocks\.sm", r"clocks\.current\.graphics",
        r"clocks\.gr", r"current_gfxclk", r"gfx_clk(_mhz)?", r"gfxclk", r"sclk( clock speed)?", r"pclk",
        r"sm_clock(_mhz)?", r"clock_mhz", r"average_gfxclk_frequency"),
    "memory_clock_mhz": (
        r"clocks\.current\.memory", r"clocks\.mem", r"current_uclk", r"mem_0_clk", r"uclk", r"mclk( clock speed)?",
        r"mem_clk(_mhz)?", r"memory_clock_mhz", r"average_uclk_frequency"),
    "power_w": (
        r"power\.draw\.instant", r"power\.draw", r"power\.draw\.average", r"current_socket_power",
        r"current socket graphics package power", r"socket_power", r"average_socket_power",
        r"average graphics package power", r"power_watts", r"power_w", r"pwr", r"power", r"power_usage"),
    "energy_j": (r"total_energy_consumption", r"energy_j"),
    "temperature_c": (
        r"temperature_hotspot", r"hotspot(_temperature)?", r"temp_junction_celsius", r"temperature \(sensor junction\)",
        r"temperature\.gpu", r"gtemp", r"temperature_edge", r"edge(_temperature)?", r"temp_edge_celsius",
        r"temperature \(sensor edge\)", r"temperature_c", r"temperature"),
    "memory_temperature_c": (
        r"temperature_mem", r"mem(_temperature)", r"temperature\.memory", r"mtemp", r"temperature \(sensor memory\)",
        r"memory_temperature_c"),
    "activity_pct": (
        r"average_gfx_activity", r"gpu_use_percent", r"gpu use", r"utilization\.gpu", r"sm", r"gfx_activity", r"gfx",
        r"activity_pct"),
    "memory_activity_pct": (
        r"average_umc_activity", r"umc_activity", r"utilization\.memory", r"mem", r"memory_activity_pct",
        r"gpu memory read/write activity"),
    "memory_used_bytes": (
        r"memory\.used", r"used_vram", r"vram_used(_bytes)?", r"vram total used memory", r"fb", r"memory_used_bytes"),
    "clock_limit_mhz": (r"gfx_0_max_clk", r"clocks\.max\.sm", r"clock_limit_mhz"),
    "power_limit_w": (
        r"enforced\.power\.limit", r"power\.limit", r"power_cap_watts", r"max graphics package power",
        r"power_limit(_w)?", r"max_power"),
}
MEANS = {r"gfx_[0-9]+_clk"}
"""one column per compute die: the mean of the valid ones"""
ACCUMULATOR = "energy_accumulator"
RESOLUTIONS_UJ = ("counter_resolution_uj", "counter_resolution", "energy_resolution_uj")
THROTTLE = (r"clocks_(event|throttle)_reasons\.active", r"throttle")
NVIDIA_REASONS = {
    0x002: "application_clocks", 0x004: "power", 0x008: "hw_slowdown", 0x010: "sync_boost", 0x020: "thermal",
    0x040: "thermal", 0x080: "power_brake", 0x100: "display_clocks",
}


@dataclass(frozen=True)
class Interpreted:
    samples: pd.DataFrame
    gpus: pd.DataFrame
    times: str
    findings: list[Finding]


def is_header(fields: Sequence[str]) -> bool:
    """A line that names a time or a GPU and at least one thing more that is known."""
    names = {plain(f) for f in fields}
    if not names & {*TIMES, *GPUS}:
        return False
    return ACCUMULATOR in names or any(_find(names, patterns) for patterns in (*NAMES.values(), THROTTLE))


def plain(header: str) -> str:
    """A header's name without its unit, in small letters."""
    return _UNIT.sub("", header.strip().lower()).strip()


def interpret(rows: pd.DataFrame, source: str, base: TimeBase, file: str, time: pd.Series | None = None) -> Interpreted:
    """Rows of strings as samples. `time`: the time's text where it is not one column. Raises UnreadableFile where the
    log has no time or its times mean nothing."""
    headers = {plain(h): h for h in reversed(rows.columns)}
    time_header = next((headers[n] for n in TIMES if n in headers), None)
    if time is None and time_header is None:
        raise UnreadableFile(f"{file}: no time in it: it cannot be aligned with a trace; let the tool write one "
                             "(nvidia-smi dmon: -o DT, nvidia-smi --query-gpu=timestamp, amd-smi: -w)")
    texts = time if time is not None else rows[time_header]
    assert texts is not None
    findings: list[Finding] = []
    numbered, gpu = _gpu_numbers(rows, headers)
    keep = texts.astype(str).str.strip().ne("") & numbered
    if left := int((~keep).sum()):
        findings.append(Finding("telemetry_partial_rows", "info",
                                f"{file}: {left} rows without a time or a GPU are left out", left))
    if not keep.any():
        raise UnreadableFile(f"{file}: no row with a time and a GPU")
    rows, texts, gpu = rows[keep], texts[keep], gpu[keep.to_numpy()]
    times = log_times.parse(texts, log_times.unit_in(time_header or ""), base, file)
    good = times.t_ns >= 0
    if bad := int((~good).sum()):
        findings.append(Finding("telemetry_bad_time", "info", f"{file}: {bad} rows without a readable time", bad))
    rows, gpu, t_ns = rows[good], gpu[good], times.t_ns[good]
    if times.resolution_ns >= 10**9:
        findings.append(Finding("telemetry_whole_seconds", "info", f"{file}: times in whole seconds: a value may be a "
                                "second off, and says little about anything shorter"))
    names = {plain(h): h for h in reversed(rows.columns)}
    found, power_of = _values(rows, names, gpu, findings, file)
    samples = pd.DataFrame(found).assign(
        t_ns=log_times.spread(t_ns, gpu, times.resolution_ns), gpu=gpu, throttle=_throttle(rows, names),
        uncertainty_ns=(times.resolution_ns + 1) // 2)
    samples, checked = telemetry_checks.check(schema.conform(samples, schema.TELEMETRY), file)
    numbers = np.unique(gpu)
    gpus = schema.conform(pd.DataFrame({"gpu": numbers, "source": source}).assign(
        power_of=[power_of.get(int(g), schema.MISSING) for g in numbers],
        name=_device_names(rows, names, gpu, numbers),
        pci_address=_addresses(rows, names, gpu, numbers)), schema.TELEMETRY_GPUS)
    return Interpreted(samples, gpus, times.origin, [*times.findings, *findings, *checked])


def _gpu_numbers(rows: pd.DataFrame, headers: dict[str, str]) -> tuple[pd.Series, np.ndarray]:
    """Which rows name a GPU, and its number: `3`, `card3`, `GPU 3`. A log without such a column is of one GPU."""
    header = next((headers[n] for n in (*GPUS, *ADDRESSES) if n in headers), None)
    if header is None:
        return pd.Series(True, index=rows.index), np.zeros(len(rows), np.int64)
    if header in (headers.get(n) for n in ADDRESSES):
        codes, _ = pd.factorize(rows[header], sort=True)
        return rows[header] != "", codes.astype(np.int64)
    found = pd.to_numeric(rows[header].astype(str).str.extract(r"^\D*([0-9]{1,6})\D*$")[0], errors="coerce")
    return found.notna(), found.fillna(-1).to_numpy(np.int64)


def _values(rows: pd.DataFrame, names: dict[str, str], gpu: np.ndarray, findings: list[Finding],
            file: str) -> tuple[dict[str, np.ndarray], dict[int, int]]:
    found: dict[str, np.ndarray] = {}
    power_of: dict[int, int] = {}
    for column, patterns in NAMES.items():
        chosen = _find(names, patterns)
        merged = np.full(len(rows), np.nan)
        for headers in chosen:
            readings = np.column_stack([numbers(rows[names[h]], column) for h in headers])
            merged = np.where(np.isnan(merged), _mean_of_valid(readings), merged)
        if column == "power_w":
            for headers in chosen:
                for h in headers:
                    power_of |= _secondary_dies(rows[names[h]], gpu)
        found[column] = merged
    if ACCUMULATOR in names:
        unit = next((numbers(rows[names[r]], "") for r in RESOLUTIONS_UJ if r in names), None)
        found["energy_j"] = _accumulated(numbers(rows[names[ACCUMULATOR]], ""), unit, gpu, findings, file)
    for die, module in power_of.items():
        findings.append(Finding("power_shared", "info", f"{file}: GPU {die} has no power of its own: it shares the "
                                f"module with GPU {module}, whose reading covers both"))
    return found, power_of


def _find(names: Iterable[str], patterns: Sequence[str]) -> list[list[str]]:
    """The names that match, in order of preference; the dies' clocks together, every other name by itself."""
    found: list[list[str]] = []
    for pattern in patterns:
        matching = sorted(n for n in names if re.fullmatch(pattern, n))
        found += [matching] if pattern in MEANS and matching else [[n] for n in matching]
    return found


def numbers(texts: pd.Series, column: str) -> np.ndarray:
    """Values of texts with or without unit: `24.51 W`, `(2100Mhz)`, `[1700, 1710, N/A]` (mean of the valid ones), in
    the unit of `column` where they name another; a column's own name may end in a unit, `power [mW]`. `N/A`,
    `[Not Supported]`, `-` and 65535 are no values."""
    texts = texts.astype(str).str.strip()
    parts = texts.str.extract(_VALUE)
    values = pd.to_numeric(parts[0], errors="coerce").to_numpy(np.float64)
    unit = _UNIT.search(str(texts.name).strip())
    default = (unit.group(1) or "").lower() if unit else ""
    if not default and column == "memory_used_bytes" and not str(texts.name).strip().lower().endswith("bytes"):
        default = "mib"  # amd-smi and dmon name none in the table
    scale = parts[1].fillna("").str.lower().replace("", default).map(SCALES).fillna(1.0)
    values = values * scale.to_numpy(np.float64)
    for text in texts[texts.str.startswith("[")].unique():
        values[(texts == text).to_numpy()] = _mean_of_list(text)
    return values if column == "" else np.where(np.isin(values, (0xFFFF, 0xFFFFFFFF)), np.nan, values)


def _mean_of_list(text: str) -> float:
    valid = [v for v in map(float, _NUMBER.findall(text)) if 0 < v < 0xFFFF]
    return float(np.mean(valid)) if valid else np.nan


def _mean_of_valid(readings: np.ndarray) -> np.ndarray:
    if readings.shape[1] == 1:
        return readings[:, 0]
    valid = (readings > 0) & (readings < telemetry_checks.MAX_MHZ)
    n = valid.sum(axis=1)
    return np.where(n > 0, np.where(valid, readings, 0).sum(axis=1) / np.maximum(n, 1), np.nan)


def _secondary_dies(power: pd.Series, gpu: np.ndarray) -> dict[int, int]:
    """GPUs whose power reads `N/A (Secondary die)`, with the die before them, which measures the module."""
    secondary = power.astype(str).str.lower().str.contains("secondary die", regex=False).to_numpy()
    return {int(g): int(g) - 1 for g in np.unique(gpu[secondary])}


def _accumulated(ticks: np.ndarray, unit_uj: np.ndarray | None, gpu: np.ndarray, findings: list[Finding],
                 file: str) -> np.ndarray:
    """Joules of an accumulator, with the wraps of a 32-bit one undone."""
    if unit_uj is None:
        findings.append(Finding("energy_unit_assumed", "warning", f"{file}: the log does not tell the unit of "
                                f"{ACCUMULATOR}; {ENERGY_UNIT_UJ} µJ is assumed"))
        unit_uj = np.full(len(ticks), ENERGY_UNIT_UJ)
    out = np.full(len(ticks), np.nan)
    wraps = 0
    for g in np.unique(gpu):
        mine = np.flatnonzero((gpu == g) & ~np.isnan(ticks))
        fell = np.diff(ticks[mine]) < 0
        # A counter that has ever been above 32 bits does not wrap there.
        wrapped = fell & (ticks[mine][:-1] > 2**31) & (ticks[mine].max(initial=0) < 2**32)
        wraps += int(wrapped.sum())
        out[mine] = (ticks[mine] + 2.0**32 * np.concatenate(([0], np.cumsum(wrapped)))) * unit_uj[mine] * 1e-6
    if wraps:
        findings.append(Finding(
            "energy_wrapped", "info", f"{file}: a 32-bit energy counter wrapped {wraps} times; undone", wraps))
    return out


def _throttle(rows: pd.DataFrame, names: dict[str, str]) -> pd.Series | None:
    chosen = _find(names, THROTTLE)
    if not chosen:
        return None
    texts = rows[names[chosen[0][0]]].astype(str).str.strip()
    known = {t: _reasons(t) for t in texts.unique()}
    return pd.Series([known[t] for t in texts], dtype=object)


def _reasons(text: str) -> str | None:
    """A bit mask as nvidia-smi prints it, or reasons as our own logs write them."""
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        bits = int(text, 16)
        reasons = dict.fromkeys(name for bit, name in NVIDIA_REASONS.items() if bits & bit)
        return " ".join(f"{r}:100" for r in reasons) or "none"
    return text if re.fullmatch(r"none|[a-z_]+:[0-9.]+( [a-z_]+:[0-9.]+)*", text) else None


def _device_names(rows: pd.DataFrame, names: dict[str, str], gpu: np.ndarray, numbers_: np.ndarray) -> list[str | None]:
    return _first_text(rows, names, ("name", "gpu_name", "market_name"), gpu, numbers_)


def _addresses(rows: pd.DataFrame, names: dict[str, str], gpu: np.ndarray, numbers_: np.ndarray) -> list[str | None]:
    texts = _first_text(rows, names, ADDRESSES, gpu, numbers_)
    return [t.lower()[-12:] if t and re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]", t)
            else None for t in texts]


def _first_text(rows: pd.DataFrame, names: dict[str, str], wanted: Sequence[str], gpu: np.ndarray,
                numbers_: np.ndarray) -> list[str | None]:
    header = next((names[n] for n in wanted if n in names), None)
    if header is None:
        return [None] * len(numbers_)
    texts = rows[header].to_numpy()
    return [next((str(t) for t in texts[gpu == g] if t), None) for g in numbers_]
