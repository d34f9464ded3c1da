"""The memory planner's solvers against brute force, on plain numbers."""

import itertools
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.passes.solve import blocks, chain, rotor, schedule
from dsc.passes.solve.activations import Op, Problem, Value, just_in_time, needed, simulate
from dsc.passes.solve.rotor import Option, Stage

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


# --- the chain's table -----------------------------------------------------------------------------------------------


def stages() -> st.SearchStrategy[list[Stage]]:
    number = st.integers(0, 4)
    option = st.builds(
        lambda a, f, b, fp, bp: Option(a, f + 1, b + 1, a + fp, bp), number, number, number, number, number
    )
    stage = st.builds(
        lambda e, g, os, once: Stage(e, g, tuple(os), min(once, *(o.nbytes for o in os))),
        number, st.integers(0, 2), st.lists(option, min_size=1, max_size=2), st.integers(0, 1),
    )  # fmt: skip
    return st.lists(stage, min_size=1, max_size=4)


def best(chain_of: list[Stage], room: int) -> float:
    """Every schedule of the model, tried out."""

    def more(o: Option, stage: Stage, rerun: bool) -> int:
        return o.nbytes - stage.once if rerun else o.nbytes

    @cache
    def run(i: int, j: int, m: int, rerun: bool) -> float:
        found = math.inf
        grads = sum(s.gradients for s in chain_of[i + 1 : j + 1])
        for o in chain_of[i].options:
            saved = more(o, chain_of[i], rerun)
            if i == j:
                lazy = rerun and saved == 0
                need = o.backward_peak if lazy else max(o.forward_peak, saved + o.backward_peak)
                if need <= m:
                    found = min(found, o.backward if lazy else o.forward + o.backward)
            elif max(o.forward_peak, saved + o.backward_peak + grads) <= m:
                rest = m - saved - chain_of[i + 1].enters
                if rest >= 0:
                    found = min(found, o.forward + o.backward + run(i + 1, j, rest, rerun))
        for k in range(i + 1, j + 1):
            peak = min(o.forward_peak for o in chain_of[i].options)
            for x in range(i + 1, k):
                peak = max(peak, chain_of[x].enters + min(o.forward_peak for o in chain_of[x].options))
            once = 0 if rerun else sum(s.once for s in chain_of[i:k])
            right = m - chain_of[k].enters - once
            left = m - sum(s.gradients for s in chain_of[k : j + 1]) - once
            if peak <= m and right >= 0 and left >= 0:
                again = sum(min(o.forward for o in s.options) for s in chain_of[i:k])
                found = min(found, again + run(k, j, right, rerun) + run(i, k - 1, left, True))
        return found

    return run(0, len(chain_of) - 1, room, False)


def with_extra(chain_of: list[Stage]) -> list[Stage]:
    """The bytes beyond ``once`` written out, as the planner does."""
    return [Stage(s.enters, s.gradients, tuple(_extra(o, s.once) for o in s.options), s.once) for s in chain_of]


def _extra(o: Option, once: int) -> Option:
    return Option(o.nbytes, o.forward, o.backward, o.forward_peak, o.backward_peak, o.nbytes - once)


@given(stages())
@SETTINGS
def test_the_table_is_the_best_of_all_schedules(chain_of: list[Stage]) -> None:
    table = rotor.solve(with_extra(chain_of), range(len(chain_of)), 1.0, 24)
    for m in range(25):
        assert table.time[m] == best(chain_of, m)


@given(stages())
@SETTINGS
def test_the_moves_take_the_time_of_the_table(chain_of: list[Stage]) -> None:
    table = rotor.solve(with_extra(chain_of), range(len(chain_of)), 1.0, 24)
    for m in range(0, 25, 3):
        if not math.isfinite(table.time[m]):
            continue
        seconds, done = 0.0, []
        for move in table.moves(m):
            options = chain_of[move.first].options
            if move.kind == "keep":
                seconds += options[move.option].forward
            elif move.kind == "back":
                seconds += options[move.option].backward
                done.append(move.first)
            else:
                seconds += sum(min(o.forward for o in s.options) for s in chain_of[move.first : move.last])
        assert done == list(reversed(range(len(chain_of))))
        assert seconds == table.time[m]


def test_alike_stretches_are_solved_once() -> None:
    one = Stage(2, 1, (Option(0, 2, 3, 3, 3), Option(4, 2, 2, 5, 1)))
    apart = rotor.solve([one] * 5, range(5), 1.0, 40)
    alike = rotor.solve([one] * 5, [0] * 5, 1.0, 40)
    assert apart.time.tolist() == alike.time.tolist()
    assert len({id(c) for c in alike.cells.values()}) == 5
    assert len({id(c) for c in apart.cells.values()}) == 15


# --- cuts ------------------------------------------------------------------------------------------------------------


