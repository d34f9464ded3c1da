"""Every program of ``cases``, compiled by dsc beside eager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance import case, cases
from dsc.errors import DscWarning


@pytest.fixture(autouse=True)
def _left_to_eager_is_an_answer() -> Iterator[None]:
    """A fall back to eager gives eager's answer, which is all that these tests ask for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DscWarning)
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", list(cases.PROGRAMS))
def test_case(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As users run it: compiled graphs are kept on disk, and the second run takes them from there."""
    monkeypatch.setenv("DSC_CACHE", "1")
    monkeypatch.setenv("DSC_CACHE_DIR", str(tmp_path))
    case.run(cases.PROGRAMS[name], "dsc")
    case.run(cases.PROGRAMS[name], "dsc")


def test_every_kind_and_program_is_described() -> None:
    assert all(cases.describe(k.__name__.rpartition(".")[2]) for k in cases.KINDS)
    assert len(cases.PROGRAMS) == sum(len(k.CASES) for k in cases.KINDS)  # no two of one name
