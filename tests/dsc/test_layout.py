"""Strides of pointwise results: foretold as ATen's own."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.ops import layout


def made(rng: random.Random, shape: list[int]) -> torch.Tensor:
    """A tensor of that shape: its dimensions in any order in memory, whole, sliced or stepped."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    kind = rng.choice(("whole", "sliced", "stepped"))
    base = torch.ones([shape[d] * (2 if kind == "stepped" else 1) + (kind == "sliced") for d in order])
    if kind != "whole":
        base = base[tuple(slice(1, None) if kind == "sliced" else slice(None, None, 2) for _ in order)]
    return base.permute([order.index(d) for d in range(len(order))])


@given(st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_strides_are_those_of_aten(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.choice((1, 2, 3, 4)) for _ in range(rng.choice((1, 2, 3, 4)))]
    operands = []
    for _ in range(rng.choice((2, 2, 3))):
        mine = [rng.choice((n, n, n, 1)) for n in shape]
        operands.append(made(rng, mine[rng.choice((0, 0, 1)) if len(mine) > 1 else 0 :]))
    want = torch.addcmul(*operands) if len(operands) == 3 else operands[0] + operands[1]
    assert not layout.differ(layout.pointwise_strides(operands, want.shape), want.stride(), want.shape)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((1, 3), (9, 1), True),
    ],
)
def test_dense(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert layout.is_dense(torch.empty_strided(shape, strides)) is dense
