"""What one block of a chain may save for its backward: the choices that are best in time or in memory.

Proposals come from minimum cuts of ``recompute time + price * saved bytes`` over many prices, each exact with all
dependencies, and are scored by the simulator, which knows of fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dsc.passes.solve.activations import Problem, Stretch, just_in_time, needed, simulate
from dsc.passes.solve.chain import Block, Chain

PRICES = 16
"""Prices of a byte that are tried."""
CHOICES = 14
"""Choices kept for a block."""
FUSED = (0.05, 1.0)
"""What traffic a fusible operator is charged when it runs again, as a share of its own."""
WHOLE = 2**28
"""Capacity that stands for everything that can be cut."""


@dataclass(frozen=True, slots=True)
class Choice:
    saved: frozenset[int]
    """Values inside of the block; what enters it is not among them."""
    nbytes: int
    forward: float
    """Seconds."""
    backward: float
    forward_peak: int
    """Bytes at the worst moment of the forward, what is saved and what leaves included, what enters not."""
    backward_peak: int
    """Bytes at the worst moment of the backward, beyond what is saved and what enters."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def choices(problem: Problem, chain: Chain, k: int) -> tuple[Choice, ...]:
    """The choices of block ``k``, from the one that saves least to the one that saves most."""
    block = chain.blocks[k]
    inside = [v for o in block.forward for v in problem.ops[o].makes]
    free = chain.always | {block.enters, block.leaves}
    required = {v for o in block.backward for v, _ in problem.ops[o].reads if v in set(inside)} - free
    must = {v for v in required if not problem.ops[problem.values[v].maker].again or v in problem.pinned}
    cut = Cut(problem, block.forward, required, free, must)
    proposals = {frozenset(must), frozenset((problem.default - problem.barred) & set(inside) - free | must)}
    for share in FUSED:
        for price in np.geomspace(2e-14, 1e-8, PRICES):
            proposals.add(cut.solve(price, share))
    scored = {s: c for s in proposals if (c := score(problem, chain, block, s)) is not None}
    for c in pareto(scored.values()):
        for v in c.saved - must:
            dropped = c.saved - {v}
            if dropped not in scored and (other := score(problem, chain, block, dropped)) is not None:
                scored[dropped] = other
    return thinned(pareto(scored.values()))


Judge: TypeAlias = Callable[[Sequence[int], Collection[int], Collection[int], int], Stretch]
"""What gives the time and peak of a script, with its results, the inputs that die in it, and the bytes held."""


def score(
    problem: Problem, chain: Chain, block: Block, saved: frozenset[int], judge: Judge | None = None
) -> Choice | None:
    """What a choice costs; None if the backward would have to run something twice that must not.

    ``judge`` takes the place of the simulator.
    """
    judged: Judge = judge or (lambda *given: simulate(problem, *given))
    nbytes = problem.nbytes(saved)
    have = saved | chain.always | {block.enters, block.leaves}
    script = just_in_time(problem, block.backward, have)
    if any(problem.ops[o].forward and not problem.ops[o].again for o in script):
        return None
    inside = {v for o in block.forward for v in problem.ops[o].makes}
    kept = saved | (inside & (chain.always | problem.results | {block.leaves}))
    effects = [o for o in block.forward if o in problem.effects]
    run = set(needed(problem, sorted(kept), chain.always - inside | {block.enters})) | set(effects)
    ahead = judged([o for o in block.forward if o in run], kept, (), 0)
    hands_back = block.leaves >= 0 and any(v == block.leaves for o in script for v, _ in problem.ops[o].reads)
    dying = block.incoming | saved | ({block.leaves} if hands_back else set())
    held = problem.nbytes(dying)
    behind = judged(script, block.outgoing, dying, held)
    return Choice(saved, nbytes, ahead.seconds, behind.seconds, ahead.peak, behind.peak - nbytes)


def alike(chain: Chain, choice: Choice, source: int, target: int) -> Choice:
    """The choice of one block for another that is alike."""
    if source == target:
        return choice
    place = {v: i for i, v in enumerate(chain.blocks[source].local)}
    other = chain.blocks[target].local
    return replace(choice, saved=frozenset(other[place[v]] for v in choice.saved))


def pareto(found: Iterable[Choice]) -> list[Choice]:
    """Choices that no other one beats, or all but beats, in everything."""
    out: list[Choice] = []
    for c in sorted(found, key=lambda c: (c.nbytes, c.seconds)):
        worse = any(
            d.nbytes <= c.nbytes * 1.002
            and d.seconds <= c.seconds * 1.003 + 1e-9
            and d.nbytes + d.backward_peak <= (c.nbytes + c.backward_peak) * 1.01
            and d.forward_peak <= c.forward_peak * 1.01
            for d in out
        )
        if not worse:
            out.append(c)
    return out


