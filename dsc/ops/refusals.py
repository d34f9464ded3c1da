"""Why a kernel may not compute a call: None, or the reason in a few words.  A rule per operator, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import Node

from dsc.ops import layout
from dsc.ops.kinds import SHORT, info, name_of, operand, split_of, tensor, tensor_operands, value

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_INT_OK = frozenset(
    """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar neg.default abs.default
    maximum.default minimum.default relu.default clone.default _to_copy.default cat.default stack.default
    lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar
    logical_and.default logical_or.default logical_xor.default logical_not.default bitwise_not.default
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar
    where.self masked_fill.Scalar masked_fill.Tensor
    clamp.default clamp_min.default clamp_max.default embedding.default slice_backward.default
    select_backward.default tril.default triu.default flip.default copy.default
    sum.default sum.dim_IntList any.default any.dim any.dims all.default all.dim all.dims amax.default amin.default
    """.split()
)
"""May read integers or bools; every other op's tensors must be floats (index arguments apart)."""

_INDEX_ARGS: Mapping[str, frozenset[int]] = {
    "embedding.default": frozenset({1}),
    "nll_loss_forward.default": frozenset({1}),
    "nll_loss_backward.default": frozenset({2}),
    "native_dropout_backward.default": frozenset({1}),
    "dsc.widen8.default": frozenset({0}),
    "masked_fill.Scalar": frozenset({1}),
    "masked_fill.Tensor": frozenset({1}),
    "where.self": frozenset({0}),
    "mul.Tensor": frozenset({0, 1}),
}
"""Positions of integer or bool operands of float ops."""


def _no_rounding(node: Node) -> str | None:
    return "rounding to decimals" if node.kwargs.get("decimals") or len(node.args) > 1 else None


def _int_true_division(node: Node) -> str | None:
    t = value(node)
    operands = [tensor(a) for a in tensor_operands(node)]
    if isinstance(t, torch.Tensor) and not all(o.dtype.is_floating_point for o in operands):
        return "integer true division"
    return None


def _one_dtype(node: Node) -> str | None:
    dtypes = {tensor(a).dtype for a in tensor_operands(node)}
    return None if len(dtypes) <= 1 else "operands of several dtypes"


def _nll_forward(node: Node) -> str | None:
    if node.args[2] is not None:
        return "class weights"
    if node.args[3] != 0:
        return "a loss over all rows is split first"
    if any(u.args[1] == 1 and u.users for u in node.users):
        return "the weight of an unreduced loss is read"
    return None if tensor(operand(node, 0)).dim() == 2 else "not [rows, classes]"


def _var_mean(node: Node) -> str | None:
    """ATen's mean is a running one, which an infinity makes NaN unless it comes last."""
    return "the mean beside a variance is read" if any(u.args[1] == 1 and u.users for u in node.users) else None


def _nll_backward(node: Node) -> str | None:
    if node.args[3] is not None:
        return "class weights"
    return None if tensor(operand(node, 1)).dim() == 2 else "not [rows, classes]"


def _layer_norm(node: Node, places: tuple[int, ...] = (0, 2, 3)) -> str | None:
    dtypes = {tensor(a).dtype for a in (node.args[i] for i in places) if isinstance(a, Node)}
    return "operands of several dtypes: fake statistics have another dtype than ATen's" if len(dtypes) > 1 else None


def _layer_norm_backward(node: Node) -> str | None:
    mask = node.args[7]
    assert isinstance(mask, Sequence)
    if mask[0] and (mask[1] or mask[2]):
        return "input and parameter gradients are split first"
    return _layer_norm(node, (0, 1, 5, 6))


def _plain_operands(node: Node) -> str | None:
    """Fake strides of these operators are not those that ATen gives."""
    dense = all(t.is_contiguous() for t in (tensor(operand(node, 0)), tensor(operand(node, 1))))
    return None if dense else "strides that only ATen knows"


def _batch_norm_strides(node: Node, *places: int) -> str | None:
    tensors = [tensor(operand(node, p)) for p in places]
    if any(tensor(a).dim() != 1 for a in node.args[len(places) :] if isinstance(a, Node)):
        return "parameters that are not vectors"
    if all(t.is_contiguous() for t in tensors):
        return None
    if all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
        return None
    return "strides that only ATen knows"


def _batch_norm(node: Node) -> str | None:
    x = tensor(operand(node, 0))
    if (strides := _batch_norm_strides(node, 0)) is not None:
        return strides
    if not node.args[5]:
        return "batch norm in evaluation"
    return None if x.dtype == torch.float32 and x.dim() >= 2 else "not float32"


