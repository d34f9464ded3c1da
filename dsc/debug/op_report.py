"""Which ATen operators kernels compute, for which dtypes, and why ATen keeps the rest.

Nothing is looked up in a text: every operator is called on small tensors, once for each dtype and once for each odd way to
call it (``ODD``), and the call is asked about as the passes ask, by ``ops.why_not_fused``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from dsc import ops
from dsc.torch_shim import aten_overloads

Call = Callable[["Maker"], tuple[tuple[Any, ...], dict[str, Any]]]

COMPUTED = ("pointwise", "reduction", "rowwise", "create")
"""Kinds of which a kernel may compute some calls."""

ABOUT: Mapping[str, str] = {
    "pointwise": "an element of the result from the elements at its place",
    "reduction": "over some dimensions",
    "rowwise": "reduce inside, and give full rows back",
    "create": "made of sizes and numbers alone",
}

REST: Mapping[str, str] = {
    "view": "no work: kernels read and write through it by strides",
    "matmul": "libraries do it: ATen's products and convolutions",
    "random": "draws from ATen's generator, in eager's order",
    "collective": "communication",
    "opaque": "no kernel for it: ATen computes it",
}
"""Why a whole kind is called through ATen, or not called at all."""

EVERYWHERE = (
    "tensors without elements",
    "complex, quantised, sparse and 8-bit float tensors",
    "conjugate and negative views that are not resolved",
    "operands on several devices",
)
"""Calls of any operator that ATen keeps."""


@dataclass(frozen=True)
class Row:
    """One operator: the dtypes that a kernel computes, and what ATen keeps, with the reason."""

    name: str
    kind: ops.Kind
    kernels: tuple[str, ...]
    aten: tuple[tuple[str, str], ...]
    """(dtype, or how it is called; reason)."""

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "kind": self.kind, "kernels": list(self.kernels), "aten": dict(self.aten)}


class Maker:
    """A graph of one call, whose operands hold small tensors of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.graph = dtype, Graph()

    def x(self, *shape: int, dtype: torch.dtype | None = None, swapped: bool = False) -> Node:
        """An operand of zeros, [4, 4] unless ``shape`` says otherwise; ``swapped`` ones are transposed in memory."""
        return self.hold(torch.zeros(shape or (4, 4), dtype=dtype or self.dtype), swapped)

    def number(self) -> Node:
        """An operand without dimensions."""
        return self.hold(torch.zeros((), dtype=self.dtype))

    def ids(self, *shape: int) -> Node:
        return self.x(*shape, dtype=torch.int64)

    def hold(self, t: torch.Tensor, swapped: bool = False) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = t.mT.contiguous().mT if swapped else t
        return node

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Raises what the operator raises for such operands."""
        node = self.graph.call_function(op, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda a: a.meta["val"])
        node.meta["val"] = op(*values[0], **values[1])
        return node


def _plain(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


_NORM = (True, False, False)
SAMPLES: Mapping[str, Call] = {
    "embedding.default": lambda m: _plain(m.x(), m.ids(3)),
    "nll_loss_forward.default": lambda m: _plain(m.x(), m.ids(4), None, 0, -100),
    "nll_loss_backward.default": lambda m: _plain(m.x(4), m.x(), m.ids(4), None, 0, -100, m.x(1)),
    "native_layer_norm.default": lambda m: _plain(m.x(), [4], m.x(4), m.x(4), 1e-5),
    "native_layer_norm_backward.default": lambda m: _plain(
        m.x(), m.x(), [4], m.x(4, 1), m.x(4, 1), m.x(4), m.x(4), list(_NORM)
    ),
    "_native_batch_norm_legit_functional.default": lambda m: _plain(
        m.x(), m.x(4), m.x(4), m.x(4), m.x(4), True, 0.1, 1e-5
    ),
    "native_batch_norm_backward.default": lambda m: _plain(
        m.x(), m.x(), m.x(4), m.x(4), m.x(4), m.x(4), m.x(4), True, 1e-5, list(_NORM)
    ),
    "native_dropout_backward.default": lambda m: _plain(m.x(), m.x(dtype=torch.bool), 2.0),
    "slice_backward.default": lambda m: _plain(m.x(2, 4), [4, 4], 0, 0, 2, 1),
    "select_backward.default": lambda m: _plain(m.x(4), [4, 4], 0, 0),
    "_softmax_backward_data.default": lambda m: _plain(m.x(), m.x(), 1, m.dtype),
    "_log_softmax_backward_data.default": lambda m: _plain(m.x(), m.x(), 1, m.dtype),
    "masked_fill.Scalar": lambda m: _plain(m.x(), m.x(dtype=torch.bool), 1),
    "masked_fill.Tensor": lambda m: _plain(m.x(), m.x(dtype=torch.bool), m.number()),
    "clamp.default": lambda m: _plain(m.x(), 0, 1),
    "clamp.Tensor": lambda m: _plain(m.x(), m.x(), m.x()),
    "where.self": lambda m: _plain(m.x(dtype=torch.bool), m.x(), m.x()),
    "_to_copy.default": lambda m: _plain(m.x(), dtype=m.dtype),
    "arange.default": lambda m: _plain(4, dtype=m.dtype),
    "arange.start": lambda m: _plain(0, 4, dtype=m.dtype),
    "arange.start_step": lambda m: _plain(0, 4, 2, dtype=m.dtype),
    "scalar_tensor.default": lambda m: _plain(1, dtype=m.dtype),
    **{f"{n}.default": lambda m: _plain([4, 4], dtype=m.dtype) for n in ("zeros", "ones")},
    "full.default": lambda m: _plain([4, 4], 1, dtype=m.dtype),
    "mse_loss_backward.default": lambda m: _plain(m.number(), m.x(), m.x(), 1),
}
"""How to call what the schema does not say enough about."""

ODD: Mapping[str, Mapping[str, Call]] = {
    "add.Tensor": {
        "with alpha, 16 bits": lambda m: _plain(m.x(dtype=torch.bfloat16), m.x(dtype=torch.bfloat16), alpha=3)
    },
    "sub.Tensor": {
        "with alpha, 16 bits": lambda m: _plain(m.x(dtype=torch.bfloat16), m.x(dtype=torch.bfloat16), alpha=3)
    },
    "_to_copy.default": {"float to integer": lambda m: _plain(m.x(), dtype=torch.int32)},
    "cat.default": {
        "several lengths": lambda m: _plain([m.x(), m.x(2, 4)]),
        "an empty vector beside matrices": lambda m: _plain([m.x(0), m.x()]),
    },
    "slice_backward.default": {"step 2": lambda m: _plain(m.x(2, 4), [4, 4], 0, 0, 4, 2)},
    "nll_loss_forward.default": {
        "class weights": lambda m: _plain(m.x(), m.ids(4), m.x(4), 0, -100),
        "mean or sum": lambda m: _plain(m.x(), m.ids(4), None, 1, -100),
    },
    "nll_loss_backward.default": {"class weights": lambda m: _plain(m.x(4), m.x(), m.ids(4), m.x(4), 0, -100, m.x(1))},
    "native_layer_norm.default": {
        "16-bit input, fp32 weight": lambda m: _plain(m.x(dtype=torch.bfloat16), [4], m.x(4), m.x(4), 1e-5)
    },
    "native_layer_norm_backward.default": {
        "all gradients in one call": lambda m: _plain(
            m.x(), m.x(), [4], m.x(4, 1), m.x(4, 1), m.x(4), m.x(4), [True, True, True]
        )
    },
    "_native_batch_norm_legit_functional.default": {
        "evaluation": lambda m: _plain(m.x(), m.x(4), m.x(4), m.x(4), m.x(4), False, 0.1, 1e-5),
        "transposed operands": lambda m: _plain(m.x(swapped=True), m.x(4), m.x(4), m.x(4), m.x(4), True, 0.1, 1e-5),
    },
    "native_dropout_backward.default": {
        "transposed operands": lambda m: _plain(m.x(swapped=True), m.x(dtype=torch.bool), 2.0)
    },
    "_softmax_backward_data.default": {
        "transposed operands": lambda m: _plain(m.x(swapped=True), m.x(swapped=True), 1, m.dtype)
    },
    "_log_softmax_backward_data.default": {
        "transposed operands": lambda m: _plain(m.x(swapped=True), m.x(swapped=True), 1, m.dtype)
    },
    "mse_loss.default": {
        "broadcast": lambda m: _plain(m.x(), m.x(4)),
        "unreduced": lambda m: _plain(m.x(), m.x(), 0),
    },
    "sum.default": {"integers to float": lambda m: _plain(m.ids(4), dtype=torch.float32)},
    "add.Scalar": {"with alpha, 16 bits": lambda m: _plain(m.x(dtype=torch.bfloat16), 1, 3)},
}
"""Calls that ATen keeps though the dtype would do, by a word for each."""


def rows() -> list[Row]:
    """Every operator of ATen that a graph can hold, by kind and name; out-of-place, and not made of others."""
    out = [
        computed(name, info.kind)
        for name, info in ops.table().items()
        if info.kind in COMPUTED and not name.startswith("dsc.")
    ]
    known = {r.name for r in out}
    for op in aten_overloads():
        node = Graph().call_function(op)
        if (name := ops.name_of(node)) not in known:
            kind = ops.info(node).kind
            out.append(Row(name, kind, (), (("every call", REST.get(kind, f"{kind} op")),)))
    order = [*COMPUTED, *REST]
    return sorted(out, key=lambda r: (order.index(r.kind) if r.kind in order else len(order), r.name))


def computed(name: str, kind: ops.Kind) -> Row:
    """Ask for each dtype, and for each odd call; dtypes that the operator refuses in eager are in neither list."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    kernels: list[str] = []
    aten: list[tuple[str, str]] = []
    for dtype, short in ops.SHORT.items():
        found = ask(op, dtype, SAMPLES.get(name) or (lambda m: generic(op, m)))
        if found == "":
            kernels.append(short)
        elif found is not None:
            aten.append((short, found))
    for words, call in ODD.get(name, {}).items():
        if found := ask(op, torch.float32, call):
            aten.append((words, found))
    return Row(name, kind, tuple(kernels), tuple(aten))


