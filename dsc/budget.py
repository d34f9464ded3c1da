"""A memory budget as the user writes it: bytes, ``40GiB``, ``80%`` of the target's memory, ``auto``."""

from __future__ import annotations

import re

from dsc.errors import BadOption
from dsc.target import Target

EXPECTED = "bytes, a size such as '40GiB', a share of the target's memory such as '80%', or 'auto'"
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)
RESERVE = 0.06
"""Share of the memory that ``auto`` leaves to the driver, to libraries' workspaces and to what the allocator splits."""


def bytes_of(budget: int | str, target: Target, name: str = "memory_budget") -> int:
    """The budget in bytes.

    Raises:
        BadOption: it is not one of the forms above, or not positive.
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    if budget == "auto":
        return int(target.memory * (1 - RESERVE))
    found = SIZE.fullmatch(budget) if isinstance(budget, str) else None
    if found is None or not float(found[1]):
        raise BadOption(name, budget, EXPECTED)
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return int(target.memory * number / 100)
    if unit not in UNITS:
        raise BadOption(name, budget, EXPECTED)
    return int(number * UNITS[unit])
