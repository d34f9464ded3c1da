"""Seconds to compile a train step from nothing, dsc against torch's default compiler: ``python benchmarks/compile_time.py``.

What compiling costs is the first forward and backward less a steady one, in seconds, and in CPU seconds of the process and
its children, which other work on the machine disturbs less.  Each measurement is a fresh process with empty
caches; kinds take turns, and the numbers are medians.  ``aot_eager`` is the floor of every backend: capturing the graph,
deriving the backward, and compiling nothing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch

KINDS = ("aot_eager", "dsc", "inductor")


def once(kind: str, name: str, dtype: str, threads: int | None) -> dict[str, float]:
    """Runs in the fresh process."""
    if threads:
        torch.set_num_threads(threads)
    case, seconds = common.case(name, dtype), []
    case.step(case.model)  # so that what eager does once is not counted as compiling
    options = {"on_compile": lambda r: seconds.append(r.seconds)} if kind == "dsc" else None
    forward: Any = torch.compile(case.model, backend=kind, options=options)
    times, cpu = [], []
    for _ in range(4):
        start, used = time.perf_counter(), common.cpu_seconds()
        case.step(forward)
        times.append(time.perf_counter() - start)
        cpu.append(common.cpu_seconds() - used)
    steady, steady_cpu = statistics.median(times[1:]), statistics.median(cpu[1:])
    return {
        "compile": times[0] - steady, "cpu": cpu[0] - steady_cpu, "first": times[0], "steady": steady,
        "backend": sum(seconds),
    }  # fmt: skip


def fresh(kind: str, name: str, dtype: str, threads: int | None) -> dict[str, float]:
    """``once`` in a new process with caches of its own."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "DSC_CACHE_DIR": "dsc"}
        env = {k: str(Path(folder) / v) for k, v in variables.items()}
        command = [__file__, "--once", kind, "--models", name, "--dtype", dtype]
        command += ["--threads", str(threads)] if threads else []
        return common.apart(command, env, f"{kind} on {name}")


def main() -> None:
    p = common.parser(__doc__, "gpt")
    p.add_argument("--repeat", type=int, default=3, help="fresh processes for each kind and model")
    p.add_argument("--kinds", default=",".join(KINDS), help="what to time")
    p.add_argument("--once", metavar="KIND", default=None, help="measure in this process, print JSON")
    args = p.parse_args()
    if args.once:
        print(json.dumps(once(args.once, args.models, args.dtype, args.threads)))
        return
    results, rows, kinds = {}, [], args.kinds.split(",")
    for name in args.models.split(","):
        runs: dict[str, list[dict[str, float]]] = {k: [] for k in kinds}
        for _ in range(args.repeat):
            for kind in kinds:
                runs[kind].append(fresh(kind, name, args.dtype, args.threads))
        results[name] = {
            k: {n: statistics.median(r[n] for r in rs) for n in rs[0]} | {"runs": rs} for k, rs in runs.items()
        }
        base = results[name].get("dsc")
        for kind, r in results[name].items():
            spread = f"{min(x['compile'] for x in r['runs']):.1f}-{max(x['compile'] for x in r['runs']):.1f}"
            wall, cpu = (r[n] / base[n] if base else None for n in ("compile", "cpu"))
            rows.append((name, kind, r["compile"], spread, wall, r["cpu"], cpu, r["backend"] or None))
        print(common.table(HEAD, rows[-len(kinds) :]), flush=True)
    if len(results) > 1:
        print("\n" + common.table(HEAD, rows))
    common.write_json(args.json, results)


HEAD = ("train step", "", "compile s", "range", "x dsc", "CPU s", "x dsc", "in passes and kernels s")


if __name__ == "__main__":
    main()
