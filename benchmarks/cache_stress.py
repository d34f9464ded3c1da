"""The cache under stress: ``python benchmarks/cache_stress.py``.

Together: so many processes compile the same train step at once, on an empty folder; each must finish with the same loss,
and each library be compiled once (twice is the most that is allowed).  Killed: a process that writes libraries and graphs
without pause is killed (SIGKILL) at a random moment, again and again, in one folder; after each kill whatever the folder
gives must be what was asked for: a library that computes its number, a graph that is whole.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

COUNTING = """#!/bin/sh
case "$*" in *-shared*) echo x >> {log} ;; esac
exec {compiler} "$@"
"""
STEP = """
import torch
from dsc.models.zoo import load
entry = load("{model}")
model = torch.compile(entry.build(), backend="dsc", options={{"cxx": "{cxx}"}})
loss = model(*entry.inputs())
loss.backward()
print(loss.item())
"""


def source(i: int) -> str:
    """A small library that says its number; large enough to be caught while it is written."""
    return f'const char filler[65536] = {{1}};\nextern "C" int run_0(void**, const long*) {{ return {i}; }}\n'


def graph(i: int) -> bytes:
    """What a graph's file holds in place of a pickle: bytes that follow from ``i``."""
    return random.Random(i).randbytes(1 << 18)


def write_forever(folder: Path, first: int) -> None:
    """Runs in the process that is killed."""
    from dsc.codegen import build, cache

    compiler = build.find_compiler()
    assert compiler is not None
    print("ready", flush=True)
    while True:
        build.build(source(first), folder, compiler)
        for i in range(20):
            cache.write(folder / f"{first * 20 + i:032x}.graph", graph(first * 20 + i))
        first += 1


def killed(times: int, seed: int = 0) -> dict[str, int]:
    """Bad hits are libraries and graphs that are not what was asked for."""
    from dsc.codegen import build, cache

    compiler = build.find_compiler()
    assert compiler is not None
    moments, bad, found, first = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(times):
            child = subprocess.Popen(
                [sys.executable, __file__, "--write", f"{folder},{first}"],
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(moments.uniform(0, 0.5))
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
            while (path := folder / f"{build.key(source(first), compiler)}.so").exists():
                bad += ctypes.CDLL(str(path)).run_0(None, None) != first
                found, first = found + 1, first + 1
            bad += build.build(source(first), folder, compiler).function("run_0")(None, None) != first
            for path in folder.glob("*.graph"):
                data = cache.read(path)
                bad += data is not None and data != graph(int(path.stem, 16))
                found += data is not None
                path.unlink()
        partial = sum(1 for p in folder.iterdir() if cache.LEFTOVER.match(p.name))
    return {"kills": times, "entries_checked": found, "bad_hits": bad, "partial_files_left": partial}


def together(count: int, model: str) -> dict[str, object]:
    """All at once on an empty folder."""
    from dsc.codegen import build

    compiler = build.find_compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory() as name:
        log, cxx = Path(name, "log"), Path(name, "c++")
        cxx.write_text(COUNTING.format(log=log, compiler=compiler))
        cxx.chmod(0o700)
        env = {**os.environ, "DSC_CACHE_DIR": f"{name}/cache", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", STEP.format(model=model, cxx=cxx)]
        children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        losses = [c.communicate()[0].strip() for c in children]
        compiled = len(log.read_text().splitlines())
        libraries = len(list(Path(name, "cache").glob("*.so")))
    return {
        "processes": count,
        "finished": sum(c.returncode == 0 for c in children),
        "losses": len(set(losses)),
        "libraries": libraries,
        "compilations": compiled,
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--processes", type=int, default=8)
    p.add_argument("--model", default="gpt-tiny", help="a name of the zoo")
    p.add_argument("--kills", type=int, default=50)
    p.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    p.add_argument("--write", metavar="FOLDER,NUMBER", help="write entries until killed")
    args = p.parse_args()
    if args.write:
        folder, first = args.write.rsplit(",", 1)
        write_forever(Path(folder), int(first))
    results = {"together": together(args.processes, args.model), "killed": killed(args.kills)}
    for part, numbers in results.items():
        print(common.table((part, ""), [(k.replace("_", " "), v) for k, v in numbers.items()]), end="\n\n")
    common.write_json(args.json, results)
    a = results["together"]
    fine = (
        a["finished"] == a["processes"]
        and a["losses"] == 1
        and int(str(a["compilations"])) <= 2 * int(str(a["libraries"]))
    )
    return int(not (fine and not results["killed"]["bad_hits"]))


if __name__ == "__main__":
    sys.exit(main())
