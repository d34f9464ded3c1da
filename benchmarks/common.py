"""What the benchmarks share: models and their train steps, interleaved timing, tables, JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsc.models import zoo

FAMILIES = ("gpt", "llama", "bert", "vit", "resnet", "moe", "mlp", "convnet")
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model with its inputs; ``dtype`` is that of autocast, None without."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype | None = None

    def step(self, forward: Callable[..., Tensor]) -> float:
        """Forward and backward from gradients that are None: what the two graphs of a train step do, and no more."""
        for p in self.model.parameters():
            p.grad = None
        with autocast(self.dtype):
            loss = forward(*self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def case(name: str, dtype: str = "fp32", batch: int | None = None) -> Case:
    entry = zoo.load(name)
    return Case(entry.build(), entry.inputs(batch), DTYPES[dtype])


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=dtype) if dtype is not None else contextlib.nullcontext()


def interleave(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call; all take turns, so that whatever else the machine does disturbs all alike."""
    out: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:  # nobody always runs after the same neighbour
            start = time.perf_counter()
            runs[name]()
            out[name].append(time.perf_counter() - start)
    return out


def cpu_seconds() -> float:
    """Of this process and of the children that it has waited for: what other work on the machine disturbs least."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios ``theirs / mine`` round by round: above one, mine is faster."""
    return statistics.median(b / a for a, b in zip(mine, theirs))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text; the first is flush left, the others right."""
    cells = [list(head), *([_cell(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def parser(description: str | None, models: str) -> argparse.ArgumentParser:
    """With the arguments that all benchmarks take."""
    p = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    p.add_argument("--models", default=models, help=f"names of the zoo, with commas (default: {models})")
    p.add_argument("--threads", type=int, default=None, help="torch.set_num_threads")
    p.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="bf16: through autocast")
    p.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    return p


def write_json(path: Path | None, numbers: Any) -> None:
    if path is not None:
        path.write_text(json.dumps({**machine(), "results": numbers}, indent=1) + "\n")


def apart(command: Sequence[str], env: Mapping[str, str], what: str) -> dict[str, float]:
    """The numbers that a script prints as JSON on its last line, run by itself in a new process."""
    done = subprocess.run([sys.executable, *command], env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} failed:\n{done.stderr}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def machine() -> dict[str, object]:
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": _cpu()}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown"


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """``owner.name`` is ``value`` inside; yields what it was."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield old
    finally:
        setattr(owner, name, old)
