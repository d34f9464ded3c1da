"""Random programs through the compiler and eager: ``python -m dsc.debug.fuzz --seconds 60``.

A program is text, a line an operator, so that one that fails can be cut down line by line and printed as a script.
Many independent ones are compiled as one graph: a call of the C++ compiler costs more than they do.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

SIZES = (1, 2, 3, 5, 16, 17)
FLOATS = ("float32", "bfloat16", "float16", "float64")
INTS = ("int64", "int32")
LIMIT = 4096
"""Elements of the largest value of a program."""


@dataclass(frozen=True)
class Input:
    dtype: str
    shape: tuple[int, ...]
    layout: str
    """plain, transposed or sliced."""
    seed: int

    def make(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        own = getattr(torch, self.dtype)
        dtype = dtype if dtype is not None and own.is_floating_point else own
        gen = torch.Generator().manual_seed(self.seed)
        shape = [n + (self.layout == "sliced") for n in self.shape]
        if self.layout == "transposed":
            shape.reverse()
        if own.is_floating_point:
            # as the program's dtype holds them, whatever dtype they are wanted in
            base = (torch.rand(shape, generator=gen, dtype=torch.float64) * 4 - 2).to(own).to(dtype)
        elif own == torch.bool:
            base = torch.randint(0, 2, shape, generator=gen).bool()
        else:
            base = torch.randint(0, 3, shape, generator=gen).to(own)
        if self.layout == "transposed":
            return base.permute(*reversed(range(base.dim())))
        return base[tuple(slice(1, None) for _ in shape)] if self.layout == "sliced" else base


@dataclass(frozen=True)
class Line:
    text: str
    """An expression over ``{0}``, ``{1}``, ..."""
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Values are numbered: inputs first, then a value a line."""

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]

    def source(self, name: str = "program", exact: bool = False) -> str:
        """Python of the program; ``exact`` writes every float cast as one to float64."""
        count = len(self.inputs)
        words = [f"x{i}" for i in range(count)] + [f"v{i}" for i in range(len(self.lines))]
        body = [
            f"{words[count + i]} = {x.text.format(*(words[o] for o in x.operands))}" for i, x in enumerate(self.lines)
        ]
        read = {o for x in self.lines for o in x.operands}
        ends = [words[i] for i in range(count, len(words)) if i not in read]
        text = (
            f"def {name}({', '.join(words[:count])}):\n    "
            + "\n    ".join([*body, f"return {', '.join(ends)},"])
            + "\n"
        )
        return re.sub(r"torch\.(bfloat16|float16|float32)", "torch.float64", text) if exact else text

    def function(self, exact: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
        return execute(self.source(exact=exact))["program"]  # type: ignore[no-any-return]

    def tensors(self, exact: bool = False) -> list[torch.Tensor]:
        made = [i.make(torch.float64 if exact else None) for i in self.inputs]
        return [t.detach().requires_grad_(t.dtype.is_floating_point) for t in made]

    def script(self) -> str:
        """A file that shows the difference by itself."""
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "from dsc.debug.fuzz import Input, Line, Program, check",
                "",
                self.source(),
                f"print(check({self!r}))",
            ]
        )


def execute(source: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(source, "<dsc fuzz>", "exec"), scope)
    return scope


# --- making programs ---------------------------------------------------------------------------------------------------

