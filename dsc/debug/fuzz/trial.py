"""Programs through the compiler and eager.

Many independent ones are compiled as one graph: a call of the C++ compiler costs more than they do.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsc.debug.fuzz import noise, rules
from dsc.debug.fuzz.observe import (
    Seen,
    gradients,
    in_eager,
    in_float64,
    random_state,
    seen,
    set_random_state,
    wants_gradient,
)
from dsc.debug.fuzz.program import Program, World, execute
from dsc.errors import DscWarning
from dsc.torch_shim import aot_autograd

SEED = 1234
"""Of the random numbers of every run."""

REFUSED = "refused by Dynamo: "
"""What verdicts of programs begin with that ``torch.compile(backend="eager")`` cannot trace either: no fault of ours."""

LEFT = "left to eager: "
"""What verdicts of programs begin with that dsc runs in eager after a warning, since AOTAutograd cannot trace them."""

UPSTREAM = " (aot_eager differs in the same place)"
"""What verdicts end with where PyTorch's own tracing is wrong: ours to detect or to repair all the same."""

TRITON_GRAIN = {**noise.GRAIN, torch.float32: 2.0**-16, torch.float64: 1e-11}
"""Elementary functions in Triton are a few parts in 10^6 off (see ``dsc.codegen.triton_math``)."""


def check(p: Program, options: Mapping[str, Any] | None = None) -> str | None:
    return check_all([p], options)[0]


def is_fault(verdict: str | None) -> bool:
    """Whether it says of dsc that it was wrong."""
    return verdict is not None and not verdict.startswith((REFUSED, LEFT))


def check_all(programs: Sequence[Program], options: Mapping[str, Any] | None = None) -> list[str | None]:
    """What is wrong with each, all compiled as one graph; alone where the whole fails.

    All must have the same worlds.
    """
    assert len({(str(p.worlds), p.marked) for p in programs}) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", DscWarning)  # falling back would hide a fault
        return _checked(programs, options)


def _checked(programs: Sequence[Program], options: Mapping[str, Any] | None) -> list[str | None]:
    out = _tried(programs, "dsc", options)
    if out is None and len(programs) > 1:
        half = len(programs) // 2
        return [*_checked(programs[:half], options), *_checked(programs[half:], options)]
    assert out is not None
    for i, (p, why) in enumerate(zip(programs, out)):
        if why is None or not is_fault(why):
            continue
        if len(programs) > 1:
            out[i] = _checked([p], options)[0] or f"{why} (only together with others)"
        elif (theirs := _tried(programs, "aot_eager", None)) is not None and _place(theirs[0]) == _place(why):
            out[i] = why + UPSTREAM
    return out


def _place(verdict: str | None) -> str:
    """What differs: ``result 0``, ``gradient 1``, ``memory shared by ...``."""
    return (verdict or "").split(":")[0].split(" (")[0]