def ask(op: Any, dtype: torch.dtype, call: Call) -> str | None:
    """The reason why ATen keeps the call; empty if a kernel may compute it; None if ATen refuses it itself."""
    maker = Maker(dtype)
    try:
        node = maker.call(op, *call(maker))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    return ops.why_not_fused(node) or ""


def generic(op: Any, maker: Maker) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands by their types in the schema: matrices, small numbers, dimension 0."""
    args = tuple(operand(str(a.type), a.name, maker) for a in op._schema.arguments if not a.has_default_value())
    return args, {}


def operand(kind: str, name: str, maker: Maker) -> object:
    match kind:
        case "Tensor":
            return maker.x()
        case "List[Tensor]":
            return [maker.x(), maker.x()]
        case "List[int]" | "Optional[List[int]]" | "List[SymInt]":
            return [4, 4] if name == "size" else [0]
        case "bool":
            return False
        case "int" | "SymInt":
            return 0
        case "Optional[Tensor]" | "Optional[number]" | "Optional[Scalar]":
            return maker.x() if "Tensor" in kind else 1
        case _:
            return 1


def by_reason(row: Row) -> Iterator[tuple[str, str]]:
    """(dtypes and ways to call, reason): those of one reason together."""
    groups: dict[str, list[str]] = {}
    for what, why in row.aten:
        groups.setdefault(why, []).append(what)
    for why, whats in groups.items():
        yield ", ".join(whats), why
