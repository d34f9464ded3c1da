"""The buffer pool: what is alive at one time never shares memory, and memory is used again."""

import threading

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.packing import ALIGN, pack
from dsc.program import Slot
from dsc.runtime.pool import Buffers, Pool

CPU = torch.device("cpu")
BUFFERS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 6)).map(
        lambda t: (t[0] * ALIGN, (t[1], t[1] + t[2]))
    ),
    max_size=20,
)


@given(BUFFERS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_buffers_alive_together_do_not_overlap(buffers: list[tuple[int, tuple[int, int]]]) -> None:
    sizes, spans = [b[0] for b in buffers], [b[1] for b in buffers]
    layout = pack(sizes, spans)
    for i in range(len(buffers)):
        assert layout.offsets[i] % ALIGN == 0
        assert layout.offsets[i] + sizes[i] <= layout.total
        for j in range(i):
            alive = spans[i][0] <= spans[j][1] and spans[j][0] <= spans[i][1]
            apart = (
                layout.offsets[i] + sizes[i] <= layout.offsets[j]
                or layout.offsets[j] + sizes[j] <= layout.offsets[i]
                or 0 in (sizes[i], sizes[j])
            )
            assert apart or not alive


def test_total_is_the_peak_of_a_chain() -> None:
    """a -> b -> c -> d, two alive at a time: two buffers' worth."""
    assert pack([128] * 4, [(0, 1), (1, 2), (2, 3), (3, 4)]).total == 256


def slot(name: str, rows: int | sympy.Expr, first: int, last: int) -> Slot:
    return Slot(name, (rows, 4), (4, 1), torch.float32, CPU, first, last)


def test_symbolic_sizes_are_laid_out_for_each_size() -> None:
    n = sympy.Symbol("s0", integer=True, positive=True)
    buffers = Buffers([slot("a", n, 0, 1), slot("b", 2 * n, 1, 2)], ["s0"], Pool())
    for size in (1, 7, 1000, 7):
        arena, (a, b) = buffers.take(size)
        assert a.shape == (size, 4)
        assert b.shape == (2 * size, 4)
        a.fill_(1)
        b.fill_(2)
        assert bool((a == 1).all())
        buffers.pool.give(arena)


def test_the_second_call_gets_the_same_memory() -> None:
    buffers = Buffers([slot("a", 64, 0, 1)], [], Pool())
    arena, (a,) = buffers.take()
    buffers.pool.give(arena)
    _, (b,) = buffers.take()
    assert a is b


def test_calls_at_one_time_get_memory_each() -> None:
    buffers = Buffers([slot("a", 64, 0, 1)], [], Pool())
    _, (a,) = buffers.take()
    _, (b,) = buffers.take()
    assert a.data_ptr() != b.data_ptr()


def test_threads() -> None:
    buffers = Buffers([slot("a", 64, 0, 1)], [], Pool())
    wrong = []

    def work(mark: int) -> None:
        for _ in range(200):
            arena, (a,) = buffers.take()
            a.fill_(mark)
            if not bool((a == mark).all()):
                wrong.append(mark)
            buffers.pool.give(arena)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_memory_taken_in_inference_mode_serves_later_calls() -> None:
    buffers = Buffers([slot("a", 64, 0, 1)], [], Pool())
    with torch.inference_mode():
        arena, (a,) = buffers.take()
        buffers.pool.give(arena)
    assert not a.is_inference()
