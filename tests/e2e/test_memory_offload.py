"""Saved values moved to a second pool: eager's gradients, the planned peak, and nothing left behind."""

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from dsc import target, tiers
from dsc.errors import BadOption, OffloadFailed
from dsc.runtime.filepool import BLOCK, FilePool
from dsc.runtime.offload import MOVER
from kit_memory import compiled, gradients, peaks, planned_and_measured, search, stack


def tier(kind: str, folder: Path) -> str:
    return "cpu" if kind == "cpu" else f"nvme:{folder}"


def within(share: float) -> int:
    most, least = peaks()
    return int(least + share * (most - least))


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_gradients_are_eagers_and_nothing_stays_away(kind: str, tmp_path: Path) -> None:
    model, inputs = stack()
    want = gradients(model, inputs, model)
    call, found = compiled(model, memory_budget=within(0.4), offload=tier(kind, tmp_path), emit="aten")
    for _ in range(2):
        got = gradients(model, inputs, call)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    assert found.numbers["planned peak"] <= within(0.4)
    assert found.numbers["bytes away"] > 0
    gc.collect()
    assert not MOVER.slots
    assert not list(tmp_path.iterdir())  # the file has no name


@pytest.mark.parametrize("emit", ["aten", "cpp"])
def test_the_measured_peak_is_the_planned_one(emit: str) -> None:
    planner = search(stack, emit == "cpp")
    budget = (planner.default.peak + planner.least().peak) // 2
    planned, measured = planned_and_measured(emit, budget, offload="cpu")
    assert planned["bytes away"] > 0
    assert measured <= budget
    assert planned["planned peak"] == pytest.approx(measured, rel=0.01)


def test_a_second_backward_finds_the_values_again_and_a_lost_forward_frees_them() -> None:
    model, inputs = stack()
    call, found = compiled(model, memory_budget=within(0.5), offload="cpu", emit="aten")
    loss = call(*inputs)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss.backward()
    twice = [p.grad for p in model.parameters() if p.grad is not None]
    assert found.numbers["bytes away"] > 0
    assert all(map(torch.equal, once, twice))
    lost = call(*inputs)
    assert MOVER.slots
    del loss, lost
    gc.collect()
    assert not MOVER.slots


def test_smaller_budgets_can_be_met_than_without() -> None:
    planner = search(stack)
    alone = planner.least().peak
    planner.tier = tiers.parse("cpu")
    assert planner.least().peak < alone
    program = planner.within(within(0.6))
    assert program is not None
    assert program.peak <= within(0.6)


def test_what_may_not_be_asked_for() -> None:
    model, inputs = stack()
    call, _ = compiled(model, memory_budget=within(0.5), offload="disk", emit="aten")
    with pytest.raises(Exception, match=r"offload.*'cpu', or 'nvme:FOLDER'"):
        call(*inputs)
    for text in ("nvme:", "nvme:@3GB/s", "nvme:/data@0GB/s"):
        with pytest.raises(BadOption, match="nvme:FOLDER"):
            tiers.parse(text)


def test_the_speed_of_a_drive_is_the_targets_or_given() -> None:
    a100 = target.find("a100")
    assert tiers.parse("nvme:/data").bandwidth(a100) == a100.drive
    given = tiers.parse("nvme:/da@ta@6.5GB/s")
    assert (given.folder, given.bandwidth(a100)) == ("/da@ta", 6.5e9)
    assert tiers.parse(str(given)) == given
    assert tiers.parse("nvme:/data@900GB/s").bandwidth(a100) == tiers.parse("cpu").bandwidth(a100)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    model, inputs = stack()
    folder = tmp_path / "missing"
    call, _ = compiled(model, memory_budget=within(0.5), offload=f"nvme:{folder}", emit="aten")
    with pytest.raises(OffloadFailed, match=r"missing.*No such file or directory"):
        call(*inputs)


# --- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_keeps_bytes(tmp_path: Path) -> None:
    pool = FilePool(str(tmp_path))
    values = [torch.randint(256, (n,), dtype=torch.uint8) for n in (1, BLOCK, BLOCK + 1, 3 << 20)]
    places = [pool.take(v.numel()) for v in values]
    for v, place in zip(values, places):
        pool.write(place, v)
    for v, place in zip(values, places):
        again = torch.zeros_like(v)
        pool.read(place, again)
        assert torch.equal(v, again)
    pool.give(places[2], values[2].numel())
    assert pool.take(BLOCK + 2) == places[2]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FilePool(str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadFailed, match="No space left on device; free space there"):
        pool.take(100)


def test_a_file_that_was_cut_gives_no_wrong_numbers(tmp_path: Path) -> None:
    pool = FilePool(str(tmp_path))
    value = torch.ones(4 * BLOCK, dtype=torch.uint8)
    place = pool.take(value.numel())
    pool.write(place, value)
    os.ftruncate(pool.file, BLOCK)
    with pytest.raises(OffloadFailed, match="bytes could not be read"):
        pool.read(place, value)
