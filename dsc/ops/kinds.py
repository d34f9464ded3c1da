"""The op table: what dsc knows of each ATen operator.  The only file that classifies ATen names.

A name is ``packet.overload``, as in ``add.Tensor``.  What stands in no table is ``opaque``: it is called through ATen.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Node

from dsc.torch_shim import OpOverload

Kind = Literal[
    "pointwise", "reduction", "rowwise", "create", "view", "item", "matmul", "collective", "random", "opaque"
]
"""``rowwise`` reduces inside and gives full rows back (softmax, norms); ``item`` picks one of several results."""

SHORT: Mapping[torch.dtype, str] = {
    torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b1",
}  # fmt: skip
"""Dtypes that kernels can load and store; anything else goes to ATen."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    name: str
    kind: Kind
    precision: Literal["follow", "wide", "any"] = "follow"
    """wide: loses accuracy in 16 bits (exp, sums, norms); any: exact in any format; follow: as its inputs."""
    viewing: bool = False
    """Gives a strided view of its first argument."""
    splitting: bool = False
    """Gives a list of views of its first argument."""


_UNARY = (
    "neg abs reciprocal sqrt rsqrt exp expm1 exp2 log log1p log2 sin cos tanh erf sigmoid floor ceil trunc round relu "
    "silu isnan logical_not bitwise_not clone gelu isinf"
).split()

_POINTWISE = frozenset(f"{n}.default" for n in _UNARY) | frozenset(
    """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar
    maximum.default minimum.default pow.Tensor_Scalar pow.Tensor_Tensor atan2.default
    lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar
    logical_and.default logical_or.default logical_xor.default
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar
    where.self masked_fill.Scalar masked_fill.Tensor
    clamp.default clamp.Tensor clamp_min.default clamp_max.default clamp_min.Tensor clamp_max.Tensor
    addcmul.default addcdiv.default lerp.Scalar lerp.Tensor
    _to_copy.default native_dropout_backward.default dsc.narrow8.default dsc.widen8.default
    gelu_backward.default silu_backward.default sigmoid_backward.default tanh_backward.default threshold_backward.default
    nll_loss_backward.default mse_loss_backward.default
    embedding.default cat.default slice_backward.default select_backward.default
    stack.default tril.default triu.default flip.default copy.default
    """.split()
)

_CREATE = frozenset(
    """
    full.default full_like.default zeros.default zeros_like.default ones.default ones_like.default
    new_full.default new_zeros.default new_ones.default
    scalar_tensor.default arange.default arange.start arange.start_step dsc.keep.default
    """.split()
)

_REDUCTION = frozenset(
    """
    sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int amax.default amin.default
    max.default min.default any.default any.dim any.dims all.default all.dim all.dims
    var.correction std.correction var_mean.correction mse_loss.default
    """.split()
)

_ROWWISE = frozenset(
    """
    _softmax.default _log_softmax.default _softmax_backward_data.default _log_softmax_backward_data.default
    native_layer_norm.default native_layer_norm_backward.default
    _native_batch_norm_legit_functional.default native_batch_norm_backward.default
    nll_loss_forward.default logsumexp.default
    """.split()
)

_VIEW = frozenset(
    """
    view.default _unsafe_view.default reshape.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims
    expand.default permute.default transpose.int t.default slice.Tensor select.int detach.default alias.default
    as_strided.default diagonal.default unfold.default _reshape_alias.default movedim.int
    """.split()
)
"""Same dtype, same storage: kernels read through them by strides."""

_MULTI_VIEW = frozenset("split.Tensor split_with_sizes.default unbind.int chunk.default split.sizes".split())

_MATMUL = frozenset(
    "mm.default addmm.default bmm.default baddbmm.default convolution.default convolution_backward.default "
    "_scaled_mm.default linear.default matmul.default".split()
)

_WIDE = (
    frozenset("exp.default log.default pow.Tensor_Scalar pow.Tensor_Tensor erf.default".split()) | _REDUCTION | _ROWWISE
)
_EXACT = _VIEW | _CREATE | frozenset("clone.default relu.default neg.default where.self".split())


