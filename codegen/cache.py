"""The folder of compiled kernels and graphs: what lies in it, and how it stays small.

An entry is a library and its source, ``KEY.so`` and ``KEY.cpp``, a compiled graph, ``KEY.graph``, the schedules that were
measured for a kernel, ``KEY.choice``, or a model for ``dsc.load``, ``KEY.artifact``; other files of the folder are not
touched.  Files appear by rename, whole or not at all.  What is used is marked by its time of change, so
the oldest times are those of what was not used for longest.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LEFTOVER = re.compile(r"\.build-|\.[0-9a-f]{32}\.\w+\.\d+-\d+$|[0-9a-f]{32}\.lock$")
NAME = re.compile(r"(?P<key>[0-9a-f]{32})\.(so|cpp|graph|choice|artifact)")
LIMIT = 2 << 30
"""Bytes of libraries and sources above which a new library drives out old ones."""
DIGEST = 32
"""Bytes of the checksum at the head of a graph."""
STALE = 3600.0
"""Seconds after which something unfinished is taken for that of a process that died."""
PATIENCE = 600.0
"""Seconds to wait for another process that builds the same."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    files: tuple[Path, ...]
    bytes: int
    used: float
    """When it was loaded last, in seconds since 1970."""

    @property
    def kind(self) -> str:
        """library, graph, choice or artifact."""
        suffix = self.files[0].suffix.removeprefix(".")
        return "library" if suffix in ("so", "cpp") else suffix

    @property
    def is_graph(self) -> bool:
        return self.kind == "graph"


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


_NUMBER = itertools.count()


def place(path: Path, data: bytes) -> None:
    """Write a file that others may be writing too: readers see all of one of them."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{next(_NUMBER)}")
    try:
        partial.write_bytes(data)
        partial.chmod(0o700)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, data: bytes) -> None:
    """Keep data with its checksum."""
    place(path, hashlib.sha256(data).digest() + data)


def read(path: Path) -> bytes | None:
    """What ``write`` kept; None if it is not there, is damaged, or if others could have written it."""
    if not (trusted(path) and trusted(path.parent, folder=True)):
        return None
    try:
        found = path.read_bytes()
    except OSError:
        return None
    data = found[DIGEST:]
    if hashlib.sha256(data).digest() != found[:DIGEST]:
        return None
    mark_used(path)
    return data


def trusted(path: Path, folder: bool = False) -> bool:
    """Whether a file is there, ours, and nobody else's to change."""
    try:
        info = path.stat() if folder else path.lstat()
    except OSError:
        return False
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    return kind(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time for each path; the lock of a process that dies is free.

    Where files cannot be locked, or after ``PATIENCE``, nobody is kept out: work is done twice then, and no harm.
    """
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        yield
        return
    try:
        end = time.monotonic() + PATIENCE
        while not _locked(handle) and time.monotonic() < end:
            time.sleep(0.02)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


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
    if total <= limit:
        return 0
    sweep(folder)
    freed = 0
    for e in found:
        if total - freed <= limit:
            break
        if e.key != spare:
            freed += delete(e)
    return freed


def clear(folder: Path) -> tuple[int, int]:
    """Delete all entries, and what dead processes left half done: (entries, bytes)."""
    found = entries(folder)
    freed = sum(map(delete, found))
    sweep(folder)
    return len(found), freed


def sweep(folder: Path) -> None:
    """Delete what processes that died long ago left: folders of builds, partial files, locks."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not LEFTOVER.match(path.name):
            continue
        try:
            if time.time() - path.lstat().st_mtime > STALE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError:  # another process was faster, or still writes there
            continue


def delete(entry: Entry) -> int:
    for path in entry.files:
        path.unlink(missing_ok=True)
    return entry.bytes
