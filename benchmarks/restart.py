"""CPU seconds of the first train step in a new process beyond a steady one: ``python benchmarks/restart.py [--model gpt]``.

With compiled graphs on disk (dsc, warm), with kernels alone (dsc, no graphs), and for tracing alone (aot_eager).  Each is
a process of its own that has compiled a small layer before, so that imports do not count; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

CHILD = """
import sys, time, torch
from dsc.models.zoo import load
name, backend, cache = sys.argv[1:]
options = {"cache": cache == "graphs"} if backend == "dsc" else None
small = torch.compile(torch.nn.Linear(3, 3), backend=backend, options=options)
torch.autograd.backward(small(torch.ones(2, 3)).sum())
entry = load(name)
model, inputs = torch.compile(entry.build(), backend=backend, options=options), entry.inputs()
times = []
for _ in range(3):
    start = time.process_time()
    torch.autograd.backward(model(*inputs))
    times.append(time.process_time() - start)
print(times[0] - times[-1])
"""
ROWS = {"dsc, warm": ("dsc", "graphs"), "dsc, no graphs": ("dsc", "none"), "aot_eager": ("aot_eager", "none")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/graphs", "DSC_CACHE_DIR": f"{folder}/kernels"}

        def first(backend: str, cache: str) -> float:
            words = [sys.executable, "-W", "ignore", "-c", CHILD, given.model, backend, cache]
            return float(subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout)

        first("dsc", "graphs")  # fills both folders
        for _ in range(given.rounds):
            for row, (backend, cache) in ROWS.items():
                seconds[row].append(first(backend, cache))
    for row, found in seconds.items():
        print(f"{row:16} {statistics.median(found):6.2f} s  ({', '.join(f'{x:.2f}' for x in found)})")


if __name__ == "__main__":
    main()
