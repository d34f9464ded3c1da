"""A forward as a chain of blocks, each handing one value to the next, and what of the backward belongs to which.

Blocks that do the same on the same sizes are alike: what is decided for one holds for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsc.passes.solve.activations import Problem

SMALL = 100
"""A value that is this many times smaller than the largest one does not count as crossing a border."""
LONG = 0.3
"""A value read over this share of the forward, and computed from inputs by cheap operators, belongs to no block."""


@dataclass(frozen=True)
class Block:
    enters: int
    """The value that it gets from the block before; -1 for the first, which reads the graph's inputs alone."""
    leaves: int
    """The value that it hands on; -1 for the last."""
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    incoming: frozenset[int]
    """What its backward reads of later blocks' backwards, gradients of parameters left out."""
    outgoing: frozenset[int]
    """What its backward makes for earlier blocks, or as a gradient."""
    gradients: int
    """Bytes of the gradients of parameters and inputs that its backward makes."""
    key: object
    """Equal for blocks that are alike."""
    local: tuple[int, ...]
    """Its values in an order that is the same in all blocks that are alike."""
    once: frozenset[int]
    """Values that it makes which must not be computed again, and that somebody reads; those that the user wants saved."""


@dataclass(frozen=True)
class Chain:
    blocks: tuple[Block, ...]
    always: frozenset[int]
    """Values of the forward that blocks read which do not make them: they are saved whatever the plan."""

    @property
    def kinds(self) -> tuple[int, ...]:
        """A number for each block, equal for those that are alike: the first such block."""
        first: dict[object, int] = {}
        return tuple(first.setdefault(b.key, i) for i, b in enumerate(self.blocks))


def find(problem: Problem) -> Chain:
    """The chain of a problem; a graph that cannot be cut is a chain of one block.

    1. The forward is cut where one value alone crosses, the smallest one between two heavy operators.
    2. Small values, and cheap ones that the whole forward reads, may cross too: they are always saved.
    3. A backward operator belongs to the last block whose values it reads, and to no later one than its predecessor.
    """
    forward = [i for i, o in enumerate(problem.ops) if o.forward]
    backward = [i for i, o in enumerate(problem.ops) if not o.forward]
    last = _last_reads(problem, forward)
    free = _free(problem, forward, last)
    cuts = _cuts(problem, forward, last, free)
    home = _homes(problem, forward, [at for at, _ in cuts])
    enters = [-1, *(v for _, v in cuts)]
    owner = _owners(problem, backward, home, enters, free)
    return _chain(problem, forward, backward, home, owner, enters, free)


def _last_reads(problem: Problem, forward: list[int]) -> dict[int, int]:
    """Value of the forward -> place of its last reader there, or of its maker."""
    last: dict[int, int] = {}
    for at, o in enumerate(forward):
        for v in problem.ops[o].makes:
            last[v] = at
        for v, _ in problem.ops[o].reads:
            if v in last:
                last[v] = at
    return last


def _free(problem: Problem, forward: list[int], last: Mapping[int, int]) -> frozenset[int]:
    """Values that may cross any border."""
    made = {v: at for at, o in enumerate(forward) for v in problem.ops[o].makes}
    largest = max((problem.values[v].nbytes for v in made), default=0)
    deep: set[int] = set()
    for o in forward:
        op = problem.ops[o]
        if op.heavy or any(v in deep for v, _ in op.reads):
            deep.update(op.makes)
    long = {v for v in made if v not in deep and last[v] - made[v] > LONG * len(forward) and len(forward) > 60}
    return frozenset(long | {v for v in made if problem.values[v].nbytes * SMALL < largest})


def _cuts(problem: Problem, forward: list[int], last: Mapping[int, int], free: frozenset[int]) -> list[tuple[int, int]]:
    """Places after which the forward is cut, each with the value that crosses there."""
    ends: dict[int, list[int]] = {}
    for v, at in last.items():
        ends.setdefault(at, []).append(v)
    alive: set[int] = set()
    cuts: list[tuple[int, int]] = []
    best: tuple[int, int] | None = None
    heavy = False
    for at, o in enumerate(forward[:-1]):
        op = problem.ops[o]
        if op.heavy:
            if best is not None and heavy:
                cuts.append(best)
            best, heavy = None, True
        alive.update(v for v in op.makes if last[v] > at and v not in free)
        alive.difference_update(ends.get(at, ()))
        if len(alive) == 1 and heavy:
            (v,) = alive
            if v not in problem.barred and (best is None or problem.values[v].nbytes <= problem.values[best[1]].nbytes):
                best = (at, v)
    return cuts


