"""``dsc compile`` of a large model for a GPU that is not here: seconds and memory, cold and with a warm cache.

Each row is a new process; the first one starts with empty caches, of dsc and of Triton.  CPU seconds are those of the
process and of those that it starts, imports included.  The kernels of the second row are copied, not compiled.

    python benchmarks/cross_compile.py [--model llama-3-1b] [--target h100] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import common


def once(model: str, target: str, out: str, parallel: int) -> dict[str, float]:
    """Runs in the new process."""
    from dsc.cli.app import app

    start = time.perf_counter()
    words = [
        "compile",
        model,
        "--target",
        target,
        "--dtype",
        "bf16",
        "--shapes",
        "-o",
        out,
        "--parallel",
        str(parallel),
    ]
    app(words, standalone_mode=False)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cubins = len(list(Path(out, "kernels").glob("*.cubin")))
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": common.cpu_seconds(),
        "peak_mb": peak / 1024,
        "kernels": cubins,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", default="llama-3-1b")
    p.add_argument("--target", default="h100")
    p.add_argument("--parallel", type=int, default=2)
    p.add_argument("--json", type=Path, default=None)
    p.add_argument("--once", default=None, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.once is not None:
        numbers = once(args.model, args.target, args.once, args.parallel)
        print()
        print(json.dumps(numbers))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        env = {"DSC_CACHE_DIR": f"{folder}/dsc", "TRITON_CACHE_DIR": f"{folder}/triton", "DSC_CACHE": "1"}
        for row in ("cold", "warm"):
            command = ["-W", "ignore", __file__, "--model", args.model, "--target", args.target]
            command += ["--parallel", str(args.parallel), "--once", f"{folder}/{row}"]
            found[row] = common.apart(command, env, f"the {row} compile of {args.model}")
    print(f"{args.model} for {args.target}, bf16, traced on shapes")
    head = ("", "wall s", "CPU s", "peak MB", "kernels")
    rows = [(row, n["seconds"], n["cpu_seconds"], n["peak_mb"], int(n["kernels"])) for row, n in found.items()]
    print(common.table(head, rows))
    common.write_json(args.json, found)


if __name__ == "__main__":
    main()
