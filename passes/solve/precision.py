"""A multiple-choice knapsack: one option for each group, least total cost, total weight within a limit.

Exact, by HiGHS.  Kellerer, Pferschy and Pisinger, "Knapsack Problems", 2004, chapter 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GAP = 1e-9
"""Relative distance from the optimum at which the search ends."""


@dataclass(frozen=True, slots=True)
class Option:
    cost: float
    weight: float


def solve(groups: Sequence[Sequence[Option]], limit: float) -> tuple[int, ...] | None:
    """The place of the chosen option in each group; None if even the lightest ones are too heavy together."""
    if not groups:
        return ()
    if sum(min(o.weight for o in g) for g in groups) > limit:
        return None
    kept = [front(g) for g in groups]
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    flat = [(i, groups[i][k]) for i, ks in enumerate(kept) for k in ks]
    top = max(o.cost for _, o in flat) or 1.0
    heavy = limit or max(o.weight for _, o in flat) or 1.0
    one = csr_array(([1.0] * len(flat), ([i for i, _ in flat], range(len(flat)))), shape=(len(groups), len(flat)))
    constraints = [
        LinearConstraint(one, 1, 1),
        LinearConstraint(np.array([[o.weight / heavy for _, o in flat]]), -np.inf, limit / heavy),
    ]
    found = milp(
        np.array([o.cost / top for _, o in flat]),
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": GAP, "time_limit": 20.0},
    )
    if found.x is None:
        return lightest(groups)
    choice = [0] * len(groups)
    at = 0
    for i, ks in enumerate(kept):
        choice[i] = ks[int(np.argmax(found.x[at : at + len(ks)]))]
        at += len(ks)
    return repaired(groups, kept, choice, limit)


def front(options: Sequence[Option]) -> list[int]:
    """Places of the options that no other one beats in both cost and weight, the lightest first."""
    order = sorted(range(len(options)), key=lambda k: (options[k].weight, options[k].cost, k))
    out: list[int] = []
    for k in order:
        if not out or options[k].cost < options[out[-1]].cost:
            out.append(k)
    return out


def lightest(groups: Sequence[Sequence[Option]]) -> tuple[int, ...]:
    return tuple(min(range(len(g)), key=lambda k: (g[k].weight, g[k].cost)) for g in groups)


def repaired(
    groups: Sequence[Sequence[Option]], kept: Sequence[Sequence[int]], choice: list[int], limit: float
) -> tuple[int, ...]:
    """The solver keeps the limit to within its tolerance only: take lighter options, at the least price, until it holds."""
    while sum(g[k].weight for g, k in zip(groups, choice)) > limit:
        steps = [
            (
                (groups[i][k].cost - groups[i][choice[i]].cost) / (groups[i][choice[i]].weight - groups[i][k].weight),
                i,
                k,
            )
            for i, ks in enumerate(kept)
            for k in ks
            if groups[i][k].weight < groups[i][choice[i]].weight
        ]
        if not steps:
            return lightest(groups)
        _, i, k = min(steps)
        choice[i] = k
    return tuple(choice)
