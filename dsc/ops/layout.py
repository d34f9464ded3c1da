"""Strides that ATen's pointwise operators give their results, which fake tensors do not always foretell.

After ``TensorIterator`` (aten/src/ATen/TensorIterator.cpp: ``fast_set_up``, ``reorder_dimensions``): operands that all are
contiguous, or channels-last, or laid out alike without gaps give results like them; else dimensions are sorted by the
strides of the operands, and the first operand that tells two dimensions apart decides.  Strides of dimensions of size 1 are
part of it: they decide how later results are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dsc.ops.kinds import info, name_of, operand, tensor, tensor_operands
from dsc.torch_shim import is_decided_by_data, unset_fake_temporarily

Ints = tuple[int, ...]

_OWN_LAYOUT = frozenset(
    """
    cat.default stack.default embedding.default slice_backward.default select_backward.default tril.default triu.default
    flip.default copy.default clone.default _to_copy.default nll_loss_backward.default mse_loss_backward.default
    conj_physical.default positive.default mvlgamma.default ldexp.Tensor hardtanh.default relu6.default deg2rad.default
    rad2deg.default nan_to_num.default float_power.Tensor_Tensor float_power.Scalar float_power.Tensor_Scalar
    rrelu.default mse_loss.default smooth_l1_loss.default huber_loss.default
    """.split()
)
"""Pointwise operators that ATen computes otherwise than by one ``TensorIterator``."""

_UNWRAPPED = frozenset("lerp.Scalar masked_fill.Scalar pow.Tensor_Scalar".split())
"""Operators whose number is no operand: other overloads with a scalar make a tensor of it, without dimensions."""


_CONTIGUOUS = frozenset(
    """
    _softmax.default _log_softmax.default _softmax_backward_data.default _log_softmax_backward_data.default
    """.split()
)
"""Not pointwise, and laid out anew; fake results have the strides of an operand where its dimensions of size 1 have others."""


def foretold(node: Node, t: torch.Tensor) -> Ints | None:
    """Strides that ATen will give the pointwise result ``t``, None where the fake ones are all there is to go by."""
    name = name_of(node)
    if name in _CONTIGUOUS:
        return contiguous(t)
    if name in ("index.Tensor", "_unsafe_index.Tensor"):
        return indexed(tensor(operand(node, 0)), node.args[1], t.shape)
    if info(node).kind != "pointwise" and not is_pointwise(node.target):
        return None
    operands = [tensor(a) for a in tensor_operands(node)]
    if not operands or name in _OWN_LAYOUT or any(x.layout != torch.strided for x in (*operands, t)):
        return None
    if name.startswith("masked_fill.") or name == "pow.Scalar":  # ATen fills a contiguous copy, or result
        return contiguous(t)
    if any(map(is_decided_by_data, (*operands, t))):
        return None
    if not all(map(is_known, (*operands, t))) and all(x.is_contiguous() and x.shape == t.shape for x in operands):
        return None  # symbols cost time, and here fake results are right
    if name == "threshold_backward.default":  # ATen hands the gradient over second
        operands.reverse()
    return pointwise_strides(operands, t.shape, "calar" in name and name not in _UNWRAPPED)


_NORMALISED = {
    "_native_batch_norm_legit_functional.default": 0, "_native_batch_norm_legit.default": 0,
    "_native_batch_norm_legit.no_stats": 0, "_native_batch_norm_legit_no_training.default": 0, "native_batch_norm.default": 0,
    "native_batch_norm_backward.default": 1,
}  # fmt: skip
"""Batch norms, and the operand like which ATen lays out their first result: channels-last, or contiguous."""


def foretold_first(node: Node, t: torch.Tensor) -> Ints | None:
    """Strides that ATen will give the first of several results, None where the fake ones are all there is to go by."""
    place = _NORMALISED.get(name_of(node))
    if place is None:
        return None
    x = tensor(operand(node, place))
    if x.layout != torch.strided or is_decided_by_data(x):
        return None
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return contiguous(t)
    return dense(t.shape, (0, *range(2, t.dim()), 1))


def is_pointwise(target: object) -> bool:
    """By PyTorch's own tags: also what no kernel of ours computes."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return not target._schema.is_mutable


CHANNELS_LAST = (0, 2, 3, 1)


def pointwise_strides(operands: Sequence[torch.Tensor], shape: Sequence[int], scalar: bool = False) -> Ints:
    """Strides of the result of that shape.  Symbols are compared as they are, which adds guards where they may turn out otherwise.

    ``scalar``: one more operand has no dimensions.
    """
    if all(tuple(t.shape) == tuple(shape) for t in operands) and not (scalar and shape):
        if all(t.is_contiguous() for t in operands):
            return dense(shape, range(len(shape)))
        if len(shape) == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in operands):
            return dense(shape, CHANNELS_LAST)
        if all(t.stride() == operands[0].stride() for t in operands) and is_dense(operands[0]):
            return tuple(operands[0].stride())
    return iterated([broadcast(t, shape) for t in operands], shape)


