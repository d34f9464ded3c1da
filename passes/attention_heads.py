"""Keys and values that are repeated for the heads that share them: found before an operator, and summed after its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from dsc import ops
from dsc.passes.attention_match import SHAPES
from dsc.passes.linears import packet


@dataclass(frozen=True)
class Repeated:
    """``wide`` [B, H, S, D] has every head of ``narrow`` [B, H', S, D] ``times`` times, one after the other."""

    wide: Node
    narrow: Node
    times: int


def repeated(wide: Node) -> Repeated | None:
    """What ``repeat_interleave(x, n, 1)`` or ``x[:, :, None].expand(..., n, ...).reshape(...)`` became, or None."""
    t = ops.tensor(wide)
    n = wide
    while packet(n) in {"view", "_unsafe_view", "reshape", "clone"}:
        n = ops.operand(n, 0)
    if packet(n) != "expand" or t.dim() != 4:
        return None
    spread, line = ops.tensor(n), ops.operand(n, 0)
    if spread.dim() != 5 or packet(line) != "unsqueeze" or line.args[1] not in (2, -3):
        return None
    narrow = ops.operand(line, 0)
    times = spread.shape[2]
    small = ops.tensor(narrow)
    if not isinstance(times, int) or small.dim() != 4 or times == 1:
        return None
    heads = small.shape[1]
    if (small.shape[0], heads * times, *small.shape[2:]) != tuple(t.shape) or spread.shape[1] != heads:
        return None
    return Repeated(wide, narrow, times)


def summed(grad: Node, r: Repeated) -> Node | None:
    """The sum [B, H', S, D] over the heads that share one, where nothing else reads the gradient [B, H, S, D]."""
    n, small = grad, ops.tensor(r.narrow)
    parts = (*small.shape[:2], r.times, *small.shape[2:])
    while True:
        if len(n.users) != 1:
            return None
        (u,) = n.users
        if packet(u) in SHAPES:
            n = u
            continue
        break
    if packet(u) != "sum" or u.args[1] != [2] or u.kwargs or tuple(ops.tensor(n).shape) != tuple(parts):
        return None
    while tuple(ops.tensor(u).shape) != tuple(small.shape):
        if len(u.users) != 1:
            return None
        (u,) = u.users
        if packet(u) not in {*SHAPES, "squeeze"}:
            return None
    return u
