"""Formats numbers for people: bytes, seconds, ratios, percentages."""

from __future__ import annotations

import math

NONE = "–"


def unit_of(largest: float) -> tuple[float, str]:
    """Return the bytes in a decimal unit, and the unit, that suits numbers of bytes up to ``largest``."""
    for divisor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= divisor:
            return divisor, unit
    return 1.0, "B"


def in_bytes(size: float) -> str:
    """Format a number of bytes, e.g. ``1.23 MB``."""
    divisor, unit = unit_of(size)
    return f"{size / divisor:,.0f} B" if unit == "B" else f"{size / divisor:,.2f} {unit}"


def in_seconds(seconds: float) -> str:
    """Format a time in seconds, however long."""
    return f"{seconds:,.1f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.2g} s"


def duration(seconds: float) -> str:
    """Format a time with one unit, e.g. ``42 s``, ``3.5 min``, ``2.1 h``, ``12 d``."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            count = seconds / length
            return f"{count:,.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def times(ratio: float, digits: int = 2) -> str:
    """Format a ratio, e.g. ``12.34×``."""
    return f"{ratio:,.{digits}f}×" if math.isfinite(ratio) else "∞"


def percent(share: float | None, sign: bool = False) -> str:
    """Format a share of 1 as a percentage. sign: also write a plus sign."""
    if share is None:
        return NONE
    if not math.isfinite(share):
        return "not a number" if math.isnan(share) else "∞" if share > 0 else "−∞"
    return f"{share:+.2%}" if sign else f"{share:.2%}"


def plural(count: int, what: str) -> str:
    """Format a count of things: ``1 file``, ``2 files``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
