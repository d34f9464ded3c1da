"""Restart in no time: compiled graphs on disk, so that a second process traces and compiles none.

The key is a hash of the Dynamo graph, its inputs and the state of PyTorch (``fingerprint``), of the options, the target,
and the sources of dsc.  Graphs lie in dsc's own folder beside the kernels; an entry names those by their source.
Not kept: compilations that somebody watches, and programs that hold what only this process knows, such as state.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import pickle
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from dsc import compiler, fingerprint, portable
from dsc.codegen import build, cache
from dsc.compiler import Compiled, Compiler
from dsc.options import Options, default_cache_dir
from dsc.program import Program
from dsc.torch_shim import (
    BypassAOTAutogradCache,
    OutputCode,
    depends_on_a_number,
    function_of,
    guards_hold,
    keepable,
    keepable_aot,
    serializable_compiler,
)

LOG = logging.getLogger("dsc")
UNSEEN = ("on_compile", "watchers", "trace", "cache", "cache_dir", "cxx", "tune", "state", "controller")
"""Options that do not change what a program computes, or that keep it out of the cache."""

_COMPILER: ContextVar[Compiler] = ContextVar("dsc_compiler")


@dataclass
class Code(OutputCode):  # type: ignore[misc]  # a class of torch that is found when first used
    """One compiled graph in the form that AOTAutograd hands on."""

    kind: str
    program: Program | None = None
    call: Compiled | None = None
    _boxed_call: bool = True

    def __call__(self, inputs: list[object]) -> tuple[object, ...]:
        assert self.call is not None
        return self.call(inputs)

    def __reduce__(self) -> tuple[Callable[..., Code], tuple[str, bytes]]:
        if self.program is None:
            raise portable.NotPortable("the graph runs as PyTorch left it")
        return read, (self.kind, portable.dumps(self.program))

    def prepare_for_serialization(self) -> None:
        """Called when AOTAutograd would write to its own cache."""
        raise BypassAOTAutogradCache("dsc keeps its graphs itself")

    def post_compile(self, *_: object) -> None:
        """Called when it was read: the kernels are found in dsc's folder, or built from the program's code."""
        if self.call is None:
            assert self.program is not None
            self.call = compiler.loaded(self.program, self.kind, _COMPILER.get())

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Triton's kernels are kept by Triton's own cache."""


def read(kind: str, data: bytes) -> Code:
    """What ``Code.__reduce__`` wrote."""
    return Code(kind, portable.loads(data))


def wanted(make: Compiler) -> bool:
    """Whether the compilation may be kept, or taken from the cache: it tells nobody, and all passes are ours."""
    tells = make.watchers or make.options.on_compile is not None or make.options.memory_plan is not None
    ours = all(type(p).__module__.startswith("dsc.passes.") for p in (*make.joint, *make.graph))
    measured = make.options.precision == "auto" or make.options.precision_plan is not None
    stateful = measured or any(getattr(p, "state", None) is not None for p in make.joint)
    return make.options.cache and ours and not tells and not stateful


def compile_as(kind: str, make: Compiler) -> Callable[[GraphModule, Sequence[Any]], Code]:
    """A compiler of graphs for AOTAutograd, whose results it may keep."""

    def compile_graph(gm: GraphModule, _: Sequence[Any]) -> Code:
        call, program = compiler.compile_aten(gm, kind, make)
        return Code(kind, program, call)

    kept: Callable[[GraphModule, Sequence[Any]], Code] = serializable_compiler(compile_graph)
    return kept


def key_of(gm: GraphModule, inputs: Sequence[Any], make: Compiler) -> str | None:
    """Under what the compiled graph is kept; None if it is not to be."""
    if not wanted(make):
        return None
    try:
        return fingerprint.of(gm, inputs, tag(make))
    except fingerprint.Unnamed as why:
        LOG.debug("Not kept on disk: %s", why)
        return None


def find(key: str, inputs: Sequence[Any], make: Compiler) -> tuple[Callable[..., Any], Any] | None:
    """The graph as a function with eager's calling convention, if it was compiled before and serves these sizes.

    With it comes what was ``noted`` then.
    """
    data = cache.read(folder(make) / f"{key}.graph")
    if data is None:
        return None
    token = _COMPILER.set(make)
    try:
        kept, noted = pickle.loads(data)
        return (function_of(kept, inputs), noted) if guards_hold(kept, inputs) else None
    except Exception as why:  # of another version of something, or kernels that cannot be built: compiled again
        LOG.debug("A kept graph could not be used: %s", why)
        return None
    finally:
        _COMPILER.reset(token)


def compiled(
    key: str,
    gm: GraphModule,
    inputs: Sequence[Any],
    aot: Callable[..., Any],
    make: Compiler,
    noted: Callable[[], object],
) -> Any:
    """What ``aot`` makes of the graph, kept on disk with what was ``noted`` meanwhile."""
    with keepable_aot():
        function = aot(gm, inputs)
    try:
        left = make.left_to_aten or depends_on_a_number(gm)
        if not left and (found := keepable(function, gm, inputs)) is not None:
            where = folder(make)
            build.guard(where)
            cache.write(where / f"{key}.graph", pickle.dumps((found, noted())))
            cache.evict(where, spare=key)
    except Exception as why:  # keeping is a favour: whatever cannot be pickled or written is not kept
        LOG.debug("Not kept on disk: %s", why)
    return function


def folder(make: Compiler) -> Path:
    return Path(make.options.cache_dir) if make.options.cache_dir else default_cache_dir()


def tag(make: Compiler) -> str:
    """What AOTAutograd does not know, and a program depends on."""
    options = [(f.name, getattr(make.options, f.name)) for f in fields(Options) if f.name not in UNSEEN]
    target = replace(make.target, peak={}, features=frozenset())  # sets are printed in another order by every process
    more = (sorted(make.target.peak.items()), sorted(make.target.features))
    known = (sources(), options, target, more, make.joint, make.graph)
    return "dsc " + hashlib.sha256(repr(known).encode()).hexdigest()


@lru_cache
def sources() -> str:
    """A hash of the sources of dsc: another version never finds this one's programs."""
    found = hashlib.sha256()
    for package in ("dsc", "dsc.passes", "dsc.codegen"):
        for folder in importlib.import_module(package).__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
