"""What a program depends on, as a hash: the same in every process, and different wherever the program could differ.

It covers the Dynamo graph with its constants, the types of its inputs and which of them share memory, and the state of
PyTorch that tracing reads.  What it cannot name is refused: that graph is then compiled anew each time.  Names of
parameters and paths of files are no part of it.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc.torch_shim import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    known_size,
    sym_expr,
    tracing_state,
)

LARGEST = 1 << 16
"""Elements of a constant up to which its values are hashed."""
NAMESPACES = ("aten", "prims", "prim", "_c10d_functional", "dsc")
"""Operators whose derivatives and decompositions come with PyTorch, or with dsc."""
HOMES = ("torch", "operator", "math", "builtins", "dsc")
"""Packages whose functions a graph may call."""
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


class Unnamed(Exception):
    """Something in the graph, or about it, has no name that holds in another process."""


def of(gm: GraphModule, inputs: Sequence[Any], more: str) -> str:
    """32 hexadecimal digits.

    Raises:
        Unnamed: what the graph mentions cannot be told apart by names.
    """
    found = hashlib.sha256()
    for line in lines(gm, inputs):
        found.update(line.encode() + b"\n")
    found.update(more.encode())
    return found.hexdigest()[:32]


def lines(gm: GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    """The text that is hashed."""
    if next(gm.parameters(), None) is not None or next(gm.buffers(), None) is not None:
        raise Unnamed("the graph has parameters of its own")
    if hasattr(gm, "saved_tensors_hooks_pack_0"):
        raise Unnamed("hooks on saved tensors")
    yield from tracing_state()
    yield from input_lines(gm, inputs)
    yield from graph_lines(gm)


# --- inputs ------------------------------------------------------------------------------------------------------------


def input_lines(gm: GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    """A line an input: its type, with symbols for sizes that may change."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise Unnamed("inputs that the graph does not name")
    storages: set[int] = set()
    for n, x in zip(placeholders, inputs):
        yield typed(n.meta.get("example_value", x), x)
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not isinstance(x, FakeTensor):
            place = x.untyped_storage().data_ptr()
            if place and place in storages:
                raise Unnamed("inputs that share memory")  # AOTAutograd adds guards for them, which are not kept
            storages.add(place)


def typed(v: object, real: object) -> str:
    """The type of an input; ``real`` is what was passed, ``v`` stands for it while tracing."""
    match v:
        case torch.Tensor() if type(v) in PLAIN and type(real) in PLAIN:
            assert isinstance(real, torch.Tensor)
            return " ".join(map(str, (*tensor_facts(v), real.requires_grad, real.is_leaf, *ranges(v.shape))))
        case torch.SymInt():
            return f"size {v.node.expr} {listed(ranges((v,)))}"
        case None | bool() | int() | float():
            return repr(v)
        case _:
            raise Unnamed(f"an input of type {type(v).__name__}")


def tensor_facts(t: torch.Tensor) -> tuple[object, ...]:
    if t.layout != torch.strided or t.is_quantized:
        raise Unnamed("a tensor that is not plain")
    sizes = [[str(sym_expr(n)) for n in x] for x in (t.shape, t.stride(), (t.storage_offset(),))]
    return (t.dtype, t.device, *sizes, t.is_conj(), t.is_neg(), t.is_inference(), type(t) is torch.nn.Parameter)


def ranges(sizes: Iterable[int | torch.SymInt]) -> Iterator[str]:
    """What is known of the symbols in sizes."""
    for n in sizes:
        if not isinstance(n, torch.SymInt):
            continue
        env = n.node.shape_env
        for s in sorted(n.node.expr.free_symbols, key=str):
            if known_size(env, s) is None:
                raise Unnamed("a size that only shows while the program runs")
            yield f"{s} in {env.var_to_range.get(s)}"


# --- the graph ---------------------------------------------------------------------------------------------------------


def graph_lines(gm: GraphModule) -> Iterator[str]:
    """A line a node, numbered as they stand; graphs inside it in full."""
    if gm.meta.get("_checkpoint_context_fn") is not None:
        raise Unnamed("a checkpoint policy")
    names: dict[Node, str] = {}
    for n in gm.graph.nodes:
        if n.meta.get("custom"):
            raise Unnamed("an annotated node")
        names[n] = f"%{len(names)}"
        match n.op:
            case "placeholder":
                yield "placeholder"
                continue
            case "get_attr":
                yield from attribute_lines(gm, str(n.target))
                continue
            case "call_module":
                yield from attribute_lines(gm, str(n.target))
            case "call_function":
                yield function_name(n.target)
            case _:
                yield f"{n.op} {n.target}"
        yield f"{words(n.args, names)} {words(n.kwargs, names)}"


def attribute_lines(gm: GraphModule, path: str) -> Iterator[str]:
    match found := operator.attrgetter(path)(gm):
        case GraphModule():
            yield "graph {"
            yield from graph_lines(found)
            yield "}"
        case torch.Tensor() if type(found) in PLAIN and found.numel() <= LARGEST:
            yield f"constant {tensor_facts(found)} {found.requires_grad} {found.tolist()}"
        case _:
            raise Unnamed(f"an attribute of type {type(found).__name__}")


def function_name(target: Any) -> str:
    """The name of what a node calls, if everybody means the same by it."""
    match target:
        case OpOverload() | OpOverloadPacket():
            name = str(target)
            if name.partition(".")[0] not in NAMESPACES:
                raise Unnamed(f"operator {name}")
            return name
        case HigherOrderOperator():
            if not target.cacheable() or "triton" in target.__name__:
                raise Unnamed(f"operator {target.__name__}")
            return f"higher order {target.__name__}"
    home, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    home = "operator" if home == "_operator" else home
    if "<" in name:  # made inside another function, and known by a plain name, as max_pool2d is
        name = getattr(target, "__name__", name)
    if home is None or home.partition(".")[0] not in HOMES or "<" in name:
        raise Unnamed(f"function {name or target}")
    found = sys.modules.get(home)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not target and type(target).__name__ != "builtin_function_or_method":
        raise Unnamed(f"function {home}.{name}")
    return f"{home}.{name}"


def words(a: Any, names: dict[Node, str]) -> str:
    """An argument as text."""
    match a:
        case Node():
            return names[a]
        case None | bool() | int() | float() | complex() | str() | bytes():
            return repr(a)
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format() | types.EllipsisType():
            return str(a)
        case slice():
            return f"slice({words((a.start, a.stop, a.step), names)})"
        case tuple() | list():
            return f"{type(a).__name__}({listed(words(x, names) for x in a)})"
        case dict():
            return f"{{{listed(f'{k!r}: {words(x, names)}' for k, x in a.items())}}}"
        case OpOverload() | OpOverloadPacket() | HigherOrderOperator():
            return function_name(a)
        case _:
            raise Unnamed(f"an argument of type {type(a).__name__}")


def listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)
