"""When programs are recorded, replayed and run plainly: the rules, on a recorder that knows addresses alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsc.runtime import graphs
from dsc.runtime.graphs import MOST, WARM, Replayer, buffer_like, dense, overlaps
from kit_recorder import Recorder


def replayer(f: Callable[..., Any], *written: int) -> Replayer:
    def call(inputs: list[object]) -> tuple[object, ...]:
        args = [*inputs]
        inputs.clear()
        out = f(*args)
        return out if isinstance(out, tuple) else (out,)

    return Replayer(call, call, Recorder(), frozenset(written))


def step(r: Replayer, *inputs: object) -> Any:
    given = [*inputs]
    out = r(given)
    assert not given, "inputs may die early"
    return out[0] if len(out) == 1 else out


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moving(count: int, *shape: int) -> list[Tensor]:
    """Inputs at different addresses."""
    return [randn(*shape, seed=i) for i in range(count)]


def test_replays_what_changed_in_place_and_what_moved() -> None:
    weight = randn(4, 4)
    r = replayer(lambda w, x: (x @ w).relu())
    for x in moving(10, 3, 4):
        torch.testing.assert_close(step(r, weight, x), (x @ weight).relu())
        weight.mul_(0.9)
    assert r.counts["replayed"] > 4
    assert r.counts["plain"] == WARM
    [form] = r.forms.values()
    [recording] = form.recordings
    assert set(recording.buffers) == {1}, "the weight is read where it lies"


def test_results_in_use_are_not_overwritten() -> None:
    x = randn(4, 4)
    r = replayer(lambda x: x + 1)
    kept = []
    for i in range(12):
        x.fill_(i)
        kept.append(step(r, x))
    for i, y in enumerate(kept):
        assert torch.equal(y, torch.full((4, 4), i + 1.0)), i
    assert r.counts["recorded"] == MOST
    assert "recorded 6 times" in r.remarks[0].why
    plain = r.counts["plain"]
    views = [y[1:] for y in kept]
    del kept, y
    step(r, x)
    assert r.counts["plain"] == plain + 1, "a view keeps its memory busy"
    del views
    before = r.counts["replayed"]
    torch.testing.assert_close(step(r, x), x + 1)
    assert r.counts["replayed"] == before + 1


def test_what_autograd_saved_is_in_use() -> None:
    x = randn(4, 4)
    r = replayer(lambda x: x * 2)
    for _ in range(WARM + 1):
        step(r, x)
    y = step(r, x)
    w = torch.ones(4, 4, requires_grad=True)
    loss = (w * y).sum()
    del y
    x.fill_(100.0)
    other = step(r, x)
    loss.backward()
    torch.testing.assert_close(w.grad, randn(4, 4) * 2)
    torch.testing.assert_close(other, torch.full((4, 4), 200.0))


def test_losses_may_be_collected() -> None:
    x = randn(8)
    r = replayer(lambda x: (x.sum(), x * 2))
    losses = []
    for i in range(8):
        x.fill_(i)
        losses.append(step(r, x)[0])
    assert losses == [8.0 * i for i in range(8)]
    assert r.counts["recorded"] == 1


def test_results_that_are_inputs_or_views_of_them() -> None:
    r = replayer(lambda x: (x, x[1:], x.t(), None, 3, x + 1))
    for x in moving(6, 3, 4):
        same, part, turned, none, three, _ = step(r, x)
        assert same is x
        assert part.data_ptr() == x[1:].data_ptr()
        assert torch.equal(turned, x.t())
        assert (none, three) == (None, 3)
    assert r.counts["replayed"] >= 3


def test_one_tensor_given_twice_is_one_tensor() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y

    r, x = replayer(f), randn(4)
    for _ in range(5):
        a, b = step(r, x)
        assert a is b


def test_inputs_that_are_written() -> None:
    def f(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    r, total, x = replayer(f, 1), torch.zeros(4), torch.ones(4)
    for i in range(6):
        version = total._version
        torch.testing.assert_close(step(r, x, total), torch.full((4,), 2.0 * (i + 1)))
        assert total._version > version
    assert r.counts["replayed"] == 6 - WARM
    assert torch.equal(total, torch.full((4,), 6.0))
    for t in moving(5, 4):
        expected = t + 1
        step(r, x, t)
        torch.testing.assert_close(t, expected)
    assert any("input 1 is written to" in m.why for m in r.remarks)


def test_parameters_that_move_once_are_recorded_again() -> None:
    r, x = replayer(lambda w, x: w * x), randn(4)
    for w in moving(2, 4):
        for _ in range(4):
            torch.testing.assert_close(step(r, w, x), w * x)
    assert r.counts["recorded"] == 2
    assert all(1 not in rec.buffers and 0 not in rec.buffers for f in r.forms.values() for rec in f.recordings)


def test_forms_are_told_apart_and_bounded() -> None:
    r = replayer(lambda x: x * 2)
    for n in range(2, 2 + graphs.FORMS + 2):
        x = randn(n, n)
        for _ in range(WARM + 2):
            torch.testing.assert_close(step(r, x), x * 2)
            torch.testing.assert_close(step(r, x.t()), x.t() * 2)
    assert len(r.forms) == graphs.FORMS
    assert "forms of its inputs" in r.remarks[0].why
    sizes = replayer(lambda n, x: x * n)
    for n in (2, 3, 2, 3, 2, 3, 2, 3):
        torch.testing.assert_close(step(sizes, n, x), x * n)
    assert len(sizes.forms) == 2


def test_a_failed_recording_leaves_the_program_as_it_was() -> None:
    r, x = replayer(lambda x: x * 2), randn(4)
    r.recorder.broken = True  # type: ignore[attr-defined]
    for _ in range(5):
        torch.testing.assert_close(step(r, x), x * 2)
    assert r.counts == {"recorded": 0, "replayed": 0, "plain": 5}
    assert [m.why for m in r.remarks] == ["recording failed: operation not permitted when stream is capturing"]


def test_recordings_belong_to_a_stream() -> None:
    r, x = replayer(lambda x: x * 2), randn(4)
    for _ in range(4):
        step(r, x)
    r.recorder.now = 7  # type: ignore[attr-defined]
    step(r, x)
    assert sorted(rec.stream for f in r.forms.values() for rec in f.recordings) == [0, 7]


def test_one_call_at_a_time() -> None:
    r, x = replayer(lambda x: x * 2), randn(4)
    for _ in range(4):
        step(r, x)
    before, found = dict(r.counts), []
    with r.lock:
        thread = threading.Thread(target=lambda: found.append(step(r, x)))
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], x * 2)
    assert r.counts["plain"] == before["plain"] + 1


def test_random_numbers_go_on_as_without() -> None:
    def drawn(call: Callable[[Sequence[Any]], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        return [call([x])[0].clone() for _ in range(6)]

    x = torch.ones(16)
    r = replayer(lambda x: (torch.bernoulli(x * 0.5), torch.rand(3)))
    plain, recorded = drawn(r.plain), drawn(r)  # type: ignore[arg-type]
    assert r.counts["replayed"] == 4
    assert all(map(torch.equal, plain, recorded))


def test_copies_keep_layout_and_alignment() -> None:
    whole = randn(40)
    for x in (whole[1:17].view(4, 4), whole[:16].view(4, 4).t(), whole[:4].expand(3, 4), whole[:8:2], whole[:0]):
        copy = buffer_like(x)
        assert (copy.shape, copy.stride(), copy.dtype) == (x.shape, x.stride(), x.dtype)
        assert x.numel() == 0 or copy.data_ptr() % 16 == x.data_ptr() % 16
        dense(copy).copy_(dense(x))
        assert torch.equal(copy, x)
        assert not overlaps(x)
    assert overlaps(whole.as_strided((3, 3), (1, 1)))
    r = replayer(lambda x: x * 2)
    for t in moving(6, 8):
        x = t.as_strided((3, 3), (1, 1))
        torch.testing.assert_close(step(r, x), x * 2)
    assert "its elements share memory" in r.remarks[0].why


def test_inference_mode_is_another_form() -> None:
    r, x = replayer(lambda x: x * 2), randn(4)
    for _ in range(4):
        with torch.inference_mode():
            step(r, x)
    for _ in range(4):
        y = step(r, x)
        assert not y.is_inference()
        (torch.ones(4, requires_grad=True) * y).sum().backward()
