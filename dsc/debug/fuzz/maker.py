"""Makes programs: adds lines that eager runs, trying each on real tensors in every world."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dsc.debug.fuzz.lines import KINDS
from dsc.debug.fuzz.observe import runs
from dsc.debug.fuzz.program import FLOATS, INTS, LAYOUTS, Input, Line, Program, World, execute, pruned

SIZES = (1, 2, 3, 4, 5, 16, 17)
LIMIT = 2048
"""Elements of the largest value of a program."""

REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AttributeError, ZeroDivisionError)

NAMES = ("a", "b", "c")


def _is_float(v: torch.Tensor, _: torch.Tensor) -> bool:
    return v.is_floating_point()


def _is_int(v: torch.Tensor, _: torch.Tensor) -> bool:
    return not v.is_floating_point() and v.dtype != torch.bool


FITS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "any": lambda v, _: True,
    "float": _is_float,
    "like": lambda v, first: v.dtype == first.dtype,
    "same": lambda v, first: v.is_floating_point() and v.shape == first.shape,
    "number": lambda v, _: v.dtype != torch.bool,
    "bool": lambda v, _: v.dtype == torch.bool,
    "int": _is_int,
    "long": lambda v, _: v.dtype == torch.int64,
}
"""What an operand must be -> the test of a value, given the first operand."""


def worlds_of(rng: random.Random, count: int) -> tuple[World, ...]:
    """Sizes by name; all differ within a world, or they would be one size to the compiler."""
    drawn = [rng.sample(range(3, 20), len(NAMES)) for _ in range(count)]
    return tuple(dict(zip(NAMES, sizes)) for sizes in drawn)


def generate(
    rng: random.Random,
    worlds: tuple[World, ...] = ({},),
    *,
    marked: bool = False,
    grad: bool = True,
    edges: bool = False,
) -> Program:
    """A program that eager runs, forward and backward, in every world.

    Without ``grad`` it is inference; ``edges`` draws infinities, NaN and large numbers too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what eager warns of
        while True:
            made = Maker(rng, worlds, marked, grad, edges).program()
            if runs(made):
                return made


