"""The first train step in a new process, its graphs on disk, against tracing alone: ``python benchmarks/restart.py``.

CPU seconds of the process and its children for the first train step beyond a steady one: with compiled graphs on disk
(dsc, warm), with kernels alone (dsc, no graphs), and for tracing alone (aot_eager), which compiles nothing.  Each is a
process of its own that has compiled a small layer before, so that imports do not count; rounds are interleaved.
"""

from __future__ import annotations

import json
import statistics
import tempfile

import common
import torch

ROWS = {"dsc, warm": ("dsc", "graphs"), "dsc, no graphs": ("dsc", "none"), "aot_eager": ("aot_eager", "none")}


def once(name: str, backend: str, cache: str) -> dict[str, float]:
    """Runs in the new process."""
    from torch._dynamo.utils import counters

    options = {"cache": cache == "graphs"} if backend == "dsc" else None
    small = torch.compile(torch.nn.Linear(3, 3), backend=backend, options=options)
    torch.autograd.backward(small(torch.ones(2, 3)).sum())
    case = common.case(name)
    forward = torch.compile(case.model, backend=backend, options=options)
    counters.clear()
    times = []
    for _ in range(3):
        start = common.cpu_seconds()
        case.step(forward)
        times.append(common.cpu_seconds() - start)
    graphs = counters["stats"]["unique_graphs"]
    return {"seconds": times[0] - times[-1], "compiled": graphs - counters["aot_autograd"]["autograd_cache_hit"]}


def fresh(name: str, backend: str, cache: str, folder: str) -> dict[str, float]:
    """``once`` in a new process with the caches of ``folder``."""
    env = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "DSC_CACHE_DIR": f"{folder}/dsc"}
    command = ["-W", "ignore", __file__, "--once", f"{backend},{cache}", "--models", name]
    return common.apart(command, env, f"{backend} on {name}")


def measure(name: str, rounds: int) -> dict[str, dict[str, object]]:
    runs: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        fresh(name, "dsc", "graphs", folder)  # fills the caches
        for _ in range(rounds):
            for row, (backend, cache) in ROWS.items():
                runs[row].append(fresh(name, backend, cache, folder))
    floor = [r["seconds"] for r in runs["aot_eager"]]
    return {
        row: {
            "seconds": statistics.median(r["seconds"] for r in found),
            "x_aot_eager": statistics.median(r["seconds"] / f for r, f in zip(found, floor)),
            "compiled": max(r["compiled"] for r in found),
            "runs": [r["seconds"] for r in found],
        }
        for row, found in runs.items()
    }


def main() -> None:
    p = common.parser(__doc__, "gpt,llama,vit,resnet")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--once", metavar="BACKEND,CACHE", help="measure in this process, print JSON")
    args = p.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.once:
        print(json.dumps(once(args.models, *args.once.split(","))))
        return
    results, rows = {}, []
    for name in args.models.split(","):
        results[name] = measure(name, args.rounds)
        for row, r in results[name].items():
            rows.append((name, row, r["seconds"], r["x_aot_eager"], f"{r['compiled']:.0f}"))
        print(common.table(HEAD, rows[-len(ROWS) :]), flush=True)
    if len(results) > 1:
        print("\n" + common.table(HEAD, rows))
    common.write_json(args.json, results)


HEAD = ("first train step", "", "CPU s", "x aot_eager", "graphs traced")


if __name__ == "__main__":
    main()
