"""Numbers as people read them."""

from __future__ import annotations

import math

NONE = "–"


def unit_of(largest: float) -> tuple[float, str]:
    """The decimal unit that suits a number of bytes, and how many bytes it has."""
    for divisor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= divisor:
            return divisor, unit
    return 1.0, "B"


def in_bytes(size: float) -> str:
    """A number of bytes."""
    divisor, unit = unit_of(size)
    return f"{size / divisor:,.0f} B" if unit == "B" else f"{size / divisor:,.2f} {unit}"


def in_seconds(seconds: float) -> str:
    """A time, in seconds however long."""
    return f"{seconds:,.1f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.2g} s"


def times(ratio: float, digits: int = 2) -> str:
    """How many times smaller."""
    return f"{ratio:,.{digits}f}×" if math.isfinite(ratio) else "∞"


def percent(share: float | None, sign: bool = False) -> str:
    """A share; with ``sign`` one that can be negative, and then says so."""
    if share is None:
        return NONE
    if not math.isfinite(share):
        return "not a number" if math.isnan(share) else "∞" if share > 0 else "−∞"
    return f"{share:+.2%}" if sign else f"{share:.2%}"


def dollars(amount: float) -> str:
    """USD with two digits that count, as small runs cost little."""
    if amount == 0 or amount >= 100:
        return f"${amount:,.0f}"
    digits = max(2, 1 - math.floor(math.log10(amount)))
    return f"${amount:.{digits}f}" if digits <= 8 else f"${amount:.1e}"


def plural(count: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
