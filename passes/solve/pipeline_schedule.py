"""The known schedules of pipelines, as orders of actions for each rank; ``None`` where one cannot take the numbers.

Sources: GPipe (Huang et al., 2019, arXiv:1811.06965); 1F1B (Narayanan et al., "PipeDream", SOSP 2019); interleaved 1F1B
(Narayanan et al., 2021, arXiv:2104.04473, section 2.2); ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
arXiv:2401.10241); ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, arXiv:2405.15362); DualPipeV
(DeepSeek-AI's DualPipe cut in half, 2025).  The orders are those that torch.distributed.pipelining runs, but that
pairs which it may overlap stand one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from dsc.passes.solve.pipeline_simulate import Order

Placement = Literal["loop", "v"]


def homes(ranks: int, chunks: int, placement: Placement) -> tuple[int, ...]:
    """Stage -> rank: round and round (loop), or there and back again (v)."""
    found = []
    for chunk in range(chunks):
        back = placement == "v" and chunk % 2
        found += [ranks - 1 - r if back else r for r in range(ranks)]
    return tuple(found)


def gpipe(ranks: int, batches: int, chunks: int = 1) -> tuple[Order, ...] | None:
    """All forwards, then all backwards."""
    every = range(batches)
    return tuple((*((r, "F", b) for b in every), *((r, "B", b) for b in every)) for r in range(ranks))


def one_forward_one_backward(ranks: int, batches: int, chunks: int = 1) -> tuple[Order, ...] | None:
    """Rank ``r`` runs ``ranks - 1 - r`` forwards ahead, then one of each in turn."""
    found = []
    for r in range(ranks):
        ahead = min(ranks - 1 - r, batches)
        order = [(r, "F", b) for b in range(ahead)]
        for b in range(batches):
            if ahead + b < batches:
                order.append((r, "F", ahead + b))
            order.append((r, "B", b))
        found.append(tuple(order))
    return tuple(found)


def interleaved(ranks: int, batches: int, chunks: int) -> tuple[Order, ...] | None:
    """1F1B over several stages a rank, in rounds of about ``ranks`` micro-batches."""
    return _rounds(ranks, batches, chunks, zero_bubble=False)


def zero_bubble(ranks: int, batches: int, chunks: int = 1) -> tuple[Order, ...] | None:
    """ZB-H1: 1F1B, whose weight gradients come ``rank`` micro-batches late, where there would be a bubble."""
    return _rounds(ranks, batches, chunks, zero_bubble=True)


def _rounds(ranks: int, batches: int, chunks: int, zero_bubble: bool) -> tuple[Order, ...] | None:
    rounds = max(1, batches // ranks)
    if batches % rounds:
        return None
    size, total = batches // rounds, batches * chunks

    def forward(step: int, rank: int) -> tuple[int, int]:
        turn, place = divmod(step, size)
        return turn % chunks * ranks + rank, turn // chunks * size + place

    def backward(step: int, rank: int) -> tuple[int, int]:
        turn, place = divmod(step, size)
        return (chunks - 1 - turn % chunks) * ranks + rank, turn // chunks * size + place

    found = []
    for r in range(ranks):
        ahead = min((chunks - 1) * size + (1 if zero_bubble else 2) * (ranks - 1 - r), total)
        order = [(s, "F", b) for s, b in (forward(step, r) for step in range(ahead))]
        late = 0
        for step in range(total):
            if ahead + step < total:
                s, b = forward(ahead + step, r)
                order.append((s, "F", b))
            s, b = backward(step, r)
            order.append((s, "I" if zero_bubble else "B", b))
            if zero_bubble and step >= r:
                s, b = backward(late, r)
                order.append((s, "W", b))
                late += 1
        order += [(s, "W", b) for s, b in (backward(step, r) for step in range(late, total if zero_bubble else 0))]
        found.append(tuple(order))
    return tuple(found)


class _Rank:
    """Actions of one rank with two stages, whose micro-batches count themselves."""

    def __init__(self, first: int, second: int) -> None:
        self.stage = (first, second)
        self.next = {(chunk, kind): 0 for chunk in (0, 1) for kind in "FIW"}
        self.order: list[tuple[int, str, int]] = []
        self.late: list[int] = []
        """Chunks whose weight gradients are owed, the longest owed first."""

    def add(self, chunk: int, kind: str) -> None:
        """The next micro-batch of F, I (whose W is owed), W, or B."""
        batch = self.next[chunk, "I" if kind == "B" else kind]
        self.order.append((self.stage[chunk], kind, batch))
        for part in "IW" if kind == "B" else kind:
            self.next[chunk, part] = batch + 1
        if kind == "I":
            self.late.append(chunk)

    def pay(self) -> None:
        """The weight gradient that is owed longest, if any."""
        if self.late:
            self.add(self.late.pop(0), "W")

    def split(self, chunk: int) -> None:
        """I, then its W at once."""
        self.add(chunk, "I")
        self.late.remove(chunk)
        self.add(chunk, "W")


def zero_bubble_v(ranks: int, batches: int, chunks: int = 2) -> tuple[Order, ...] | None:
    """ZB-V: two stages a rank, there and back again; as many activations as 1F1B."""
    count = max(2 * ranks - 1, batches)  # a full pipeline; what is too much is left out in the end
    found = []
    for r in range(ranks):
        rank = _Rank(r, 2 * ranks - 1 - r)
        for _ in range(2 * (ranks - r) - 1):
            rank.add(0, "F")
        for _ in range(r):
            rank.add(1, "F")
            rank.add(0, "F")
        for _ in range(ranks - r):
            rank.add(1, "F")
            rank.split(1)
        while rank.next[1, "F"] < rank.next[0, "F"] or rank.next[0, "F"] < count:
            if rank.next[0, "F"] < count:
                rank.add(0, "F")
            rank.split(0)
            rank.add(1, "F")
            rank.split(1)
        for _ in range(r):
            rank.add(0, "I")
            rank.add(1, "I")
        for _ in range(ranks - r):
            rank.add(0, "I")
            rank.add(0, "W")
        for chunk in (1, 0):
            while rank.next[chunk, "W"] < rank.next[chunk, "I"]:
                rank.add(chunk, "W")
        found.append(tuple(a for a in rank.order if a[2] < batches))
    return tuple(found)


def dual_pipe_v(ranks: int, batches: int, chunks: int = 2) -> tuple[Order, ...] | None:
    """DualPipeV: two stages a rank, a forward of the one beside a backward of the other."""
    if batches < 2 * ranks:
        return None
    found = []
    for r in range(ranks):
        rank = _Rank(r, 2 * ranks - 1 - r)
        rest = ranks - r - 1
        for _ in range(2 * rest):
            rank.add(0, "F")
        for _ in range(r + 1):
            rank.add(0, "F")
            rank.add(1, "F")
        for _ in range(rest):
            rank.add(1, "I")
            rank.pay()
            rank.add(1, "F")
        for _ in range(batches - 2 * ranks + r + 1):
            for chunk in (0, 1):
                rank.add(chunk, "F")
                rank.add(1 - chunk, "B")
        for _ in range(rest):
            rank.add(1, "B")
            rank.add(1, "F")
            rank.add(0, "B")
        half = (r + 1) // 2
        for i in range(r + 1):
            rank.add(1, "I" if i > half or (i == half and r % 2) else "B")
            rank.add(0, "I" if i >= half else "B")
        for _ in range(rest):
            rank.pay()
            rank.add(0, "I")
        while rank.late:
            rank.pay()
        found.append(tuple(rank.order))
    return tuple(found)


@dataclass(frozen=True)
class Known:
    """A schedule by name."""

    name: str
    placement: Placement
    chunks: int | None
    """Stages a rank; None: two or more."""
    orders: Callable[[int, int, int], tuple[Order, ...] | None]
    """Ranks, micro-batches, chunks."""


SCHEDULES: Mapping[str, Known] = {
    k.name: k
    for k in (
        Known("gpipe", "loop", 1, gpipe),
        Known("1f1b", "loop", 1, one_forward_one_backward),
        Known("zb-h1", "loop", 1, zero_bubble),
        Known("interleaved", "loop", None, interleaved),
        Known("interleaved-zb", "loop", None, zero_bubble),
        Known("zbv", "v", 2, zero_bubble_v),
        Known("dualpipev", "v", 2, dual_pipe_v),
    )
}


def halves(order: Order) -> Order:
    """Every B as I and W."""
    return tuple(part for s, k, b in order for part in ([(s, "I", b), (s, "W", b)] if k == "B" else [(s, k, b)]))
