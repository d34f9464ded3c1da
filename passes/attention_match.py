"""Finds attention that a model writes as products and a softmax, forward and backward, in a joint or inference graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.passes.attention_constant import constant
from dsc.passes.linears import packet
from dsc.torch_shim import unset_fake_temporarily

SHAPES = frozenset("view _unsafe_view reshape expand clone".split())
"""Leave the elements in their order: here they only join or part the batch and the heads."""
ALIASES = frozenset("detach alias".split())
NOTHING = -3e4
"""What is added to scores that are not to be seen, or less: fp16's least number is -65504."""
Shape = tuple[int | torch.SymInt, ...]


@dataclass
class Gradients:
    """The backward of one attention: products of three dimensions."""

    grad: Node
    """Of the output [B H, T, D]."""
    query: Node | None = None
    """[B H, T, D]."""
    key: Node | None = None
    """[B H, D, S]."""
    value: Node | None = None
    """[B H, S, D]."""
    scores: list[Node] = field(default_factory=list)
    """What is computed of [T, S] a head."""


@dataclass
class Found:
    """One attention: its operands, in four dimensions, and what computes it."""

    softmax: Node
    out: Node
    """The second product [B H, T, D]."""
    query: Node
    """[B, H, T, D]."""
    key: Node
    """[B, H, D, S]: turned."""
    value: Node
    """[B, H, S, D]."""
    shape: Shape
    """B, H, T, S, D."""
    scale: float = 1.0
    causal: bool = False
    mask: Node | None = None
    """Broadcast to [B, H, T, S]; bool: True is seen; else it is added."""
    hidden: Node | None = None
    """As a bool mask; True is not seen."""
    dropout: Node | None = None
    scores: list[Node] = field(default_factory=list)
    """What is computed of [T, S] a head, forward, products included."""
    backward: Gradients | None = None

    @property
    def safe(self) -> bool:
        return packet(self.softmax) == "_safe_softmax"


class No(Exception):
    """It is another graph than those known here."""


def find(gm: GraphModule, softmax: Node) -> Found | str:
    """The attention around a softmax; or why there is none, in a few words; nothing to say: ""."""
    t = ops.tensor(softmax)
    if softmax.args[1] not in (-1, t.dim() - 1) or t.dim() not in (3, 4):
        return ""
    try:
        with unset_fake_temporarily(), torch.no_grad():  # masks are looked at
            return _found(gm, softmax)
    except No as why:
        return str(why)


def _found(gm: GraphModule, softmax: Node) -> Found:
    masks: list[Node] = []
    scale, product, scores = _scores(softmax, masks)
    weights, kept = _weights(softmax)
    out = weights.product
    shape = _shape(softmax, product, out)
    found = Found(
        softmax, out, origin(ops.operand(product, 0), (*shape[:3], shape[4])),
        origin(ops.operand(product, 1), (*shape[:2], shape[4], shape[3])),
        origin(ops.operand(out, 1), (*shape[:2], shape[3], shape[4])), shape, scale, dropout=kept,
        scores=[*scores, *weights.made, out],
    )  # fmt: skip
    for m in masks:
        _mask(gm, found, m)
    found.backward = _backward(found, weights, product)
    return found


def _scores(softmax: Node, masks: list[Node]) -> tuple[float, Node, list[Node]]:
    """Scale, product and all nodes of the scores, upwards from the softmax; fills ``masks``, the last one first."""
    scale, made, n = 1.0, [softmax], ops.operand(softmax, 0)
    while packet(n) != "bmm":
        if n.op != "call_function" or (len(n.users) > 1 and packet(n) not in SHAPES):
            raise No("" if n.op != "call_function" else "its scores are read")
        made.append(n)
        match packet(n), n.args:
            case name, _ if name in SHAPES:
                n = ops.operand(n, 0)
            case "_to_copy", _ if ops.tensor(n).dtype == torch.float32:
                n = ops.operand(n, 0)
            case ("mul" | "div") as name, (Node() as x, int() | float() as by) if by:
                scale, n = (scale * by if name == "mul" else scale / by), x
            case "masked_fill", (Node() as x, Node(), int() | float()):
                masks.append(n)
                n = x
            case "where", (Node(), Node() as a, Node() as b):
                masks.append(n)
                n = a if _is_scores(a) else b
            case "add", (Node() as a, Node() as b) if not n.kwargs and scale == 1:  # or it would be scaled too
                masks.append(n)
                n = a if _is_scores(a) else b
            case _:
                raise No("")
    if len(n.users) > 1:
        raise No("its scores are read")
    return scale, n, [*made, n]


