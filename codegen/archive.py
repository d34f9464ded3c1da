"""Compiled kernels and graphs as one file, for a machine that is like this one: the nodes of a cluster, an image.

The file is a gzipped tar of libraries, their sources, graphs, and ``manifest.json`` with a SHA-256 of each.  A library is
machine code, and a graph is code too: import what you would run.  Of an archive only files of our naming are taken, and
of those only what is whole; of libraries those whose name is the hash of their source with the compiler, flags and
processor of this machine.  (A graph of another version of dsc or PyTorch is never asked for.)
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsc.codegen import build, cache
from dsc.errors import BadArchive

MANIFEST = "manifest.json"
LARGEST = 256 << 20
"""Bytes of one file of an archive; a larger one is not ours."""


@dataclass(frozen=True, slots=True)
class Imported:
    taken: int
    present: int
    """Were here before."""
    foreign: int
    """For another compiler or processor, or changed, or not ours."""


def write(folder: Path, file: Path) -> tuple[int, int]:
    """All whole entries of the folder into ``file``: (entries, bytes of the file).

    Raises:
        BadArchive: the file cannot be written.
    """
    found = [e for e in cache.entries(folder) if len(e.files) == (1 if e.is_graph else 2)]
    contents = {p.name: p.read_bytes() for e in found for p in e.files}
    manifest = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}).encode()
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with tarfile.open(partial, "w:gz") as tar:
            for name, data in {MANIFEST: manifest, **contents}.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        partial.replace(file)
    except OSError as why:
        raise BadArchive(str(file), f"it cannot be written: {why.strerror or why}") from why
    return len(found), file.stat().st_size


def read(file: Path, folder: Path, compiler: str) -> Imported:
    """Take what fits this machine into the folder.

    Raises:
        BadArchive: the file is not there, or is no archive of ours.
        build.CacheUnusable: the folder cannot be written, or others can write it.
    """
    build.guard(folder)
    contents = members(file)
    try:
        manifest = json.loads(contents.pop(MANIFEST))
    except (KeyError, ValueError) as why:
        raise BadArchive(str(file), "it has no manifest") from why
    keys = {m["key"] for name in contents if (m := cache.NAME.fullmatch(name))}
    taken = present = 0
    for key in sorted(keys):
        files = {name: contents[name] for name in (f"{key}.cpp", f"{key}.so", f"{key}.graph") if name in contents}
        if not fits(key, files, manifest, compiler):
            continue
        if (folder / [*files][-1]).exists():
            present += 1
            continue
        for name, data in files.items():  # the source first: a library without one could not be exported again
            cache.place(folder / name, data)
        taken += 1
    return Imported(taken, present, len(keys) - taken - present)


def members(file: Path) -> dict[str, bytes]:
    """The plain files of the archive, by name.  Nothing is extracted, so no path of it is ever used."""
    out: dict[str, bytes] = {}
    try:
        with tarfile.open(file, "r:gz") as tar:
            for info in tar:
                known = info.name == MANIFEST or cache.NAME.fullmatch(info.name)
                if info.isreg() and known and info.size <= LARGEST and (stream := tar.extractfile(info)) is not None:
                    out[info.name] = stream.read()
    except OSError as why:
        raise BadArchive(str(file), (why.strerror or str(why)).lower()) from why
    except (tarfile.TarError, EOFError, zlib.error) as why:
        raise BadArchive(str(file), "it is no gzipped tar, or it was cut off") from why
    return out


def fits(key: str, files: Mapping[str, bytes], manifest: Mapping[str, str], compiler: str) -> bool:
    """Whether the entry is whole, is what was exported, and its library what this machine would make."""
    if not isinstance(manifest, dict):
        return False
    if any(hashlib.sha256(data).hexdigest() != manifest.get(name) for name, data in files.items()):
        return False
    if [*files] == [f"{key}.graph"]:
        return True
    if [*files] != [f"{key}.cpp", f"{key}.so"]:
        return False
    try:
        source = files[f"{key}.cpp"].decode()
    except UnicodeDecodeError:
        return False
    return build.key(source, compiler) == key