def name_of(node: Node) -> str:
    """``packet.overload`` of an ATen call, ``getitem`` for one of several results, else the target's own name."""
    target = node.target
    if isinstance(target, OpOverload):
        name = _NAMES.get(target._name)
        if name is None:
            name = _NAMES[target._name] = str(target)[5:] if target.namespace == "aten" else str(target)
        return name
    if target is operator.getitem:
        return "getitem"
    return getattr(target, "__name__", str(target))


_NAMES: dict[str, str] = {}
"""``aten::add.Tensor`` -> ``add.Tensor``: asked for tens of times a node."""


def _kind(name: str) -> Kind:
    if name == "getitem":
        return "item"
    if name in _CREATE:
        return "create"
    for kind, table in (
        ("pointwise", _POINTWISE),
        ("reduction", _REDUCTION),
        ("rowwise", _ROWWISE),
        ("view", _VIEW | _MULTI_VIEW),
        ("matmul", _MATMUL),
    ):
        if name in table:
            return kind  # type: ignore[return-value]
    return "opaque"


_TABLE: Mapping[str, OpInfo] = {
    n: OpInfo(n, _kind(n), "wide" if n in _WIDE else "any" if n in _EXACT else "follow", n in _VIEW, n in _MULTI_VIEW)
    for n in sorted(_POINTWISE | _CREATE | _REDUCTION | _ROWWISE | _VIEW | _MULTI_VIEW | _MATMUL | {"getitem"})
}


def table() -> Mapping[str, OpInfo]:
    """Every operator that is not opaque, by name."""
    return _TABLE


def info(node: Node) -> OpInfo:
    """What the table says of a ``call_function`` node; ``opaque`` for everything else."""
    target = node.target
    if node.op != "call_function":
        return _TABLE.get(node.op) or OpInfo(node.op, "opaque")
    if not isinstance(target, OpOverload):
        return _looked_up(name_of(node))
    found = _INFOS.get(target._name)
    if found is None:
        found = _looked_up(name_of(node))
        if found.kind == "opaque" and torch.Tag.nondeterministic_seeded in target.tags:
            found = OpInfo(found.name, "random")
        _INFOS[target._name] = found
    return found


_INFOS: dict[str, OpInfo] = {}
"""By ``aten::add.Tensor``: asked for hundreds of times a node, and the same for good."""


def _looked_up(name: str) -> OpInfo:
    found = _TABLE.get(name)
    if found is not None:
        return found
    return OpInfo(name, "collective" if name.startswith(("_c10d_functional.", "c10d.")) else "opaque")


def is_view(node: Node) -> bool:
    """A strided view of its first argument, or one piece of a split."""
    found = info(node)
    if found.kind == "item":
        return isinstance(node.args[0], Node) and info(node.args[0]).splitting
    return found.viewing


def is_split(node: Node) -> bool:
    """Gives a list of views of its first argument."""
    return info(node).splitting


def is_alias(node: Node) -> bool:
    """A view, a piece, or the list of pieces: its first argument's storage."""
    found = info(node)
    return found.viewing or found.splitting or (found.kind == "item" and is_view(node))


def axes(node: Node, rank: int) -> list[int]:
    """The axes of the operand, of so many, in the order in which a t, transpose or permute gives them."""
    if name_of(node) == "t.default":
        return list(reversed(range(rank)))
    if name_of(node) == "permute.default":
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    order = list(range(rank))
    if rank:
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        order[a], order[b] = b, a
    return order


def mutated(node: Node) -> list[Node]:
    """Operands that the call writes to."""
    out: list[Node] = []
    for i, word in written_places(node.target):
        a = node.args[i] if i < len(node.args) else node.kwargs.get(word)
        out += [x for x in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(x, Node)]
    return out


