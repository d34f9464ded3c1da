"""A small graph as a program that can be written down, cut and resized: inputs, a line a node, results."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from dsc.debug import repro
from dsc.debug.bisect.run import cone
from dsc.torch_shim import OpOverload


@dataclass(frozen=True)
class Ref:
    """The value of a name."""

    name: str


@dataclass(frozen=True, eq=False)
class Input:
    """A tensor: its ``value``, or what to draw it from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: torch.Tensor | None
    order: tuple[int, ...] | None = None
    """Dimensions, outermost in memory first; None if that is their own order."""
    mean: float = 0.0
    std: float = 1.0
    below: int = 2
    seed: int = 0

    def tensor(self) -> torch.Tensor:
        if self.value is not None:
            return self.value
        return repro.drawn(
            self.shape, self.dtype, self.seed, mean=self.mean, std=self.std, below=self.below, order=self.order
        )

    def spelled(self) -> str:
        if self.value is not None:
            return repro.literal(self.value)
        words = [str(list(self.shape)), str(self.dtype), f"seed={self.seed}"]
        if self.dtype.is_floating_point:
            words += [f"mean={self.mean:g}"] if self.mean else []
            words += [f"std={self.std:g}"] if self.std != 1.0 else []
        elif self.dtype != torch.bool:
            words.append(f"below={self.below}")
        words += [f"order={list(self.order)}"] if self.order is not None else []
        return f"drawn({', '.join(words)})"


@dataclass(frozen=True)
class Line:
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def reads(self) -> list[str]:
        return list(dict.fromkeys(_refs((self.args, list(self.kwargs.values())))))

    def source(self) -> str:
        if self.target is operator.getitem:
            return f"{self.name} = {word(self.args[0])}[{word(self.args[1])}]"
        given = [word(a) for a in self.args] + [f"{k}={word(v)}" for k, v in self.kwargs.items()]
        return f"{self.name} = {_op(self.target)}({', '.join(given)})"


@dataclass(frozen=True)
class Sketch:
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    joint: bool = False
    """What depends on tangents keeps a name that says so when it becomes an input: there the backward starts."""

    def source(self, name: str) -> str:
        body = [*(x.source() for x in self.lines), f"return ({', '.join(self.results)},)"]
        head = f"def {name}({', '.join(x.name for x in self.inputs)}):"
        return "\n".join([head, *(f"    {x}" for x in body)]) + "\n"

    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
        exec(compile(self.source("graph"), "<dsc reduce>", "exec"), scope)
        return scope["graph"]  # type: ignore[no-any-return]

    def tensors(self) -> list[torch.Tensor]:
        return [x.tensor() for x in self.inputs]


# --- from a graph ------------------------------------------------------------------------------------------------------


def is_writable(node: Node) -> bool:
    """Whether a line of Python can call it."""
    return node.op == "call_function" and (isinstance(node.target, OpOverload) or node.target is operator.getitem)


def closed(nodes: set[Node]) -> set[Node]:
    """With each item its source, with each source of several results its items: a tuple is no input and no result."""
    out = set(nodes)
    for n in nodes:
        if n.target is operator.getitem:
            out.add(n.args[0])  # type: ignore[arg-type]
    for n in list(out):
        out |= {u for u in n.users if u.target is operator.getitem}
    return out


def of(nodes: Sequence[Node], values: Mapping[Node, Any], joint: bool = False) -> Sketch | None:
    """Nodes in order, and the values of what they read from outside.  None where a tuple would have to be an input."""
    inside = set(nodes)
    if any(isinstance(v, (list, tuple)) for v in values.values()):
        return None
    tensors = [n for n, v in values.items() if isinstance(v, torch.Tensor)]
    numbers = {n.name: v for n, v in values.items() if not isinstance(v, torch.Tensor)}
    inputs = tuple(_input(n.name, values[n]) for n in tensors)
    lines = tuple(Line(n.name, n.target, _plain(n.args, numbers), dict(_plain(dict(n.kwargs), numbers))) for n in nodes)
    wanted = [n for n in nodes if any(u not in inside for u in n.users)] or [nodes[-1]]
    results = tuple(n.name for n in wanted if isinstance(n.meta.get("val"), torch.Tensor))
    if not results:
        return None
    late = {n.name: f"tangents_{n.name}" for n in tensors if joint and n.op != "placeholder" and _is_late(n)}
    return _with_names(Sketch(inputs, lines, results, joint), late)


