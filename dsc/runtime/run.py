"""Programs to functions."""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsc.program import Program
from dsc.runtime import guards
from dsc.runtime.pool import Buffers, Pool
from dsc.runtime.state import Entry, State

_NUMBER = itertools.count()
Launch = Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], int]
"""Tensors and sizes of a sequence -> 0, or k + 1 if the check of its kernel k failed."""

WORDS = {
    "torch": torch,
    "aten": torch.ops.aten,
    "math": math,
    "device": torch.device,
    "empty_strided": torch.empty_strided,
    "expect": guards.expect,
}
"""What every program may mention."""


def load(
    program: Program, launches: Sequence[Launch], pool: Pool, title: str, state: State | None = None
) -> Callable[[list[object]], tuple[object, ...]]:
    """The program as a function of a list of inputs, which it empties so that they can die early.

    ``launches`` are the program's sequences, built; temporaries lie in ``pool``, what lives between calls in ``state``.
    """
    known = {k: state.live(x) if isinstance(x, Entry) and state else x for k, x in program.externals.items()}
    namespace: dict[str, Any] = {**WORDS, **known, **{f"run_{i}": run for i, run in enumerate(launches)}}
    if program.slots:
        namespace |= {"take": Buffers(program.slots, program.symbols, pool).take, "give": pool.give}
    filename = f"<dsc {title} {next(_NUMBER)}>"
    linecache.cache[filename] = (len(program.source), None, program.source.splitlines(keepends=True), filename)
    exec(compile(program.source, filename, "exec"), namespace)
    call = namespace["call"]
    call._boxed_call = True
    return call  # type: ignore[no-any-return]
