"""Restart in no time: compiled graphs in AOTAutograd's own cache on disk, so that a second process traces and compiles none.

The key is AOTAutograd's (the Dynamo graph, its inputs, the state of PyTorch) and ours (``tag``): the options, the target,
and the sources of dsc.  Kernels lie in dsc's own folder, by content; an entry names them by their source.
Not cached: compilations that somebody watches, and programs that hold what only this process knows, such as state.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from dsc import compiler, portable
from dsc.compiler import Compiled, Compiler
from dsc.options import Options
from dsc.program import Program
from dsc.torch_shim import BypassAOTAutogradCache, OutputCode, cached_aot, serializable_compiler

UNSEEN = ("on_compile", "watchers", "trace", "cache", "cache_dir", "cxx", "state")
"""Options that do not change what a program computes, or that keep it out of the cache."""

_COMPILER: ContextVar[Compiler] = ContextVar("dsc_compiler")


@dataclass
class Code(OutputCode):  # type: ignore[misc]  # a class of torch that is found when first used
    """One compiled graph in the form that AOTAutograd keeps."""

    kind: str
    program: Program | None = None
    call: Compiled | None = None
    data: bytes | None = None
    _boxed_call: bool = True

    def __call__(self, inputs: list[object]) -> tuple[object, ...]:
        assert self.call is not None
        return self.call(inputs)

    def prepare_for_serialization(self) -> None:
        """Called on a copy that is about to be written."""
        if self.program is None:
            raise BypassAOTAutogradCache("dsc: the graph runs as PyTorch left it")
        try:
            self.data = portable.dumps(self.program)
        except portable.NotPortable as why:
            raise BypassAOTAutogradCache(f"dsc: {why}") from why
        self.program = self.call = None

    def post_compile(self, *_: object) -> None:
        """Called when it was read: the kernels are found in dsc's folder, or built from the program's code."""
        if self.call is None:
            assert self.data is not None
            self.program, self.data = portable.loads(self.data), None
            self.call = compiler.loaded(self.program, self.kind, _COMPILER.get())

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Triton's kernels are kept by Triton's own cache."""


def wanted(make: Compiler) -> bool:
    """Whether the compilation may be kept, or taken from the cache: it tells nobody, and all passes are ours."""
    tells = make.watchers or make.options.on_compile is not None or make.options.memory_plan is not None
    ours = all(type(p).__module__.startswith("dsc.passes.") for p in (*make.joint, *make.graph))
    stateful = any(getattr(p, "state", None) is not None for p in make.joint)
    return make.options.cache and ours and not tells and not stateful


def compile_as(kind: str, make: Compiler) -> Callable[[GraphModule, Sequence[Any]], Code]:
    """A compiler of graphs for AOTAutograd, whose results it may keep."""

    def compile_graph(gm: GraphModule, _: Sequence[Any]) -> Code:
        call, program = compiler.compile_aten(gm, kind, make)
        return Code(kind, program, call)

    kept: Callable[[GraphModule, Sequence[Any]], Code] = serializable_compiler(compile_graph)
    return kept


@contextmanager
def caching(make: Compiler) -> Iterator[None]:
    """AOTAutograd called inside looks into its cache first, and keeps what it had to compile."""
    token = _COMPILER.set(make)
    try:
        with cached_aot(tag(make)):
            yield
    finally:
        _COMPILER.reset(token)


def tag(make: Compiler) -> str:
    """What AOTAutograd does not know, and a program depends on."""
    options = [(f.name, getattr(make.options, f.name)) for f in fields(Options) if f.name not in UNSEEN]
    target = replace(make.target, peak={})
    known = (sources(), options, target, sorted(make.target.peak.items()), make.joint, make.graph)
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
