"""Programs to functions."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable

from dsc.program import Program

_NUMBER = itertools.count()


def load(program: Program, title: str) -> Callable[[list[object]], tuple[object, ...]]:
    """The program as a function of a list of inputs, which it empties so that they can die early."""
    namespace = dict(program.namespace)
    filename = f"<dsc {title} {next(_NUMBER)}>"
    linecache.cache[filename] = (len(program.source), None, program.source.splitlines(keepends=True), filename)
    exec(compile(program.source, filename, "exec"), namespace)
    call = namespace["call"]
    call._boxed_call = True
    return call  # type: ignore[no-any-return]
