"""Units: numbers as people write them, `25Gb`, `20us`, `24GiB`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*)(?:/s)?\s*")
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SIZES = {
    **{"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
_BITS = {"kb": 125.0, "Mb": 125e3, "Gb": 125e6, "Tb": 125e9}
_BITS |= {f"{unit}it": value for unit, value in _BITS.items()}


def seconds(text: str) -> float:
    """A time.

    Example:
        >>> seconds("20ms"), seconds("0.1")
        (0.02, 0.1)
    """
    return _parsed(text, _SECONDS, "a time such as 100ms, 20us or 0.1 (seconds)")


def count(text: str) -> float:
    """How many there are.

    Example:
        >>> count("25.6M"), count("7B")
        (25600000.0, 7000000000.0)
    """
    return _parsed(text, _COUNTS, "a number such as 25.6M, 7B or 1000000")


def size(text: str) -> float:
    """Bytes.

    Example:
        >>> size("101MB"), size("2GiB")
        (101000000.0, 2147483648.0)
    """
    return _parsed(text, _SIZES, "a size such as 101MB, 24GiB or 1000000 (bytes)")


def rate(text: str) -> float:
    """Bytes per second; networks are sold by bits, which have a small b.

    Example:
        >>> rate("25Gb"), rate("25GB/s")
        (3125000000.0, 25000000000.0)
    """
    what = "a rate such as 25Gb (bits per second), 3GB or 3000000000 (bytes per second)"
    found = _parsed(text, _SIZES | _BITS, what)
    if not found:
        raise ValueError(f"expected more than 0 bytes per second, got {text!r}")
    return found


def _parsed(text: str, units: Mapping[str, float], what: str) -> float:
    match = _NUMBER.fullmatch(text)
    try:
        if match is None or match[2] not in units:
            raise ValueError
        value = float(match[1]) * units[match[2]]
    except ValueError:
        raise ValueError(f"expected {what}, got {text!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"expected {what}, got {text!r}, which is too large")
    return value


def shown_bytes(value: float) -> str:
    """Bytes for people.

    Example:
        >>> shown_bytes(3 * 2**30), shown_bytes(4 * 2**20), shown_bytes(500)
        ('3.0 GiB', '4.0 MiB', '500 bytes')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value >= _SIZES[unit]:
            return f"{value / _SIZES[unit]:,.1f} {unit}"
    return f"{value:.0f} bytes"


def shown_time(value: float) -> str:
    """Seconds for people, with three digits that count, or more before the point.

    Example:
        >>> shown_time(0.0123), shown_time(5.1254), shown_time(0.15), shown_time(12.0)
        ('12.3 ms', '5,125 ms', '150 ms', '12.0 s')
    """
    return f"{digits(value)} s" if value >= 10 else f"{digits(value * 1e3)} ms"


def digits(value: float) -> str:
    """A number with three digits that count, or more before the point.

    Example:
        >>> digits(1234.5), digits(12.34), digits(1.234), digits(0.0)
        ('1,234', '12.3', '1.23', '0')
    """
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}" if value else "0"
