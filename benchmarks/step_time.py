"""Steady seconds of a train step in eager, dsc and torch's default compiler: ``python benchmarks/step_time.py``.

Forward and backward, no optimizer.  All take turns in one process, each on its own copy of the same model, after every
one has compiled and warmed up; the numbers are medians, and ratios are medians of the ratios round by round.  Page faults
are those of a step after warm-up (``ru_minflt``).
"""

from __future__ import annotations

import copy
import resource
import statistics
import tempfile
from collections.abc import Callable

import common
import torch

KINDS = ("eager", "dsc", "inductor")


def compiled(kind: str, case: common.Case, cache: str) -> Callable[..., torch.Tensor]:
    if kind == "eager":
        return case.model
    if kind == "dsc":
        return torch.compile(case.model, backend="dsc", options={"cache_dir": cache})  # type: ignore[return-value]
    return torch.compile(case.model)  # type: ignore[return-value]


def measure(
    name: str, dtype: str, kinds: tuple[str, ...], rounds: int, batch: int | None
) -> dict[str, dict[str, float]]:
    first = common.case(name, dtype, batch)
    runs: dict[str, Callable[[], object]] = {}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for kind in kinds:
            case = common.Case(copy.deepcopy(first.model), first.inputs, first.dtype)
            forward = compiled(kind, case, cache)
            losses[kind] = case.step(forward)
            case.step(forward)
            runs[kind] = lambda case=case, forward=forward: case.step(forward)  # type: ignore[misc]
        times = common.interleave(runs, rounds)
        faults = {kind: median_faults(runs[kind]) for kind in kinds}
    torch._dynamo.reset()
    return {
        kind: {
            "seconds": statistics.median(times[kind]),
            "least": min(times[kind]),
            "speedup_over_eager": common.ratios(times[kind], times["eager"]) if "eager" in times else float("nan"),
            "dsc_speedup_over_this": common.ratios(times["dsc"], times[kind]) if "dsc" in times else float("nan"),
            "loss": losses[kind],
            "page_faults": faults[kind],
        }
        for kind in kinds
    }


def median_faults(run: Callable[[], object], rounds: int = 5) -> float:
    """Page faults of a call that has run before."""

    def count() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    found = []
    for _ in range(rounds):
        before = count()
        run()
        found.append(count() - before)
    return statistics.median(found)


def main() -> None:
    p = common.parser(__doc__, "gpt")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--batch", type=int, default=None, help="default: the model's own")
    p.add_argument("--kinds", default=",".join(KINDS), help="what to time")
    args = p.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    results, rows = {}, []
    for name in args.models.split(","):
        results[name] = measure(name, args.dtype, tuple(args.kinds.split(",")), args.rounds, args.batch)
        for kind, r in results[name].items():
            rows.append((f"{name} {args.dtype}", kind, r["seconds"] * 1e3, r["least"] * 1e3, r["speedup_over_eager"],
                         r["dsc_speedup_over_this"], f"{r['page_faults']:.0f}", f"{r['loss']:.5f}"))  # fmt: skip
        print(common.table(HEAD, rows[-len(results[name]) :]), flush=True)
    if len(results) > 1:
        print("\n" + common.table(HEAD, rows))
    common.write_json(args.json, results)


HEAD = ("train step", "", "ms", "least ms", "x eager", "dsc is x", "page faults", "loss")


if __name__ == "__main__":
    main()
