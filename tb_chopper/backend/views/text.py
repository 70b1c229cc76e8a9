"""Numbers and names as a person reads them: scaled units, shares, counts, labels that are safe in a figure."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable

DASH = "–"


def time_unit(largest_us: float) -> tuple[str, float]:
    """The unit for times up to `largest_us`, and what a time in µs is divided by."""
    if not math.isfinite(largest_us) or largest_us < 1e3:
        return "µs", 1.0
    return ("ms", 1e3) if largest_us < 1e6 else ("s", 1e6)


def duration(us: float | None) -> str:
    """A time in µs with three to four digits and its own unit: `86.6 ms`."""
    if us is None or not math.isfinite(us):
        return DASH
    unit, divisor = time_unit(abs(us))
    return f"{digits(us / divisor)} {unit}"


def durations(parts_us: Iterable[float]) -> list[str]:
    """Several times in the unit of the largest, without the unit, the unit last."""
    values = list(parts_us)
    unit, divisor = time_unit(max((abs(v) for v in values), default=0.0))
    return [*(digits(v / divisor) for v in values), unit]


def share(value: float | None) -> str:
    """A share (0 to 1) in percent: `22 %`, one decimal below 10 % and just below 100 %."""
    if value is None or not math.isfinite(value):
        return DASH
    percent = 100 * value
    if 0 < abs(percent) < 0.05:
        return "< 0.1 %"
    if 99.5 <= percent < 100:  # not all of it
        return f"{min(percent, 99.9):.1f} %"
    if 0 < abs(percent) < 9.95:
        return f"{percent:.1f} %"
    return f"{math.floor(percent + 0.5)} %"  # a half goes up, as in the browser


def digits(value: float) -> str:
    """At least three significant digits, no exponent, thousands apart."""
    size = abs(value)
    decimals = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{decimals}f}".replace(",", " ")


def change(value: float, before: float) -> str:
    """`+4.2 %`, `−30 %`, `× 12`: a value against the one before, which is not 0."""
    ratio = value / before
    if abs(ratio - 1) < 0.0005:
        return "no change"
    if ratio >= 3:
        return f"× {digits(ratio)}"
    return f"{'+' if ratio >= 1 else '−'}{share(abs(ratio - 1))}"


def count(n: int, noun: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}".replace(",", " ")


def short(name: str, limit: int = 40) -> str:
    """A long name with its middle left out."""
    name = " ".join(str(name).split())
    if len(name) <= limit:
        return name
    head = (limit - 1) * 2 // 3
    return f"{name[:head]}…{name[-(limit - 1 - head) :]}"


def label(name: str, limit: int = 40) -> str:
    """A name for an axis or a legend: short, and text to Plotly, which reads pseudo-HTML."""
    return escape(short(name, limit))


def hover(name: str, width: int = 90, limit: int = 900) -> str:
    """A name for a hover text: wrapped, whole up to `limit` characters."""
    return "<br>".join(escape(line) for line in textwrap.wrap(short(name, limit), width) or [""])


def escape(text: str) -> str:
    """Text that Plotly shows as it is; template marks lose their meaning, too."""
    return html.escape(str(text), quote=False).replace("%{", "%\u200b{")