def _batch_norm_backward(node: Node) -> str | None:
    mask = node.args[9]
    assert isinstance(mask, Sequence)
    if not node.args[7]:
        return "batch norm in evaluation"
    if tensor(operand(node, 0)).dtype != torch.float32:
        return "not float32"
    return _batch_norm_strides(node, 0, 1)


def _embedding(node: Node) -> str | None:
    return None if tensor(operand(node, 0)).dim() == 2 else "weight is not a matrix"


def _copy_dtype(node: Node) -> str | None:
    if node.kwargs.get("layout") not in (None, torch.strided):
        return "layout change"
    return _cast(tensor(operand(node, 0)), tensor(node))


def _copy_into(node: Node) -> str | None:
    source = node.args[1]
    return _cast(tensor(source), tensor(node)) if isinstance(source, Node) else None


def _cast(source: torch.Tensor, target: torch.Tensor) -> str | None:
    if source.device != target.device:
        return "moves between devices"
    if source.dtype.is_floating_point and target.dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ):
        return "float to integer is undefined out of range: ATen decides"
    return None


def _masked_fill(node: Node) -> str | None:
    return None if not isinstance(node.args[2], Node) or tensor(operand(node, 2)).dim() == 0 else "tensor fill"


def _reduction_dtype(node: Node) -> str | None:
    t, x = tensor(node), tensor(operand(node, 0))
    if name_of(node) in ("prod.default", "prod.dim_int") and not t.dtype.is_floating_point:
        return "integer product"
    if t.dtype.is_floating_point and not x.dtype.is_floating_point:
        return "integer to float reduction"
    if x.dtype.is_floating_point and t.dtype != x.dtype and not t.dtype.is_floating_point:
        return "float to integer reduction"
    return None


def _mse(node: Node) -> str | None:
    if tensor(operand(node, 0)).shape != tensor(operand(node, 1)).shape:
        return "broadcast loss"
    if tensor(operand(node, 0)).dtype != tensor(operand(node, 1)).dtype:
        return "a loss of two dtypes"
    return "unreduced loss" if len(node.args) > 2 and node.args[2] == 0 else None


def _mse_backward(node: Node) -> str | None:
    if tensor(operand(node, 1)).shape != tensor(operand(node, 2)).shape:
        return "broadcast loss"
    if tensor(operand(node, 1)).dtype != tensor(operand(node, 2)).dtype:
        return "a loss of two dtypes"
    if not all(tensor(operand(node, p)).is_contiguous() for p in (1, 2)):
        return "strides that only ATen knows"
    return "unreduced loss" if node.args[3] == 0 else None


def _cat(node: Node) -> str | None:
    parts = [tensor(a) for a in node.args[0]]  # type: ignore[union-attr,arg-type]
    if any(p.dim() != parts[0].dim() for p in parts):
        return "pieces of several ranks"
    return None if split_of(node) else "pieces of several lengths"


def _stack(node: Node) -> str | None:
    return None if node.args[0] else "nothing to stack"


def _no_arithmetic_on_bool(node: Node) -> str | None:
    return "arithmetic on bool" if tensor(node).dtype == torch.bool else None


def _sum(node: Node) -> str | None:
    """ATen's 16-bit CPU kernels round ``alpha * y`` in scalar loops and rests, and not in vectorised loops."""
    t = tensor(node)
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    if t.dtype in (torch.bfloat16, torch.float16) and t.device.type == "cpu" and alpha not in (1, -1):
        return "alpha rounds by place in 16 bits"
    return _no_arithmetic_on_bool(node)


def _truth(node: Node) -> str | None:
    return None if tensor(node).dtype == torch.bool else "uint8 truth"


def _extreme(node: Node) -> str | None:
    return "of bool" if tensor(operand(node, 0)).dtype == torch.bool else None


def _slice_backward(node: Node) -> str | None:
    return None if node.args[5] == 1 else "step other than 1"


def _arange(node: Node) -> str | None:
    t = tensor(node)
    if t.dtype not in (torch.int64, torch.int32):
        return "float arange"
    return None if all(isinstance(a, (int, torch.SymInt, Node)) for a in node.args) else "float arange"


def _softmax(node: Node) -> str | None:
    return "half to float" if node.args[2] else None


def _softmax_backward(node: Node) -> str | None:
    return _plain_operands(node) if node.args[3] == tensor(operand(node, 0)).dtype else "half to float"


def _tril(node: Node) -> str | None:
    return None if tensor(node).dim() >= 2 else "not a matrix"


