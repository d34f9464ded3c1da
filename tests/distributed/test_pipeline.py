"""Pipelines on processes of this machine, over gloo.  Every launch has a time limit: nothing may hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 480
"""Seconds, on a busy machine."""
TWO = (
    "gpt-tiny,random,2,interpreted,3",
    "gpt-tiny,InterleavedZeroBubble,1,compiled,0",
    "saves",
    "resplit",
    "watches",
    "rebalances",
    "refuses",
    "dies",
)
FOUR = ("uvit-tiny,ZBVZeroBubble,2,interpreted,1", "powersgd", "replicated", "sharded")


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )


def checked(world: int, folder: Path, names: tuple[str, ...]) -> dict[str, list[dict[str, object]]]:
    """Check -> what each rank said."""
    done = launch([str(HERE / "worker.py"), str(world), str(folder), *names])
    out: dict[str, list[dict[str, object]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            out.setdefault(json.loads(line)["check"], []).append(json.loads(line))
    if not out:
        raise AssertionError(done.stderr)
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return checked(2, tmp_path_factory.mktemp("two"), TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    return checked(4, tmp_path_factory.mktemp("four"), FOUR)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two: dict[str, list[dict[str, object]]], name: str) -> None:
    assert name in two, f"a check before it failed: {', '.join(two)}"
    assert len(two[name]) == (1 if name == "dies" else 2)
    for rank in two[name]:
        assert rank["good"], rank["found"]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four: dict[str, list[dict[str, object]]], name: str) -> None:
    assert name in four, f"a check before it failed: {', '.join(four)}"
    assert len(four[name]) == 4
    for rank in four[name]:
        assert rank["good"], rank["found"]


def test_torchrun_starts_again_where_the_last_checkpoint_was(tmp_path: Path) -> None:
    """One rank is killed inside of a step; the parameters after the restart are those of a run that nobody disturbed."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.2"]
    done = launch([*command, "-m", "dsc.distributed.run", str(HERE / "script.py"), str(tmp_path)])
    assert (tmp_path / "result").exists(), done.stderr
    assert (tmp_path / "result").read_text() == "started from 3, equal True"


def test_the_launcher_says_an_error_of_dsc_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("from dsc.errors import WorldMismatch\nraise WorldMismatch(1, 4, '4 ranks')\n")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    done = launch([*command, "--rdzv-endpoint", "localhost:0", "-m", "dsc.distributed.run", str(script)])
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("dsc: ")]
    assert said == [
        "dsc: The plan needs 4 processes (4 ranks), and 1 run; launch with torchrun --nproc-per-node 4, or plan for 1 stages."
    ]
