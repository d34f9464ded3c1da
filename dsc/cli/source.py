"""What a user means by MODEL: a name of the zoo, a file, or a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsc.errors import UnknownModel

if TYPE_CHECKING:
    from dsc.debug.source import Model


def find(spec: str, inputs: Sequence[str] = ()) -> Model:
    """The model that ``spec`` names, on ``inputs`` such as ``f32[4,128]`` where they are given.

    Raises:
        UnknownModel: no name of the zoo, and none of the other forms.
        BadModel, BadInput: what the form that it has cannot use.
    """
    if spec.startswith("hf:"):
        from dsc.debug.load import huggingface

        return huggingface.load(spec, inputs)
    if spec.endswith(".pt2"):
        from dsc.debug.load import exported

        return exported.load(spec, inputs)
    if spec.endswith(".py") or ".py:" in spec:
        from dsc.debug.load import python

        return python.load(spec, inputs)
    return from_zoo(spec, inputs)


def from_zoo(name: str, inputs: Sequence[str]) -> Model:
    """A model of ``dsc.models``, in any case of its name."""
    from dsc.debug.load.python import from_user
    from dsc.debug.source import Model
    from dsc.models.zoo import ZOO

    entry = ZOO.get(name.lower())
    if entry is None:
        raise UnknownModel(name, tuple(ZOO))
    module = entry.build()
    return Model(entry.name, module, from_user(inputs, module) if inputs else entry.inputs())
