"""What every error of dsc is, and the words that several share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields


class DscWarning(UserWarning):
    """Something works, but not as well as it could."""


class DscError(Exception):
    """Any mistake that dsc reports.  The fields of a subclass are its facts; ``str`` makes the sentence of them."""

    def __reduce__(self) -> tuple[type[DscError], tuple[object, ...]]:
        """Travel between processes: the exception's own ``args`` miss what was given by keyword."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'fuse'?`` where some known name is near, else the list of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"use one of {', '.join(map(repr, names))}." if names else "there is none to choose."


def size(nbytes: int) -> str:
    """``1.25 GiB``, ``3.00 MiB``, ``17 B``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"
