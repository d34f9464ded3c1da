"""Changes to a Dynamo graph without which AOTAutograd would compute something else than eager.

1. Dropout that drops nothing (not training, or p of 0) is its input in eager, and a copy to AOTAutograd, which shows when
   either is written to: such a call is replaced by its input.
2. AOTAutograd drops calls whose result nobody reads.  In eager those that draw random numbers move the generator, and
   those that check indices may raise: their results are given out too, and taken away again from what the caller sees.
   Inside of a region of its own (a checkpoint) nothing can be given out: a graph with an unread draw there is for eager.
3. AOTAutograd takes the gradient of a result in the strides of that result, and elements of one place in memory overwrite
   one another (a result of ``unfold``).  It knows better where what the result is a view of is given out as well.
4. Random numbers that an in-place call draws go to the elements in the order of memory; made functional, the call draws
   in the order of indices.  It gets a view of its operand in which both are one.
5. A write keeps the layout of what it writes to; made functional, ``tril_`` gives the layout of ``tril``.  Where they differ
   the result is computed apart and copied.
6. A graph that runs in eager after all must keep the generator's state for its checkpoint regions, as the user's call of
   ``checkpoint`` did, and as Dynamo's stand-in for it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dsc.torch_shim import optimization_hint

DROPOUTS = ("dropout", "dropout_")

DRAWS = frozenset(
    """
    rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ alpha_dropout alpha_dropout_
    feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ scaled_dot_product_attention gumbel_softmax
    """.split()
)

CHECKS = frozenset(
    """
    embedding embedding_bag gather index_select take take_along_dim index_add index_copy index_fill index_put scatter
    scatter_add scatter_reduce cross_entropy nll_loss one_hot cholesky cholesky_ex inv inverse solve binary_cross_entropy
    floordiv floor_divide mod remainder fmod repeat_interleave
    """.split()
)
"""Raise for some values of their operands."""

FIRST_IS_A_PATTERN = frozenset(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_empty_strided new_tensor size dim ndimension numel stride storage_offset element_size is_contiguous
    """.split()
)
SECOND_IS_A_PATTERN = frozenset("type_as expand_as view_as reshape_as resize_as".split())
"""Ask an operand for its shape, dtype or device alone: its values are not read."""


def repair(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Change the graph in place.  What comes back turns its compiled function into one with the results of before."""
    drop_idle_dropout(gm)
    draw_in_order_of_memory(gm)
    keep_layout_of_writes(gm)
    output = gm.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return lambda compiled: compiled
    unread, sources = list(unread_calls(gm)), list(sources_of_overlaps(gm))
    if not unread and not sources:
        return lambda compiled: compiled
    with gm.graph.inserting_before(output):
        extra = [gm.graph.call_method("detach", (n,)) for n in unread]
    for added, n in zip(extra, unread):
        added.meta["example_value"] = n.meta["example_value"].detach()
    output.args = ((*results, *extra, *sources),)
    gm.recompile()
    return lambda compiled: lambda *inputs: tuple(compiled(*inputs))[: len(results)]


def buried(gm: GraphModule) -> str | None:
    """Why the graph cannot be repaired: an unread call inside of a region draws random numbers."""
    inner = (m for m in gm.modules() if isinstance(m, GraphModule) and m is not gm)
    names = [name_of(n) for m in inner for n in unread_calls(m) if name_of(n) in DRAWS]
    return f"AOTAutograd drops {names[0]}, whose numbers nobody reads, from a region" if names else None


def for_eager(gm: GraphModule) -> None:
    """Change the checkpoint regions of a graph, in place, into calls of ``checkpoint`` that draw the same numbers twice."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        regions = [
            n for n in module.graph.nodes if n.op == "call_function" and name_of(n) == "tag_activation_checkpoint"
        ]
        for node in regions:
            node.target = region
            node.kwargs = {k: v for k, v in node.kwargs.items() if k == "preserve_rng_state"}
        if regions:
            module.recompile()


def region(body: GraphModule, *inputs: Any, preserve_rng_state: bool = True) -> Any:
    """What the user wrote; which of its values are kept is not what they are, so a selective policy is left out."""
    return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def drop_idle_dropout(gm: GraphModule) -> None:
    """``dropout(x, p, training=False)`` and ``dropout(x, 0)`` -> ``x``."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or name_of(node) not in DROPOUTS:
            continue
        arguments = {**dict(zip(("input", "p", "training"), node.args)), **node.kwargs}
        training = arguments.get("training", arguments.get("train", True))
        source, p = arguments.get("input"), arguments.get("p", 0.5)
        if isinstance(source, Node) and (training is False or (isinstance(p, (int, float)) and p == 0)):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            changed = True
    if changed:
        gm.recompile()


def draw_in_order_of_memory(gm: GraphModule) -> None:
    """Case 4: ``x.bernoulli_(p)`` -> ``x.permute(order).bernoulli_(p)``, and likewise dropout in place."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method") or not draws_in_place(node):
            continue
        source = node.args[0] if node.args else node.kwargs.get("input")
        value = source.meta.get("example_value") if isinstance(source, Node) else None
        order = memory_order(value) if isinstance(value, torch.Tensor) else []
        if order == sorted(order):
            continue
        assert isinstance(source, Node) and isinstance(value, torch.Tensor)
        with gm.graph.inserting_before(node):
            view = gm.graph.call_method("permute", (source, order))
            view.meta["example_value"] = value.permute(order)
        node.replace_all_uses_with(source)
        node.replace_input_with(source, view)
        node.meta["example_value"] = view.meta["example_value"]
        changed = True
    if changed:
        gm.recompile()