def thinned(found: Sequence[Choice]) -> tuple[Choice, ...]:
    if len(found) <= CHOICES:
        return tuple(found)
    places = sorted({round(i * (len(found) - 1) / (CHOICES - 1)) for i in range(CHOICES)})
    return tuple(found[i] for i in places)


class Cut:
    """Minimum cuts of one stretch of the forward.

    Two decisions: an operator runs in the backward (its time), a value is there in the backward (its bytes times the
    price, if its operator does not run).  An operator that runs needs its operands.  Submodular, so one cut is exact.
    """

    def __init__(
        self,
        problem: Problem,
        forward: Sequence[int],
        required: Collection[int],
        free: Collection[int],
        must: Collection[int],
    ) -> None:
        self.problem, self.must = problem, frozenset(must)
        self.ops = list(forward)
        node: dict[tuple[str, int], int] = {("source", 0): 0, ("sink", 0): 1}
        rows: list[tuple[int, int, str, int]] = []

        def at(kind: str, i: int) -> int:
            return node.setdefault((kind, i), len(node))

        made = {v for o in forward for v in problem.ops[o].makes}
        for v in required:
            rows.append((at("value", v), 1, "whole", v))
        for o in forward:
            op = problem.ops[o]
            rows.append((0, at("op", o), "time" if op.again else "whole", o))
            for v in op.makes:
                rows.append((at("op", o), at("value", v), "bytes", v))
            for v, _ in op.reads:
                if v in made and v not in free:
                    rows.append((at("value", v), at("op", o), "whole", v))
        self.node = node
        self.heads = np.array([r[0] for r in rows])
        self.tails = np.array([r[1] for r in rows])
        self.kinds = [r[2] for r in rows]
        self.of = [r[3] for r in rows]

    def solve(self, price: float, fused: float) -> frozenset[int]:
        """Values to save at ``price`` seconds a byte."""
        from scipy.sparse import coo_array  # costs as much as compiling a small graph, and only a budget needs it
        from scipy.sparse.csgraph import maximum_flow

        capacity = self._capacity(price, fused)
        graph = coo_array((capacity, (self.heads, self.tails)), shape=(len(self.node), len(self.node))).tocsr()
        graph.sum_duplicates()
        graph.data = np.minimum(graph.data, WHOLE).astype(np.int32)
        left = graph - maximum_flow(graph, 0, 1).flow
        reached = _reached(left.tocsr())
        again = {o for o in self.ops if not reached[self.node["op", o]]}
        saved = set(self.must)
        for o in self.ops:
            if o not in again:
                saved.update(v for v in self.problem.ops[o].makes if not reached[self.node["value", v]])
        return frozenset(saved)

    def _capacity(self, price: float, fused: float) -> np.ndarray:
        problem = self.problem
        cost = np.zeros(len(self.kinds))
        for i, (kind, x) in enumerate(zip(self.kinds, self.of)):
            if kind == "time":
                op = problem.ops[x]
                traffic = sum(n for _, n in op.reads) + problem.nbytes(op.makes)
                moved = traffic / problem.bandwidth
                launch = 0.0 if op.fuses else problem.launch
                share = fused if op.fuses and not op.over else 1.0
                cost[i] = max(op.seconds, moved * share) + launch + 1e-9
            elif kind == "bytes":
                kept = x in self.must
                cost[i] = 0.0 if kept else -1.0 if x in problem.barred else price * problem.values[x].nbytes
            else:
                cost[i] = -1.0
        scale = 1e8 / max(float(cost[cost > 0].sum()), 1e-30)
        return np.where(cost < 0, WHOLE, np.round(np.minimum(cost * scale, 1e8))).astype(np.int64)


def _reached(graph: object) -> np.ndarray:
    """Nodes that the source still reaches."""
    indptr, indices, data = graph.indptr, graph.indices, graph.data  # type: ignore[attr-defined]
    seen = np.zeros(len(indptr) - 1, dtype=bool)
    seen[0] = True
    stack = [0]
    while stack:
        n = stack.pop()
        for e in range(indptr[n], indptr[n + 1]):
            if data[e] > 0 and not seen[indices[e]]:
                seen[indices[e]] = True
                stack.append(int(indices[e]))
    return seen
