"""Numbers for people: three digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence


def nbytes(n: float) -> str:
    """``512 B``, ``4.1 kB``, ``12.6 MB``: thousands, as memory bandwidths count."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB"))


def flops(n: float) -> str:
    """``980``, ``1.2k``, ``3.4M``, ``5.6G``: operations, not a rate."""
    return _scaled(n, ("", "k", "M", "G", "T", "P")).replace(" ", "")


def seconds(s: float) -> str:
    """``870 ns``, ``3.2 µs``, ``1.5 ms``, ``2.1 s``; nothing is ``0``."""
    return _scaled(s * 1e9, ("ns", "µs", "ms", "s")) if s > 0 else "0"


def percent(part: float, whole: float) -> str:
    """``12 %``, ``0.4 %``; of nothing, a dash."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %"


def plural(count: int, word: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _scaled(n: float, units: Sequence[str]) -> str:
    size = 0
    while n >= 999.5 and size < len(units) - 1:
        n, size = n / 1000, size + 1
    whole = size == 0 and n == int(n)
    text = f"{n:.0f}" if n >= 99.95 or whole else f"{n:.1f}" if n >= 0.05 else f"{n:.2g}"
    return f"{text} {units[size]}".rstrip()
