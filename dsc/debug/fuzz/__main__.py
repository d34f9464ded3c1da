"""``python -m dsc.debug.fuzz``: random programs through dsc, eager and float64."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsc.debug.fuzz.campaign import BATCH, Total, outcomes


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if a difference was found that no rule of ``dsc.debug.fuzz.rules`` allows."""
    a = parser().parse_args(argv)
    options: dict[str, Any] = {"emit": a.emit}
    seconds = a.seconds if a.seconds is not None or a.programs is not None else 60.0
    batches = None if a.programs is None else -(-a.programs // a.batch)
    total, start = Total(), time.monotonic()
    with progress(a.programs, seconds) as show:
        for outcome in outcomes(a.seed, batches, seconds, a.batch, a.workers, options, a.device):
            total.add(outcome)
            show(total)
            for f in outcome.findings:
                say(f"\nseed {f.seed}: {f.why}\n\n{f.script}")
                if a.save is not None:
                    a.save.mkdir(parents=True, exist_ok=True)
                    (a.save / f"{a.emit}_{f.seed}_{len(total.findings)}.py").write_text(f.script)
            if len(total.findings) >= a.failures:
                break
    total.seconds = time.monotonic() - start
    say(summary(total))
    return 1 if total.findings else 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m dsc.debug.fuzz", description=__doc__)
    out.add_argument("--seconds", type=float, help="stop after so long (default: 60, or no limit with --programs)")
    out.add_argument("--programs", type=int, help="stop after so many")
    out.add_argument("--seed", type=int, default=0, help="of the first batch; the next has the next")
    out.add_argument("--batch", type=int, default=BATCH, help="programs a graph")
    out.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    out.add_argument("--emit", choices=("auto", "cpp", "triton", "aten"), default="auto")
    out.add_argument("--device", default="cpu", help="where the programs run, such as cuda")
    out.add_argument("--failures", type=int, default=1, help="stop after so many")
    out.add_argument("--save", type=Path, help="a folder for the scripts of failing programs")
    return out


def summary(t: Total) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(t.by_kind.items()))
    excused = "".join(f", {n} {word}" for word, n in sorted(t.excused.items()))
    return f"{t.programs} programs ({kinds}){excused}: {len(t.findings)} mismatches, {t.seconds:.0f} s"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def progress(programs: int | None, seconds: float | None) -> Iterator[Callable[[Total], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stdout.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("fuzz", total=programs or seconds, numbers="")

        def show(t: Total) -> None:
            done = t.programs if programs else min(time.monotonic() - start, seconds or 0)
            bar.update(task, completed=done, numbers=f"{t.programs} programs, {len(t.findings)} mismatches")

        yield show


if __name__ == "__main__":
    raise SystemExit(main())
