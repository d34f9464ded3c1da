"""State that lives between steps: masks, largest values seen, counts.  Compiled graphs read and write it in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsc.errors import BadState
from dsc.torch_shim import unset_fake_temporarily

PREFIX = "_dsc_state_"
"""Graphs know the entry ``mlp.fc1.mask`` as the attribute ``_dsc_state_mlp_fc1_mask``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Stands in a program for one tensor of a state, until the program is loaded."""

    attribute: str


class State(Mapping[str, Tensor]):
    """Named tensors.  Every compiled graph that mentions a name uses the very tensor that is here.

    To change what graphs see, write to the tensors in place: ``state["mlp.fc1.mask"].fill_(True)``.  It is seen at the
    next call, forward and backward, and nothing is compiled again.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"State({', '.join(self._tensors)})"

    def put(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of that name; where there is none, what ``make`` returns, called outside of any fake mode.

        A tensor that was loaded before anybody used it moves to the device of ``make``'s.

        Raises:
            BadState: there is one of another shape or dtype, or a name that differs in punctuation only.
        """
        with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            wanted, known = make(), self._tensors.get(name)
            if known is None:
                return self._keep(name, wanted)
            if (known.shape, known.dtype) != (wanted.shape, wanted.dtype):
                raise BadState(
                    name, f"is {_form(known)}, and {_form(wanted)} is needed", "give the model its own State"
                )
            if known.device != wanted.device:
                self._tensors[name] = known.to(wanted.device)
        return self._tensors[name]

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        other = self._names.setdefault(attribute(name), name)
        if other != name:
            raise BadState(name, f"cannot be told from {other!r} in a graph", "name one of them otherwise")
        self._tensors[name] = tensor
        return tensor

    def replace(self, name: str, tensor: Tensor) -> None:
        """Another tensor under a name.  Graphs that read the old one do not see it: for entries that none of them reads."""
        self._tensors[name] = tensor

    def named(self, attr: str) -> str:
        """The name of the entry that graphs know as attribute ``attr``."""
        return self._names[attr]

    def live(self, entry: Entry) -> Tensor:
        """The tensor that an entry of a program stands for."""
        return self._tensors[self._names[entry.attribute]]

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name, to be saved next to the model's own."""
        return dict(self._tensors)

    def load_state_dict(self, saved: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy saved values into the tensors, in place; names that are not there yet are kept for when they are asked.

        Raises:
            BadState: another shape or dtype; with ``strict``, a name that ``saved`` lacks.
        """
        for name in self._tensors:
            if strict and name not in saved:
                raise BadState(name, "is not in what was saved", "load with strict=False to leave it as it is")
        with torch.no_grad():
            for name, value in saved.items():
                known = self._tensors.get(name)
                if known is None:
                    self._keep(name, value.detach().clone())
                elif (known.shape, known.dtype) != (value.shape, value.dtype):
                    raise BadState(
                        name, f"is {_form(known)}, and what was saved is {_form(value)}", "load its own file"
                    )
                else:
                    known.copy_(value)


def attribute(name: str) -> str:
    """The name of the attribute by which graphs know an entry."""
    return PREFIX + re.sub(r"\W", "_", name)


def is_attribute(target: object) -> bool:
    """Whether the target of a ``get_attr`` node is an entry of a state."""
    return isinstance(target, str) and target.startswith(PREFIX)


def _form(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
