"""Collections of garbage: none while dsc compiles, and as before afterwards, whatever happened."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from dsc import collector


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_put_back(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is on


def test_it_is_put_back_after_an_error() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="why"), collector.paused():
        raise ValueError("why")
    assert gc.isenabled()


def test_a_compilation_pauses_it_and_a_step_does_not() -> None:
    gc.enable()
    seen: list[bool] = []
    fn = torch.compile(
        lambda x: x.sin() * 2,
        backend="dsc",
        options={"on_compile": lambda _: seen.append(gc.isenabled()), "emit": "aten", "cache": False},
    )
    fn(torch.rand(3))
    assert seen == [False]
    assert gc.isenabled()
