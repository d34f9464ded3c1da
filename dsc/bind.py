"""Groups of a graph to kernels, each distinct one lowered once, however often its like comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from dsc import domain, ops, products, text
from dsc.codegen import lower_create, lower_eight, lower_pointwise, lower_product, lower_reduce, lower_view
from dsc.codegen.builder import Unlowerable
from dsc.codegen.kernel import Kernel
from dsc.codegen.lower import Bound, lower
from dsc.domain import Space
from dsc.steps import Step, storage_of
from dsc.torch_shim import optimization_hint

RULES = {**lower_view.RULES, **lower_pointwise.RULES, **lower_create.RULES, **lower_eight.RULES, **lower_reduce.RULES}
PRODUCTS = lower_product.RULES
WRITES = {"copy_.default": lower_pointwise.copy_into}
"""Opaque to every pass but ``fuse``: a write into an input."""


@dataclass
class Binder:
    """Kernels made so far, by the form of their group."""

    numerics: str
    prefix: str
    known: dict[str, tuple[Kernel, tuple[int, ...]]] = field(default_factory=dict)

    def bind(self, step: Step) -> Bound:
        """The kernel of a group and the tensors to call it with.

        Raises:
            Unlowerable: no one kernel computes the group.
        """
        outputs = results(step)
        form, inputs = signature(step, outputs)
        if form not in self.known:
            name = f"{self.prefix}{len(self.known)}_{_title(step)}"
            made = lower(
                name, step.nodes, outputs, space(step), {**RULES, **PRODUCTS, **WRITES}, self.numerics, origin(step)
            )
            lower_product.check(made.kernel)
            used = made.nodes[: len(made.nodes) - len(outputs)]
            self.known[form] = made.kernel, tuple(inputs.index(n) for n in used)
        kernel, places = self.known[form]
        return Bound(kernel, (*(inputs[i] for i in places), *outputs))


def space(step: Step) -> Space:
    """The nest in which all nodes of the group meet."""
    computed = [n for n in step.nodes if ops.info(n).kind != "item"]
    multiplied = [p for n in computed if (p := products.of(n)) is not None]
    first = multiplied[0] if multiplied else None
    others = (products.space_of(n, first) for n in computed if products.of(n) is None)
    spaces = [*map(products.space, multiplied), *sorted(others, key=lambda s: not s.reduces)]
    wanted = [domain.plain(ops.tensor(n)) for n in results(step)]
    met = spaces[0] if spaces[0].reduces else wanted[0]
    for s in [*spaces[1:], *wanted]:
        # what does not meet is only read inside, at other indices
        met = domain.meet(met, s) or domain.cross(met, s) or met
    return met


def only_triton(kernel: Kernel) -> str | None:
    """What of a kernel the C++ emitter does not do."""
    found = {v.op for v in kernel.lets}
    if "dot" in found:
        return "multiply matrices"
    return "sum over rows and columns at once" if "collect" in found else None


def results(step: Step) -> list[Node]:
    """Tensors of the group that something outside of it reads, perhaps through views; writes into inputs."""
    inside = set(step.nodes)
    return [
        n for n in step.nodes if isinstance(n.meta.get("val"), torch.Tensor) and (ops.mutated(n) or _wanted(n, inside))
    ]


def _wanted(n: Node, inside: set[Node]) -> bool:
    for user in n.users:
        if user in inside:
            continue
        if not ops.is_alias(user) or _wanted(user, inside):
            return True
    return False


def signature(step: Step, outputs: Sequence[Node]) -> tuple[str, list[Node]]:
    """The group's form, without names, and the tensors that it reads from memory in order of first mention."""
    inside, ids, inputs, lines = set(step.nodes), {}, [], []  # type: ignore[var-annotated]

    def ref(n: Node) -> str:
        if n not in ids:
            line = describe(n)
            ids[n] = f"%{len(ids)}"
            lines.append(f"{ids[n]} = {line}")
        return ids[n]

    def describe(n: Node) -> str:
        v = n.meta.get("val")
        if n in inside or (ops.is_view(n) and reads_inside(n, inside)) or ops.is_split(n):
            call = [word(a) for a in n.args] + [f"{k}={word(a)}" for k, a in sorted(n.kwargs.items())]
            return f"{ops.name_of(n)}({', '.join(call)}): {form(v)}"
        if not isinstance(v, torch.Tensor):
            return f"size {v}"
        root = storage_of(n)
        if root not in inputs:
            inputs.append(root)
        base = root.meta["val"].storage_offset()
        return f"input {inputs.index(root)} {form(v)} at {v.storage_offset()} of {base}"

    def word(a: object) -> str:
        if isinstance(a, Node):
            return ref(a)
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(word, a))}]"
        return repr(a)

    for n in step.nodes:
        ref(n)
    return "\n".join([*lines, f"return {', '.join(ids[o] for o in outputs)}"]), inputs


def reads_inside(n: Node, inside: set[Node]) -> bool:
    root = storage_of(n)
    return root in inside


def form(v: object) -> str:
    if isinstance(v, torch.Tensor):
        return f"{v.dtype}{tuple(v.shape)}{tuple(v.stride())}{v.device}"
    if isinstance(v, (list, tuple)):
        return f"[{', '.join(map(form, v))}]"
    return str(v)


def _title(step: Step) -> str:
    words: list[str] = []
    for n in step.nodes:
        word = ops.name_of(n).split(".")[0].strip("_")
        if word not in (*words, "getitem", "clone", "to_copy", "full", "arange"):
            words.append(word)
    return "_".join(words[:3]) or "copy"


def origin(step: Step) -> str:
    """Canonical text of the group, for the head of its kernel."""
    return "\n".join(text.line(n) for n in step.nodes)


def refused(step: Step, reason: Unlowerable) -> str:
    return f"{len(step.nodes)} nodes stay with ATen: {reason}"


def accessed(bound: Bound, counts: Sequence[int] | None = None) -> list[tuple[Node, int]]:
    """Bytes that the kernel reads of each input and writes to each output, each counted once (hints for symbols).

    ``counts``: ``touched`` of the kernel, if it is at hand.
    """
    k = bound.kernel
    out = []
    for b, n, count in zip(k.buffers, bound.nodes, touched(k) if counts is None else counts):
        t = ops.tensor(n)
        whole = int(optimization_hint(t.numel()))
        moved = whole * (b.role != "in") + min(whole, count) * (b.role != "out")
        out.append((n, moved * t.element_size()))
    return out


def touched(kernel: Kernel) -> tuple[int, ...]:
    """Elements of each buffer that the loads of the kernel reach (hints for symbols)."""
    extents = {a.name: int(optimization_hint(a.extent)) for a in kernel.axes}
    by_name = {v.name: v for v in kernel.lets}
    out = []
    for b in kernel.buffers:
        count = 0
        for index, v in {v.access[1]: v for v in kernel.lets if v.op == "load" and v.access[0] == b.name}.items():
            axes = {s.name for s in index.free_symbols if s.name in extents}
            axes |= set().union(*(by_name[a].axes for a in v.args)) if v.args else set()
            count += math.prod(extents[a] for a in axes)
        out.append(count)
    return tuple(out)
