"""Run the suites: ``make conformance``, or ``PYTHONPATH=tests python -m conformance --suite cases --only mutation``."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conformance import isolate, report
from conformance.outcome import Outcome, Program, Settings
from conformance.report import Result
from conformance.suites import SUITES


def arguments() -> argparse.Namespace:
    names = ",".join(s.name for s in SUITES)
    parser = argparse.ArgumentParser(prog="conformance", description="Does dsc give eager's answers?")
    parser.add_argument("--suite", default=names, help=f"some of {names}")
    parser.add_argument("--only", default="", help="programs whose names hold one of these words, split by commas")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every N-th program, from the K-th on")
    parser.add_argument("--compare", default="", help="other backends, such as eager,aot_eager,inductor")
    parser.add_argument("--backend", default="dsc", help="what to test")
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic=True")
    parser.add_argument("--device", default="cpu", help="where the programs run, such as cuda; not for operators")
    parser.add_argument("--dtypes", default="", help="of the operators; default: float32,int64,bool,bfloat16,float16")
    parser.add_argument("--samples", type=int, default=2, help="of an operator and dtype")
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))), help="processes at once")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one program")
    parser.add_argument("--fresh", action="store_true", help="with empty caches of kernels, to compare times")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--list", action="store_true", help="print the programs and leave")
    return parser.parse_args()


def chosen(options: argparse.Namespace, settings: Settings, console: Console) -> list[Program]:
    """The programs that were asked for; a suite whose package is missing says so."""
    wanted = options.suite.split(",")
    if unknown := set(wanted) - {s.name for s in SUITES}:
        raise SystemExit(f"There is no suite {', '.join(sorted(unknown))}; use {', '.join(s.name for s in SUITES)}.")
    programs: list[Program] = []
    for suite in SUITES:
        if suite.name not in wanted:
            continue
        try:
            programs += suite.programs(settings)
        except ModuleNotFoundError as missing:
            console.print(f"Suite {suite.name} is left out: it needs {missing.name} (pip install {missing.name}).")
    words = [w for w in options.only.split(",") if w]
    programs = [p for p in programs if not words or any(w in p.name for w in words)]
    k, n = map(int, options.part.split("/"))
    return programs[k::n]


def run(program: Program, settings: Settings, threads: int, device: str) -> Outcome:
    """In the program's own process."""
    if device != "cpu":
        torch.set_default_device(device)
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return program.run(settings)


def main() -> int:
    options = arguments()
    console = Console()
    backends = [options.backend, *(b for b in options.compare.split(",") if b)]
    dtypes = tuple(d for d in options.dtypes.split(",") if d)
    settings = [Settings(b, True if options.dynamic else None, dtypes, options.samples) for b in backends]
    programs = chosen(options, settings[0], console)
    if options.list:
        for p in programs:
            console.print(f"{p.suite:14} {p.kind:16} {p.name}", highlight=False)
        return 0
    preload(backends)
    jobs = [(p, s) for p in programs for s in settings]  # backends take turns: what disturbs one disturbs all
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    results: list[Result] = []
    begin = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console, auto_refresh=False) as bar:
        if options.fresh:
            os.environ.update(DSC_CACHE_DIR=f"{folder}/dsc", TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor")
        task = bar.add_task("conformance", total=len(jobs))
        bar.refresh()
        todo = [partial(run, p, s, threads, options.device) for p, s in jobs]
        for i, outcome in isolate.run_all(todo, options.jobs, options.timeout):
            program, s = jobs[i]
            results.append(Result(program, s.backend, outcome))
            report.failures(results[-1:], bar.console)
            if not console.is_terminal and not outcome.failures:
                console.print(
                    f"pass {s.backend} {program.suite} {program.name} {outcome.seconds:.1f} s", soft_wrap=True
                )
            bar.update(task, advance=1, description=f"{program.suite} {program.name}"[:40].ljust(40))
            bar.refresh()
    console.print(report.summary(results, SUITES, backends))
    for other in backends[1:]:
        lost = report.regressions(results, backends[0], other)
        console.print(f"{other} passes more than {backends[0]} in {len(lost)} programs: {', '.join(lost) or 'none'}")
    seconds = time.monotonic() - begin
    console.print(f"{len(programs)} programs, {options.jobs} at once, {seconds:.0f} s.")
    if options.json:
        facts = {"torch": torch.__version__, "seconds": seconds, "jobs": options.jobs, "dynamic": options.dynamic}
        report.write(options.json, results, facts)
    return int(any(r.outcome.failures for r in results if r.backend == backends[0]))


def preload(backends: list[str]) -> None:
    """Import what the backends import at their first graph, so that no program's time holds it."""
    for backend in backends:
        torch._dynamo.lookup_backend(backend)
    importlib.import_module("torch._functorch.aot_autograd")
    if "inductor" in backends:
        importlib.import_module("torch._inductor.compile_fx")


if __name__ == "__main__":
    sys.exit(main())