def written_places(target: object) -> tuple[tuple[int, str], ...]:
    """Place and name of every parameter that a call of ``target`` writes to."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ()
    name = target._name if isinstance(target, OpOverload) else None
    written = None if name is None else _WRITES.get(name)
    if written is None:
        written = tuple((i, p.name) for i, p in enumerate(schema.arguments) if p.alias_info and p.alias_info.is_write)
        if name is not None:
            _WRITES[name] = written
    return written


_WRITES: dict[str, tuple[tuple[int, str], ...]] = {}
"""By ``aten::add_.Tensor``: place and name of every parameter that the operator writes to."""


def is_ordered(node: Node) -> bool:
    """Must keep its place among its like: random calls, and calls with effects besides their results."""
    if node.op != "call_function":
        return False
    kind = info(node).kind
    if kind in ("random", "collective"):
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True  # a graph or a random call inside
    return kind == "opaque" and node.is_impure()


def may_fail(node: Node) -> bool:
    """Raises for some values of its operands (an index out of range): not to be dropped though nobody reads it."""
    return name_of(node) in ("embedding.default", "nll_loss_forward.default")


def value(node: Node) -> object:
    """The fake value of a node: a FakeTensor, a tuple of them, a SymInt, or None."""
    return node.meta.get("val")


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor of a node that has one result."""
    v = node.meta["val"]
    assert isinstance(v, torch.Tensor), node
    return v


def operand(node: Node, index: int) -> Node:
    """Argument ``index``, which must be a node."""
    arg = node.args[index]
    assert isinstance(arg, Node), (node, index)
    return arg


def tensor_operands(node: Node) -> list[Node]:
    """Argument nodes that are tensors, in order, without repeats."""
    return [a for a in node.all_input_nodes if isinstance(value(a), torch.Tensor)]


def is_tangent(node: Node) -> bool:
    """Whether an input of a joint or backward graph is the gradient of a result, by the name that AOTAutograd gives it."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def nbytes(t: torch.Tensor) -> int | torch.SymInt:
    return t.numel() * t.element_size()


def split_of(node: Node) -> tuple[int, int | torch.SymInt] | None:
    """(dimension, length of a piece) if the result's dimension is best walked as (piece, place)."""
    name = name_of(node)
    if name == "cat.default":
        parts = [tensor(a) for a in node.args[0]]  # type: ignore[union-attr,arg-type]
        dim = int(node.args[1]) % parts[0].dim() if len(node.args) > 1 else 0  # type: ignore[arg-type]
        lengths = {str(p.shape[dim]) for p in parts}
        return (dim, parts[0].shape[dim]) if len(lengths) == 1 else None
    if name == "slice_backward.default":
        whole, piece = tensor(node), tensor(operand(node, 0))
        dim, start = int(node.args[2]) % whole.dim(), node.args[3]  # type: ignore[arg-type]
        length, size = piece.shape[dim], whole.shape[dim]
        if isinstance(length, int) and isinstance(size, int) and isinstance(start, int) and length > 0:
            start = start + size if start < 0 else start
            return (dim, length) if size % length == 0 and start % length == 0 else None
    return None


def reduced_dims(node: Node) -> tuple[int, ...]:
    """Dimensions of operand 0 over which a reduction or rowwise node sums, normalised and sorted."""
    x = tensor(operand(node, 0))
    everything = tuple(range(x.dim()))
    name = name_of(node)
    dims: object
    match name:
        case "native_layer_norm.default":
            dims = everything[x.dim() - len(node.args[1]) :]  # type: ignore[arg-type]
        case "native_layer_norm_backward.default":
            inner = len(node.args[2])  # type: ignore[arg-type]
            dims = everything[x.dim() - inner :] if node.args[7][0] else everything[: x.dim() - inner]  # type: ignore[index]
        case "_native_batch_norm_legit_functional.default" | "native_batch_norm_backward.default":
            dims = (0, *everything[2:])
        case "nll_loss_forward.default":
            dims = (1,)
        case "_softmax_backward_data.default" | "_log_softmax_backward_data.default":
            dims = node.args[2]
        case (
            "sum.default"
            | "mean.default"
            | "prod.default"
            | "any.default"
            | "all.default"
            | "max.default"
            | "min.default"
        ):
            dims = everything
        case "mse_loss.default":
            dims = everything
        case _:
            dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or (
        isinstance(dims, Sequence) and not dims and name not in ("native_layer_norm_backward.default",)
    ):
        dims = everything
    chosen = (dims,) if isinstance(dims, int) else tuple(dims)  # type: ignore[arg-type]
    return tuple(sorted({d % x.dim() for d in chosen})) if x.dim() else ()
