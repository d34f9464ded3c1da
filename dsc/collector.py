"""Python's cyclic garbage collector stays out of compilations.

A graph is hundreds of thousands of objects that all stay alive, and every collection of the oldest generation walks all of
them again: a quarter of the time of a large compilation.  What it would find meanwhile is collected afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collections inside, if there were any outside.  Serves as a decorator too."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