def _is_late(node: Node) -> bool:
    return any("tangents" in n.name for n in cone([node]))


def _input(name: str, value: torch.Tensor) -> Input:
    return Input(name, tuple(value.shape), value.dtype, value, _order(value))


def _order(t: torch.Tensor) -> tuple[int, ...] | None:
    strides = t.stride()
    order = tuple(sorted(range(t.dim()), key=lambda d: (-strides[d], d)))
    return None if order == tuple(range(t.dim())) else order


def _plain(a: Any, numbers: Mapping[str, Any]) -> Any:
    match a:
        case Node():
            return numbers[a.name] if a.name in numbers else Ref(a.name)
        case list():
            return [_plain(x, numbers) for x in a]
        case tuple():
            return tuple(_plain(x, numbers) for x in a)
        case dict():
            return {k: _plain(v, numbers) for k, v in a.items()}
        case _:
            return a


# --- smaller -----------------------------------------------------------------------------------------------------------


def only(s: Sketch, results: tuple[str, ...]) -> Sketch:
    """Those results alone, with what they read."""
    return _pruned(replace(s, results=results))


def without(s: Sketch, at: Iterable[int], orphans: bool = False) -> Sketch | None:
    """The lines taken away; what others read of them becomes an input.  None where that is no tensor.

    ``orphans``: lines that nobody reads any more become results, instead of going too.
    """
    gone = {s.lines[i].name for i in at}
    kept = tuple(x for x in s.lines if x.name not in gone)
    read = {r for x in kept for r in x.reads()}
    values = {**_evaluated(s, gone & read)}
    if len(values) < len(gone & read) or any(not isinstance(v, torch.Tensor) for v in values.values()):
        return None
    results = tuple(r for r in s.results if r not in gone)
    if orphans or not results:
        unread = [x.name for x in kept if not any(x.name in y.reads() for y in kept)]
        found = _evaluated(s, set(unread))
        results = tuple(dict.fromkeys((*results, *(n for n in unread if isinstance(found[n], torch.Tensor)))))
    if not results:
        return None
    inputs = (*s.inputs, *(_input(n, v) for n, v in values.items()))
    late = {n: f"tangents_{n}" for n in values if n in _late(s)}
    return _with_names(_pruned(replace(s, inputs=inputs, lines=kept, results=results)), late)


def _late(s: Sketch) -> set[str]:
    """Names whose values depend on tangents, in a joint graph."""
    late = {x.name for x in s.inputs if s.joint and "tangents" in x.name}
    for line in s.lines:
        if not late.isdisjoint(line.reads()):
            late.add(line.name)
    return late


def _evaluated(s: Sketch, names: set[str]) -> dict[str, Any]:
    """Values of lines, from the inputs as they are."""
    if not names:
        return {}
    scope: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, **{x.name: x.tensor() for x in s.inputs}}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for line in s.lines:
            exec(line.source(), scope)
    return {n: scope[n] for n in names}


def _pruned(s: Sketch) -> Sketch:
    """Without lines and inputs that nobody reads; inputs keep their order."""
    wanted = set(s.results)
    lines = []
    for x in reversed(s.lines):
        if x.name in wanted:
            lines.append(x)
            wanted.update(x.reads())
    return replace(s, lines=tuple(reversed(lines)), inputs=tuple(x for x in s.inputs if x.name in wanted))


def drawn(s: Sketch, places: Iterable[int]) -> Sketch:
    """Seeded random numbers of the same spread in place of these inputs' values."""
    inputs = list(s.inputs)
    for i in places:
        inputs[i] = _drawn(inputs[i], seed=i)
    return replace(s, inputs=tuple(inputs))


def _drawn(x: Input, seed: int) -> Input:
    if x.value is None:
        return x
    if not x.dtype.is_floating_point:
        top = int(x.value.max()) + 1 if x.value.numel() and x.dtype != torch.bool else 2
        return replace(x, value=None, below=top, seed=seed)
    v = x.value.double()
    mean = float(v.mean()) if v.numel() else 0.0
    std = float(v.std(correction=0)) if v.numel() else 1.0
    return replace(x, value=None, mean=_short(mean), std=_short(std), seed=seed)


