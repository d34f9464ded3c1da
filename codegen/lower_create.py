"""What operators that make a tensor of nothing compute at one index.  A new op is a new row."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from dsc import ops
from dsc.codegen.elementwise import out_dtype
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE
from dsc.codegen.lower import Lowering, Rule, Value, size
from dsc.domain import Extent, shape


def fill(low: Lowering, n: Node) -> Value:
    """full, zeros, ones and their ``like`` and ``new`` forms."""
    name, dtype = ops.name_of(n), out_dtype(n)
    if name.startswith(("zeros", "new_zeros")):
        number: object = 0
    elif name.startswith(("ones", "new_ones")):
        number = 1
    else:
        number = (
            n.args[0] if name == "scalar_tensor.default" else n.args[2] if name == "new_full.default" else n.args[1]
        )
    b = low.build
    if not isinstance(number, (int, float)):
        e = size(number)
        return Value(shape(ops.tensor(n)), dtype, lambda _: b.rounded(b.index(e), dtype))
    return Value(shape(ops.tensor(n)), dtype, lambda _: b.rounded(b.const(number, COMPUTE[dtype]), dtype))


def arange(low: Lowering, n: Node) -> Value:
    start = size(n.args[0]) if len(n.args) > 1 else 0
    step = size(n.args[2]) if len(n.args) > 2 else 1
    b, dtype = low.build, out_dtype(n)
    return Value(shape(ops.tensor(n)), dtype, lambda i: b.rounded(b.index(start + i[0] * step), dtype))


def keep(low: Lowering, n: Node) -> Value:
    """The mask of a dropout: each element drawn at its place in row-major order (``dsc.keep``)."""
    b, seed, extents, p = low.build, low.of(n.args[0]), shape(ops.tensor(n)), n.args[2]
    assert isinstance(p, float)

    def at(index: Index) -> str:
        place: Extent = 0
        for i, e in zip(index, extents):
            place = place * e + i
        u = b.let("random", (seed.at(()), b.index(place)), "uniform", "f32")
        return b.let("lt", (u, b.const(p, "f32")), dtype="b1")

    return Value(extents, "b1", at)


FILLS = "full full_like zeros zeros_like ones ones_like new_full new_zeros new_ones scalar_tensor"

RULES: Mapping[str, Rule] = {
    **{f"{name}.default": fill for name in FILLS.split()},
    "dsc.keep.default": keep,
    "arange.default": arange,
    "arange.start": arange,
    "arange.start_step": arange,
}
