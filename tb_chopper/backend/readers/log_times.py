"""The times of foreign logs: what a column of text or numbers means, and what the user must add where it is not told.

An epoch is recognised by its size, in any unit. A time without a zone is local time somewhere: the user names the
zone, or a moment of the run, to which the whole quarter of an hour that brings the log closest is taken. A clock that
counts from boot needs one moment on both clocks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection, UnreadableFile
from tb_chopper.backend.findings import Finding

EPOCH_NS = (1_000_000_000 * 10**9, 4_100_000_000 * 10**9)
"""2001 to 2099: what a time since the epoch may be"""
UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
QUARTER_NS = 15 * 60 * 10**9
DAY_NS = 86_400 * 10**9
NEAR_NS = 5 * 60 * 10**9
"""a log that misses the run by less was still made for it"""
_FORMATS = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S",
            "%Y-%m-%dT%H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S", "%Y%m%d %H:%M:%S")


@dataclass(frozen=True)
class TimeBase:
    """What the user knows about a log's times.

    time_zone: zone of local times, "Europe/Berlin", "UTC" or "+02:00".
    anchor: one moment as (time in the log's clock, time since the epoch), both ns.
    near_ns: a moment of the run, since the epoch, to find the zone of local times by.
    """

    time_zone: str | None = None
    anchor: tuple[int, int] | None = None
    near_ns: int | None = None


@dataclass(frozen=True)
class Times:
    """t_ns (int64, since the epoch; rows that are no time: -1), the width of what one time may mean, and how it was
    found: epoch, local or anchored."""

    t_ns: np.ndarray
    resolution_ns: int
    origin: str
    findings: list[Finding]


def parse(texts: pd.Series, unit: str | None, base: TimeBase, file: str) -> Times:
    """Times of a column. `unit`: s, ms, us or ns where the header tells. Raises UnreadableFile where the times are
    not since the epoch and nothing ties them to it, InvalidSelection for a zone that does not exist."""
    numbers = pd.to_numeric(texts, errors="coerce")
    if numbers.notna().sum() * 2 >= len(texts) and numbers.notna().any():
        return _numeric(texts, unit, base, file)
    return _local(texts, base, file)


def _numeric(texts: pd.Series, unit: str | None, base: TimeBase, file: str) -> Times:
    exact, resolution = _exact_ns(texts, unit or _likely_unit(texts, base.anchor))
    known = exact[exact >= 0]
    if base.anchor is not None:
        log_ns, epoch_ns = base.anchor
        return Times(np.where(exact >= 0, exact + (epoch_ns - log_ns), -1), resolution, "anchored", [])
    if len(known) and not EPOCH_NS[0] <= np.median(known) <= EPOCH_NS[1]:
        days = int(np.median(known)) // DAY_NS
        raise UnreadableFile(
            f"{file}: its times are not epoch times ({days} days since the start of their clock): give one moment on "
            "both clocks (anchor), or log with a clock since the epoch")
    return Times(exact, resolution, "epoch", [])


def _likely_unit(texts: pd.Series, anchor: tuple[int, int] | None) -> str:
    """The unit that brings the times to the anchor, else makes them an epoch, else the time since a boot."""
    middle = float(pd.to_numeric(texts, errors="coerce").median())
    if anchor is not None:
        return min(UNITS_NS, key=lambda u: abs(middle * UNITS_NS[u] - anchor[0]))
    epoch = (u for u, ns in UNITS_NS.items() if EPOCH_NS[0] <= middle * ns <= EPOCH_NS[1])
    uptime = (u for u, ns in UNITS_NS.items() if middle * ns < EPOCH_NS[0] // 10)
    return next(epoch, None) or next(uptime, "ns")


def _exact_ns(texts: pd.Series, unit: str) -> tuple[np.ndarray, int]:
    """Decimal numbers as int64 ns without going through float, and the value of the last digit that is given."""
    factor = UNITS_NS[unit]
    parts = texts.astype(str).str.strip().str.extract(r"^([0-9]{1,19})(?:\.([0-9]*))?$")
    digits = len(str(factor)) - 1
    whole = pd.to_numeric(parts[0], errors="coerce")
    fraction = parts[1].fillna("").str[:digits]
    shown = int(fraction.str.len().max()) if len(fraction) else 0
    scale = pd.to_numeric(fraction.str.ljust(digits, "0"), errors="coerce").fillna(0) if digits else 0
    fits = whole.notna() & (whole < 9.2e18 / factor)
    ns = parts[0].where(fits, "0").astype("int64") * factor + np.asarray(scale, np.int64)
    return np.where(fits, ns, -1), factor // 10**shown


def _local(texts: pd.Series, base: TimeBase, file: str) -> Times:
    texts = texts.astype(str).str.strip()
    zoned = texts.str.contains(r"(?:Z|[+-][0-9]{2}:?[0-9]{2})$", regex=True)
    if zoned.all():
        return _times(pd.to_datetime(texts, errors="coerce", utc=True, format="ISO8601"), _shown(texts), "epoch", [])
    naive = _naive(texts)
    if naive.notna().sum() == 0:
        raise UnreadableFile(f"{file}: no time that could be read, e.g. {texts.iloc[0]!r}" if len(texts) else
                             f"{file}: no sample")
    zone, findings = _zone(naive, base, file)
    # A whole hour occurs twice as summer time ends: the order of the samples tells where, else the first is taken.
    try:
        aware = naive.dt.tz_localize(zone, ambiguous="infer", nonexistent="shift_forward")
    except ValueError:
        aware = naive.dt.tz_localize(zone, ambiguous=np.ones(len(naive), bool), nonexistent="shift_forward")
        findings.append(Finding("ambiguous_local_time", "warning", f"{file}: its times lie in the hour that the end of "
                                "summer time repeats; the first one is assumed"))
    return _times(aware.dt.tz_convert("UTC"), _shown(texts), "local", findings)


def _naive(texts: pd.Series) -> pd.Series:
    parsed = pd.Series(pd.NaT, index=texts.index, dtype="datetime64[ns]")
    for form in _FORMATS:
        missing = parsed.isna()
        if not missing.any():
            break
        found = pd.to_datetime(texts[missing], format=form, errors="coerce")
        parsed[missing] = found.astype("datetime64[ns]")
    return parsed


def _zone(naive: pd.Series, base: TimeBase, file: str) -> tuple[tzinfo, list[Finding]]:
    if base.time_zone is not None:
        return named_zone(base.time_zone), []
    if base.near_ns is None:
        return timezone.utc, [Finding("no_time_zone", "warning", f"{file}: its times have no zone and are taken as UTC:"
                                      " give the time zone, or the run to align to")]
    known = naive.dropna().astype("int64").to_numpy()
    offset = _offset_near(int(known.min()), int(known.max()), base.near_ns)
    if offset is None:
        raise UnreadableFile(f"{file}: no time zone, or more than one, brings its times to the run: give the time zone")
    return timezone(offset), [Finding("guessed_time_zone", "warning", f"{file}: its times have no zone; "
                                      f"{_name(offset)} brings them to the run and is assumed")]


def _offset_near(low: int, high: int, near_ns: int) -> timedelta | None:
    """The one offset from UTC under which a log from `low` to `high` (local, ns) holds the moment of the run, or
    comes within NEAR_NS of it. Whole hours go before quarters; None where none or several fit."""
    offsets = np.arange(-12 * 4, 14 * 4 + 1) * QUARTER_NS
    away = np.maximum(np.maximum(low - offsets - near_ns, near_ns - (high - offsets)), 0)
    for fits in ((away == 0) & (offsets % (4 * QUARTER_NS) == 0), away == 0, away <= NEAR_NS):
        if fits.sum() == 1:
            return timedelta(seconds=int(offsets[fits][0]) // 10**9)
        if fits.any():
            return None
    return None


def _name(offset: timedelta) -> str:
    return f"UTC{'-' if offset < timedelta(0) else '+'}{str(abs(offset))[:-3].zfill(5)}"


def named_zone(name: str) -> tzinfo:
    """A zone by name or offset. Raises InvalidSelection."""
    if match := re.fullmatch(r"([+-])([0-9]{2}):?([0-9]{2})", name):
        sign, hours, minutes = match.groups()
        return timezone((1 if sign == "+" else -1) * timedelta(hours=int(hours), minutes=int(minutes)))
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise InvalidSelection(f"no time zone {name!r}; a name like Europe/Berlin or an offset like +02:00") from error


def _times(aware: pd.Series, resolution_ns: int, origin: str, findings: list[Finding]) -> Times:
    t = aware.astype("datetime64[ns, UTC]").astype("int64").to_numpy()
    return Times(np.where(aware.isna(), -1, t), resolution_ns, origin, findings)


def _shown(texts: pd.Series) -> int:
    """Value of the last digit of the seconds, ns."""
    fraction = texts.str.extract(r"\.([0-9]+)")[0].fillna("")
    return 10 ** max(0, 9 - int(fraction.str.len().max())) if len(texts) else 10**9


def spread(t_ns: np.ndarray, gpu: np.ndarray, resolution_ns: int) -> np.ndarray:
    """Times cut to whole units, apart: several samples of a GPU under one time share its unit evenly, and each stands
    in the middle of its part. Rows in the order of the file."""
    if resolution_ns <= 1:
        return t_ns
    frame = pd.DataFrame({"t": t_ns, "gpu": gpu})
    groups = frame.groupby(["gpu", "t"], sort=False)
    k, n = groups.cumcount().to_numpy(), groups["t"].transform("size").to_numpy()
    return t_ns + ((2 * k + 1) * resolution_ns) // (2 * n)


def joined(date: pd.Series, time: pd.Series) -> pd.Series:
    return date.astype(str) + " " + time.astype(str)


def unit_in(header: str, known: Sequence[str] = tuple(UNITS_NS)) -> str | None:
    """`timestamp_us`, `time (ms)` or `time [s]`: the unit that a header names."""
    match = re.search(r"(?:_|\(|\[)(ns|us|µs|ms|s)[)\]]?$", header.strip().lower())
    unit = match.group(1).replace("µ", "u") if match else None
    return unit if unit in known else None