def _homes(problem: Problem, forward: list[int], cuts: list[int]) -> dict[int, int]:
    """Value of the forward -> the block that makes it."""
    home: dict[int, int] = {}
    k = 0
    for at, o in enumerate(forward):
        for v in problem.ops[o].makes:
            home[v] = k
        if k < len(cuts) and cuts[k] == at:
            k += 1
    return home


def _owners(
    problem: Problem, backward: list[int], home: Mapping[int, int], enters: list[int], free: frozenset[int]
) -> dict[int, int]:
    """Backward operator -> its block."""
    owner: dict[int, int] = {}
    now = len(enters) - 1
    for o in backward:
        own = [
            home[v]
            for v, _ in problem.ops[o].reads
            if v in home and v not in free and enters[min(home[v] + 1, len(enters) - 1)] != v
        ]
        now = min(now, max(own)) if own else now
        owner[o] = now
    return owner


def _chain(
    problem: Problem,
    forward: list[int],
    backward: list[int],
    home: Mapping[int, int],
    owner: Mapping[int, int],
    enters: list[int],
    free: frozenset[int],
) -> Chain:
    count = len(enters)
    leaves = [*enters[1:], -1]
    ahead: list[list[int]] = [[] for _ in range(count)]
    behind: list[list[int]] = [[] for _ in range(count)]
    k = 0
    for o in forward:
        makes = problem.ops[o].makes
        k = home[makes[0]] if makes else k
        ahead[k].append(o)
    made_by = {}
    for o in backward:
        behind[owner[o]].append(o)
        made_by.update(dict.fromkeys(problem.ops[o].makes, owner[o]))
    always: set[int] = set()
    incoming: list[set[int]] = [set() for _ in range(count)]
    outgoing: list[set[int]] = [set() for _ in range(count)]
    for k in range(count):
        for o in (*ahead[k], *behind[k]):
            for v, _ in problem.ops[o].reads:
                if v in home and home[v] != k and v not in (enters[k], leaves[k]):
                    always.add(v)
                if (j := made_by.get(v, k)) != k:
                    outgoing[j].add(v)
                    if v not in problem.gradients:
                        incoming[k].add(v)
    grads = [0] * count
    for v in problem.gradients:
        if v in made_by:
            outgoing[made_by[v]].add(v)
            grads[made_by[v]] += problem.values[v].nbytes
    blocks = []
    read = {v for op in problem.ops for v, _ in op.reads} - always
    wanted = {v for op in problem.ops if not op.forward for v, _ in op.reads} - always
    for k in range(count):
        made = [v for o in ahead[k] for v in problem.ops[o].makes]
        key, local = _key(problem, ahead[k], behind[k], enters[k], leaves[k], frozenset(always))
        blocks.append(
            Block(
                enters[k],
                leaves[k],
                tuple(ahead[k]),
                tuple(behind[k]),
                frozenset(incoming[k]),
                frozenset(outgoing[k]),
                grads[k],
                key,
                local,
                frozenset(v for v in made if v in read and not problem.ops[problem.values[v].maker].again)
                | (problem.pinned & wanted).intersection(made),
            )
        )
    return Chain(tuple(blocks), frozenset(always))


def _key(
    problem: Problem, ahead: Iterable[int], behind: Iterable[int], enters: int, leaves: int, always: frozenset[int]
) -> tuple[object, tuple[int, ...]]:
    """What tells a block from others, without names, and its values in order."""
    number: dict[int, int] = {}
    lines: list[object] = []

    def ref(v: int) -> object:
        if v == enters:
            return "enters"
        value = problem.values[v]
        return number.get(v, (value.kind, value.nbytes, v in always))

    for o in (*ahead, *behind):
        op = problem.ops[o]
        lines.append((op.what, op.forward, op.again, op.seconds, *((ref(v), n) for v, n in op.reads)))
        for v in op.makes:
            number[v] = len(number)
            marks = (v == leaves, v in always, v in problem.results, v in problem.gradients, v in problem.default)
            lines.append((problem.values[v].nbytes, v in problem.pinned, v in problem.barred, *marks))
    return hash(tuple(lines)), tuple(number)