def _is_scores(n: Node) -> bool:
    """Whether a product is behind a chain of what may stand between a product and a softmax."""
    while n.op == "call_function" and n.all_input_nodes:
        name = packet(n)
        if name == "bmm":
            return True
        if name not in {*SHAPES, "_to_copy", "mul", "div", "masked_fill", "where", "add"}:
            return False
        if name in ("where", "add"):
            return any(_is_scores(a) for a in n.all_input_nodes[-2:])
        n = ops.operand(n, 0)
    return False


@dataclass(frozen=True)
class _Weights:
    last: Node
    """What the second product reads, [B H, T, S]."""
    product: Node
    made: list[Node]


def _weights(softmax: Node) -> tuple[_Weights, Node | None]:
    """From the softmax down to the second product, and the dropout on the way."""
    made: list[Node] = []
    dropout, n = None, softmax
    while True:
        down = [u for u in n.users if packet(u) not in {*ALIASES, "_softmax_backward_data"} and not _turned(u)]
        if packet(n) == "native_dropout":
            dropout = n
            down = [u for u in n.users if u.args[1] == 0]
        if len(down) != 1:
            raise No("its weights are read" if down else "")
        made.append(n)
        (n,) = down
        if packet(n) == "bmm" and n.args[0] is made[-1]:
            return _Weights(made[-1], n, made[1:]), dropout
        known = packet(n) in SHAPES or packet(n) in ("_to_copy", "native_dropout") or n.target is operator.getitem
        if not known:
            raise No("")


def _turned(n: Node) -> bool:
    return packet(n) == "transpose" and n.args[1:] == (1, 2)


def _shape(softmax: Node, product: Node, out: Node) -> Shape:
    """B, H, T, S, D."""
    t = ops.tensor(softmax)
    batch, heads = (t.shape[0], t.shape[1]) if t.dim() == 4 else (t.shape[0], 1)
    width = ops.tensor(ops.operand(product, 0)).shape[-1]
    if ops.tensor(out).shape[-1] != width:
        raise No("keys and values differ in width")
    return batch, heads, t.shape[-2], t.shape[-1], width


def origin(n: Node, shape: Shape) -> Node:
    """The earliest node with the elements of ``n`` in the four dimensions ``shape``; ``n`` itself if there is none."""
    best, at = n, n
    while True:
        if tuple(ops.tensor(at).shape) == tuple(shape):
            best = at
        if packet(at) not in SHAPES or ops.tensor(ops.operand(at, 0)).numel() != ops.tensor(at).numel():
            return best
        at = ops.operand(at, 0)


# Masks.


def _mask(gm: GraphModule, found: Found, node: Node) -> None:
    """Take one mask into ``found``."""
    match packet(node), node.args:
        case "masked_fill", (_, Node() as cond, float() | int() as value):
            _hide(gm, found, cond, True, float(value))
        case "where", (Node() as cond, Node() as a, Node() as b):
            other = b if _is_scores(a) else a
            known = constant(gm, other)
            if known is None or known.numel() != 1:
                raise No("scores are replaced by other numbers")
            _hide(gm, found, cond, other is a, float(known))
        case "add", (Node() as a, Node() as b):
            _add(gm, found, b if _is_scores(a) else a)


def _hide(gm: GraphModule, found: Found, cond: Node, hides: bool, value: float) -> None:
    known = constant(gm, cond)
    if known is not None:
        allowed = ~known if hides else known
        if value > NOTHING:
            raise No("scores are replaced by other numbers")
        if _is_causal(found, allowed):
            found.causal = True
            return
        if bool(allowed.all()):
            return
    if value != -math.inf:
        raise No("what is not seen is a number, and a row may see nothing")
    if found.mask is not None or found.hidden is not None:
        raise No("it has two masks")
    if hides:
        found.hidden = cond
    else:
        found.mask = cond


