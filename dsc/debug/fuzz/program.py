"""A random program as data: inputs, then a line of text an operator, so that it can be cut down and printed.

Every value has a number: inputs first, then a value a line.  Sizes of inputs may have names; a *world* gives each name
a number, and a program with several worlds runs in each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

World = Mapping[str, int]

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTS = ("int64", "int32", "int16", "int8", "uint8")
LAYOUTS = ("plain", "transposed", "sliced", "stepped", "expanded")
EDGES = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 0.5, -2.5, 1e4, -1e4, 1e-6)

_DRAWN_INTS = 5
"""Integers of inputs are below this: more make sums of narrow ones wrap everywhere."""


@dataclass(frozen=True)
class Input:
    dtype: str
    shape: tuple[int | str, ...]
    layout: str = "plain"
    seed: int = 0
    grad: bool = False
    edges: bool = False
    """Holds infinities, NaN, zeros of both signs and large numbers; integers at the ends of their range."""

    def make(self, world: World, exact: bool = False) -> torch.Tensor:
        """The tensor, from its seed; with ``exact``, the same floats held in float64."""
        shape = [n if isinstance(n, int) else world[n] for n in self.shape]
        base = self._data(self._stored(shape))
        if exact and base.is_floating_point():
            base = base.double()
        return self._laid(base, shape).detach().requires_grad_(self.grad)

    def _stored(self, shape: Sequence[int]) -> list[int]:
        match self.layout:
            case "transposed":
                return [*reversed(shape)]
            case "sliced":
                return [n + 1 for n in shape]
            case "stepped":
                return [*shape[:-1], 2 * shape[-1]]
            case "expanded":
                return [1, *shape[1:]]
            case _:
                return [*shape]

    def _laid(self, base: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        match self.layout:
            case "transposed":
                return base.permute(*reversed(range(base.dim())))
            case "sliced":
                return base[tuple(slice(1, None) for _ in shape)]
            case "stepped":
                return base[..., ::2]
            case "expanded":
                return base.expand(shape)
            case _:
                return base

    def _data(self, shape: Sequence[int]) -> torch.Tensor:
        dtype, gen = getattr(torch, self.dtype), torch.Generator().manual_seed(self.seed)
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=gen).bool()
        if dtype.is_floating_point:
            values = torch.rand(shape, generator=gen, dtype=torch.float64) * 4 - 2
            special = torch.tensor(EDGES, dtype=torch.float64)
        else:
            values = torch.randint(0, _DRAWN_INTS, shape, generator=gen)
            info = torch.iinfo(dtype)
            special = torch.tensor([info.min, info.max, info.max - 1, -1 if info.min else 1])
        if self.edges:
            which = torch.randint(0, 4 * len(special), shape, generator=gen)
            values = torch.where(which < len(special), special[which % len(special)], values)
        return values.to(dtype)


@dataclass(frozen=True)
class Line:
    text: str
    """An expression over ``{0}``, ``{1}``, ...; a method whose name ends in ``_`` writes its first operand."""
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...] = ()
    """Values that it returns besides those that nothing reads."""
    worlds: tuple[World, ...] = ({},)
    marked: bool = False
    """Several worlds are told by ``mark_dynamic``, not by ``dynamic=True``."""
    half: bool = False
    """The loss is made of every second result, so that some inputs may get no gradient."""

    @property
    def size(self) -> int:
        """How many values it has."""
        return len(self.inputs) + len(self.lines)

    @property
    def returned(self) -> list[int]:
        read = {o for x in self.lines for o in x.operands}
        ends = [i for i in range(len(self.inputs), self.size) if i not in read]
        return sorted({*ends, *self.outputs})

    @property
    def grad(self) -> bool:
        return any(i.grad for i in self.inputs)

    def source(
        self,
        name: str = "program",
        *,
        exact: bool = False,
        noisy: Mapping[int, str] | None = None,
        results: Sequence[int] | None = None,
    ) -> str:
        """Python of the program.

        ``exact`` casts to float64 wherever it casts to a float.  ``noisy`` gives values, and how the line that makes
        them reads an operand: ``noise({0}, {1})`` of a variable and the number of its value, and then ``again`` of both
        wherever its text names it; ``size`` stands for the results.
        """
        count = len(self.inputs)
        words = [f"x{i}" if i < count else f"v{i - count}" for i in range(self.size)]
        body = []
        for i, line in enumerate(self.lines, count):
            text = re.sub(r"torch\.(bfloat16|float16|float32)", "torch.float64", line.text) if exact else line.text
            operands = [words[o] for o in line.operands]
            if noisy and i in noisy:  # read once a line, however often its text names it; a gradient each time
                read = {o: f"r{o}" for o in line.operands}
                body += [f"{name} = {noisy[i].format(words[o], o)}" for o, name in read.items()]
                operands = [f"again({read[o]}, {o})" for o in line.operands]
            body.append(f"{words[i]} = {text.format(*operands)}")
        last = noisy.get(self.size, "{0}") if noisy else "{0}"
        ends = [last.format(words[i], i) for i in (self.returned if results is None else results)]
        body.append(f"return {', '.join(ends)}," if ends else "return ()")
        return f"def {name}({', '.join(words[:count])}):\n    " + "\n    ".join(body) + "\n"

    def used(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Results that gradients are taken of."""
        return results[::2] if self.half else results

    def function(self, *, exact: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
        return execute(self.source(exact=exact))["program"]  # type: ignore[no-any-return]

    def tensors(self, world: World, *, exact: bool = False) -> list[torch.Tensor]:
        return [i.make(world, exact) for i in self.inputs]


def script(programs: Sequence[Program], why: str, options: Mapping[str, object] | None = None) -> str:
    """A file that shows a difference by itself."""
    listing = "".join(p.source(f"program_{i}" if len(programs) > 1 else "program") for i, p in enumerate(programs))
    shown = {k: v for k, v in (options or {}).items() if v != "auto"}
    return "\n".join(
        [
            f"# {why}",
            "import torch",
            "import torch.nn.functional as F",
            "",
            "from dsc.debug.fuzz import Input, Line, Program, check_all",
            "",
            listing,
            f"programs = [{', '.join(map(repr, programs))}]",
            f"print(check_all(programs, {shown!r}))",
            "",
        ]
    )


def execute(source: str, **names: object) -> dict[str, Any]:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "aten": torch.ops.aten, **names}
    exec(compile(source, "<dsc fuzz>", "exec"), scope)
    return scope


def pruned(p: Program) -> Program:
    """Without the inputs that nothing reads or returns."""
    read = {o for x in p.lines for o in x.operands} | set(p.outputs)
    kept = [i for i in range(len(p.inputs)) if i in read]
    place = {old: new for new, old in enumerate([*kept, *range(len(p.inputs), p.size)])}
    return Program(
        tuple(p.inputs[i] for i in kept),
        tuple(Line(x.text, tuple(place[o] for o in x.operands)) for x in p.lines),
        tuple(place[o] for o in p.outputs),
        p.worlds,
        p.marked,
        p.half,
    )
