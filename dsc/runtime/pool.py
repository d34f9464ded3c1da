"""The buffer pool: temporaries of a program packed into one arena by liveness, kept between calls.

Keeping it matters on CPUs: a fresh allocation above the allocator's threshold faults in every page at every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from dsc.domain import Extent
from dsc.packing import Layout, aligned, pack, span_bytes
from dsc.program import Slot
from dsc.torch_shim import raw_stream

KEPT_LAYOUTS = 16
"""Size combinations of one program whose layouts are remembered."""


@dataclass
class Arena:
    """One block of memory and the tensors laid out in it."""

    block: torch.Tensor
    stream: int = 0
    """Of a GPU: kernels of another stream may still read from it."""
    laid: dict[tuple[Buffers, tuple[int, ...]], tuple[torch.Tensor, ...]] = field(default_factory=dict)


@dataclass
class Pool:
    """Arenas shared by the programs of one compiled function: forward and backward never run at one time.

    A call takes an arena and gives it back; calls on several threads or streams get an arena each.
    """

    free: list[Arena] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int, device: torch.device) -> Arena:
        stream = raw_stream(device.index or 0) if device.type == "cuda" else 0
        with self.lock:
            fits = (i for i, a in enumerate(self.free) if a.stream == stream and a.block.device == device)
            arena = self.free.pop(i) if (i := next(fits, None)) is not None else None
        if arena is None or arena.block.numel() < nbytes:
            with torch.inference_mode(False):  # or no later call could write to it outside of inference mode
                arena = Arena(torch.empty(nbytes, dtype=torch.uint8, device=device), stream)
        return arena

    def give(self, arena: Arena) -> None:
        with self.lock:
            self.free.append(arena)

    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The memory that is not in use now, for whoever must keep it."""
        with self.lock:
            return tuple(a.block for a in self.free)


class Buffers:
    """The slots of one program, as tensors for given sizes."""

    def __init__(self, slots: Sequence[Slot], symbols: Sequence[str], pool: Pool) -> None:
        self.slots, self.pool = tuple(slots), pool
        self.device = slots[0].device if slots else torch.device("cpu")
        names = [sympy.Symbol(s) for s in symbols]
        self.shapes = [_evaluator(s.shape, names) for s in self.slots]
        self.strides = [_evaluator(s.stride, names) for s in self.slots]
        self.layouts: dict[tuple[int, ...], tuple[Layout, list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {}

    def take(self, *sizes: int) -> tuple[Arena, tuple[torch.Tensor, ...]]:
        """An arena and the tensors of all slots in it."""
        known = self.layouts.get(sizes)
        if known is None:
            known = self._plan(sizes)
        layout, forms = known
        arena = self.pool.take(layout.total, self.device)
        key = (self, sizes)
        tensors = arena.laid.get(key)
        if tensors is None:
            if len(arena.laid) >= 2 * KEPT_LAYOUTS:
                arena.laid.clear()
            with torch.inference_mode(False):
                tensors = arena.laid[key] = tuple(
                    _lay(arena.block, o, s.dtype, shape, stride)
                    for s, o, (shape, stride) in zip(self.slots, layout.offsets, forms)
                )
        return arena, tensors

    def _plan(self, sizes: tuple[int, ...]) -> tuple[Layout, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        forms = [(shape(sizes), stride(sizes)) for shape, stride in zip(self.shapes, self.strides)]
        nbytes = [aligned(span_bytes(*form, s.dtype.itemsize)) for s, form in zip(self.slots, forms)]
        layout = pack(nbytes, [(s.first, s.last) for s in self.slots])
        if len(self.layouts) >= KEPT_LAYOUTS:
            self.layouts.clear()
        self.layouts[sizes] = layout, forms
        return layout, forms


def _lay(
    block: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=block.device)
    return empty.set_(block.untyped_storage(), offset // dtype.itemsize, tuple(shape), tuple(stride))


def _evaluator(extents: Sequence[Extent], names: Sequence[sympy.Symbol]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    def run(sizes: Sequence[int]) -> tuple[int, ...]:
        known = dict(zip((n.name for n in names), sizes))
        return tuple(e if isinstance(e, int) else _value(e, known) for e in extents)

    return run


def _value(e: sympy.Expr, known: dict[str, int]) -> int:
    return int(e.subs({s: known[s.name] for s in e.free_symbols}))
