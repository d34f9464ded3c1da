"""The search for the fastest train step within a memory budget: proposals from a chain of blocks, checked as programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch.fx import GraphModule

from dsc import cost, liveness
from dsc.liveness import Profile
from dsc.passes import memory_compress, memory_offload
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory_apply import halves
from dsc.passes.memory_measure import measure
from dsc.passes.memory_offload import Away
from dsc.passes.memory_problem import Extracted
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
MOVED = (0.3, 0.55, 0.75, 0.9, 1.1)
"""Shares of what the link can take while the forward runs: budgets larger by that are planned for, and then brought down."""
SHORTENED = (0.1, 0.25, 0.45)
"""Shares of the default's peak by which budgets are larger that are planned for, and then brought down by compression."""
AIMS = 3
"""How often less is aimed at because the program needs more than was foreseen."""
RUNS, RUNS_LARGE, LARGE = 6, 3, 1000
"""Programs that are made for one budget; fewer from so many operators on."""
PRICES = 16
"""Prices of a byte that are tried in cuts of the whole forward."""
FUSED = (0.05, 1.0)
"""What traffic a fusible operator is charged in them when it runs again, as a share of its own."""


@dataclass(frozen=True)
class Program:
    """One plan as the compiler will run it."""

    origin: str
    schedule: Schedule
    profile: Profile
    seconds: float
    away: tuple[Away, ...] = ()
    """Saved values that are not in the device's memory between forward and backward."""
    short: tuple[str, ...] = ()
    """Saved values that are compressed in between."""

    @property
    def peak(self) -> int:
        return self.profile.peak


