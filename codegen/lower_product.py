"""Products of matrices: a ``dot`` over the reduce axes, and the bias that belongs to it, rounded once as eager does."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from dsc import ops, products
from dsc.codegen.builder import Unlowerable
from dsc.codegen.elementwise import broadcast, out_dtype
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE, Kernel, product, stages
from dsc.codegen.lower import Lowering, Rule, Value
from dsc.domain import shape


def matmul(low: Lowering, n: Node) -> Value:
    p = products.of(n)
    if p is None:
        raise Unlowerable(f"{ops.name_of(n)} of these operands")
    a, b, build, dtype = low.of(p.a), low.of(p.b), low.build, out_dtype(n)
    bias = None if p.bias is None or p.beta == 0 else low.of(p.bias)

    def at(index: Index) -> str:
        if build.off_row(index):
            raise Unlowerable("a product is read where it is being added up")
        *batch, i, j = index
        (k,) = build.reduce_index([p.k])
        v = build.let("dot", (a.at((*batch, i, k)), b.at((*batch, k, j))), p.form, "f32")
        if p.alpha != 1:
            v = build.let("mul", (v, build.const(p.alpha, "f32")))
        if bias is not None:
            more = build.cast(bias.at(broadcast(index, bias.shape)), COMPUTE[dtype])
            if p.beta != 1:
                more = build.let("mul", (more, build.const(p.beta, "f32")))
            v = build.let("add", (v, more))
        return build.result(v, dtype)

    return Value(shape(ops.tensor(n)), dtype, at)


def check(kernel: Kernel) -> None:
    """A kernel has one product at most, of rows by columns; what is reduced beside it belongs to its rows.

    Raises:
        Unlowerable: it is not so.
    """
    v = product(kernel)
    if v is None:
        return
    if sum(x.op == "dot" for x in kernel.lets) > 1:
        raise Unlowerable("two products in one kernel")
    lets, level = {x.name: x for x in kernel.lets}, stages(kernel)
    a, b = (lets[name] for name in v.args)
    summed = {x.name for x in kernel.reduced}
    if not (a.axes - b.axes) or not (b.axes - a.axes) or not summed or not (summed <= a.axes and summed <= b.axes):
        raise Unlowerable("a product that is not one of rows by columns")
    if level[b.name] or any(x.op in ("collect", "check") for x in kernel.lets):
        raise Unlowerable("a product beside reductions of its columns, or beside checks")
    names = {x.name for x in kernel.axes}
    for x in kernel.stores:  # what is kept of an operand has an element for each of its rows and terms
        along = {str(e) for e in x.index.free_symbols} & names
        if along & summed and along != a.axes:
            raise Unlowerable("something that is neither in the rows nor in the result of a product")
    found = {x.name for x in kernel.lets if x.op == "peak"}
    columns = [x for x in kernel.parallel if x.name in b.axes - a.axes]
    if found and (len(columns) != 2 or any(found & {*x.args} for x in kernel.lets)):
        raise Unlowerable("maxima of blocks of columns that something else of the kernel reads, or that are cut")
    if any(x.op == "reduce" and (level[x.name] > level[v.name] or x.axes - a.axes) for x in kernel.lets):
        raise Unlowerable("a product and reductions that are not of its rows")


_NAMES = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "dsc.mm_tf32.default")
RULES: Mapping[str, Rule] = dict.fromkeys(_NAMES, matmul)