def _short(x: float) -> float:
    return float(f"{x:.1e}") if math.isfinite(x) else 0.0


def standard(s: Sketch, i: int) -> Sketch:
    """An input of mean 0 and standard deviation 1."""
    x = s.inputs[i]
    if x.value is not None or not x.dtype.is_floating_point or (x.mean, x.std) == (0.0, 1.0):
        return s
    return replace(s, inputs=(*s.inputs[:i], replace(x, mean=0.0, std=1.0), *s.inputs[i + 1 :]))


def sizes(s: Sketch) -> set[int]:
    """The numbers that may be sizes: those in shapes of inputs and in lists of arguments."""
    found = {n for x in s.inputs for n in x.shape}
    for line in s.lines:
        found |= set(_numbers((line.args, list(line.kwargs.values()))))
    return {n for n in found if n > 1}


def resized(s: Sketch, size: int, smaller: int, indices: bool) -> Sketch | None:
    """``smaller`` for ``size`` wherever it or a multiple of it stands; inputs with values of their own stay.

    ``indices``: integers are drawn from a range that shrinks too.
    """
    inputs = []
    for x in s.inputs:
        shape = tuple(_scaled(n, size, smaller) for n in x.shape)
        if shape != x.shape and x.value is not None:
            return None
        below = max(x.below * smaller // size, 1) if indices and x.below > 2 else x.below
        inputs.append(replace(x, shape=shape, below=below))
    lines = tuple(
        replace(
            x,
            args=_rescaled(x.args, size, smaller, False),
            kwargs={k: _rescaled(v, size, smaller, False) for k, v in x.kwargs.items()},
        )
        for x in s.lines
    )
    return replace(s, inputs=tuple(inputs), lines=lines)


def _scaled(n: int, size: int, smaller: int) -> int:
    return n // size * smaller if n >= size and n % size == 0 else n


def _rescaled(a: Any, size: int, smaller: int, listed: bool) -> Any:
    match a:
        case bool():
            return a
        case int():
            return _scaled(a, size, smaller) if listed or a == size else a
        case list() | tuple():
            return type(a)(_rescaled(x, size, smaller, isinstance(a, list)) for x in a)
        case _:
            return a


def _numbers(a: Any) -> Iterable[int]:
    match a:
        case bool():
            return
        case int():
            yield a
        case list() | tuple():
            for x in a:
                yield from _numbers(x)


def renamed(s: Sketch) -> Sketch:
    """Short names for inputs; joint graphs keep the names by which tangents are known."""
    letters = iter([*"xyzwuvpqrs", *(f"x{i}" for i in range(len(s.inputs)))])
    taken = {x.name for x in s.lines}
    names = {}
    for x in s.inputs:
        if "tangents" not in x.name:
            names[x.name] = next(c for c in letters if c not in taken)
    return _with_names(s, names)


def _with_names(s: Sketch, names: Mapping[str, str]) -> Sketch:
    """Inputs by other names."""
    return replace(
        s,
        inputs=tuple(replace(x, name=names.get(x.name, x.name)) for x in s.inputs),
        lines=tuple(
            replace(x, args=_named(x.args, names), kwargs={k: _named(v, names) for k, v in x.kwargs.items()})
            for x in s.lines
        ),
    )


def _named(a: Any, names: Mapping[str, str]) -> Any:
    match a:
        case Ref():
            return Ref(names.get(a.name, a.name))
        case list() | tuple():
            return type(a)(_named(x, names) for x in a)
        case _:
            return a


def _refs(a: Any) -> Iterable[str]:
    match a:
        case Ref():
            yield a.name
        case list() | tuple():
            for x in a:
                yield from _refs(x)


# --- as Python ---------------------------------------------------------------------------------------------------------


def _op(target: Any) -> str:
    if target.namespace == "aten":
        return str(target)
    return f"torch.ops.{target}"


def word(a: Any) -> str:
    """An argument as source."""
    match a:
        case Ref():
            return a.name
        case list():
            return f"[{', '.join(map(word, a))}]"
        case tuple():
            return f"({', '.join(map(word, a))}{',' if len(a) == 1 else ''})"
        case float():
            return repr(a) if math.isfinite(a) else f'float("{a}")'
        case torch.device():
            return 'torch.device("cpu")'
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(a)
        case _:
            return repr(a)
