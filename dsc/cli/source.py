"""What a user means by MODEL: a name of the zoo, a file, or a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from dsc.debug.source import Model


def find(spec: str, inputs: Sequence[str] = ()) -> Model:
    """The model that ``spec`` names, on ``inputs`` such as ``f32[4,128]`` where they are given."""
    from dsc.models.zoo import load

    entry = load(spec)
    return Model(spec, entry.build(), entry.inputs())
