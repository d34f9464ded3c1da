"""The search for the fastest train step within a memory budget: proposals from a chain of blocks, checked as programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch.fx import GraphModule

from dsc import collector, cost, liveness
from dsc.passes import memory_away, memory_compress, memory_offload
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory_apply import halves
from dsc.passes.memory_measure import measure
from dsc.passes.memory_offload import Away
from dsc.passes.memory_problem import Extracted
from dsc.passes.memory_program import Halves, Program
from dsc.passes.solve import blocks, chain, rotor, schedule
from dsc.passes.solve.activations import Problem, Stretch, simulate
from dsc.passes.solve.blocks import Choice
from dsc.passes.solve.chain import Chain
from dsc.passes.solve.rotor import Move, Table
from dsc.passes.solve.schedule import Schedule
from dsc.target import Target
from dsc.tiers import Tier

SLOTS = 500
"""Amounts of memory that the table of the chain tells apart."""
ROUNDS = 4
"""How often what the chain chose is measured, and chosen anew."""
SLACK = 0.02
"""By how much the simulator may think a plan slower or larger than the program is."""
NEAR = 0.04
"""How far above the budget a guess may be that is tried when nothing else is left to try."""
ATTEMPTS = 8
"""Plans of the chain that are simulated for one budget."""
RUNS, RUNS_LARGE, LARGE = 6, 3, 1000
"""Programs that are made for one budget; fewer from so many operators on."""
SMALL = 200
"""Operators up to which one set of programs serves all budgets."""
AROUND, SPREAD = 500, (0.9, 0.92, 0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.13)
"""Operators up to which plans of the chain for more and less memory are tried too, and how much: it knows nothing of what a
product takes into its kernel, so a plan for another budget may well be better than the one for this."""
RUNGS = (0.0, 0.12, 0.25, 0.37, 0.5, 0.62, 0.75, 0.88)
"""Budgets for which that is made: shares of the way from the smallest peak to the default's."""
PRICES = 16
"""Prices of a byte that are tried in cuts of the whole forward."""
FUSED = (0.05, 1.0)
"""What traffic a fusible operator is charged in them when it runs again, as a share of its own."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What the simulator thinks of a plan."""

    origin: str
    plan: Schedule
    peak: int
    seconds: float