def _float_only_when_signed(node: Node) -> str | None:
    return "unsigned" if tensor(node).dtype in (torch.uint8, torch.bool) else None


_REASONS: Mapping[str, Callable[[Node], str | None]] = {
    **{
        f"{n}": _no_arithmetic_on_bool
        for n in "mul.Tensor mul.Scalar neg.default "
        "maximum.default minimum.default relu.default clamp.default clamp_min.default clamp_max.default".split()
    },
    **dict.fromkeys("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar".split(), _sum),
    **{f"{n}": _truth for n in "any.default any.dim any.dims all.default all.dim all.dims".split()},
    **{f"{n}": _extreme for n in "amax.default amin.default".split()},
    "cat.default": _cat,
    "stack.default": _stack,
    "round.default": _no_rounding,
    "div.Tensor": _int_true_division,
    "div.Scalar": _int_true_division,
    "native_dropout_backward.default": _plain_operands,
    "var_mean.correction": _var_mean,
    "nll_loss_forward.default": _nll_forward,
    "nll_loss_backward.default": _nll_backward,
    "native_layer_norm.default": _layer_norm,
    "native_layer_norm_backward.default": _layer_norm_backward,
    "_native_batch_norm_legit_functional.default": _batch_norm,
    "native_batch_norm_backward.default": _batch_norm_backward,
    "embedding.default": _embedding,
    "_to_copy.default": _copy_dtype,
    "copy.default": _copy_into,
    "masked_fill.Tensor": _masked_fill,
    "sum.default": _reduction_dtype,
    "sum.dim_IntList": _reduction_dtype,
    "prod.default": _reduction_dtype,
    "prod.dim_int": _reduction_dtype,
    "mean.default": _reduction_dtype,
    "mean.dim": _reduction_dtype,
    "mse_loss.default": _mse,
    "mse_loss_backward.default": _mse_backward,
    "slice_backward.default": _slice_backward,
    "arange.default": _arange,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "_softmax.default": _softmax,
    "_log_softmax.default": _softmax,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _softmax_backward,
    "tril.default": _tril,
    "triu.default": _tril,
    "abs.default": _float_only_when_signed,
}


def _unforetold_strides(node: Node) -> bool:
    """Whether the fake result has other strides than ATen's (unknown sizes count as foretold)."""
    t = tensor(node)
    found = layout.foretold(node, t)
    return found is not None and layout.differ(found, t.stride(), t.shape)


def is_plain(t: torch.Tensor) -> bool:
    """A strided tensor with elements, which a kernel can load and store."""
    plain = t.layout == torch.strided and not (t.is_quantized or t.is_conj() or t.is_neg())
    return t.dtype in SHORT and plain and not any(isinstance(d, int) and d == 0 for d in t.shape)


def why_not_fused(node: Node) -> str | None:
    """None if a kernel may compute the node, else why ATen must, in a few words."""
    kind = info(node).kind
    if kind not in ("pointwise", "reduction", "rowwise", "create"):
        return f"{kind} op"
    results = node.meta.get("val")
    results = [r for r in (results if isinstance(results, (tuple, list)) else [results]) if r is not None]
    if not results:
        return "no fake value"
    operands = tensor_operands(node)
    tensors = [t for t in results if isinstance(t, torch.Tensor)] + [tensor(a) for a in operands]
    if len(tensors) < len(results) + len(operands) or not results:
        return "not a tensor"
    for t in tensors:
        if t.dtype not in SHORT:
            return f"dtype {str(t.dtype).removeprefix('torch.')}"
        if t.layout != torch.strided or t.is_quantized or t.is_conj() or t.is_neg():
            return "not a plain strided tensor"
        if any(isinstance(d, int) and d == 0 for d in t.shape):
            return "empty"
    if len({t.device for t in tensors}) > 1:
        return "several devices"
    if kind == "pointwise" and _unforetold_strides(node):
        return "strides that only ATen knows"
    name = name_of(node)
    if name not in _INT_OK and kind != "create":
        index = _INDEX_ARGS.get(name, frozenset())
        floats = [a for i, a in enumerate(node.args) if isinstance(a, Node) and i not in index]
        if any(isinstance(value(a), torch.Tensor) and tensor(a).dtype not in _FLOATS for a in floats):
            return "not floating point"
        if (
            isinstance(results[0], torch.Tensor)
            and results[0].dtype not in _FLOATS
            and name not in ("isnan.default", "isinf.default", "dsc.narrow8.default")
        ):
            return "not floating point"
    reason = _REASONS.get(name)
    return reason(node) if reason else None
