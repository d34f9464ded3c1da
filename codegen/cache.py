"""The folder of compiled kernels: what lies in it, and how it stays small.

An entry is a library and its source, ``KEY.so`` and ``KEY.cpp``; other files of the folder are not touched.
A library that is used is marked by its time of change, so the oldest times are those of what was not used for longest.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"(?P<key>[0-9a-f]{32})\.(so|cpp)")
LIMIT = 2 << 30
"""Bytes of libraries and sources above which a new library drives out old ones."""
STALE = 3600.0
"""Seconds after which a folder of an unfinished build is taken for that of a process that died."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    files: tuple[Path, ...]
    bytes: int
    used: float
    """When its library was loaded last, in seconds since 1970."""


def entries(folder: Path) -> list[Entry]:
    """What lies in the folder, least recently used first; nothing if there is no such folder."""
    files: dict[str, list[Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (m := NAME.fullmatch(path.name)) is not None and not path.is_symlink():
            files.setdefault(m["key"], []).append(path)
    found = [e for key, paths in files.items() if (e := _entry(key, sorted(paths))) is not None]
    return sorted(found, key=lambda e: (e.used, e.key))


def _entry(key: str, paths: list[Path]) -> Entry | None:
    """None if another process deleted it meanwhile."""
    try:
        infos = [p.stat() for p in paths]
    except FileNotFoundError:
        return None
    return Entry(key, tuple(paths), sum(i.st_size for i in infos), max(i.st_mtime for i in infos))


def mark_used(path: Path) -> None:
    """Set the time of a library to now; one that cannot be marked is merely forgotten sooner."""
    try:
        os.utime(path)
    except OSError:
        return


def evict(folder: Path, limit: int = LIMIT, spare: str = "") -> int:
    """Delete the least recently used entries until ``limit`` bytes are left, but not the entry ``spare``.

    A process that has a deleted library loaded goes on with it.  Returns the bytes that were freed.
    """
    found = entries(folder)
    total = sum(e.bytes for e in found)
    freed = 0
    for e in found:
        if total - freed <= limit:
            break
        if e.key != spare:
            freed += delete(e)
    return freed


def clear(folder: Path) -> tuple[int, int]:
    """Delete all entries, and what dead processes left half built: (entries, bytes)."""
    found = entries(folder)
    freed = sum(map(delete, found))
    for path in folder.glob(".build-*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > STALE:
            shutil.rmtree(path, ignore_errors=True)
    return len(found), freed


def delete(entry: Entry) -> int:
    for path in entry.files:
        path.unlink(missing_ok=True)
    return entry.bytes
