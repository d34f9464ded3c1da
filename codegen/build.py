"""From C++ text to callable functions: compile once, keep the library by content, load it.

A library is named by a hash of its source, the flags, the compiler and the features of this CPU, so a stale one is never
found.  Files appear by rename, so processes may race.  A folder that others can write is refused: what lies in it gets run.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dsc.codegen import cache

FLAGS = (
    "-O2", "-march=native", "-fopenmp", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-semantic-interposition", "-fno-exceptions", "-fno-rtti", "-w", "-x", "c++", "-std=c++17", "-fPIC", "-shared",
)  # fmt: skip
TIMEOUT = 600
Run = Callable[[object, object], int]


class CacheUnusable(RuntimeError):
    """The cache folder cannot be written, or others can write it."""


class CompileFailed(RuntimeError):
    """The compiler refused the source."""


@dataclass(frozen=True, slots=True)
class Library:
    path: Path
    handle: ctypes.CDLL

    def function(self, name: str) -> Run:
        """``int name(void** buffers, const long* sizes)``."""
        f = getattr(self.handle, name)
        f.argtypes, f.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
        return f  # type: ignore[no-any-return]


def find_compiler(preferred: str | None = None) -> str | None:
    """Full path of the first of: ``preferred``, g++, clang++, c++."""
    names = [preferred] if preferred else []
    return next((p for n in [*names, "g++", "clang++", "c++"] if (p := shutil.which(n))), None)


def build(source: str, cache_dir: Path, compiler: str) -> Library:
    """Compile ``source``, or find it compiled, and load it."""
    guard(cache_dir)
    path = cache_dir / f"{key(source, compiler)}.so"
    if (found := _load(path)) is not None:
        return found
    with cache.alone(path.with_suffix(".lock")):
        if (found := _load(path)) is not None:
            return found  # another process built it meanwhile
        _compile(source, path, compiler)
        library = Library(path, ctypes.CDLL(str(path)))
    cache.evict(cache_dir, spare=path.stem)
    return library


def _load(path: Path) -> Library | None:
    """The library, if it is there."""
    if not cache.trusted(path):
        return None
    try:
        library = Library(path, ctypes.CDLL(str(path)))
    except OSError:
        if path.exists():
            raise
        return None  # deleted by another process just now
    cache.mark_used(path)
    return library


def build_many(sources: Sequence[str], cache_dir: Path, compiler: str, jobs: int | None = None) -> list[Library]:
    """``build`` of each, compilers running side by side."""
    guard(cache_dir)
    width = jobs or min(len(sources), len(os.sched_getaffinity(0))) or 1
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(lambda s: build(s, cache_dir, compiler), sources))


def key(source: str, compiler: str) -> str:
    parts = (source, " ".join(FLAGS), _version(compiler), _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@lru_cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except OSError as e:
        raise CompileFailed(f"{compiler} does not run: {e}") from e
    return done.stdout


@lru_cache
def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model", "cpu family", "vendor_id", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in wanted)


def guard(folder: Path) -> None:
    """Make the folder if need be; raise CacheUnusable if it cannot be written, or if others can write it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = folder.stat()
    except OSError as e:
        raise CacheUnusable(f"{folder}: {e.strerror}") from e
    if not stat.S_ISDIR(info.st_mode):
        raise CacheUnusable(f"{folder} is not a folder")
    if info.st_uid != os.geteuid():
        raise CacheUnusable(f"{folder} belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheUnusable(f"others can write {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheUnusable(f"{folder} cannot be written")


def _compile(source: str, path: Path, compiler: str) -> None:
    try:
        folder = tempfile.mkdtemp(prefix=".build-", dir=path.parent)
    except OSError as e:
        raise CacheUnusable(f"{path.parent}: {e.strerror}") from e
    try:
        text, made = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        text.write_text(source)
        command = [compiler, *FLAGS, str(text), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise CompileFailed(_first_errors(done.stderr) or f"{compiler} exited with {done.returncode}")
        made.chmod(0o700)
        os.replace(text, path.with_suffix(".cpp"))
        os.replace(made, path)
    except OSError as e:
        raise CacheUnusable(f"{path.parent}: {e.strerror}") from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_errors(stderr: str, count: int = 5) -> str:
    lines = stderr.splitlines()
    return "\n".join([x for x in lines if "error" in x][:count] or lines[:count])
