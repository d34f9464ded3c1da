"""The matrix products of a joint graph: which layer each belongs to, what it is for, and what its operands are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.precision.formats import Role
from dsc.torch_shim import optimization_hint

PRODUCTS = frozenset("mm.default addmm.default bmm.default baddbmm.default".split())
PASSED = frozenset("_to_copy.default add.Tensor _unsafe_view.default view.default reshape.default".split())
"""What may stand between the last layer and the loss."""
TURNS = frozenset("t.default transpose.int permute.default".split())


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product, as a matrix whose rows run along the contraction."""

    base: Node
    turned: bool
    """The rows are the columns of ``base``."""
    weight: bool
    gradient: bool
    """It depends on the gradients that come from behind."""


@dataclass(frozen=True, slots=True)
class Site:
    """One product [m, k] x [k, n]; of batched ones there are ``batch``."""

    name: str
    """Layer and role, as in ``blocks.0.mlp.up.forward``; a second call of the layer is ``blocks.0.mlp.up#2.forward``."""
    layer: str
    role: Role
    node: Node
    left: Operand
    right: Operand
    bias: Node | None
    m: int
    n: int
    k: int
    batch: int = 1
    last: bool = False
    """Its layer feeds the loss."""

    @property
    def instance(self) -> str:
        """One call of one layer: what its roles have in common."""
        return self.name.rpartition(f".{self.role}")[0]


def extract(gm: GraphModule) -> tuple[Site, ...]:
    """Every product with its role: ``dgrad`` where a gradient meets a weight, ``wgrad`` where it meets an activation.

    Products of activations alone, as in attention that is written out, are ``forward``, and ``dgrad`` behind.
    """
    behind = dependent(gm)
    products = [n for n in gm.graph.nodes if n.op == "call_function" and ops.name_of(n) in PRODUCTS]
    names, known = _Names(products), weights(gm, products, behind)
    sites = [_site(n, behind, known, names) for n in products]
    lasts = {s.instance for s in sites if s.role == "forward" and _feeds_loss(s.node)}
    return tuple(_marked(s) if s.instance in lasts else s for s in sites)


def dependent(gm: GraphModule) -> set[Node]:
    """Nodes that depend on a tangent."""
    found: set[Node] = set()
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            if ops.is_tangent(n):
                found.add(n)
        elif any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def weights(gm: GraphModule, products: Iterable[Node], behind: set[Node]) -> set[Node]:
    """Inputs that are parameters: with a gradient, and on the right of a forward product, or alone on its left."""
    described = gm.graph.output_node().meta.get("desc") or ()
    trained = {repr(d.grad_of) for d in described if hasattr(d, "grad_of")}
    inputs = {n for n in gm.graph.find_nodes(op="placeholder") if n not in behind and _is_float(n)}
    if trained:
        inputs = {n for n in inputs if repr(n.meta.get("desc")) in trained}
    found: set[Node] = set()
    for node in products:
        if node not in behind:
            left, right = (a for a in node.args[-2:] if isinstance(a, Node))
            found |= sources(right, inputs) or sources(left, inputs)
    return found


def _is_float(node: Node) -> bool:
    return isinstance(t := ops.value(node), torch.Tensor) and t.is_floating_point()


def _site(node: Node, behind: set[Node], known: set[Node], names: _Names) -> Site:
    given = [a for a in node.args if isinstance(a, Node)]
    bias, (a, b) = (given[0] if len(given) == 3 else None), given[-2:]
    batched = ops.tensor(node).dim() == 3
    left = Operand(a, False, False, a in behind) if batched else _operand(a, behind, known, turned=False)
    right = Operand(b, False, False, b in behind) if batched else _operand(b, behind, known, turned=True)
    if node not in behind:
        role: Role = "forward"
    else:
        role = "dgrad" if batched or left.weight or right.weight else "wgrad"
    *batch, m, k = map(_hint, ops.tensor(a).shape)
    name = names.of(node, role)
    n = _hint(ops.tensor(b).shape[-1])
    return Site(name, layer_of(node), role, node, left, right, bias, m, n, k, batch[0] if batch else 1)


def _marked(s: Site) -> Site:
    return Site(s.name, s.layer, s.role, s.node, s.left, s.right, s.bias, s.m, s.n, s.k, s.batch, True)


def _operand(node: Node, behind: set[Node], known: set[Node], turned: bool) -> Operand:
    base = node
    while base.op == "call_function" and _turns(base):
        base, turned = ops.operand(base, 0), not turned
    return Operand(base, turned, bool(sources(base, known)), base in behind)


def _turns(node: Node) -> bool:
    if ops.name_of(node) not in TURNS or ops.tensor(ops.operand(node, 0)).dim() != 2:
        return False
    dims = node.args[1:] if ops.name_of(node) == "transpose.int" else node.args[1] if len(node.args) > 1 else (1, 0)
    assert isinstance(dims, (list, tuple))
    return sorted(int(d) % 2 for d in dims) == [0, 1] and (
        ops.name_of(node) != "permute.default" or int(dims[0]) % 2 == 1
    )


def sources(node: Node, inputs: set[Node]) -> set[Node]:
    """The inputs that a value is made of, such as a weight in another dtype, or masked; none if of anything else too."""
    stack, seen, found = [node], set[Node](), set[Node]()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == "placeholder":
            if n not in inputs:
                return set()
            found.add(n)
        elif n.op == "call_function" and len(seen) < 64:
            stack += n.all_input_nodes
        elif n.op != "get_attr":
            return set()
    return found


def layer_of(node: Node) -> str:
    """The path of the module that called the product, ``blocks.0.mlp.up``; empty outside of any."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return clean(list(stack.values())[-1][0]) if stack else ""


def clean(path: str) -> str:
    """``L['self'].blocks.0.q`` and ``L['self']._modules['q']`` -> ``blocks.0.q``, ``q``."""
    path = re.sub(r"^L\['\w+'\]\.?|^self\.?", "", path)
    return re.sub(r"\.?_modules\['([^']+)'\]|\['?([^']+?)'?\]", r".\1\2", path).lstrip(".")


class _Names:
    """A name for every product, the same for the roles of one call."""

    def __init__(self, products: Iterable[Node]) -> None:
        calls: dict[str, dict[object, int]] = {}
        for n in sorted(products, key=lambda n: n.meta.get("seq_nr", 0)):
            known = calls.setdefault(layer_of(n), {})
            known.setdefault(n.meta.get("seq_nr"), len(known) + 1)
        self.calls = calls
        self.taken: set[str] = set()

    def of(self, node: Node, role: Role) -> str:
        layer = layer_of(node)
        number = self.calls[layer][node.meta.get("seq_nr")]
        call = f"{layer or 'mm'}#{number}" if number > 1 else layer or "mm"
        name, again = f"{call}.{role}", 1
        while name in self.taken:
            again += 1
            name = f"{call}/{again}.{role}"
        self.taken.add(name)
        return name


def _feeds_loss(node: Node) -> bool:
    stack = [node]
    while stack:
        for user in stack.pop().users:
            name = ops.name_of(user) if user.op == "call_function" else ""
            if name in ("_log_softmax.default", "mse_loss.default"):
                return True
            if name in PASSED:
                stack.append(user)
    return False


def by_instance(sites: Iterable[Site]) -> Iterator[tuple[str, list[Site]]]:
    """Sites of one call of one layer together, in the order of the graph."""
    found: dict[str, list[Site]] = {}
    for s in sites:
        found.setdefault(s.instance, []).append(s)
    yield from found.items()


def _hint(size: int | torch.SymInt) -> int:
    return int(optimization_hint(size))
