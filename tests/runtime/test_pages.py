"""Freed memory stays with the process: a step that has run faults in no page."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsc.runtime import pages

CODE = """
import resource, torch
from dsc.runtime import pages
torch.set_num_threads(1)
if {keep}:
    assert pages.keep()
found = []
for _ in range(16):  # the heap finds its shape after some
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.ones(12_000_000)  # 48 MB, more than glibc takes from its heap by itself
    y = x * 2
    del x, y
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(found[-1])
"""


def faults(keep: bool, **env: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(keep=keep)], capture_output=True, text=True, check=True, env=env
    )
    return int(run.stdout)


@pytest.mark.skipif(not pages.keep(), reason="another C library, or its variables are set")
def test_large_blocks_are_had_again_without_faults() -> None:
    assert faults(keep=False) > 1000
    assert faults(keep=True) < 50


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert not pages.keep.__wrapped__()