UNARY = (
    "-{0}", "{0}.abs()", "torch.sigmoid({0})", "torch.tanh({0})", "F.silu({0})", "F.gelu({0})", "F.relu({0})",
    "F.gelu({0}, approximate='tanh')", "torch.sin({0})", "torch.cos({0})", "torch.exp(-{0}.abs())", "torch.erf({0})",
    "torch.sqrt({0}.abs() + 1)", "torch.rsqrt({0} * {0} + 1)", "torch.log({0}.abs() + 0.5)", "{0} * 0.3", "{0} + 1",
    "1 - {0}", "{0}.pow(2)", "{0}.pow(3)", "{0}.clamp(-1, 1)", "{0} / 3", "torch.log1p({0}.abs())", "{0}.clone()",
    "F.softplus({0})", "F.leaky_relu({0}, 0.1)", "F.elu({0})", "{0}.reciprocal().clamp(-2, 2)", "torch.expm1(-{0}.abs())",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})",
    "torch.add({0}, {1}, alpha=2)", "torch.atan2({0}, {1}.abs() + 1)", "torch.where({0}.detach() == {0}.detach(), {1}, {0})",
)  # fmt: skip
TERNARY = ("torch.addcmul({0}, {1}, {2}, value=0.5)", "torch.lerp({0}, {1}, 0.3)")
INT_UNARY = (
    "-{0}",
    "{0} + 1",
    "{0} * 3",
    "{0} & 1",
    "{0}.clamp(0, 1)",
    "{0}.abs()",
    "({0} > 0).to({0}.dtype)",
    "{0}.to(torch.float32)",
)
INT_BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "{0} ^ {1}", "{0} | {1}")