class Maker:
    def __init__(self, rng: random.Random, worlds: tuple[World, ...], marked: bool, grad: bool, edges: bool) -> None:
        self.rng, self.worlds, self.marked, self.grad, self.edges = rng, worlds, marked, grad, edges
        named: list[int | str] = [*NAMES] if len(worlds) > 1 else []
        self.sizes: list[int | str] = named or [rng.choice(SIZES) for _ in range(3)]
        if not named and rng.random() < 0.08:
            self.sizes[rng.randrange(3)] = 0
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.values: list[list[torch.Tensor]] = []
        """Of every value, what it is in each world."""
        self.dtype = rng.choice(("float32", "float32", "float32", "bfloat16", "float16", "float64"))

    def open(self) -> None:
        """Draws the inputs."""
        rng = self.rng
        for _ in range(rng.choice((1, 2, 2, 3))):
            self.add_input(self.dtype if rng.random() < 0.8 else rng.choice(FLOATS))
        if rng.random() < 0.5:
            first = self.inputs[0].shape
            self.add_input("bool", first if rng.random() < 0.5 else first[1:])
        if rng.random() < 0.5:
            self.add_input(rng.choice((*INTS, "int64", "int64")))

    def program(self) -> Program:
        """Inputs, a few lines, and now and then results that others are made of."""
        rng = self.rng
        self.open()
        wanted, tries = rng.randrange(1, 9), 0
        while len(self.lines) < wanted and tries < 60:
            tries += 1
            self.step()
        if not self.lines:
            self.line("{0} * 2", (0,))
        total = len(self.inputs) + len(self.lines)
        return self.drawn(rng.sample(range(total), min(total, 2)) if rng.random() < 0.4 else [])

    def drawn(self, outputs: Sequence[int] = ()) -> Program:
        """What was drawn so far."""
        whole = Program(tuple(self.inputs), tuple(self.lines), tuple(sorted(outputs)), self.worlds, self.marked)
        return pruned(replace(whole, half=len(whole.returned) > 1 and self.rng.random() < 0.3))

    def add_input(self, dtype: str, shape: Sequence[int | str] | None = None) -> None:
        rng = self.rng
        if shape is None:
            rank = rng.choice((0, 1, 2, 2, 3, 3, 4))
            shape = [rng.choice((1, *self.sizes, *self.sizes)) for _ in range(rank)]
            while any(math.prod(n if isinstance(n, int) else w[n] for n in shape) > LIMIT for w in self.worlds):
                shape = shape[1:]
        layout = rng.choice((*LAYOUTS, "plain", "plain")) if shape else "plain"
        grad = self.grad and dtype in FLOATS and rng.random() < 0.7
        edges = self.edges and rng.random() < 0.7
        made = Input(dtype, tuple(shape), layout, rng.randrange(1 << 16), grad, edges)
        self.inputs.append(made)
        self.values.insert(len(self.inputs) - 1, [made.make(w) for w in self.worlds])

    def line(self, text: str, operands: Sequence[int]) -> bool:
        """Adds the line if eager runs it everywhere and its result is a tensor, not too large."""
        if re.search(r"\w_\(|inplace=True", text) and not self._writes_well(operands):
            return False
        names = [f"x{i}" for i in range(len(operands))]
        fn = execute(f"def line({', '.join(names)}):\n    return {text.format(*names)}\n")["line"]
        made = []
        for world in range(len(self.worlds)):
            try:
                out = fn(*(self.values[o][world] for o in operands))
            except REFUSALS:
                return False
            if not isinstance(out, torch.Tensor) or out.numel() > LIMIT or out.is_complex():
                return False
            made.append(out)
        if len({(v.dtype, v.dim()) for v in made}) > 1:
            return False
        self.lines.append(Line(text, tuple(operands)))
        self.values.append(made)
        return True

    def _writes_well(self, operands: Sequence[int]) -> bool:
        """Whether a write gives one answer: it reads no other view of what it writes, and writes no place twice."""
        storages = {self.values[o][0].untyped_storage().data_ptr() for o in operands}
        target = self.values[operands[0]][0]
        overlaps = any(s == 0 and n > 1 for n, s in zip(target.shape, target.stride()))
        return len(storages) == len(operands) and not overlaps

    def step(self) -> None:
        kind = self.rng.choices([*KINDS], [weight for weight, _, _ in KINDS.values()])[0]
        _, rows, fits = KINDS[kind]
        if (operands := self.operands(fits)) is not None:
            self.add(self.rng.choice(rows), operands)

    def operands(self, fits: Sequence[str]) -> list[int] | None:
        """Values that a row of a kind may read."""
        out: list[int] = []
        for fit in fits:
            found = self.pick(fit, out[0] if out else None)
            if found is None:
                return None
            out.append(found)
        return out

    def add(self, row: str, operands: Sequence[int]) -> bool:
        """Adds a row, with those of the operands that it mentions."""
        used = max((i + 1 for i in range(len(operands)) if f"{{{i}}}" in row), default=1)
        return self.line(self.filled(row, self.values[operands[0]][0]), operands[:used])

    def pick(self, fit: str, first: int | None) -> int | None:
        """A value that fits, later ones more likely."""
        one = self.values[first][0] if first is not None else None
        found = [i for i, v in enumerate(self.values) if FITS[fit](v[0], v[0] if one is None else one)]
        if one is not None:
            found = [i for i in found if _meets(self.values[i][0], one)] or found
        if not found:
            return None
        return self.rng.choice(found[-4:]) if self.rng.random() < 0.7 else self.rng.choice(found)

    def filled(self, text: str, x: torch.Tensor) -> str:
        """The row with dimensions of its first operand."""
        rng, rank = self.rng, max(x.dim(), 1)
        dims = sorted(rng.sample(range(rank), min(rank, rng.choice((1, 1, 1, 2, rank)))))
        for word, value in (
            ("[dims]", str(dims)),
            ("[d]", str(rng.randrange(rank))),
            ("[e]", str(rng.randrange(rank))),
            ("[keep]", str(rng.random() < 0.5)),
            ("[float]", rng.choice(FLOATS)),
        ):
            text = text.replace(word, value)
        return text


def _meets(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shapes broadcast, to something small."""
    try:
        return math.prod(torch.broadcast_shapes(a.shape, b.shape)) <= LIMIT  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