def draws_in_place(node: Node) -> bool:
    """Calls that fill or scale their operand by the functional ``bernoulli``, and give the operand back."""
    name = name_of(node)
    if name in ("dropout", "alpha_dropout"):
        arguments = {**dict(zip(("input", "p", "training", "inplace"), node.args)), **node.kwargs}
        return arguments.get("inplace") is True
    if name == "bernoulli_" and any(isinstance(a, Node) for a in (*node.args[1:], *node.kwargs.values())):
        return False  # probabilities of their own: drawn in the order of memory, functional or not
    return name in ("bernoulli_", "dropout_", "alpha_dropout_")


def memory_order(t: torch.Tensor) -> list[int]:
    """Dimensions, that of the largest step first."""
    strides = t.stride()
    return sorted(range(t.dim()), key=lambda d: -hint(strides[d]))


def keep_layout_of_writes(gm: GraphModule) -> None:
    """Case 5: ``x.tril_()`` -> ``x.copy_(x.tril())`` where ``x`` is dense and laid out otherwise than ``x.tril()``."""
    changed = False
    for node in list(gm.graph.nodes):
        name = name_of(node)
        if (
            node.op != "call_method"
            or not name.endswith("_")
            or name.endswith("__")
            or name in DRAWS
            or name == "copy_"
        ):
            continue
        source = node.args[0]
        value = source.meta.get("example_value") if isinstance(source, Node) else None
        if not isinstance(value, torch.Tensor) or value.is_contiguous() or not is_dense(value):
            continue
        apart = functional(node, value, name[:-1])
        if apart is None or apart.shape != value.shape or apart.stride() == value.stride():
            continue
        with gm.graph.inserting_before(node):
            made = gm.graph.call_method(name[:-1], node.args, node.kwargs)
        made.meta["example_value"] = apart
        node.target, node.args, node.kwargs = "copy_", (source, made), {}
        changed = True
    if changed:
        gm.recompile()


def functional(node: Node, value: torch.Tensor, name: str) -> torch.Tensor | None:
    """What the method that does not write would give, as a fake tensor."""

    def known(a: object) -> object:
        return a.meta["example_value"] if isinstance(a, Node) else a

    if not hasattr(value, name):
        return None
    rest = pytree.tree_map(known, (node.args[1:], node.kwargs))
    try:
        with torch.no_grad():
            out = getattr(value.detach(), name)(*rest[0], **rest[1])
    except Exception:  # it writes what it cannot compute apart, or its operands have no fake values
        return None
    return out if isinstance(out, torch.Tensor) and out.dtype == value.dtype else None


def is_dense(t: torch.Tensor) -> bool:
    """Its elements fill a block of memory, one place each."""
    count = 1
    for step, n in sorted((hint(d), hint(n)) for n, d in zip(t.shape, t.stride()) if hint(n) != 1):
        if step != count:
            return False
        count *= n
    return True


def sources_of_overlaps(gm: GraphModule) -> Iterator[Node]:
    """Case 3: what results with overlapping elements are views of, where the graph computes it."""
    results = set(gm.graph.output_node().all_input_nodes)
    found: set[Node] = set()
    for r in results:
        value = r.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not overlaps(value):
            continue
        source = next(n for n in gm.graph.nodes if shares(n.meta.get("example_value"), value))
        if source.op != "placeholder" and source not in results | found:
            found.add(source)
            yield source


def overlaps(t: torch.Tensor) -> bool:
    """Some place in memory stands for several elements that are not those of an expanded dimension."""
    steps = sorted((hint(d), hint(n)) for n, d in zip(t.shape, t.stride()) if hint(n) > 1 and hint(d) > 0)
    reach = 0
    for step, count in steps:
        if step <= reach:
            return True
        reach += step * (count - 1)
    return False


def shares(a: object, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def hint(n: int | torch.SymInt) -> int:
    """A size as it is in this call."""
    return n if isinstance(n, int) else int(optimization_hint(n))


def unread_calls(gm: GraphModule) -> Iterator[Node]:
    """Calls that draw or check, that no result depends on, and that give one tensor."""
    read: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.op == "output" or node in read:
            read.update(values_read(node))
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in read:
            continue
        if not isinstance(node.meta.get("example_value"), torch.Tensor):
            continue
        name = name_of(node)
        if name in DRAWS or name in CHECKS or (name == "getitem" and indexes_by_tensor(node)):
            yield node


def values_read(node: Node) -> set[Node]:
    """Operands on whose values the result depends."""
    name = name_of(node)
    place = 0 if name in FIRST_IS_A_PATTERN else 1 if name in SECOND_IS_A_PATTERN else len(node.args)
    patterns = {a for a in node.args[place : place + 1] if isinstance(a, Node)}
    others = {a for i, a in enumerate(node.args) if i != place and isinstance(a, Node)}
    return set(node.all_input_nodes) - (patterns - others - set(node.kwargs.values()))


def indexes_by_tensor(node: Node) -> bool:
    return any(isinstance(a.meta.get("example_value"), torch.Tensor) for a in node.all_input_nodes[1:])


def name_of(node: Node) -> str:
    """``dropout`` of ``F.dropout``, of ``torch.dropout`` and of a method."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