def layered(layers: int = 4) -> Problem:
    """A residual stream: each layer a product of the stream, a cheap function of it, a product, and a sum.

    The backward of each reads the stream and the cheap function's result.
    """
    ops: list[Op] = []
    values = [Value("x", 64, -1, "input"), Value("dy", 64, -1, "tangent")]

    def add(name: str, reads: list[int], nbytes: int, **facts: object) -> int:
        values.append(Value(name, nbytes, len(ops)))
        given = {"seconds": 0.0, "forward": True, "again": True, "fuses": True, "what": name.rstrip("0123456789")}
        ops.append(Op(name, tuple((r, values[r].nbytes) for r in reads), (len(values) - 1,), **{**given, **facts}))  # type: ignore[arg-type]
        return len(values) - 1

    heavy = {"seconds": 50.0, "fuses": False, "heavy": True}
    stream, kept = add("embed", [0], 64), []
    for i in range(layers):
        up = add(f"up{i}", [stream], 256, **heavy)
        act = add(f"act{i}", [up], 256)
        down = add(f"down{i}", [act], 64, **heavy)
        kept.append((stream, up, act))
        stream = add(f"sum{i}", [stream, down], 64)
    grad, grads = 1, []
    for i, (x, up, act) in reversed(list(enumerate(kept))):
        behind = {"forward": False, "again": False}
        grads.append(add(f"gdown{i}", [grad, act], 128, **heavy | behind))
        dact = add(f"dact{i}", [grad], 256, **heavy | behind)
        dup = add(f"dup{i}", [dact, up], 256, **behind)
        grads.append(add(f"gup{i}", [dup, x], 128, **heavy | behind))
        dx = add(f"dx{i}", [dup], 64, **heavy | behind)
        grad = add(f"dsum{i}", [grad, dx], 64, **behind)
    return Problem(tuple(ops), tuple(values), frozenset({stream}), frozenset({*grads, grad}), 64.0, 0.1)


def cut_cost(problem: Problem, saved: frozenset[int], required: set[int], price: float) -> float:
    """Recompute time and the price of what is saved; infinite if something cannot be had."""
    script = needed(problem, sorted(required), saved)
    if any(not problem.ops[o].again for o in script):
        return math.inf
    time = 0.0
    for o in script:
        op = problem.ops[o]
        traffic = (sum(n for _, n in op.reads) + problem.nbytes(op.makes)) / problem.bandwidth
        time += max(op.seconds, traffic) + (0 if op.fuses else problem.launch) + 1e-9
    return time + price * problem.nbytes(saved)


@pytest.mark.parametrize("price", [0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 5.0])
def test_a_cut_is_the_best_of_all_sets(price: float) -> None:
    problem = layered(2)
    forward = [i for i, o in enumerate(problem.ops) if o.forward]
    made = [v for o in forward for v in problem.ops[o].makes]
    required = {v for o in problem.ops if not o.forward for v, _ in o.reads if v in made}
    cut = blocks.Cut(problem, forward, required, (), ())
    sets = itertools.chain.from_iterable(itertools.combinations(made, n) for n in range(len(made) + 1))
    want = min(cut_cost(problem, frozenset(s), required, price) for s in sets)
    assert cut_cost(problem, cut.solve(price, 1.0), required, price) == pytest.approx(want, rel=1e-6)


def test_what_must_not_run_twice_is_saved() -> None:
    problem = layered(2)
    ops = [Op(**{f: getattr(o, f) for f in o.__slots__} | {"again": not o.name.startswith("up")}) for o in problem.ops]
    problem = Problem(
        tuple(ops), *(getattr(problem, f) for f in ("values", "results", "gradients", "bandwidth", "launch"))
    )
    links = chain.find(problem)
    for k in range(len(links.blocks)):
        for choice in blocks.choices(problem, links, k):
            block = links.blocks[k]
            script = just_in_time(problem, block.backward, choice.saved | links.always | {block.enters, block.leaves})
            assert not any(problem.ops[o].name.startswith("up") for o in script)


# --- chains, schedules, the simulator --------------------------------------------------------------------------------


def test_a_residual_stream_is_a_chain_of_alike_blocks() -> None:
    links = chain.find(layered(6))
    assert len(links.blocks) == 6
    assert len(set(links.kinds[1:-1])) == 1
    assert not links.always


@pytest.mark.parametrize("m", [10, 20, 40, 80, 160])
def test_schedules_read_only_what_is_there(m: int) -> None:
    problem = layered(5)
    links = chain.find(problem)
    options = {k: blocks.choices(problem, links, k) for k in set(links.kinds)}
    choices = [tuple(blocks.alike(links, c, k, i) for c in options[k]) for i, k in enumerate(links.kinds)]
    costs = [
        Stage(
            problem.values[b.enters].nbytes if b.enters >= 0 else 0,
            b.gradients,
            tuple(Option(c.nbytes, c.forward, c.backward, c.forward_peak, c.backward_peak) for c in cs),
        )
        for b, cs in zip(links.blocks, choices)
    ]
    table = rotor.solve(costs, links.kinds, 32.0, 160)
    if table.least is None or m < table.least:
        return
    plan = schedule.spell(problem, links, choices, table.moves(m))
    have = set(plan.saved) | {v for v, x in enumerate(problem.values) if x.maker < 0}
    for o in plan.script:
        assert {v for v, _ in problem.ops[o].reads} <= have
        have.update(problem.ops[o].makes)
    assert problem.gradients <= have


def test_fused_temporaries_take_no_memory() -> None:
    problem = layered(1)
    script = [i for i, o in enumerate(problem.ops) if o.forward]
    held = simulate(problem, script, problem.results)
    assert held.groups == 5  # embed, up, act, down, sum: products are barriers
    assert held.peak == 64 + 256 + 256
    assert held.seconds == pytest.approx(50.1 * 2 + (512 + 192 + 128) / 64 + 0.3)


def test_cheap_values_are_computed_for_each_reader_anew() -> None:
    problem = layered(1)
    act = next(v for v, x in enumerate(problem.values) if x.name == "act0")
    assert act not in problem.cheap  # a product reads it
    assert needed(problem, [act], {next(v for v, x in enumerate(problem.values) if x.name == "up0")}) == [2]
