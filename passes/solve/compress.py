"""Which saved values to keep in fewer bits, so that a train step stays within a budget: the cheapest a byte first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Item:
    """A saved value; steps count from the first of the forward."""

    name: str
    nbytes: int
    small: int
    """Bytes of its short form."""
    born: int
    read: int
    """The last step of the forward that touches it."""
    uses: tuple[int, ...]
    """Steps of the backward that read it, in order."""
    whole: tuple[int, ...]
    """Those of them that need it in memory as it was: a kernel of ours casts while it reads."""
    seconds: float
    """What the casts add to the step; less than nothing where they shorten what kernels move."""


def choose(alive: Sequence[int], items: Sequence[Item], budget: int) -> tuple[Item, ...] | None:
    """The cheapest of ``items`` that bring the peak within ``budget`` bytes; None if taking them so finds no way.

    ``alive``: bytes at each step with nothing compressed.  Items are taken by seconds a byte until the peak is met, and
    then dropped again, the dearest first, where it is met without them.
    """
    now = np.array(alive, dtype=np.int64)
    taken: list[Item] = []
    left = sorted(items, key=lambda i: (i.seconds / max(i.nbytes - i.small, 1), i.name))
    while now.max() > budget:
        at = int(now.argmax())
        item = next((i for i in left if helps(i, at)), None)
        if item is None:
            return None
        now += change(item, len(now))
        taken.append(item)
        left.remove(item)
    for item in sorted(taken, key=lambda i: (-i.seconds, i.name)):
        less = now - change(item, len(now))
        if less.max() <= budget:
            now = less
            taken.remove(item)
    return tuple(taken)


def helps(item: Item, at: int) -> bool:
    """Whether the short form takes bytes away from a step."""
    return item.small < item.nbytes and item.read < at <= item.uses[-1] and at not in item.whole


def change(item: Item, count: int) -> NDArray[np.int64]:
    """What compressing an item adds to the bytes alive at each of ``count`` steps."""
    out = np.zeros(count, dtype=np.int64)
    last = item.uses[-1]
    out[item.born : last + 1] += item.small
    out[item.read + 1 : last + 1] -= item.nbytes
    for at in item.whole:
        out[at] += item.nbytes
    return out
