"""All benchmarks of speed in one table: ``make bench``, or ``python benchmarks/all.py [--quick] [--only restart,scale]``.

Each script runs by itself and writes its JSON into a folder; the table has the figures that are promised, with the bound
where there is one.  Medians of interleaved runs; ``--quick`` measures once, on fewer and smaller models.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

FOUR = "gpt,llama,vit,resnet"
Row = tuple[str, float, str]
"""What, the number, the bound."""


@dataclass(frozen=True)
class Script:
    name: str
    arguments: str
    quick: str
    rows: Callable[[dict[str, Any]], Iterator[Row]]


def compile_time(results: dict[str, Any]) -> Iterator[Row]:
    for model, r in results.items():
        for unit, word in (("compile", "seconds"), ("cpu", "CPU seconds")):
            ratio = r["inductor"][unit] / r["dsc"][unit]
            yield f"cold compile of {model}, default compiler / dsc, {word}", ratio, ">= 8"
        yield f"cold compile of {model}, dsc beyond tracing, CPU s", r["dsc"]["cpu"] - r["aot_eager"]["cpu"], "<= 3"


def restart(results: dict[str, Any]) -> Iterator[Row]:
    for model, r in results.items():
        yield f"first step of {model} in a new process / that of aot_eager", r["dsc, warm"]["x_aot_eager"], "<= 1.3"
        yield f"graphs of {model} compiled then", r["dsc, warm"]["compiled"], "0"


def scale(results: dict[str, Any]) -> Iterator[Row]:
    for part, rows in results.items():
        counts = list(rows)
        for before, after in itertools.pairwise(counts):
            growth = rows[after]["beyond"] / rows[before]["beyond"]
            bound = "<= 2.5" if (part, before, after) == ("layers", "24", "96") else f"~ {int(after) / int(before):.0f}"
            yield f"beyond tracing, {after} {part} / {before}", growth, bound
        yield f"peak MB of compiling {counts[-1]} {part}", rows[counts[-1]]["peak_mb"], "<= 3000"


def cache_stress(results: dict[str, Any]) -> Iterator[Row]:
    a, b = results["together"], results["killed"]
    yield f"{a['processes']} processes at once: finished", a["finished"], str(a["processes"])
    yield "compilations of a library", a["compilations"] / a["libraries"], "<= 2"
    yield f"bad hits after {b['kills']} kills", b["bad_hits"], "0"


def step_time(results: dict[str, Any]) -> Iterator[Row]:
    faster: dict[str, list[float]] = {"eager": [], "inductor": []}
    for model, r in results.items():
        for kind, found in faster.items():
            found.append(r[kind]["dsc_speedup_over_this"])
        yield f"train step of {model}, default compiler / dsc", r["inductor"]["dsc_speedup_over_this"], ">= 0.98"
        yield f"page faults of a step of {model}", r["dsc"]["page_faults"], "0"
    for kind, bound in (("inductor", ">= 1.10"), ("eager", ">= 1.15")):
        mean = math.exp(sum(map(math.log, faster[kind])) / len(faster[kind]))
        yield f"train step, geometric mean, {kind} / dsc", mean, bound


def fusion(results: dict[str, Any]) -> Iterator[Row]:
    for model, r in results.items():
        yield f"bytes moved by {model}, dsc / default compiler", r["dsc"]["bytes"] / r["inductor"]["bytes"], "<= 1"


SCRIPTS = (
    Script("compile_time", f"--models {FOUR}", "--models gpt --repeat 1", compile_time),
    Script("restart", f"--models {FOUR}", "--models gpt --rounds 1", restart),
    Script("scale", "", "--layers 6,24 --nodes 1000,10000", scale),
    Script("cache_stress", "", "--processes 4 --kills 10", cache_stress),
    Script("step_time", f"--models {','.join(common.FAMILIES)}", "--models mlp,convnet --rounds 5", step_time),
    Script("fusion", "", "--models mlp,convnet", fusion),
)


def run(script: Script, folder: Path, quick: bool) -> list[Row]:
    """The figures of one script; it prints its own table meanwhile."""
    out = folder / f"{script.name}.json"
    command = [sys.executable, str(Path(__file__).with_name(f"{script.name}.py")), "--json", str(out)]
    print(f"\n{script.name}", flush=True)
    out.unlink(missing_ok=True)
    done = subprocess.run([*command, *(script.quick if quick else script.arguments).split()])
    if not out.exists():
        return [(f"{script.name}: failed with status {done.returncode}", math.nan, "")]
    return list(script.rows(json.loads(out.read_text())["results"]))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--quick", action="store_true", help="fewer models, measured once")
    p.add_argument("--only", default=",".join(s.name for s in SCRIPTS), help="some of the scripts, with commas")
    p.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the JSON files (default: bench_out)")
    p.add_argument("--json", type=Path, default=None, help="write the table here too")
    args = p.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - {s.name for s in SCRIPTS}:
        raise SystemExit(f"There is no {', '.join(sorted(unknown))}; use {', '.join(s.name for s in SCRIPTS)}.")
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [row for s in SCRIPTS if s.name in wanted for row in run(s, args.out, args.quick)]
    facts = common.machine()
    print(f"\n{datetime.date.today()}, torch {facts['torch']}, {facts['threads']} threads, {facts['cpu']}\n")
    print(common.table(("figure", "measured", "bound"), rows))
    common.write_json(args.json, [{"figure": a, "measured": b, "bound": c} for a, b, c in rows])


if __name__ == "__main__":
    main()
