"""The folder of kernels and graphs under processes that race, and under processes that die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsc.codegen import archive, build, cache

SOURCE = 'extern "C" int run_0(void**, const long*) {{ return {}; }}\n'


def forked(work: Callable[[], None]) -> int:
    """The number of a process that does the work and leaves."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


@pytest.fixture
def counting(tmp_path: Path) -> tuple[str, Path]:
    """A compiler that writes a line for each library that it makes, and takes its time."""
    found = build.find_compiler()
    assert found is not None
    log, script = tmp_path / "log", tmp_path / "c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo x >> {log}; sleep 0.3;; esac\nexec {found} "$@"\n')
    script.chmod(0o700)
    return str(script), log


def test_processes_that_want_the_same_kernels_compile_them_once(tmp_path: Path, counting: tuple[str, Path]) -> None:
    compiler, log = counting

    def work() -> None:
        assert build.build(SOURCE.format(7), tmp_path / "cache", compiler).function("run_0")(None, None) == 7

    pids = [forked(work) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert log.read_text() == "x\n"
    assert not list((tmp_path / "cache").glob("*.lock"))


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path, counting: tuple[str, Path]) -> None:
    compiler = counting[0]
    path = tmp_path / f"{build.key(SOURCE.format(8), compiler)}.lock"

    def work() -> None:
        with cache.alone(path):
            (tmp_path / "held").touch()
            time.sleep(60)

    pid = forked(work)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert build.build(SOURCE.format(8), tmp_path, compiler).function("run_0")(None, None) == 8


def test_a_writer_killed_at_any_moment_leaves_no_bad_entry(tmp_path: Path) -> None:
    moments, whole = random.Random(0), 0
    path = tmp_path / f"{1:032x}.graph"
    contents = {bytes([i]) * 300_000 for i in range(3)}

    def work() -> None:
        while True:
            for data in contents:
                cache.write(path, data)

    for _ in range(10):
        pid = forked(work)
        time.sleep(moments.uniform(0.005, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = cache.read(path)
        assert found is None or found in contents
        whole += found is not None
    assert whole > 0
    for leftover in tmp_path.iterdir():
        os.utime(leftover, (1, 1))
    cache.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_live_process_writes_is_not_swept(tmp_path: Path) -> None:
    fresh, stale = tmp_path / f".{1:032x}.graph.12-0", tmp_path / f".{2:032x}.graph.12-0"
    fresh.touch()
    stale.touch()
    os.utime(stale, (1, 1))
    (tmp_path / "notes.txt").touch()
    cache.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([fresh.name, "notes.txt"])


def test_graphs_travel_with_the_kernels(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "all.tgz"
    build.build(SOURCE.format(9), here, compiler)
    name = f"{5:032x}.graph"
    cache.write(here / name, b"a graph")
    assert archive.write(here, file)[0] == 2
    assert archive.read(file, there, compiler) == archive.Imported(2, 0, 0)
    assert cache.read(there / name) == b"a graph"
    assert archive.read(file, there, compiler) == archive.Imported(0, 2, 0)