def _add(gm: GraphModule, found: Found, mask: Node) -> None:
    known = constant(gm, mask)
    if known is not None and known.is_floating_point():
        if bool((known == 0).all()):
            return
        if bool(((known == 0) | (known <= NOTHING)).all()) and _is_causal(found, known == 0):
            found.causal = True
            return
    if not ops.tensor(mask).is_floating_point() or ops.tensor(mask).dtype == torch.float64:
        raise No("what is added to its scores is no float")
    if found.mask is not None or found.hidden is not None:
        raise No("it has two masks")
    found.mask = mask


def _is_causal(found: Found, allowed: torch.Tensor) -> bool:
    rows, columns = found.shape[2:4]
    *outer, t, s = (1, 1, *allowed.shape)
    if (t, s) != (rows, columns) or math.prod(outer) != 1:
        return False
    return bool((allowed.reshape(t, s) == torch.ones(t, s, dtype=torch.bool).tril()).all())


# The backward.


def _backward(found: Found, weights: _Weights, product: Node) -> Gradients | None:
    """The gradients, all of which come from one gradient of the softmax; None if there are none."""
    ends = list(_readers(found.softmax))
    if not ends:
        if any(_turned(u) for u in weights.last.users):
            raise No("its weights are read")
        return None
    if len(ends) != 1 or packet(ends[0]) != "_softmax_backward_data":
        raise No("its weights are read")
    (end,) = ends
    made, up = [end], ops.operand(end, 0)
    while packet(up) != "bmm":
        if packet(up) not in {*SHAPES, "_to_copy", "native_dropout_backward"} or len(up.users) > 1:
            raise No("its backward is another one")
        if packet(up) == "native_dropout_backward" and not _same_dropout(found.dropout, up):
            raise No("its backward is another one")
        made.append(up)
        up = ops.operand(up, 0)
    if (found.dropout is not None) != any(packet(n) == "native_dropout_backward" for n in made):
        raise No("its backward is another one")
    grad, turned = ops.operand(up, 0), ops.operand(up, 1)
    if not (_turned(turned) and turned.args[0] is found.out.args[1]) or len(up.users) > 1:
        raise No("its backward is another one")
    g = Gradients(grad, scores=[*made, up])
    for t in (u for u in weights.last.users if _turned(u)):
        for u in t.users:
            if packet(u) != "bmm" or u.args != (t, grad) or g.value is not None:
                raise No("its weights are read")
            g.value = u
            g.scores.append(u)
    _slopes(found, g, end, product)
    return g


def _readers(n: Node) -> Iterator[Node]:
    """What reads the softmax for the gradient, or anything that may be it."""
    for u in n.users:
        if packet(u) in ALIASES:
            yield from _readers(u)
        elif packet(n) in ALIASES or packet(u) == "_softmax_backward_data":
            yield u


def _same_dropout(dropout: Node | None, backward: Node) -> bool:
    if dropout is None:
        return False
    mask = ops.operand(backward, 1)
    while packet(mask) in ALIASES:
        mask = ops.operand(mask, 0)
    return mask.target is operator.getitem and mask.args == (dropout, 1)


def _slopes(found: Found, g: Gradients, end: Node, product: Node) -> None:
    """From the gradient of the softmax down to the gradients of query and key."""
    n, scale = end, 1.0
    while True:
        down = list(n.users)
        if any(packet(u) == "bmm" for u in down):
            break
        if len(down) != 1:
            raise No("its mask has a gradient")
        (u,) = down
        match packet(u), u.args:
            case name, _ if name in SHAPES or name == "_to_copy":
                pass
            case ("mul" | "div") as name, (_, int() | float() as by):
                scale = scale * by if name == "mul" else scale / by
            case "masked_fill", (x, Node(), 0 | 0.0) if x is n:
                pass
            case "where", (Node(), Node(), Node()):
                pass
            case _:
                raise No("its mask has a gradient")
        g.scores.append(u)
        n = u
    if not math.isclose(scale, found.scale, rel_tol=1e-6):
        raise No("its backward is another one")
    left, right = product.args
    for u in n.users:
        if packet(u) != "bmm":
            raise No("its mask has a gradient")
        a, b = u.args
        if isinstance(a, Node) and _turned(a) and a.args[0] is left and b is n and g.key is None:
            g.key = u
        elif a is n and isinstance(b, Node) and _turned(b) and b.args[0] is right and g.query is None:
            g.query = u
        else:
            raise No("its backward is another one")
        g.scores.append(u)
