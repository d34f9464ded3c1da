"""Random numbers drawn twice: the generator's state is read before a call draws, and set again where it is repeated.

A repeated draw in the backward stands between two calls: ``before = dsc::set_rng_state(state)``, the draw, and
``dsc::set_rng_state(before)``.  So the stream that the user sees is eager's, and the numbers are those of the forward.
On CUDA the state is a seed and an offset of Philox, 16 bytes, kept by the host; on a CPU it has 5 KB.
Importing this module registers the operators.
"""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
TAGS = (torch.Tag.nondeterministic_seeded,)
"""They keep their place among random calls."""
LIBRARY.define("rng_state(Device device) -> Tensor", tags=TAGS)  # type: ignore[no-untyped-call]
LIBRARY.define("set_rng_state(Tensor state, Device device) -> Tensor", tags=TAGS)  # type: ignore[no-untyped-call]

STATE_BYTES = {"cpu": 5056, "cuda": 16}


def rng_state(device: torch.device) -> Tensor:
    """The state of the default generator of ``device``: uint8, on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: Tensor, device: torch.device) -> Tensor:
    """Set the state, and give the one of before."""
    before = rng_state(device)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
    return before


def fake_state(device: torch.device) -> Tensor:
    return torch.empty(STATE_BYTES[device.type], dtype=torch.uint8)


LIBRARY.impl("rng_state", rng_state, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("set_rng_state", set_rng_state, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("dsc::rng_state", fake_state, lib=LIBRARY)
torch.library.register_fake("dsc::set_rng_state", lambda state, device: fake_state(device), lib=LIBRARY)
torch.fx.node.has_side_effect(torch.ops.dsc.set_rng_state.default)  # or the last one of each draw would be dead code