@dataclass
class Search:
    """All that is known of one joint graph; ``within`` finds the best program for a budget."""

    gm: GraphModule
    found: Extracted
    target: Target
    fused: bool = True
    """Whether the programs will have kernels of ours."""
    tier: Tier | None = None
    """Where saved values may be moved."""
    format: str | None = None
    """In which saved values may be compressed."""
    chain: Chain = field(init=False)
    default: Program = field(init=False)
    forward_seconds: float = field(init=False)
    """Of a forward, whatever it saves."""

    @collector.paused()
    def __post_init__(self) -> None:
        problem = self.found.problem
        self.chain = chain.find(problem)
        self.kinds = self.chain.kinds
        self.measured: set[tuple[int, frozenset[int]]] = set()
        self.runs: dict[Schedule, Program] = {}
        """All programs that were made."""
        self.default = self.run(
            "default", schedule.from_saved(problem, set(problem.default - problem.barred) | self.must())
        )
        self._proposals: list[Guess] | None = None
        self._off: tuple[int, float] | None = None
        self._options: dict[int, list[Choice]] | None = None
        self._table: Table | None = None
        self._ladder: Sequence[Program] | None = None

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
        if plan not in self.runs:
            forward, backward, saved, _ = self.build(plan)
            ahead, behind = (cost.graph_cost(g, self.target).seconds for g in (forward, backward))
            self.forward_seconds, seconds = ahead, ahead + behind
            self.runs[plan] = Program(origin, plan, liveness.profile_step(forward, backward, saved), seconds)
        return self.runs[plan]

    def build(self, plan: Schedule, away: tuple[Away, ...] = (), short: tuple[str, ...] = ()) -> Halves:
        """The graphs of a plan as the compiler will run them."""
        script = [self.found.nodes[o] for o in plan.script]
        kept = [self.found.values[v] for v in plan.saved]
        forward, backward, saved = halves(self.gm, self.found, kept, script)
        names: dict[str, str] = {}
        if short and self.format is not None:
            formats = dict.fromkeys(short, self.format)
            saved, names = memory_compress.install(forward, backward, formats, self.found.results, saved)
        if away and self.tier is not None:
            away = tuple(replace(a, name=names.get(a.name, a.name)) for a in away)
            renamed = memory_offload.install(forward, backward, away, self.tier, self.found.results)
            saved = {renamed.get(name, name): place for name, place in saved.items()}
        for graph in (forward, backward):
            for p in (Canonicalize(), Fuse()) if self.fused else ():
                p.run(graph, self.target)
        return Halves(forward, backward, saved, names)

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

    @collector.paused()
    def within(self, budget: int) -> Program | None:
        """The fastest program found whose peak is at most ``budget`` bytes; None if there is none."""
        found = [self.resident(budget), *memory_away.compressing(self, budget), *memory_away.moving(self, budget)]
        return min((p for p in found if p is not None), key=lambda p: p.seconds, default=None)

    def resident(self, budget: int) -> Program | None:
        """The fastest program with nothing moved away.

        Of a small graph, the same programs are weighed for every budget: those found for a few fixed ones.  So a tighter
        budget never has a larger peak than a looser one, nor less time.
        """
        if self.default.peak <= budget:
            return self.default
        if len(self.found.problem.ops) >= SMALL:
            return self.searched(budget)
        fits = [p for p in self.ladder() if p.peak <= budget]
        return min(fits, key=lambda p: (p.seconds, p.peak), default=None)

    def ladder(self) -> Sequence[Program]:
        """All programs that searches for the budgets of ``RUNGS`` make, and the least one."""
        if self._ladder is None:
            lowest = self.least_resident().peak
            for share in RUNGS:
                self.searched(int(lowest + (self.default.peak - lowest) * share))
            self._ladder = tuple(self.runs.values())
        return self._ladder

    def searched(self, budget: int) -> Program | None:
        """The fastest program that a search for this budget finds, or one before did.

        The simulator says which plans are worth a look; the programs of the most promising ones decide.
        """
        guesses = [*self.proposals(), *self.from_chain(budget)]
        if len(self.found.problem.ops) < AROUND:
            guesses += self.around(budget)
        fits: list[Program] = []
        aims = {budget}
        enough = RUNS if len(self.found.problem.ops) < LARGE else RUNS_LARGE
        for count in range(2 * RUNS):
            if count >= enough and fits:
                break
            best = min((p.seconds for p in fits), default=float("inf"))
            untried = [g for g in guesses if g.plan not in self.runs and g.seconds < best * (1 + SLACK)]
            new = [g for g in untried if g.peak <= budget]
            if not new:  # the simulator may think too badly of what promises more
                new = [g for g in untried if g.peak <= budget * (1 + NEAR) and g.seconds < best]
            if not new:
                break
            guess = min(new, key=lambda g: g.seconds)
            program = self.run(guess.origin, guess.plan)
            if program.peak <= budget:
                fits.append(program)
            off = program.peak - guess.peak
            guesses = [replace(g, peak=g.peak + off) if g.origin == guess.origin else g for g in guesses]
            if guess.origin == "chain" and (aim := budget - off) not in aims:
                aims.add(aim)
                guesses += [replace(g, peak=g.peak + off) for g in self.from_chain(aim)]
        fits += [p for p in self.runs.values() if p.peak <= budget]
        if not fits and (least := self.least_resident()).peak <= budget:
            fits.append(least)
        return min(fits, key=lambda p: (p.seconds, p.peak), default=None)

    def from_chain(self, budget: int) -> Iterator[Guess]:
        """Plans of the chain that the simulator thinks to fit, nearer and nearer to the budget."""
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
            guess = self.guess("chain", plan)
            over = guess.peak - budget
            if over <= budget * NEAR:
                yield guess
            if over <= 0:
                low = max(low, room)
                if -over <= 0.004 * (budget - self.found.problem.fixed):
                    return
                room = min(room - over * 0.95, (room + high) / 2)
            else:
                high = min(high, room)
                less = max(over * 1.02, 1.01 * self.table().unit)  # one step of the table, or the plan is the same
                room = max(room - less, (low + room) / 2)

    def around(self, budget: int) -> Iterator[Guess]:
        """Plans of the chain for amounts of memory near the budget, whatever the simulator thinks of their peaks."""
        for share in SPREAD:
            moves = self.moves((budget - self.found.problem.fixed) * share)
            if moves is not None and not schedule.illegal(self.found.problem, plan := self.spelled(moves)):
                yield self.guess("chain", plan)

    def guess(self, origin: str, plan: Schedule) -> Guess:
        """What the simulator thinks of a plan, set right by what it thinks of the default."""
        peak, seconds = _simulated(self.found.problem, plan)
        if self._off is None:
            known = _simulated(self.found.problem, self.default.schedule)
            self._off = self.default.peak - known[0], self.default.seconds - known[1]
        return Guess(origin, plan, peak + self._off[0], seconds + self._off[1])

    def proposals(self) -> list[Guess]:
        """Plans that owe nothing to the chain's table."""
        if self._proposals is None:
            found = {plan: origin for origin, plan in self._proposed()}
            legal = [plan for plan in found if not schedule.illegal(self.found.problem, plan)]
            self._proposals = [self.guess(found[plan], plan) for plan in legal]
        return self._proposals

    def _proposed(self) -> Iterator[tuple[str, Schedule]]:
        problem = self.found.problem
        moves = [Move("keep", i, option=0) for i in range(len(self.kinds))]
        back = [Move("back", i, option=0) for i in reversed(range(len(self.kinds)))]
        yield "checkpoint", self.spelled([*moves, *back])
        forward = [i for i, o in enumerate(problem.ops) if o.forward]
        must = self.must()
        read = {v for op in problem.ops if not op.forward for v, _ in op.reads}
        required = {v for v in read if (m := problem.values[v].maker) >= 0 and problem.ops[m].forward}
        cut = blocks.Cut(problem, forward, required, (), must)
        for saved in {cut.solve(price, share): None for share in FUSED for price in self.prices()}:
            yield "cut", schedule.from_saved(problem, set(saved))

    def prices(self) -> list[float]:
        """Seconds for a byte: from far less than it takes to move one, to what a launch for a small value costs."""
        problem = self.found.problem
        sizes = sorted(v.nbytes for v in problem.values if v.maker >= 0) or [1]
        highest = max(200 / problem.bandwidth, 4 * problem.launch / max(sizes[len(sizes) // 2], 1))
        count = PRICES if len(problem.ops) < LARGE else PRICES // 2
        return [float(p) for p in np.geomspace(0.02 / problem.bandwidth, highest, count)]

    @collector.paused()
    def least(self) -> Program:
        """The program with the smallest peak that was found."""
        least = self.least_resident()
        if self.format is not None:
            least = memory_away.lowered(self, least, memory_away.compressed)
        return least if self.tier is None else memory_away.lowered(self, least, memory_away.moved)

    def least_resident(self) -> Program:
        """The one with nothing moved away, and nothing compressed."""
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
        for guess in self.proposals():
            if guess.origin == "checkpoint":
                found.append(self.run(guess.origin, guess.plan))
        return min(found, key=lambda p: (p.peak, p.seconds))


def _simulated(problem: Problem, plan: Schedule) -> tuple[int, float]:
    """Peak and seconds of forward and backward in the eyes of the simulator."""
    forward = [o for o, op in enumerate(problem.ops) if op.forward]
    dying = [v for v in plan.saved if v not in problem.results]
    ahead = simulate(problem, forward, problem.results | set(plan.saved))
    behind = simulate(problem, plan.script, problem.gradients, dying, problem.nbytes(plan.saved))
    return problem.fixed + max(ahead.peak, behind.peak), ahead.seconds + behind.seconds
