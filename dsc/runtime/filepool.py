"""A file as memory: values at fixed places, written and read around the page cache where the file system allows it.

The file has no name: nobody can remove it, and it is gone with the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading

import torch

from dsc.errors import OffloadFailed

BLOCK = 4096
"""Direct I/O moves whole blocks between block boundaries of the file and of memory."""
CHUNK = 8 << 20
"""Bytes that one call moves."""


class FilePool:
    """Raises OffloadFailed where the folder cannot be written, the disk is full, or the drive fails."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            self.file, name = tempfile.mkstemp(prefix="dsc-", dir=folder)
            self.direct = self._reopen(name)
            os.unlink(name)
        except OSError as why:
            raise OffloadFailed(f"the folder {folder!r}", why.strerror or str(why)) from why
        self.end = 0
        self.free: dict[int, list[int]] = {}
        self.lock = threading.Lock()

    def _reopen(self, name: str) -> bool:
        """Open the file for direct I/O; whether the file system has that."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        try:
            direct = os.open(name, os.O_RDWR | flag)
        except OSError:
            return False
        os.close(self.file)
        self.file = direct
        return True

    def take(self, nbytes: int) -> int:
        """A place for so many bytes, on disk for sure."""
        size = -(-max(nbytes, 1) // BLOCK) * BLOCK
        with self.lock:
            if known := self.free.get(size):
                return known.pop()
            try:
                os.posix_fallocate(self.file, self.end, size)
            except OSError as why:
                raise OffloadFailed(f"{nbytes} bytes in {self.folder!r}", why.strerror or str(why)) from why
            self.end += size
            return self.end - size

    def give(self, place: int, nbytes: int) -> None:
        with self.lock:
            self.free.setdefault(-(-max(nbytes, 1) // BLOCK) * BLOCK, []).append(place)

    def write(self, place: int, source: torch.Tensor) -> None:
        """All bytes of a uint8 tensor on the host."""
        address, nbytes = source.data_ptr(), source.numel()
        with mmap.mmap(-1, CHUNK) as buffer:
            for at in range(0, nbytes, CHUNK):
                n = min(CHUNK, nbytes - at)
                ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), address + at, n)
                self._move(os.pwritev, buffer, n, place + at, "written")

    def read(self, place: int, target: torch.Tensor) -> None:
        address, nbytes = target.data_ptr(), target.numel()
        with mmap.mmap(-1, CHUNK) as buffer:
            for at in range(0, nbytes, CHUNK):
                n = min(CHUNK, nbytes - at)
                self._move(os.preadv, buffer, n, place + at, "read")
                ctypes.memmove(address + at, ctypes.addressof(ctypes.c_char.from_buffer(buffer)), n)

    def _move(self, call: object, buffer: mmap.mmap, n: int, place: int, verb: str) -> None:
        whole = -(-n // BLOCK) * BLOCK
        done = 0
        with memoryview(buffer) as view:
            while done < whole:
                try:
                    moved = call(self.file, [view[done:whole]], place + done)  # type: ignore[operator]
                except OSError as why:
                    raise OffloadFailed(f"the file in {self.folder!r}", why.strerror or str(why)) from why
                if moved <= 0:
                    raise OffloadFailed(f"the file in {self.folder!r}", f"{n - done} bytes could not be {verb}")
                done += moved
