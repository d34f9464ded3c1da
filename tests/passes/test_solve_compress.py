"""Which saved values to compress: within the budget, no more than needed, and the cheapest where that is the whole choice."""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from dsc.passes.solve.compress import Item, change, choose

STEPS = 12


def item(name: str, nbytes: int, seconds: float, **fields: object) -> Item:
    made = Item(name, nbytes, nbytes // 4, 1, 2, (9,), (), seconds)
    return replace(made, **fields)  # type: ignore[arg-type]


def alive(items: list[Item], chosen: tuple[Item, ...] = ()) -> np.ndarray:
    out = np.full(STEPS, 10)
    for i in items:
        out[i.born : i.uses[-1] + 1] += i.nbytes
    for i in chosen:
        out += change(i, STEPS)
    return out


def test_the_cheapest_a_byte_is_taken_and_no_more() -> None:
    items = [
        item("dear", 400, 4.0, born=3, read=3), item("cheap", 400, 1.0), item("small", 40, 0.3, born=5, read=5)
    ]  # fmt: skip
    found = choose(alive(items), items, 600)
    assert found is not None
    assert [i.name for i in found] == ["cheap"]
    assert choose(alive(items), items, 10_000) == ()
    assert choose(alive(items), items, 100) is None


def test_a_value_that_the_peak_needs_whole_does_not_help() -> None:
    one = item("x", 400, 1.0, uses=(5, 9), whole=(5,))
    peak = alive([one])
    peak[5] += 100
    assert choose(peak, [one], 500) is None
    peak[5] -= 100
    peak[6] += 300
    assert choose(peak, [one], 550) == (one,)


@pytest.mark.parametrize("seed", range(20))
def test_within_the_budget_and_nothing_can_be_left_out(seed: int) -> None:
    draw = random.Random(seed)
    items = []
    for k in range(6):
        born = draw.randrange(4)
        last = draw.randrange(6, STEPS)
        size = draw.randrange(4, 40) * 10
        items.append(item(f"v{k}", size, draw.random() - 0.2, born=born, read=born, uses=(last,), small=size // 4))
    peak = int(alive(items).max())
    least = min(int(alive(items, s).max()) for n in range(7) for s in combinations(items, n))
    for budget in (peak, (peak + least) // 2, least, least - 1):
        found = choose(alive(items), items, budget)
        assert (found is None) == (budget < least) or (found is None and budget < (peak + least) // 2)
        if found is None:
            continue
        assert alive(items, found).max() <= budget
        for i in found:
            rest = tuple(j for j in found if j is not i)
            assert alive(items, rest).max() > budget