def indexed(x: torch.Tensor, index: object, shape: Sequence[int]) -> Ints | None:
    """Strides of ``x[index]``, after ``AdvancedIndex`` (aten/src/ATen/native/TensorAdvancedIndexing.cpp).

    One ``TensorIterator`` over ``x``, which stands still along the dimensions that indices make, and over the indices.
    These dimensions come where the indices stand, or first if those do not stand together.
    """
    places = list(index) if isinstance(index, (list, tuple)) else []
    found = [(d, tensor(n)) for d, n in enumerate(places) if isinstance(n, Node)]
    if not found or any(i.dtype == torch.bool or i.dtype == torch.uint8 for _, i in found):
        return None
    if any(is_decided_by_data(t) for t in (x, *(i for _, i in found))):
        return None
    if x.device.type != "cpu" and len(found) > 1:  # there ATen makes several indices alike first
        return None
    taken = [d for d, _ in found]
    made = torch.broadcast_shapes(*(i.shape for _, i in found))  # type: ignore[no-untyped-call]
    first = taken[0] if taken == list(range(taken[0], taken[-1] + 1)) else 0
    kept = [s for d, s in enumerate(x.stride()) if d not in taken]
    before, after = kept[:first], kept[first:]
    spread = [(*before, *(0 for _ in made), *after)]
    wide = (*(1 for _ in before), *made, *(1 for _ in after))
    for _, i in found:
        if all(map(is_known, (x, i))):
            with unset_fake_temporarily():  # how a view strides dimensions of size 1
                i = torch.empty_strided(i.shape, i.stride(), device="meta").expand(made).reshape(wide)
            spread.append(broadcast(i, shape))
        else:
            spread.append((*(0 for _ in before), *broadcast(i, made), *(0 for _ in after)))
    return iterated(spread, shape)


def is_known(t: torch.Tensor) -> bool:
    """Sizes and strides are numbers, not symbols."""
    return all(isinstance(n, int) for n in (*t.shape, *t.stride()))


def iterated(spread: Sequence[Ints], shape: Sequence[int]) -> Ints:
    """Strides of what a ``TensorIterator`` allocates for operands with these strides along each dimension of the result."""
    order = list(reversed(range(len(shape))))  # fastest first
    for i in range(1, len(order)):
        moving = i
        for place in reversed(range(i)):
            decision = compare(order[place], order[moving], spread, shape)
            if decision < 0:
                break
            if decision > 0:
                order[place], order[moving] = order[moving], order[place]
                moving = place
    return dense(shape, list(reversed(order)))


def broadcast(t: torch.Tensor, shape: Sequence[int]) -> Ints:
    """Strides of an operand along each dimension of the result, 0 where it repeats."""
    front = (0,) * (len(shape) - t.dim())
    return front + tuple(0 if n == 1 and n != m else s for n, m, s in zip(t.shape, shape[len(front) :], t.stride()))


def compare(a: int, b: int, spread: Sequence[Ints], shape: Sequence[int]) -> int:
    """1 if dimension ``b`` should be faster than ``a``, -1 if it should not, 0 if nothing tells."""
    for strides in spread:
        x, y = strides[a], strides[b]
        if x == 0 or y == 0:
            continue
        if x != y:
            return 1 if x > y else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def contiguous(t: torch.Tensor) -> Ints:
    """Strides of a contiguous tensor of that shape, which may hold symbols."""
    if all(isinstance(n, int) for n in t.shape):
        return dense(t.shape, range(t.dim()))
    return tuple(t.new_empty(t.shape).stride())


def dense(shape: Sequence[int], slowest_first: Sequence[int]) -> Ints:
    """Strides without gaps, dimensions in that order."""
    out, step = [0] * len(shape), 1
    for d in reversed(slowest_first):
        out[d] = step
        step *= max(shape[d], 1) if isinstance(shape[d], int) else shape[d]  # symbols are 2 or more
    return tuple(out)


def is_dense(t: torch.Tensor) -> bool:
    """No gaps and no overlap, in some order of the dimensions."""
    return has_no_gaps(t.shape, t.stride())


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """``is_dense`` of a tensor with this shape and these strides."""
    step = 1
    for s, n in sorted((s, n) for s, n in zip(strides, shape) if n != 1):
        if s != step:
            return False
        step *= n
    return True


def differ(a: Sequence[int], b: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the strides of some dimension longer than 1 do."""
    return any(x != y for n, x, y in zip(shape, a, b) if n > 1)
