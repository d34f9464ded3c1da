"""Random programs, forward and backward, against eager: C++ and Triton's interpreter.

Many programs share one graph, so that a compiler runs for many at once; each is compared alone, and a failure prints it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("error::dsc.errors.DscWarning")  # falling back to ATen would hide a bug

PROGRAMS = 25
"""In one graph."""
SIZES = (1, 2, 3, 5, 16, 17)
Step = Callable[[list[Tensor]], Tensor]


@dataclass
class Draft:
    """A program under construction: inputs, and steps that append to a list of values."""

    dice: random.Random
    inputs: list[Tensor] = field(default_factory=list)
    steps: list[tuple[str, Step]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, text: str, step: Step) -> None:
        """Keeps a step if eager can do it on the values so far, and its result is small and finite."""
        values = run(self.inputs, self.steps)
        try:
            out = step(values)
        except (RuntimeError, IndexError):
            return
        if out.numel() <= 4096 and out.numel() > 0 and bool(out.isfinite().all()) and float(out.abs().max()) < 1e3:
            self.steps.append((text, step))
            self.shapes.append(tuple(out.shape))


def run(inputs: Sequence[Tensor], steps: Sequence[tuple[str, Step]]) -> list[Tensor]:
    values = list(inputs)
    for _, step in steps:
        values.append(step(values))
    return values


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "sin": torch.sin,
    "exp(tanh)": lambda x: x.tanh().exp(),
    "gelu": F.gelu,
    "silu": F.silu,
    "abs+sqrt": lambda x: (x.abs() + 1).sqrt(),
    "clone": torch.clone,
    "square": lambda x: x * x * 0.1,
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "to f64 and back": lambda x: (x.double() * 2).to(x.dtype),
    "where": lambda x: torch.where(x > 0.1, x, x * 0.5),
    "mask": lambda x: x.masked_fill(x < -0.3, 0.25),
    "rank mask": lambda x: x * (torch.arange(x.shape[-1]) % 2 == 0) if x.dim() else x,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "div": lambda x, y: x / (y.abs() + 1),
    "lerp": lambda x, y: torch.lerp(x.expand_as(x + y), y.expand_as(x + y), 0.3),
    "matmul": lambda x, y: x @ y.transpose(-1, -2) * 0.1,
}
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, d: x.sum(d) * 0.2,
    "mean keepdim": lambda x, d: x.mean(d, keepdim=True),
    "amax": lambda x, d: x.amax(d),
    "var": lambda x, d: x.var(d, unbiased=False, keepdim=True),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "centre": lambda x, d: x - x.mean(d, keepdim=True),
    "unsqueeze": lambda x, d: x.unsqueeze(d),
    "narrow": lambda x, d: x.narrow(d, x.shape[d] // 2, x.shape[d] - x.shape[d] // 2),
    "flip": lambda x, d: x.flip(d),
    "cat self": lambda x, d: torch.cat([x, -x], d),
    "stack": lambda x, d: torch.stack([x, x * 2], d),
    "halves": lambda x, d: torch.cat([*reversed(x.chunk(2, d))], d) if x.shape[d] % 2 == 0 else x,
    "select": lambda x, d: x.select(d, -1),
    "transpose": lambda x, d: x.transpose(d, 0),
    "expand": lambda x, d: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]),
    "layer_norm": lambda x, d: F.layer_norm(x, x.shape[d:]) if x.shape[d:].numel() > 1 else x,
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(),
    "reshape": lambda x: x.reshape(-1, x.shape[-1]) if x.dim() else x,
    "sum all": lambda x: x.sum() * 0.1,
    "contiguous t": lambda x: x.t().contiguous() if x.dim() == 2 else x,
}


def draft(seed: int) -> Draft:
    dice = random.Random(seed)
    made = Draft(dice)
    generator = torch.Generator().manual_seed(seed)
    base = [dice.choice(SIZES) for _ in range(dice.randint(1, 3))]
    for _ in range(dice.randint(1, 3)):
        shape = [1 if dice.random() < 0.2 else n for n in base[dice.randint(0, len(base) - 1) :]]
        x = torch.randn(shape, generator=generator)
        if dice.random() < 0.25 and x.dim() > 1:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        made.inputs.append(x)
    for _ in range(dice.randint(2, 9)):
        count = len(made.inputs) + len(made.steps)
        # late values are likelier, so that programs are deep
        i = max(dice.randrange(count), dice.randrange(count))
        j = dice.randrange(count)
        table = dice.choice(("unary", "unary", "binary", "binary", "along", "along", "whole"))
        if table == "unary":
            name, f = dice.choice(list(UNARY.items()))
            made.add(f"{name}(v{i})", lambda v, f=f, i=i: f(v[i]))
        elif table == "binary":
            name, g = dice.choice(list(BINARY.items()))
            made.add(f"{name}(v{i}, v{j})", lambda v, g=g, i=i, j=j: g(v[i], v[j]))
        elif table == "along":
            name, h = dice.choice(list(ALONG.items()))
            d = dice.randrange(3)
            made.add(f"{name}(v{i}, {d})", lambda v, h=h, i=i, d=d: h(v[i], d))
        else:
            name, w = dice.choice(list(WHOLE.items()))
            made.add(f"{name}(v{i})", lambda v, w=w, i=i: w(v[i]))
    return made


def describe(d: Draft) -> str:
    lines = [f"v{i}: input {list(x.shape)} strides {x.stride()}" for i, x in enumerate(d.inputs)]
    return "\n".join([*lines, *(f"v{len(d.inputs) + i} = {text}" for i, (text, _) in enumerate(d.steps))])


def outputs(d: Draft, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The last value, and the middle one: results inside a kernel that others read too."""
    values = run(inputs, d.steps)[len(inputs) :]
    return [values[-1], values[len(values) // 2]] if values else []


def all_outputs(drafts: Sequence[Draft], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [outputs(d, x) for d, x in zip(drafts, inputs)]


def check(seeds: Sequence[int], emit: str) -> None:
    drafts = [d for d in map(draft, seeds) if d.steps]

    def leaves() -> list[list[Tensor]]:
        return [
            [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in d.inputs] for d in drafts
        ]

    compiled = torch.compile(all_outputs, backend="dsc", options={"emit": emit}, fullgraph=True, dynamic=False)
    ours, theirs = leaves(), leaves()
    got, want = compiled(drafts, ours), all_outputs(drafts, theirs)
    for results in (got, want):
        total = sum(
            ((r * (i % 3 + 1)).sum() for row in results for i, r in enumerate(row) if r.requires_grad), torch.zeros(())
        )
        total.backward()
    for d, a, b, x, y in zip(drafts, got, want, ours, theirs):
        for r, s in zip(a, b):
            assert (r.shape, r.dtype, steps_of(r)) == (s.shape, s.dtype, steps_of(s)), describe(d)
            torch.testing.assert_close(r, s, rtol=1e-4, atol=2e-5, msg=lambda m, d=d: f"{m}\n{describe(d)}")
        for p, q in zip(x, y):
            assert (p.grad is None) == (q.grad is None), describe(d)
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-3, atol=2e-4, msg=lambda m, d=d: f"grad: {m}\n{describe(d)}"
                )


def steps_of(t: Tensor) -> list[int]:
    """Strides that mean something."""
    return [s for n, s in zip(t.shape, t.stride()) if n > 1]


SEEDS = st.lists(st.integers(0, 10**9), min_size=PROGRAMS, max_size=PROGRAMS, unique=True)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("part", range(4))
def test_cpp(part: int) -> None:
    @settings(
        max_examples=4, deadline=None, derandomize=True, suppress_health_check=QUIET, phases=[*settings().phases][:3]
    )
    @given(SEEDS)
    def many(seeds: list[int]) -> None:
        torch._dynamo.reset()
        check([s + part for s in seeds], "cpp")

    many()


@pytest.mark.parametrize("part", range(2))
def test_triton_in_the_interpreter(part: int) -> None:
    @settings(
        max_examples=3, deadline=None, derandomize=True, suppress_health_check=QUIET, phases=[*settings().phases][:3]
    )
    @given(SEEDS)
    def many(seeds: list[int]) -> None:
        torch._dynamo.reset()
        check([s + 1000 + part for s in seeds], "triton")

    many()
