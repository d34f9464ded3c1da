"""Values moved out of the device's memory and back: to pinned memory of the host, or to a file.

On CUDA copies run on two streams of their own, one each way.  Elsewhere a thread does what a stream would, and the
second pool is plain memory or the same file, so that one code is run and tested on every machine.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsc import tiers
from dsc.errors import OffloadFailed
from dsc.runtime.filepool import FilePool
from dsc.tiers import Tier

WORKERS = 2
"""Threads that copy: one out while another copies in."""


@dataclass
class HostPool:
    """Buffers of host memory, kept for the next value of their size."""

    free: dict[tuple[int, bool], list[tuple[Tensor, Any]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    held: int = 0
    """Bytes allocated so far."""

    def take(self, nbytes: int, pinned: bool) -> tuple[Tensor, Any]:
        """A buffer, and the event after which it may be written, if any.

        Raises:
            OffloadFailed: the host has no such memory left.
        """
        with self.lock:
            known = self.free.get((nbytes, pinned))
            if known:
                return known.pop()
            try:
                new = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as why:
                raise OffloadFailed(f"{nbytes} bytes of host memory", str(why).splitlines()[0]) from why
            self.held += nbytes
            return new, None

    def give(self, buffer: Tensor, after: Any = None) -> None:
        with self.lock:
            self.free.setdefault((buffer.numel(), buffer.is_pinned()), []).append((buffer, after))


@dataclass
class Slot:
    """One value that is away."""

    tier: Tier
    nbytes: int
    handles: int = 0
    buffer: Tensor | None = None
    """Host memory that holds it."""
    place: int = -1
    """Where it starts in the file."""
    out: Any = None
    """What ends the copy out: a CUDA event, or a future."""
    written: Future[None] | None = None
    """On CUDA with a file: the write that follows the copy out."""
    back: Any = None
    """What ends the latest copy in: a CUDA event, or a future, perhaps of one."""


class Mover:
    """All that is away.  One for a process, as there is one allocator for a device."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.host = HostPool()
        self.files: dict[str, FilePool] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count()

    @property
    def nbytes(self) -> int:
        """Bytes that are away now."""
        with self.lock:
            return sum(s.nbytes for s in self.slots.values())

    # --- out -----------------------------------------------------------------------------------------------------------

    def offload(self, x: Tensor, tier: str) -> Tensor:
        where = tiers.parse(tier)
        flat = raw(x)
        slot = Slot(where, flat.numel())
        if where.kind == "nvme":
            slot.place = self.file(where).take(slot.nbytes)
        if x.is_cuda:
            self._out_of_cuda(slot, flat)
        elif where.kind == "nvme":
            slot.out = workers().submit(self.file(where).write, slot.place, flat)
        else:
            slot.buffer, _ = self.host.take(slot.nbytes, False)
            slot.out = workers().submit(_copy, slot.buffer, flat)
        number = next(self.numbers)
        with self.lock:
            self.slots[number] = slot
        return self.handle(number)

    def offloaded(self, handle: Tensor, x: Tensor) -> Tensor:
        slot = self.slot(handle)
        if isinstance(slot.out, Future):
            slot.out.result()
        else:
            torch.cuda.current_stream(x.device).wait_event(slot.out)
        return self.handle(int(handle))

    def _out_of_cuda(self, slot: Slot, flat: Tensor) -> None:
        stream = streams(flat.device)[0]
        buffer, after = self.host.take(slot.nbytes, True)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            buffer.copy_(flat, non_blocking=True)
            slot.out = stream.record_event()
        if slot.tier.kind == "cpu":
            slot.buffer = buffer
            return
        event, file, place = slot.out, self.file(slot.tier), slot.place

        def write() -> None:
            event.synchronize()
            try:
                file.write(place, buffer)
            finally:
                self.host.give(buffer)

        slot.written = workers().submit(write)

    # --- back ----------------------------------------------------------------------------------------------------------

    def fetch(
        self, handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        slot = self.slot(handle)
        y = torch.empty_strided(size, stride, dtype=dtype, device=device)
        flat = raw(y)
        if y.is_cuda:
            self._into_cuda(slot, flat, y)
        elif slot.tier.kind == "nvme":
            slot.back = workers().submit(self.file(slot.tier).read, slot.place, flat)
        else:
            assert slot.buffer is not None
            slot.back = workers().submit(_copy, flat, slot.buffer)
        return y

    def fetched(self, x: Tensor, handle: Tensor) -> None:
        back = self.slot(handle).back
        if isinstance(back, Future):
            back = back.result()
        if back is not None:
            torch.cuda.current_stream(x.device).wait_event(back)

    def _into_cuda(self, slot: Slot, flat: Tensor, y: Tensor) -> None:
        stream = streams(y.device)[1]
        stream.wait_stream(torch.cuda.current_stream(y.device))  # whoever had this memory before is done then
        y.record_stream(stream)
        if slot.tier.kind == "cpu":
            assert slot.buffer is not None
            slot.back = _upload(flat, slot.buffer, stream)
            return
        file = self.file(slot.tier)

        def read() -> Any:
            assert slot.written is not None
            slot.written.result()
            buffer, after = self.host.take(slot.nbytes, True)
            if after is not None:
                after.synchronize()
            file.read(slot.place, buffer)
            event = _upload(flat, buffer, stream)
            self.host.give(buffer, event)
            return event

        slot.back = workers().submit(read)

    # --- slots ---------------------------------------------------------------------------------------------------------

    def file(self, tier: Tier) -> FilePool:
        with self.lock:
            if tier.folder not in self.files:
                self.files[tier.folder] = FilePool(tier.folder)
            return self.files[tier.folder]

    def slot(self, handle: Tensor) -> Slot:
        slot = self.slots.get(int(handle))
        if slot is None:
            why = "its handle was copied, by saved_tensors_hooks such as save_on_cpu, and the original is gone"
            raise OffloadFailed("a saved value", why)
        return slot

    def handle(self, number: int) -> Tensor:
        """A new handle of a slot, which lives as long as one of them."""
        with self.lock:
            self.slots[number].handles += 1
        new = torch.tensor([number], dtype=torch.int64)
        weakref.finalize(new.untyped_storage(), self.drop, number).atexit = False
        return new

    def drop(self, number: int) -> None:
        with self.lock:
            slot = self.slots[number]
            slot.handles -= 1
            if slot.handles:
                return
            del self.slots[number]
        if slot.buffer is not None:
            _finish(slot.out, slot.back)
            self.host.give(slot.buffer, slot.back if not isinstance(slot.back, Future) else None)
        if slot.place >= 0:
            _finish(slot.out, slot.written, slot.back)
            self.file(slot.tier).give(slot.place, slot.nbytes)


def raw(x: Tensor) -> Tensor:
    """The memory of a tensor without holes, as bytes."""
    start = x.storage_offset() * x.element_size()
    new = torch.empty(0, dtype=torch.uint8, device=x.device)
    return new.set_(x.untyped_storage(), start, (x.numel() * x.element_size(),), (1,))


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def _upload(flat: Tensor, buffer: Tensor, stream: Any) -> Any:
    with torch.cuda.stream(stream):
        flat.copy_(buffer, non_blocking=True)
        return stream.record_event()


def _finish(*ends: Any) -> None:
    """Wait for threads, not for streams; what failed there was raised where it was waited for."""
    for end in ends:
        if isinstance(end, Future):
            end.exception()


@lru_cache
def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, "dsc-offload")


@lru_cache
def streams(device: torch.device) -> tuple[Any, Any]:
    """Of one device: the stream out, and the stream in."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


MOVER = Mover()
_RUN: dict[str, Callable[..., Any]] = {
    "offload": MOVER.offload,
    "offloaded": MOVER.offloaded,
    "fetch": MOVER.fetch,
    "fetched": MOVER.fetched,
}
for _name, _function in _RUN.items():
    tiers.LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