class Maker:
    """Adds lines that eager runs, trying each on real tensors."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes = [rng.choice(SIZES) for _ in range(3)]
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.values: list[torch.Tensor] = []
        self.dtype = rng.choice(("float32", "float32", "float32", "bfloat16", "float16", "float64"))

    def add_input(self, dtype: str, shape: Sequence[int] | None = None) -> int:
        rng = self.rng
        if shape is None:
            rank = rng.choice((0, 1, 2, 2, 3, 3, 4))
            shape = [rng.choice((1, *self.sizes, *self.sizes)) for _ in range(rank)]
            while _product(shape) > LIMIT:
                shape = shape[1:]
        layout = rng.choice(("plain", "plain", "transposed", "sliced")) if shape else "plain"
        made = Input(dtype, tuple(shape), layout, rng.randrange(1 << 16))
        self.inputs.append(made)
        self.values.insert(len(self.inputs) - 1, made.make())
        return len(self.inputs) - 1

    def line(self, text: str, *operands: int) -> bool:
        names = [f"x{i}" for i in range(len(operands))]
        scope = {"torch": torch, "F": torch.nn.functional, **dict(zip(names, (self.values[o] for o in operands)))}
        try:
            out = eval(text.format(*names), scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return False
        if out.numel() > LIMIT or out.numel() == 0:
            return False
        self.lines.append(Line(text, operands))
        self.values.append(out)
        return True

    def pick(self, test: Callable[[torch.Tensor], bool]) -> int | None:
        """A value, later ones more likely."""
        found = [i for i, v in enumerate(self.values) if test(v)]
        if not found:
            return None
        return self.rng.choice(found[-4:]) if self.rng.random() < 0.7 else self.rng.choice(found)

    def program(self) -> Program:
        rng = self.rng
        for _ in range(rng.choice((1, 2, 2, 3))):
            self.add_input(self.dtype if rng.random() < 0.8 else rng.choice(FLOATS))
        first = self.inputs[0].shape
        self.add_input("bool", first if rng.random() < 0.5 else first[1:])
        if rng.random() < 0.4:
            self.add_input(rng.choice(INTS))
        wanted, tries = rng.randrange(2, 11), 0
        while len(self.lines) < wanted and tries < 60:
            tries += 1
            self.step()
        if not self.lines:
            self.line("{0} * 2", 0)
        return pruned(Program(tuple(self.inputs), tuple(self.lines)))

    def step(self) -> None:
        rng = self.rng
        a = self.pick(lambda v: v.dtype.is_floating_point)
        assert a is not None
        x = self.values[a]
        kind = rng.choice(
            ("unary",) * 3
            + ("binary",) * 4
            + ("view",) * 4
            + ("reduce",) * 3
            + ("row",) * 2
            + ("join", "mask", "cast", "int", "ternary", "matmul", "other")
        )
        match kind:
            case "unary":
                self.line(rng.choice(UNARY), a)
            case "binary":
                b = self.pick(lambda v: v.dtype.is_floating_point and _broadcasts(x, v))
                self.line(rng.choice(BINARY), *rng.sample((a, a if b is None else b), 2))
            case "ternary":
                b = self.pick(lambda v: v.dtype == x.dtype and _broadcasts(x, v))
                c = self.pick(lambda v: v.dtype == x.dtype and _broadcasts(x, v))
                self.line(rng.choice(TERNARY), *((a, b, c)[:3] if b is not None and c is not None else (a, a, a)))
            case "view":
                target = a if rng.random() < 0.9 else rng.randrange(len(self.values))
                self.line(self.view(self.values[target]), target)
            case "reduce":
                self.line(self.reduction(x), a)
            case "row":
                self.row(a)
            case "join":
                b = self.pick(lambda v: v.dtype.is_floating_point and v.shape == x.shape)
                d = rng.randrange(-1, max(x.dim(), 1))
                self.line(
                    rng.choice(
                        (
                            f"torch.cat([{{0}}, {{1}}], {d})",
                            f"torch.stack([{{0}}, {{1}}], {d})",
                            "torch.cat([{1}, {0}, {0}])",
                        )
                    ),
                    a,
                    a if b is None else b,
                )
            case "mask":
                m = self.pick(lambda v: v.dtype == torch.bool and _broadcasts(x, v))
                b = self.pick(lambda v: v.dtype.is_floating_point and _broadcasts(x, v))
                if m is not None:
                    self.line(
                        rng.choice(
                            (
                                "torch.where({0}, {1}, {2})",
                                "{1}.masked_fill({0}, -0.5)",
                                "{1} * {0}",
                                "torch.where({0}, {1}, 0.0)",
                            )
                        ),
                        m,
                        a,
                        a if b is None else b,
                    )
            case "cast":
                self.line(f"{{0}}.to(torch.{rng.choice(FLOATS)})", a)
            case "int":
                i = self.pick(lambda v: v.dtype in (torch.int64, torch.int32))
                if i is not None:
                    j = self.pick(lambda v: v.dtype in (torch.int64, torch.int32) and _broadcasts(v, self.values[i]))
                    self.line(
                        *(
                            (rng.choice(INT_UNARY), i)
                            if j is None or rng.random() < 0.5
                            else (rng.choice(INT_BINARY), i, j)
                        )
                    )
            case "matmul":
                b = self.pick(lambda v: v.dtype == x.dtype and v.dim() == x.dim() == 2)
                if b is not None:
                    self.line(rng.choice(("{0} @ {1}", "{0} @ {1}.t()", "{0}.t() @ {1}")), a, b)
            case _:
                d = rng.randrange(-2, 3)
                self.line(
                    rng.choice(
                        (
                            f"{{0}}.tril({d})",
                            f"{{0}}.triu({d})",
                            "{0}.flip(0)",
                            "{0} + torch.arange({0}.shape[-1])",
                            "torch.ones_like({0}) * {0}",
                            "{0}.contiguous()",
                            "F.pad({0}, (1, 2))",
                            "F.mse_loss({0}, {0}.detach() * 0.5)",
                            "{0}.roll(1, 0)",
                            "{0}.cumsum(0)",
                        )
                    ),
                    a,
                )

    def dims(self, x: torch.Tensor) -> list[int]:
        count = self.rng.choice((1, 1, 1, 2, x.dim()))
        return sorted(self.rng.sample(range(x.dim()), min(count, x.dim()))) or [0]

    def reduction(self, x: torch.Tensor) -> str:
        rng, dims, keep = self.rng, self.dims(x), self.rng.random() < 0.5
        over = rng.choice((f"{dims}, {keep}", f"{dims}, {keep}", ""))
        name = rng.choice(("sum", "sum", "sum", "mean", "mean", "amax", "amin", "var", "std", "logsumexp", "prod"))
        match name:
            case "prod":
                return f"{{0}}.clamp(-1.5, 1.5).prod({dims[0]}, {keep})"
            case "logsumexp":
                return f"torch.logsumexp({{0}}, {dims}, {keep})"
            case "var" | "std":
                count = _product([x.shape[d] for d in dims] if x.dim() else [])
                tail = "" if name == "var" else ".add(0.1).sqrt()"
                return f"{{0}}.var({dims}, correction={int(count > 1)}, keepdim={keep}){tail}"
            case "amax" | "amin":
                return f"{{0}}.{name}({dims}, {keep})"
            case _:
                return f"{{0}}.{name}({over})"

    def row(self, a: int) -> None:
        rng, x = self.rng, self.values[a]
        if x.dim() == 0:
            return
        d = rng.randrange(x.dim())
        match rng.choice(("softmax", "log_softmax", "layer_norm", "layer_norm", "rms", "center", "normalize")):
            case "softmax":
                self.line(f"torch.softmax({{0}}, {d})", a)
            case "log_softmax":
                self.line(f"torch.log_softmax({{0}}, {d})", a)
            case "layer_norm":
                tail = list(x.shape[d:])
                w = self.pick(lambda v: v.dtype == x.dtype and list(v.shape) == tail)
                text = f"F.layer_norm({{0}}, {tail})" if w is None else f"F.layer_norm({{0}}, {tail}, {{1}}, {{1}})"
                self.line(text, *((a,) if w is None else (a, w)))
            case "rms":
                self.line(f"{{0}} * torch.rsqrt({{0}}.pow(2).mean({d}, True) + 1e-2)", a)
            case "center":
                self.line(f"{{0}} - {{0}}.mean({d}, True)", a)
            case _:
                self.line(f"{{0}} / ({{0}}.abs().sum({d}, True) + 1)", a)

    def view(self, x: torch.Tensor) -> str:
        rng, rank = self.rng, x.dim()
        if rank == 0:
            return rng.choice(("{0}.unsqueeze(0)", "{0}.expand(3, 5)", "{0}.reshape(1, 1)"))
        d = rng.randrange(rank)
        n = x.shape[d]
        match rng.choice(
            (
                "permute",
                "slice",
                "select",
                "expand",
                "reshape",
                "split",
                "unsqueeze",
                "flatten",
                "unflatten",
                "T",
                "squeeze",
            )
        ):
            case "permute":
                return f"{{0}}.permute({rng.sample(range(rank), rank)})"
            case "slice":
                start, step = rng.randrange(n), rng.choice((1, 1, 1, 2))
                head = ":, " * d
                return f"{{0}}[{head}{start}:{rng.randrange(start + 1, n + 1)}:{step}]"
            case "select":
                return f"{{0}}.select({d}, {rng.randrange(-n, n)})"
            case "expand":
                return rng.choice(
                    (
                        f"{{0}}.unsqueeze({d}).expand({', '.join([*('-1' for _ in range(d)), '3', *('-1' for _ in range(rank - d))])})",
                        f"{{0}}.expand(2, {', '.join(['-1'] * rank)})",
                    )
                )
            case "reshape":
                shape = [*x.shape]
                rng.shuffle(shape)
                return f"{{0}}.reshape({shape})"
            case "split":
                size = rng.randrange(1, n + 1)
                return rng.choice(
                    (
                        f"{{0}}.split({size}, {d})[{rng.randrange(-(-n // size))}]",
                        f"{{0}}.chunk(2, {d})[0]",
                        f"{{0}}.unbind({d})[{rng.randrange(n)}]",
                    )
                )
            case "unsqueeze":
                return f"{{0}}.unsqueeze({rng.randrange(-1, rank + 1)})"
            case "flatten":
                return "{0}.reshape(-1)"
            case "unflatten":
                factor = rng.choice([f for f in range(1, n + 1) if n % f == 0])
                return f"{{0}}.unflatten({d}, ({factor}, {n // factor}))"
            case "squeeze":
                return "{0}.squeeze()"
            case _:
                return f"{{0}}.transpose({d}, {rng.randrange(rank)})"


def _product(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return _product(torch.broadcast_tensors(a, b)[0].shape) <= LIMIT  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False


def generate(rng: random.Random) -> Program:
    """A program that eager runs, forward and backward."""
    while True:
        made = Maker(rng).program()
        if runs(made):
            return made


def runs(p: Program) -> bool:
    try:
        evaluate(p.function(), p.tensors())
        evaluate(p.function(exact=True), p.tensors(exact=True))
    except Exception:
        return False
    return True


def pruned(p: Program) -> Program:
    """Without the inputs that nothing reads."""
    read = {o for x in p.lines for o in x.operands}
    kept = [i for i in range(len(p.inputs)) if i in read]
    place = {old: new for new, old in enumerate([*kept, *range(len(p.inputs), len(p.inputs) + len(p.lines))])}
    lines = tuple(Line(x.text, tuple(place[o] for o in x.operands)) for x in p.lines)
    return Program(tuple(p.inputs[i] for i in kept), lines)


# --- comparing ---------------------------------------------------------------------------------------------------------


def evaluate(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Results, then the gradients of the inputs."""
    outs = list(fn(*inputs))
    return [o.detach() for o in outs] + gradients(outs, inputs)


