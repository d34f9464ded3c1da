"""A pipeline with passes left out or cut off."""

from __future__ import annotations

from collections.abc import Sequence

from dsc import passlist
from dsc.errors import UnknownPass
from dsc.manager import Pass
from dsc.passlist import Default


def cut(text: str | None = None, stop_after: str | None = None, disable: Sequence[str] = ()) -> tuple[Pass, ...]:
    """The passes of ``text`` (the default pipeline if None) up to ``stop_after``, but for those of ``disable``.

    Raises:
        UnknownPass: the pipeline has no pass of a name that is to be the last, or left out.
        BadOption, UnknownOption: the text is no pipeline.
    """
    passes = tuple(q for p in passlist.parse(Default.name if text is None else text) for q in written_out(p))
    names = [p.name for p in passes]
    for wanted in (*disable, *([stop_after] if stop_after else [])):
        if wanted not in names:
            raise UnknownPass(wanted, tuple(dict.fromkeys(names)))
    if stop_after is not None:
        passes = passes[: len(names) - names[::-1].index(stop_after)]
    return tuple(p for p in passes if p.name not in disable)


def written_out(p: Pass) -> tuple[Pass, ...]:
    """``default`` as the passes that it stands for; one that runs before and after the split once."""
    if not isinstance(p, Default):
        return (p,)
    return (*passlist.JOINT, *(q for q in passlist.GRAPH if q not in passlist.JOINT))