def _tried(programs: Sequence[Program], backend: str, options: Mapping[str, Any] | None) -> list[str | None] | None:
    """A verdict each; None if there are several and one of them raises.

    dsc runs twice, and takes what it compiled from the disk the second time, the worlds in the opposite order.
    """
    if backend != "dsc":
        return _verdict(programs, backend, None, [])
    given = dict(options or {})
    with tempfile.TemporaryDirectory() as folder:
        chosen = {**given, "cache": True, "cache_dir": folder}
        graphs: list[object] = []
        compile_graph: Any = torch._dynamo.lookup_backend("dsc")

        def counting(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            graphs.append(gm)
            done: Callable[..., Any] = compile_graph(gm, inputs, options=chosen)
            return done

        once = _verdict(programs, counting, None, graphs)
        if once is None or any(map(is_fault, once)) or "on_compile" in given:  # what is watched is not kept
            return once
        turned = [replace(p, worlds=p.worlds[::-1]) for p in programs]
        again = _verdict(turned, backend, chosen, [])
    if again is None:
        return ["it raises once it was kept on disk" for _ in once]
    return [a if b is None else f"{b} (once it was kept on disk)" for a, b in zip(once, again)]


def _verdict(
    programs: Sequence[Program], backend: Any, options: Mapping[str, Any] | None, graphs: Sequence[object]
) -> list[str | None] | None:
    """Of one run in every world; ``graphs`` grows with every compilation."""
    torch._dynamo.reset()
    try:
        fn = compiled(programs, backend, options)
        runs, counts = [], []
        for world in programs[0].worlds:
            runs.append(run(fn, programs, world))
            counts.append(len(graphs))
    except Exception as why:
        return [refused(programs[0], why)] if len(programs) == 1 else None
    triton = (options or {}).get("emit") == "triton" or torch.get_default_device().type == "cuda"
    grain = TRITON_GRAIN if triton else noise.GRAIN
    out = _verdicts(programs, runs, grain)
    if len(programs) == 1 and out[0] is None and counts[-1] > counts[0]:
        return [_compiled_again(programs[0], counts[-1] - counts[0])]
    return out


def compiled(programs: Sequence[Program], backend: Any, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """All programs as one function of all their inputs, which gives a tuple of results each."""
    source = "\n".join(p.source(f"program_{i}") for i, p in enumerate(programs))
    calls, start = [], 0
    for i, p in enumerate(programs):
        stop = start + len(p.inputs)
        calls.append(f"program_{i}({', '.join(f'x{k}' for k in range(start, stop))}), ")
        start = stop
    source += f"\ndef together({', '.join(f'x{i}' for i in range(start))}):\n    return ({''.join(calls)})\n"
    dynamic = True if len(programs[0].worlds) > 1 and not programs[0].marked else None
    chosen = dict(options) if options else None
    fn = execute(source)["together"]
    return torch.compile(fn, backend=backend, options=chosen, fullgraph=True, dynamic=dynamic)


def run(fn: Callable[..., Any], programs: Sequence[Program], world: World) -> tuple[list[Seen], torch.Tensor]:
    """What each program shows, and the random state afterwards."""
    inputs = [p.tensors(world) for p in programs]
    for p, tensors in zip(programs, inputs):
        mark(p, tensors)
    flat = [t for ts in inputs for t in ts]
    torch.manual_seed(SEED)
    results = fn(*flat)
    grads = gradients([r for p, rs in zip(programs, results) for r in p.used(rs)], flat)
    state, rest, out = random_state(), iter(grads), []
    for p, ts, rs in zip(programs, inputs, results):
        mine = [next(rest, None) for t in ts if wants_gradient(t)]
        out.append(seen(rs, mine if any(r.requires_grad for r in p.used(rs)) else [], ts))
    return out, state


def mark(p: Program, tensors: Sequence[torch.Tensor]) -> None:
    """Tells torch.compile which dimensions of the inputs may change, if the program is ``marked``."""
    if not p.marked or len(p.worlds) < 2:
        return
    for i, t in zip(p.inputs, tensors):
        for d, n in enumerate(i.shape):
            if isinstance(n, str):
                torch._dynamo.maybe_mark_dynamic(t, d)


def _verdicts(
    programs: Sequence[Program], runs: Sequence[tuple[list[Seen], torch.Tensor]], grain: Mapping[torch.dtype, float]
) -> list[str | None]:
    out: list[str | None] = [None] * len(programs)
    for world, (got, after) in zip(programs[0].worlds, runs):
        torch.manual_seed(SEED)
        for i, p in enumerate(programs):
            state = random_state()
            want = in_eager(p, world)
            end = random_state()
            set_random_state(state)
            exact = in_float64(p, world)
            sample = functools.partial(_sample, p, world, state, grain)
            found = rules.difference(got[i], want, exact, sample)
            out[i] = out[i] or (
                found if found is None or len(programs[0].worlds) == 1 else f"{found} with {dict(world)}"
            )
            set_random_state(end)
        if not torch.equal(random_state(), after):
            out[-1] = out[-1] or "the state of the random generator afterwards"
    return out


def _sample(
    p: Program,
    world: World,
    state: torch.Tensor,
    grain: Mapping[torch.dtype, float],
    count: int,
    seed: int,
    how: rules.How,
) -> list[Seen]:
    return noise.samples(p, world, state, count, seed, grain, how=how)


def refused(p: Program, why: Exception) -> str:
    """An exception as a verdict: whose fault it is."""
    torch._dynamo.reset()
    words = f"{type(why).__name__}: {str(why)[:300]}"
    if isinstance(getattr(why, "inner_exception", why), DscWarning) and "runs in eager" in words:
        return LEFT + words
    try:
        fn = compiled([p], "eager", None)
        for world in p.worlds:
            run(fn, [p], world)
    except Exception:
        return REFUSED + words
    return words


def _compiled_again(p: Program, more: int) -> str | None:
    """Compiling again for other sizes is a fault where tracing alone does not ask for it."""
    graphs: list[int] = []

    def counting(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(1)
        return gm.forward

    torch._dynamo.reset()
    fn = compiled([p], aot_autograd(fw_compiler=counting), None)
    run(fn, [p], p.worlds[0])
    first = len(graphs)
    for world in p.worlds[1:]:
        run(fn, [p], world)
    return None if len(graphs) > first else f"compiled again for other sizes: {more} more graphs"