def gradients(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    leaves = [t for t in inputs if t.requires_grad]
    roots = [o for o in outs if o.requires_grad]
    if not leaves or not roots:
        return []
    seeds = [torch.linspace(-1, 1, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype) for r in roots]
    return list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True))


EPSILON = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


def compare(
    got: Sequence[torch.Tensor | None],
    want: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None],
    lowest: float,
    results: int,
) -> str | None:
    """Dtypes, shapes and strides (of the first ``results``, the rest are gradients) as eager's; integers equal; floats as near to float64 as eager's, or near to eager's."""
    for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
        if g is None or w is None or e is None:
            if g is not w:
                return f"result {i}: {g} instead of {w}"
            continue
        if g.dtype != w.dtype or g.shape != w.shape:
            return f"result {i}: {g.dtype}{tuple(g.shape)} instead of {w.dtype}{tuple(w.shape)}"
        if i < results and any(a != b for n, a, b in zip(g.shape, g.stride(), w.stride()) if n > 1):
            return f"result {i}: strides {g.stride()} instead of {w.stride()}"
        if not g.dtype.is_floating_point:
            if not torch.equal(g, w):
                return f"result {i}: {g.flatten()[:4].tolist()} instead of {w.flatten()[:4].tolist()}"
            continue
        a, b, c = g.double(), w.double(), e.double()
        if not torch.equal(a.isfinite(), b.isfinite()):
            if not torch.equal(b.isfinite(), c.isfinite()):
                continue  # overflow on the way: where it falls depends on the order of operations
            return f"result {i}: finite elsewhere than eager's"
        a, b, c = (t.nan_to_num(0, 0, 0) for t in (a, b, c))
        scale = float(c.abs().max()) if c.numel() else 0.0
        room = max(EPSILON[g.dtype], lowest) * (c.abs() + max(scale, 0.1)) + 8 * float((b - c).abs().max())
        if bool(((a - b).abs() > room + 1e-30).any()):
            at = int(((a - b).abs() - room).argmax())
            return f"result {i}: {a.flatten()[at]} instead of {b.flatten()[at]}, in float64 {c.flatten()[at]}"
    return None


