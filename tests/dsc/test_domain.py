"""Which loop nests meet."""

import pytest
import sympy

from dsc.domain import Dim, Space, divide, meet, refine, runs_over

B, T = (sympy.Symbol(n, integer=True, positive=True) for n in ("s0", "s1"))


def space(text: str) -> Space:
    """``4 8!`` -> [4, 8 reduced]."""
    return Space(tuple(Dim(int(w.rstrip("!")), w.endswith("!")) for w in text.split()))


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ("32 8", "4 8 8", "4 8 8"),
        ("4 6", "6 4", None),
        ("4 8!", "4 8!", "4 8!"),
        ("4 8!", "4! 8", None),
        ("4 8!", "32", "4 8!"),
        ("4 8!", "4", "4 8!"),
        ("4 8!", "2 2", "2 2 8!"),
        ("4 8!", "8", None),
        ("4 8!", "4 2 4", "4 2! 4!"),
        ("2! 4 8!", "4", "2! 4 8!"),
        ("12 8!", "4 3", "4 3 8!"),
        ("4 3 8!", "12", "4 3 8!"),
        ("64!", "64", "64!"),
    ],
)
def test_meet(a: str, b: str, want: str | None) -> None:
    for met in (meet(space(a), space(b)), meet(space(b), space(a))):
        assert met == (space(want) if want is not None else None)


def test_symbolic_sizes_meet_when_provable() -> None:
    assert refine([Dim(B * T), Dim(8)], [Dim(B), Dim(T), Dim(8)]) == (Dim(B), Dim(T), Dim(8))
    assert refine([Dim(B)], [Dim(T)]) is None
    assert divide(6 * B, 3) == 2 * B
    assert divide(B, 3) is None


def test_runs_over() -> None:
    s = space("4 8!")
    assert runs_over((4, 8), s) is True
    assert runs_over((2, 2), s) is False
    assert runs_over((8,), s) is None
