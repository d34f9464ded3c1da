"""The search for the fastest train step within a memory budget: proposals from a chain of blocks, checked as programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.fx import GraphModule

from dsc import cost, liveness
from dsc.liveness import Profile
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory_apply import halves
from dsc.passes.memory_measure import measure
from dsc.passes.memory_problem import Extracted
from dsc.passes.solve import blocks, chain, rotor, schedule
from dsc.passes.solve.activations import Problem, Stretch, simulate
from dsc.passes.solve.blocks import Choice
from dsc.passes.solve.chain import Chain
from dsc.passes.solve.rotor import Move, Table
from dsc.passes.solve.schedule import Schedule
from dsc.target import Target

SLOTS = 500
"""Amounts of memory that the table of the chain tells apart."""
ROUNDS = 4
"""How often what the chain chose is measured, and chosen anew."""
ATTEMPTS = 4
"""Programs of the chain that are tried for one budget."""
CUTS = 6
"""Prices of a byte for cuts of the whole forward."""
LARGE = 2500
"""Operators beyond which the whole forward is not cut at once: the chain finds as good plans in less time."""


@dataclass(frozen=True)
class Program:
    """One plan as the compiler will run it."""

    origin: str
    schedule: Schedule
    profile: Profile
    seconds: float

    @property
    def peak(self) -> int:
        return self.profile.peak


@dataclass
class Search:
    """All that is known of one joint graph; ``within`` finds the best program for a budget."""

    gm: GraphModule
    found: Extracted
    target: Target
    fused: bool = True
    """Whether the programs will have kernels of ours."""
    chain: Chain = field(init=False)
    default: Program = field(init=False)

    def __post_init__(self) -> None:
        problem = self.found.problem
        self.chain = chain.find(problem)
        self.kinds = self.chain.kinds
        self.measured: set[tuple[int, frozenset[int]]] = set()
        self.default = self.run(
            "default", schedule.from_saved(problem, set(problem.default - problem.barred) | self.must())
        )
        self._options: dict[int, list[Choice]] | None = None
        self._table: Table | None = None

    def must(self) -> set[int]:
        """Values that the backward reads and that must not be computed twice, or that the user wants saved."""
        problem = self.found.problem
        read = {v for op in problem.ops if not op.forward for v, _ in op.reads}
        return {
            v
            for v in read
            if (m := problem.values[v].maker) >= 0
            and problem.ops[m].forward
            and (not problem.ops[m].again or v in problem.pinned)
        }

    def run(self, origin: str, plan: Schedule) -> Program:
        """The program of a schedule: split, fused, with the bytes alive at each of its steps."""
        script = [self.found.nodes[o] for o in plan.script]
        kept = [self.found.values[v] for v in plan.saved]
        forward, backward, saved = halves(self.gm, self.found, kept, script)
        for graph in (forward, backward):
            for p in (Canonicalize(), Fuse()) if self.fused else ():
                p.run(graph, self.target)
        seconds = sum(cost.graph_cost(g, self.target).seconds for g in (forward, backward))
        return Program(origin, plan, liveness.profile_step(forward, backward, saved), seconds)

    # --- the chain -----------------------------------------------------------------------------------------------------

    def choices(self) -> dict[int, list[Choice]]:
        """The choices of each kind of block."""
        if self._options is None:
            problem = self.found.problem
            self._options = {k: list(blocks.choices(problem, self.chain, k)) for k in sorted(set(self.kinds))}
        return self._options

    def table(self) -> Table:
        """The fastest schedules of the chain for every amount of memory."""
        if self._table is None:
            problem, options = self.found.problem, self.choices()
            stages = []
            for k, block in zip(self.kinds, self.chain.blocks):
                first = self.chain.blocks[k]
                costs = tuple(
                    rotor.Option(
                        c.nbytes,
                        c.forward,
                        c.backward,
                        c.forward_peak,
                        c.backward_peak,
                        problem.nbytes(c.saved - first.once),
                    )
                    for c in options[k]
                )
                enters = problem.values[block.enters].nbytes if block.enters >= 0 else 0
                stages.append(rotor.Stage(enters, block.gradients, costs, problem.nbytes(block.once)))
            unit = max(self.default.peak - problem.fixed, 1) * 1.05 / SLOTS
            self._table = rotor.solve(stages, self.kinds, unit, SLOTS)
        return self._table

    def moves(self, room: float) -> list[Move] | None:
        """The fastest schedule of the chain within ``room`` bytes, by measured costs of what it uses."""
        for _ in range(ROUNDS):
            table = self.table()
            m = min(int((room - self.found.problem.nbytes(self.chain.always)) / table.unit), SLOTS)
            if table.least is None or m < table.least:
                return None
            moves = table.moves(m)
            if not self.refine(moves):
                break
        return moves

    def refine(self, moves: Sequence[Move]) -> bool:
        """Measure the choices that a schedule uses; whether any was new."""
        problem, options = self.found.problem, self.choices()
        new = False
        for move in moves:
            if move.kind != "back":
                continue
            k = self.kinds[move.first]
            choice = options[k][move.option]
            if (k, choice.saved) in self.measured:
                continue
            self.measured.add((k, choice.saved))
            real = blocks.score(problem, self.chain, self.chain.blocks[k], choice.saved, self.judge)
            if real is not None and real != choice:
                options[k][move.option] = real
                new = True
        if new:
            self._table = None
        return new

    def judge(self, script: Sequence[int], results: Collection[int], dying: Collection[int], held: int) -> Stretch:
        return measure(self.found, script, results, dying, held, self.target, self.fused)

    def spelled(self, moves: Sequence[Move]) -> Schedule:
        options = self.choices()
        needed_blocks = {m.first for m in moves}
        spread = [
            tuple(blocks.alike(self.chain, c, k, i) for c in options[k]) if i in needed_blocks else ()
            for i, k in enumerate(self.kinds)
        ]
        return schedule.spell(self.found.problem, self.chain, spread, moves)

    # --- the portfolio ---------------------------------------------------------------------------------------------------

    def within(self, budget: int) -> Program | None:
        """The fastest program found whose peak is at most ``budget`` bytes; None if there is none."""
        if self.default.peak <= budget:
            return self.default
        fits: list[Program] = [p for p in self.from_chain(budget) if p.peak <= budget]
        best = min((p.seconds for p in fits), default=float("inf"))
        fits += [p for p in self.others(budget, best) if p.peak <= budget]
        if not fits and (least := self.least()).peak <= budget:
            fits.append(least)
        return min(fits, key=lambda p: p.seconds, default=None)

    def from_chain(self, budget: int) -> Iterator[Program]:
        """Programs of the chain, nearer and nearer to the budget."""
        room = float(budget - self.found.problem.fixed)
        low, high = 0.0, float("inf")
        tried: set[Schedule] = set()
        for _ in range(ATTEMPTS):
            moves = self.moves(room)
            if moves is None:
                return
            plan = self.spelled(moves)
            if plan in tried or schedule.illegal(self.found.problem, plan):
                return
            tried.add(plan)
            program = self.run("chain", plan)
            yield program
            over = program.peak - budget
            if over <= 0:
                low = max(low, room)
                if -over <= 0.015 * (budget - self.found.problem.fixed):
                    return
                room = min(room - over * 0.95, (room + high) / 2)
            else:
                high = min(high, room)
                room = max(room - over * 1.02, (low + room) / 2)

    def others(self, budget: int, seconds: float) -> Iterator[Program]:
        """Full checkpointing and cuts of the whole forward, where they promise to be faster than ``seconds``."""
        problem = self.found.problem
        for origin, plan in self.proposals():
            if schedule.illegal(problem, plan):
                continue
            if self.estimate(plan) < seconds:
                yield self.run(origin, plan)

    def proposals(self) -> Iterator[tuple[str, Schedule]]:
        problem = self.found.problem
        moves = [Move("keep", i, option=0) for i in range(len(self.kinds))]
        back = [Move("back", i, option=0) for i in reversed(range(len(self.kinds)))]
        yield "checkpoint", self.spelled([*moves, *back])
        if len(problem.ops) > LARGE:
            return
        forward = [i for i, o in enumerate(problem.ops) if o.forward]
        must = self.must()
        read = {v for op in problem.ops if not op.forward for v, _ in op.reads}
        required = {v for v in read if (m := problem.values[v].maker) >= 0 and problem.ops[m].forward}
        cut = blocks.Cut(problem, forward, required, (), must)
        seen = set()
        for price in np.geomspace(1e-13, 1e-9, CUTS):
            saved = cut.solve(float(price), 0.05)
            if saved not in seen:
                seen.add(saved)
                yield "cut", schedule.from_saved(problem, set(saved))

    def estimate(self, plan: Schedule) -> float:
        """Seconds of a schedule by the simulator, in proportion to the default's."""
        problem = self.found.problem
        return self.default.seconds * _simulated(problem, plan) / _simulated(problem, self.default.schedule)

    def least(self) -> Program:
        """The program with the smallest peak that was found."""
        found = [self.default]
        table = self.table()
        for _ in range(ROUNDS):
            if table.least is None or not self.refine(table.moves(table.least)):
                break
            table = self.table()
        if table.least is not None:
            for m in (table.least, table.least + SLOTS // 50):
                plan = self.spelled(table.moves(min(m, SLOTS)))
                if not schedule.illegal(self.found.problem, plan):
                    found.append(self.run("chain", plan))
        for origin, plan in self.proposals():
            if origin == "checkpoint" and not schedule.illegal(self.found.problem, plan):
                found.append(self.run(origin, plan))
        return min(found, key=lambda p: (p.peak, p.seconds))


def _simulated(problem: Problem, plan: Schedule) -> float:
    again = simulate(problem, plan.script, problem.gradients)
    return again.seconds