def lowest(p: Program) -> float:
    """The unit of the coarsest dtype on the way."""
    words = {i.dtype for i in p.inputs} | {d for x in p.lines for d in FLOATS if f"torch.{d}" in x.text}
    return max((EPSILON[getattr(torch, d)] for d in words if d in FLOATS), default=0.0)


def check_all(programs: Sequence[Program], options: dict[str, Any] | None = None) -> list[str | None]:
    """What is wrong with each, all compiled as one graph; alone where the whole fails."""
    inputs = [p.tensors() for p in programs]
    flat = [t for ts in inputs for t in ts]
    source = "\n".join(p.source(f"program_{i}") for i, p in enumerate(programs))
    calls, start = [], 0
    for i, ts in enumerate(inputs):
        calls.append(f"program_{i}({', '.join(f'x{start + k}' for k in range(len(ts)))})")
        start += len(ts)
    source += f"\ndef together({', '.join(f'x{i}' for i in range(len(flat)))}):\n    return ({', '.join(calls)},)\n"
    torch._dynamo.reset()
    try:
        results = torch.compile(execute(source)["together"], backend="dsc", options=options, fullgraph=True)(*flat)  # type: ignore[no-untyped-call]
        grads = iter(gradients([r for rs in results for r in rs], flat))
        mine: list[list[torch.Tensor | None]] = []
        for ts, rs in zip(inputs, results):
            taken = [next(grads, None) for t in ts if t.requires_grad]
            mine.append([*(r.detach() for r in rs), *(taken if any(r.requires_grad for r in rs) else [])])
    except Exception as why:
        if len(programs) == 1:
            return [f"{type(why).__name__}: {str(why)[:300]}"]
        return [check(p, options) for p in programs]
    return [verdict(p, got) for p, got in zip(programs, mine)]