class Halves(NamedTuple):
    forward: GraphModule
    backward: GraphModule
    saved: dict[str, int]
    """Input of the backward that has been saved -> place among the forward's results."""
    short: dict[str, str]
    """Compressed value -> the node that holds its short form."""


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

    def within(self, budget: int) -> Program | None:
        """The fastest program found whose peak is at most ``budget`` bytes; None if there is none."""
        found = [self.resident(budget), *self.compressing(budget), *self.moving(budget)]
        return min((p for p in found if p is not None), key=lambda p: p.seconds, default=None)

    def bases(self, budget: int, room: int, shares: Sequence[float]) -> list[Program]:
        """Programs for budgets larger by shares of ``room``, and the default one, the fastest first."""
        wider = [budget + int(room * share) for share in shares]
        found = [self.resident(b) for b in wider if b < self.default.peak]
        found.append(self.default if self.default.peak > budget else None)
        return sorted({p.schedule: p for p in found if p is not None}.values(), key=lambda p: p.seconds)

    def compressing(self, budget: int) -> Iterator[Program]:
        """Programs that recompute for a larger budget, and compress what does not fit then."""
        if self.format is None:
            return
        for base in self.bases(budget, self.default.peak - self.found.problem.fixed, SHORTENED):
            if (program := self.compressed(base, budget)) is not None:
                yield program

    def compressed(self, base: Program, budget: int) -> Program | None:
        """A program with so much of what it saves compressed that it fits."""
        assert self.format is not None
        pinned = {self.found.values[v].name for v in self.found.problem.pinned}
        forward, backward, saved, _ = self.build(base.schedule)
        aim = budget
        for _ in range(AIMS):
            short = memory_compress.plan(
                forward, backward, saved, self.found.results, aim, self.target, self.format, pinned
            )
            if short is None:
                return None
            program = self.run_short(base, short)
            if program.peak <= budget:
                return program
            aim -= int((program.peak - budget) * 1.05) + 1
        return None

    def run_short(self, base: Program, short: tuple[str, ...]) -> Program:
        forward, backward, saved, names = self.build(base.schedule, (), short)
        seconds = sum(cost.graph_cost(g, self.target).seconds for g in (forward, backward))
        profile = marked(liveness.profile_step(forward, backward, saved), names.values())
        origin = base.origin if base.origin != "default" else "no"
        return Program(f"{origin} recompute, {self.format}", base.schedule, profile, seconds, (), short)

    def moving(self, budget: int) -> Iterator[Program]:
        """Programs that recompute, or compress, for a larger budget, and move away what does not fit then."""
        if self.tier is None:
            return
        room = int(self.tier.bandwidth(self.target) * self.forward_seconds)
        for base in self.bases(budget, room, MOVED):
            if (program := self.moved(base, budget)) is not None:
                yield program
        for wider in {budget + int(room * share) for share in MOVED} if self.format is not None else ():
            for base in self.compressing(wider):
                if (program := self.moved(base, budget)) is not None:
                    yield program

    def moved(self, base: Program, budget: int) -> Program | None:
        """A program with so much of what it saves moved away that it fits."""
        assert self.tier is not None
        forward, backward, saved, names = self.build(base.schedule, (), base.short)
        known = {new: old for old, new in names.items()}
        scales = saved.keys() - known.keys() - {n.name for n in self.found.values}
        aim = budget
        for _ in range(AIMS):
            away = memory_offload.plan(
                forward, backward, saved, self.found.results, aim, self.target, self.tier, scales
            )
            if away is None:
                return None
            program = self.run_away(base, tuple(replace(a, name=known.get(a.name, a.name)) for a in away))
            if program.peak <= budget:
                return program
            aim -= int((program.peak - budget) * 1.05) + 1
        return None

    def run_away(self, base: Program, away: tuple[Away, ...]) -> Program:
        assert self.tier is not None
        forward, backward, saved, names = self.build(base.schedule, away, base.short)
        seconds = memory_offload.elapsed(forward, backward, self.target, self.tier)
        profile = marked(liveness.profile_step(forward, backward, saved), names.values())
        origin = base.origin if base.short else f"{base.origin if base.origin != 'default' else 'no'} recompute"
        return Program(f"{origin}, {self.tier.kind} offload", base.schedule, profile, seconds, away, base.short)

    def resident(self, budget: int) -> Program | None:
        """The fastest program with nothing moved away.

        The simulator says which plans are worth a look; the programs of the most promising ones decide.
        """
        if self.default.peak <= budget:
            return self.default
        guesses = [*self.proposals(), *self.from_chain(budget)]
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
        if not fits and (least := self.least()).peak <= budget:
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
        return [float(p) for p in np.geomspace(0.02 / problem.bandwidth, highest, PRICES)]

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
        for guess in self.proposals():
            if guess.origin == "checkpoint":
                found.append(self.run(guess.origin, guess.plan))
        least = min(found, key=lambda p: (p.peak, p.seconds))
        if self.format is not None:
            least = self.lowered(least, self.compressed)
        return least if self.tier is None else self.lowered(least, self.moved)

    def lowered(self, base: Program, by: Callable[[Program, int], Program | None]) -> Program:
        """The smallest peak that is left of a program if values move away, or are compressed."""
        best, low, high = base, self.found.problem.fixed, base.peak
        for _ in range(AIMS * 2):
            middle = (low + high) // 2
            program = by(base, middle)
            if program is None:
                low = middle
            else:
                best, high = program, min(program.peak, middle)
        return best


def marked(profile: Profile, names: Collection[str]) -> Profile:
    """A profile that tells short forms from values that are saved as they are."""
    values = tuple(
        replace(v, kind="compressed") if v.kind == "saved" and v.name in names else v for v in profile.values
    )
    return replace(profile, values=values)


def _simulated(problem: Problem, plan: Schedule) -> tuple[int, float]:
    """Peak and seconds of forward and backward in the eyes of the simulator."""
    forward = [o for o, op in enumerate(problem.ops) if op.forward]
    dying = [v for v in plan.saved if v not in problem.results]
    ahead = simulate(problem, forward, problem.results | set(plan.saved))
    behind = simulate(problem, plan.script, problem.gradients, dying, problem.nbytes(plan.saved))
    return problem.fixed + max(ahead.peak, behind.peak), ahead.seconds + behind.seconds
