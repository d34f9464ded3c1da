"""Which elements a dropout keeps, drawn where they are used: each from its place and one number of the generator.

    dsc::keep(seed, size, p) -> bool, of that size: element i (in row-major order) is kept where uniform(seed, i) < p

``uniform`` is the first word of Philox 4x32-10 under the key ``seed`` and the counter ``i``, its top 24 bits as a number in
[0, 1): ``random`` of the kernel IR.  A mask need not be stored: whoever knows the seed can draw it again, at any element.
These are not the numbers of ATen's dropout, which come from its own launch: how many threads a GPU has, and how many
elements each of them takes.  Importing this module registers the operator.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
"""Of the key, from round to round."""
WORD = 0xFFFFFFFF
OPERATIONS = 30.0
"""What an element costs, in fp32 operations of good vector code (half of the peak) on sm_80: 30 integer products, of which a
multiprocessor makes 64 a clock there and on sm_90; counted in the machine code."""


def keep(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    """``seed``: one int64.  ``p``: the share that is kept."""
    at = torch.arange(math.prod(size), device=seed.device)
    key = [seed & WORD, (seed >> 32) & WORD]
    c0, c1, c2, c3 = at & WORD, at >> 32, torch.zeros_like(at), torch.zeros_like(at)
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # they wrap, and keep all 64 bits
        c0, c1, c2, c3 = (
            ((high >> 32) & WORD) ^ c1 ^ key[0],
            high & WORD,
            ((low >> 32) & WORD) ^ c3 ^ key[1],
            low & WORD,
        )
        key = [(k + s) & WORD for k, s in zip(key, STEPS)]
    return ((c0 >> 8).float() * 2.0**-24 < p).view(tuple(size))


def _fake_keep(seed: Tensor, size: Sequence[int], p: float) -> Tensor:
    return torch.empty(tuple(size), dtype=torch.bool, device=seed.device)


LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("keep(Tensor seed, SymInt[] size, float p) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("keep", keep, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("dsc::keep", _fake_keep, lib=LIBRARY)
