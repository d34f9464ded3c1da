"""Operators may have any name; the Python of a program means its own words all the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.library import Library

from dsc import emit, words
from dsc.runtime import run

HOSTILE = (
    *sorted(words.TAKEN - {"torch"}), "run_0", "replay_0", "const_0", "op_add", "op_call", "s0", "s77", "u0", "zf0", "range",
    "slice", "float", "take_of", "expect_of", "primals_1", "self", "del_", "dsc",
)  # fmt: skip


@pytest.fixture
def library() -> Iterator[str]:
    """Operators of all these names that add one."""
    lib = Library("names", "DEF")
    for name in HOSTILE:
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")
        lib.impl(name, lambda x: torch.empty_like(x), "Meta")
        lib.impl(name, Plus.apply, "Autograd")
    yield "names"
    lib._destroy()


class Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.detach() + 1

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", HOSTILE)
def test_operators_of_any_name(library: str, name: str, dynamic: bool | None) -> None:
    """A pool that is taken and given back, checked indices, constants, sizes, memory that is allocated and asked for."""
    op = getattr(torch.ops.names, name)

    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        h = op(x.sin().cumsum(0)) * 2.0
        a = torch.softmax(h, -1) @ h.t()
        return a.relu()[i % a.shape[0]] + float("inf"), op(h + 1), torch.take(h, i), h.new_empty(3).fill_(1)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="dsc", dynamic=dynamic)
    for n in (4, 7) if dynamic else (4,):
        mine, theirs = (torch.linspace(-2, 2, 5 * n).reshape(n, 5).requires_grad_() for _ in range(2))
        got, want = compiled(mine, torch.tensor([0, 3, 1])), fn(theirs, torch.tensor([0, 3, 1]))
        torch.testing.assert_close(got, want)
        for out in (got, want):
            sum(x.nan_to_num(posinf=0.0).sum() for x in out).backward()
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("op", [torch.empty_strided, torch.take, torch.expand_copy], ids=lambda f: f.__name__)
def test_operators_of_torch_with_names_of_ours(op: object) -> None:
    def fn(x: Tensor) -> Tensor:
        if op is torch.empty_strided:
            out = torch.empty_strided((8, 4), (1, 8))
            out[:] = x + x
            return out
        if op is torch.take:
            h = torch.take(x, torch.tensor([0, 5, 7]))
            return (h.sin().cumsum(0) * 2).cumsum(0).cos()
        return torch.expand_copy(x.sin(), (2, 8, 4)).cumsum(0) + 1

    x = torch.randn(8, 4)
    got, want = torch.compile(fn, backend="dsc")(x), fn(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()


def test_every_word_of_a_program_is_kept_from_operators() -> None:
    assert set(run.WORDS) <= words.TAKEN
    source = "".join(map(inspect.getsource, (emit, run)))
    assert all(w in source for w in words.TAKEN), "a word that no program knows"
