"""What ``dsc compile`` wrote before, on disk: an unchanged model is read by Dynamo and hashed, and nothing is lowered again.

The key is ``fingerprint``'s, of Dynamo's graph, with what a folder holds besides the programs: the names of the model's
tensors, the structure of its result, the target, the options, and the versions of everything.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from dsc import artifact, compiler, errors, fingerprint, warm
from dsc import options as opt
from dsc import target as targets
from dsc.codegen import build, cache
from dsc.debug.capture import capture, untouched
from dsc.debug.saving import files_of, names_of, write
from dsc.debug.source import Model
from dsc.options import Options
from dsc.watch import Watcher


class Found(BaseException):
    """Ends a capture whose outcome is on disk; no error, so nothing that handles errors sees it."""


@dataclass
class Probe(Watcher):
    """Looks for what was made of the first graph before; raises ``Found`` if there is something."""

    model: Model
    folder: Path
    more: str
    key: str | None = None
    data: bytes | None = None
    graphs: int = 0
    tensors: list[object] = field(default_factory=list)

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        self.graphs += 1
        if self.graphs > 1:
            self.key = None  # one folder holds one graph
            return self
        try:
            names = names_of(self.model, inputs)
            self.key = fingerprint.of(gm, inputs, f"{self.more} {names}")
        except (fingerprint.Unnamed, errors.Unsaveable):
            return self
        self.data = cache.read(self.folder / f"{self.key}.artifact")
        if self.data is not None:
            raise Found
        return self


def compile_into(
    out: Path,
    model: Model,
    target: str,
    *,
    training: bool = True,
    parallel: int = 2,
    tune: bool = False,
    begins: Callable[[int], None] = lambda _: None,
    done: Callable[[], None] = lambda: None,
) -> tuple[artifact.Manifest, bool]:
    """Compile ``model`` into the folder ``out``, or copy there what an earlier call made; whether it was copied.

    ``begins`` is called with the number of kernels to compile, ``done`` after each of them.

    Raises:
        What ``capture`` and ``saving.files_of`` raise.
    """
    given = opt.parse(None, None, os.environ)
    probe = None
    if given.cache:
        folder = Path(given.cache_dir) if given.cache_dir else opt.default_cache_dir()
        probe = Probe(model, folder, " ".join([tag(target), str((training, tune, structure(model))), model.name]))
    try:
        session = capture(
            model, target, training=training, watchers=(probe,) if probe is not None else (), keep_stages=False
        )
    except Found:
        assert probe is not None
        assert probe.data is not None
        files = unpacked(probe.data)
        write(out, files)
        return artifact.read(out), True
    manifest, files = files_of(session, parallel, begins, done, tune)
    write(out, files)
    if probe is not None and probe.key is not None:
        keep(probe.folder, probe.key, files)
    return manifest, False


def tag(target: str) -> str:
    """Passes, options, sources and versions."""
    make = compiler.make(Options(target=target), targets.find(target))
    return f"artifact {warm.tag(make)} {artifact.FORMAT} {sorted(artifact.versions().items())}"


def structure(model: Model) -> str:
    """Of the model's result, with which of its tensors have a gradient; the model's own error if it raises."""
    try:
        with untouched(model.module), torch.enable_grad():
            leaves, spec = pytree.tree_flatten(model.module(*model.args))
    except Exception as why:  # capture says it better
        return type(why).__name__
    return f"{spec} {[x.requires_grad if isinstance(x, torch.Tensor) else None for x in leaves]}"


def keep(folder: Path, key: str, files: Mapping[str, bytes]) -> None:
    """Where that cannot be, the next call compiles again."""
    try:
        build.guard(folder)
        cache.write(folder / f"{key}.artifact", packed(files))
        cache.evict(folder, spare=key)
    except (build.CacheUnusable, OSError):
        return


def packed(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
