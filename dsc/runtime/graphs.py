"""Programs recorded once and replayed: on a GPU one call then launches everything, whatever Python would have cost.

Here is decided when; a ``Recorder`` records and replays (``dsc.runtime.graphs_cuda``, a CUDA graph).  What must hold:

1. A recording reads and writes fixed addresses.  An input that came at no more than ``PLACES`` addresses is read where it
   lies (parameters, and what another recording made); one that moves more is copied into a buffer first.  A recording is
   replayed only if every input that it reads in place lies where it lay.
2. What it gives is overwritten by the next replay.  So it is replayed only if nothing uses the memory of its results any
   more: no tensor of the user's, no view, nothing that autograd saved.  Else another recording serves (gradients that are
   being accumulated keep one busy), or the program runs as it always did.  Results of one element are copied, since
   losses are collected.
3. Results that share memory with an input are made anew from the input of the call.
4. A recording belongs to a stream, to shapes and strides, and to one call at a time.
5. An input that the program writes to is never copied, and its version counts on, as autograd wants to know.
6. There are at most ``MOST`` recordings of one form and ``FORMS`` forms; beyond, and after any error while recording, the
   program runs plainly, and a remark says so.

Memory that was handed to other streams with ``Tensor.record_stream`` counts as unused once its tensors are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dsc.manager import Remark
from dsc.torch_shim import storage_uses

WARM = 2
"""Plain calls of a form before it is recorded: kernels are compiled, and addresses seen."""
PLACES = 2
"""Addresses at which an input may have come and still be read in place."""
MOST = 6
"""Recordings of one form."""
FORMS = 8
"""Forms (shapes, strides, sizes) of one program that are recorded."""
ALIGNED = 16
"""Bytes: kernels were compiled for pointers that are multiples of it, or are not."""

Call = Callable[[list[object]], tuple[object, ...]]
Form = tuple[object, ...]


class Recorder(Protocol):
    """Records what a function launches."""

    def stream(self) -> int:
        """The stream on which work is put now."""
        ...

    def record(self, run: Callable[[], tuple[object, ...]]) -> tuple[tuple[object, ...], Callable[[], None]]:
        """What ``run`` returns, not yet computed, and how to compute it: again and again, from and into the same memory."""
        ...


@dataclass(frozen=True)
class Result:
    """How one result is handed out."""

    value: object = None
    """A tensor of the recording, or what is no tensor."""
    copied: bool = False
    source: int | None = None
    """The input whose memory it lies in, or that it is."""
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    """Shape, strides, and elements from the start of that input; None: it is that input."""


@dataclass(frozen=True)
class Recording:
    stream: int
    fixed: dict[int, int]
    """Input -> the address where it is read in place."""
    buffers: dict[int, Tensor]
    """Input -> where it is copied to."""
    replay: Callable[[], None]
    results: tuple[Result, ...]
    storages: tuple[tuple[int, int], ...]
    """Of the results: each storage, and how many use it when nobody else does."""
    written: frozenset[int]
    """Inputs that it writes to."""
    held: object
    """What must live as long as the recording."""

    def fits(self, stream: int, places: Sequence[int]) -> bool:
        return stream == self.stream and all(places[i] == p for i, p in self.fixed.items())

    def free(self) -> bool:
        """Whether nobody looks at the results of the last replay."""
        return all(storage_uses(s) <= alone for s, alone in self.storages)

    def run(self, inputs: Sequence[object]) -> tuple[object, ...]:
        for i, buffer in self.buffers.items():
            dense(buffer).copy_(dense(tensor(inputs[i])))
        self.replay()
        for i in self.written:
            torch.autograd.graph.increment_version(tensor(inputs[i]))
        given: dict[int, Tensor] = {}
        return tuple(hand_out(r, inputs, given) for r in self.results)


@dataclass
class Recordings:
    """Of one form."""

    seen: int = 0
    places: list[set[int]] = field(default_factory=list)
    """Addresses of each input so far; not followed beyond ``PLACES``."""
    made: int = 0
    recordings: list[Recording] = field(default_factory=list)

    def note(self, places: Sequence[int]) -> None:
        """Follow the addresses of a call; recordings that read what turns out to move are dropped."""
        self.seen += 1
        if not self.places:
            self.places = [{p} for p in places]
            return
        moved = set()
        for i, (known, p) in enumerate(zip(self.places, places)):
            if p not in known and len(known) <= PLACES:
                known.add(p)
                if len(known) > PLACES:
                    moved.add(i)
        if moved:
            self.recordings = [r for r in self.recordings if not moved & r.fixed.keys()]

    def moves(self, i: int) -> bool:
        return len(self.places[i]) > PLACES


@dataclass
class Replayer:
    """A program as a function of a list of inputs, which it empties, like the plain one."""

    plain: Call
    recordable: Call
    """The same program, with temporaries that only recordings use."""
    recorder: Recorder
    written: frozenset[int]
    """Inputs that it writes to."""
    hold: Callable[[], object] = lambda: None
    """What recordings have to keep alive: the memory of the temporaries, as it is after recording."""
    forms: dict[Form, Recordings] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"recorded": 0, "replayed": 0, "plain": 0})
    remarks: list[Remark] = field(default_factory=list)
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _boxed_call: bool = True

    def __call__(self, inputs: list[object]) -> tuple[object, ...]:
        if not self.failed and self.lock.acquire(blocking=False):
            try:
                with torch.no_grad():
                    recording = self.find(inputs)
                    if recording is not None:
                        results = recording.run(inputs)
                        inputs.clear()
                        self.counts["replayed"] += 1
                        return results
            finally:
                self.lock.release()
        self.counts["plain"] += 1
        return self.plain(inputs)

    def find(self, inputs: Sequence[object]) -> Recording | None:
        """The recording to replay for these inputs, made if need be; None: run plainly."""
        form = form_of(inputs)
        known = self.forms.get(form)
        if known is None:
            if len(self.forms) >= FORMS:
                self.remark(f"{FORMS} forms of its inputs are recorded: others run plainly")
                return None
            known = self.forms[form] = Recordings()
        places = [x.data_ptr() if isinstance(x, Tensor) else 0 for x in inputs]
        known.note(places)
        if known.seen <= WARM:
            return None
        stream = self.recorder.stream()
        for r in known.recordings:
            if r.fits(stream, places) and r.free():
                return r
        if known.made >= MOST:
            self.remark(f"recorded {MOST} times: calls that no recording fits run plainly")
            return None
        moving = [i for i in range(len(inputs)) if known.moves(i)]
        if (bad := next((i for i in moving if i in self.written), None)) is not None:
            self.remark(f"input {bad} is written to, and comes at another address every time")
            return None
        if (bad := next((i for i in moving if overlaps(tensor(inputs[i]))), None)) is not None:
            self.remark(f"input {bad} cannot be copied: its elements share memory")
            return None
        known.made += 1
        try:
            made = self.record(inputs, places, moving, stream)
        except Exception as why:
            self.failed = True
            self.forms.clear()
            words = str(why).strip().splitlines()
            self.remark(f"recording failed: {words[0] if words else type(why).__name__}")
            return None
        known.recordings.append(made)
        self.counts["recorded"] += 1
        return made

    def record(self, inputs: Sequence[object], places: Sequence[int], moving: Sequence[int], stream: int) -> Recording:
        buffers = {i: buffer_like(tensor(inputs[i])) for i in moving}
        for i, b in buffers.items():
            dense(b).copy_(dense(tensor(inputs[i])))
        given = [buffers.get(i, x) for i, x in enumerate(inputs)]
        results, replay = self.recorder.record(lambda: self.recordable(list(given)))
        sources = {x.untyped_storage()._cdata: i for i, x in reversed([*enumerate(given)]) if isinstance(x, Tensor)}
        handed = tuple(described(r, given, sources) for r in results)
        own = [r.value for r in handed if isinstance(r.value, Tensor) and not r.copied]
        del results
        storages = {t.untyped_storage()._cdata for t in own}
        return Recording(
            stream=stream,
            fixed={i: p for i, p in enumerate(places) if i not in buffers and isinstance(inputs[i], Tensor)},
            buffers=buffers,
            replay=replay,
            results=handed,
            storages=tuple((s, storage_uses(s)) for s in sorted(storages)),
            written=self.written,
            held=self.hold(),
        )

    def remark(self, why: str) -> None:
        """Once each."""
        found = Remark("", "skipped", why)
        if found not in self.remarks:
            self.remarks.append(found)


def form_of(inputs: Sequence[object]) -> Form:
    """What a recording depends on beside contents and addresses."""
    return (
        torch.is_inference_mode_enabled(),
        *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in inputs),
    )


def described(value: object, given: Sequence[object], sources: dict[int, int]) -> Result:
    """How a result of a recording is handed out.  ``sources``: storage -> the first input in it."""
    if not isinstance(value, Tensor):
        return Result(value)
    i = sources.get(value.untyped_storage()._cdata)
    if i is None:
        return Result(value, copied=value.numel() <= 1)
    source = tensor(given[i])
    j = next((j for j, x in enumerate(given) if x is value), None)
    if j is not None:
        return Result(source=j)
    return Result(
        source=i, view=(tuple(value.shape), value.stride(), int(value.storage_offset() - source.storage_offset()))
    )


def hand_out(r: Result, inputs: Sequence[object], given: dict[int, Tensor]) -> object:
    """A result of this call.  One that the program gives twice is one tensor here too, as autograd wants to know."""
    value = r.value
    if r.source is not None:
        source = tensor(inputs[r.source])
        if r.view is None:
            return source
        shape, stride, offset = r.view
        return source.as_strided(shape, stride, source.storage_offset() + offset)
    if not isinstance(value, Tensor):
        return value
    if id(value) not in given:
        given[id(value)] = value.clone() if r.copied else value.detach()
    return given[id(value)]


def tensor(x: object) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def buffer_like(x: Tensor) -> Tensor:
    """Memory for a copy of ``x``: as it is laid out, and aligned."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    skipped = x.data_ptr() % ALIGNED // x.element_size()
    with torch.inference_mode(False):
        flat = torch.empty(span + skipped, dtype=x.dtype, device=x.device)
        return flat.as_strided(x.shape, x.stride(), skipped)


def dense(x: Tensor) -> Tensor:
    """Every element in memory once: dimensions that are broadcast have extent 1."""
    shape = [1 if s == 0 and n > 1 else n for n, s in zip(x.shape, x.stride())]
    return x.as_strided(shape, x.stride(), x.storage_offset()) if 0 in x.stride() else x


def overlaps(x: Tensor) -> bool:
    """Whether elements share memory otherwise than by broadcasting."""
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride()) if n > 1 and s > 0):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False