def verdict(p: Program, got: Sequence[torch.Tensor | None]) -> str | None:
    want = evaluate(p.function(), p.tensors())
    exact = evaluate(p.function(exact=True), p.tensors(exact=True))
    leaves = sum(t.requires_grad for t in p.tensors())
    return compare(got, want, exact, lowest(p), 0 if has_odd_strides(p) else len(want) - leaves)


def has_odd_strides(p: Program) -> bool:
    """Whether some value's size-1 dimensions have strides of their own: results of broadcasting such a value have
    strides that fake tensors do not foretell, and neither does any compiler that trusts them.
    """
    every = replace(p, lines=(*p.lines, *(Line("{0}", (i,)) for i in range(len(p.inputs) + len(p.lines)))))
    with torch.no_grad():
        values = every.function()(*p.tensors())
    return any(1 in t.shape and t.stride() != torch.empty(t.shape, device="meta").stride() for t in values)


def check(p: Program, options: dict[str, Any] | None = None) -> str | None:
    return check_all([p], options)[0]


def shrink(p: Program, fails: Callable[[Program], bool], attempts: int = 60) -> Program:
    """Drops lines, later ones first, while the program still runs in eager and still fails."""
    progress = True
    while progress and attempts > 0:
        progress = False
        for at in reversed(range(len(p.lines))):
            for smaller in without(p, at):
                if attempts <= 0 or not smaller.lines or not runs(smaller):
                    continue
                attempts -= 1
                if fails(smaller):
                    p, progress = smaller, True
                    break
            if progress:
                break
    return p


def without(p: Program, at: int) -> list[Program]:
    """The program without a line, its readers reading one of its operands instead."""
    gone = len(p.inputs) + at

    def moved(o: int, instead: int) -> int:
        o = instead if o == gone else o
        return o - 1 if o > gone else o

    out = []
    for instead in dict.fromkeys(p.lines[at].operands):
        lines = [
            replace(x, operands=tuple(moved(o, instead) for o in x.operands)) for i, x in enumerate(p.lines) if i != at
        ]
        out.append(pruned(Program(p.inputs, tuple(lines))) if lines else p)
    return [q for q in out if len(q.lines) < len(p.lines)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dsc.debug.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=25, help="programs a graph")
    parser.add_argument("--emit", choices=("auto", "cpp", "triton"), default="auto")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    a = parser.parse_args()
    options: dict[str, Any] = {"emit": a.emit}
    end, seed, found = time.monotonic() + a.seconds, a.seed, 0
    while time.monotonic() < end and found < a.failures:
        programs = [generate(random.Random(seed + i)) for i in range(a.batch)]
        for _i, (p, why) in enumerate(zip(programs, check_all(programs, options))):
            if why is None:
                continue
            found += 1
            alone = check(p, options)
            if alone is None:
                continue
            shrink(p, lambda q: check(q, options) is not None)
        seed += a.batch
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
