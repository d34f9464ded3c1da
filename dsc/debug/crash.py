"""What a pass that failed was given, kept to be read and to be run again: ``dsc replay FILE.json``.

A crash is two files of one name: ``.txt`` for people, ``.json`` for ``replay``.  They lie in ``crashes`` in the cache
folder, or in the folder of the traces if there is one; of a folder's crashes the last ``KEPT`` stay.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from dsc import __version__, compiler, errors, manager, passlist, text
from dsc import target as targets
from dsc.compiler import Compiler
from dsc.debug import graphs
from dsc.errors import PassFailed
from dsc.manager import Pass, PassPipeline, Report
from dsc.options import Options, default_cache_dir
from dsc.target import Target

SCHEMA = 1
KEPT = 20
CRASHES = "crashes"


def folder_of(options: Options) -> Path:
    """Where crashes of a compilation with these options go."""
    if options.trace is not None:
        return Path(options.trace)
    return (Path(options.cache_dir) if options.cache_dir else default_cache_dir()) / CRASHES


def save(gm: GraphModule, stage: str, failed: PassFailed, made: Compiler) -> Path:
    """Write down the graph before the failed pass, given ``gm``, the graph before all passes of its stage.

    The passes before it run again on a copy: they give the same graph as before.

    Raises:
        OSError: the folder cannot be written.
    """
    passes = made.pipeline(stage).passes
    before = compiler.copied(gm)
    PassPipeline(passes[: len(failed.earlier)], verify=False).run(before, made.target)
    culprit = passes[len(failed.earlier)]
    folder = folder_of(made.options)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{stage}-{culprit.name}.crash"
    path = folder / f"{name}.txt"
    write(path.with_suffix(".json"), json.dumps(as_data(before, stage, failed, culprit, made)))
    write(path, as_text(before, stage, failed, culprit, made, path))
    forget(folder)
    return path


def write(path: Path, content: str) -> None:
    """All of it or nothing, even where several processes crash at once."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def saved(folder: Path) -> list[Path]:
    """The ``.txt`` files of the folder's crashes, oldest first; their names begin with the time."""
    return sorted(folder.glob("*.crash.txt"))


def forget(folder: Path) -> None:
    """Delete the oldest crashes of the folder until ``KEPT`` are left."""
    for path in saved(folder)[:-KEPT]:
        delete(path)


def clear(folder: Path) -> int:
    """Delete all crashes of the folder; how many there were."""
    found = saved(folder)
    for path in found:
        delete(path)
    return len(found)


def delete(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)


def as_data(before: GraphModule, stage: str, failed: PassFailed, culprit: Pass, made: Compiler) -> dict[str, Any]:
    return {
        "crash": SCHEMA,
        "dsc": __version__,
        "torch": torch.__version__,
        "stage": stage,
        "pass": manager.spell([culprit]),
        "target": made.target.name,
        "verify": made.options.verify,
        "error": str(failed),
        "graph": graphs.encode(before),
    }


def as_text(before: GraphModule, stage: str, failed: PassFailed, culprit: Pass, made: Compiler, path: Path) -> str:
    trace = "".join(traceback.format_exception(failed.cause))
    return (
        f"{failed}\n\n"
        f"pass:    {manager.spell([culprit])}\n"
        f"graph:   {stage}, {len(before.graph.nodes)} nodes\n"
        f"target:  {made.target.name}\n"
        f"version: dsc {__version__}, torch {torch.__version__}\n"
        f"again:   dsc replay {path.with_suffix('.json')}\n\n"
        f"{trace}\n"
        f"The graph before the pass:\n\n{text.show(before.graph)}"
    )


# --- again


@dataclass(frozen=True)
class Crash:
    """A saved crash."""

    stage: str
    spelled: str
    target: Target
    verify: bool
    error: str
    gm: GraphModule


def read(path: str | Path) -> Crash:
    """A ``.crash.json`` file.

    Raises:
        BadCrash: there is no such file, or it is something else.
        BadGraphFile, UnknownTarget: it is of a version that knew more.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as why:
        raise errors.BadCrash(str(path), (why.strerror or str(why)).lower()) from why
    except ValueError as why:
        raise errors.BadCrash(str(path), "it is not JSON") from why
    if not isinstance(data, dict) or data.get("crash") != SCHEMA:
        raise errors.BadCrash(str(path), "it was not saved by this version of dsc")
    gm = graphs.decode(data["graph"])
    return Crash(data["stage"], data["pass"], targets.find(data["target"]), data["verify"], data["error"], gm)


def replay(crash: Crash, known: Mapping[str, type[Pass]]) -> Report:
    """Run the failed pass on the graph again.  ``known`` holds passes beside ours and those of installed packages.

    Raises:
        PassFailed: it fails again.
        UnknownPass: it is not here.
    """
    name = manager.names(crash.spelled)[0]
    found = manager.parse(crash.spelled, known) if name in known else passlist.parse(crash.spelled)
    ((_, report),) = PassPipeline(found, verify=crash.verify).run(crash.gm, crash.target)
    return report
