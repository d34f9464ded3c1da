"""A recorder for CPU tensors that behaves as a CUDA graph does: it knows addresses, not tensors, and computes nothing early."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class At:
    """Memory as a tensor, known by its address."""

    place: Place

    def tensor(self) -> Tensor:
        address, shape, stride, dtype = self.place
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=span).as_strided(shape, stride)


def at(t: Tensor) -> At:
    return At((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype))


@dataclass
class Recorder:
    """Operators of ATen, replayed one after the other on the memory that they had."""

    now: int = 0
    """The current stream."""
    broken: bool = False
    records: int = 0
    replays: int = 0

    def stream(self) -> int:
        return self.now

    def record(self, run: Callable[[], tuple[object, ...]]) -> tuple[tuple[object, ...], Callable[[], None]]:
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        tape = _Tape()
        with torch.random.fork_rng(devices=[]), tape:
            results = run()
        for written, before in reversed(tape.before):
            written.tensor().copy_(before)
        self.records += 1

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, out in tape.calls:
                given = pytree.tree_map(lambda x: x.tensor() if isinstance(x, At) else x, (args, kwargs))
                made = func(*given[0], **given[1])
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(made)):
                    if isinstance(old, At):
                        old.tensor().copy_(new)

        return results, replay


@dataclass
class _Tape(TorchDispatchMode):
    calls: list[Any] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    """A graph's own memory: what a call made lives as long as the tape."""
    before: list[tuple[At, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = pytree.tree_map(lambda x: at(x) if isinstance(x, Tensor) else x, (args, kwargs))
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if writes:
            self.before += [(at(t), t.clone()) for t in tensors]
        out = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in tensors}
        if not writes and all(t.untyped_storage().data_ptr() in storages for t in made) and made:
            return out  # a view
        self.fresh += [t for t in made if t.untyped_storage().data_ptr() not in storages]
        results = None if writes else pytree.tree_map(lambda x: at(x) if isinstance(x, Tensor) else x, out)
        self.calls.append((func, *known, results))
        return out
