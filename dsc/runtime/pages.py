"""Memory that ATen and gradients take from the C library stays with the process, so that no step faults pages in again.

glibc hands every freed block of some megabytes back to the system, and the next step pays for each page anew: half of
the time of a cheap operator on a large tensor.  See ``mallopt(3)``.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT = 1 << 30
"""Bytes at the end of the heap above which they go back to the system."""
USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@lru_cache(None)
def keep() -> bool:
    """Once a process: whether it was done.

    Not where somebody has set glibc's variables, nor with another C library or allocator.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # all blocks from the heap: the threshold for a mapping of its own cannot be raised above 32 MiB
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
