"""What the option ``precision`` asks for: formats by layer and role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dsc.errors import BadOption, BadPrecision
from dsc.precision.formats import RECIPES, ROLES, Format, Role, find
from dsc.precision.plan import PrecisionPlan

KEYS: Mapping[str, tuple[Role, ...]] = {
    "forward": ("forward",), "backward": ("dgrad", "wgrad"), "dgrad": ("dgrad",), "wgrad": ("wgrad",),
}  # fmt: skip
FORM = "a format such as 'bf16' or 'fp8', 'auto', a dsc.PrecisionPlan, or a mapping of layer patterns to formats"
DEFAULT_BUDGET = 0.02
"""Relative error of the gradient of all parameters.  The noise of a mini-batch is some forty times as large."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Formats for the layers that a pattern matches; roles that are missing stay as they are."""

    pattern: str
    formats: Mapping[Role, Format]


@dataclass(frozen=True, slots=True)
class Request:
    rules: tuple[Rule, ...]
    """The first that matches a layer decides."""
    uniform: bool = False
    """One format for the whole model: layers that are known to suffer are left out."""

    def rule(self, layer: str) -> Rule | None:
        return next((r for r in self.rules if matches(r.pattern, layer)), None)


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern (``*``, ``?``, ``[...]``) is the layer's path; ``*.attn.*`` is also ``attn.out``."""
    return fnmatchcase(layer, pattern) or fnmatchcase(f".{layer}.", pattern)


def check(value: object) -> object:
    """The value of the option if it may have it, whatever the recipe.

    Raises:
        BadPrecision, UnknownFormat: it has the wrong form.
    """
    if value is not None and value != "auto" and not isinstance(value, PrecisionPlan):
        parse(value, "blockwise")
    return value


def check_recipe(value: object) -> object:
    if value not in RECIPES:
        raise BadOption("recipe", value, f"one of {', '.join(map(repr, RECIPES))}")
    return value


def check_budget(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise BadOption("error_budget", value, "a number between 0 and 1, such as 0.02")
    return value


def parse(value: object, recipe: str) -> Request:
    """``fp8``, or a mapping as in ``{"*.attn.*": {"forward": "bf16", "backward": "fp32"}, "head": "bf16"}``.

    Raises:
        BadPrecision, UnknownFormat: it has another form.
    """
    match value:
        case str():
            return Request((Rule("*", dict.fromkeys(ROLES, find(value, recipe))),), uniform=True)
        case Mapping() if value and all(isinstance(k, str) for k in value):
            return Request(tuple(Rule(k, _formats(v, value, recipe)) for k, v in value.items()))
    raise BadPrecision(value, FORM)


def _formats(given: object, whole: object, recipe: str) -> dict[Role, Format]:
    match given:
        case str():
            return dict.fromkeys(ROLES, find(given, recipe))
        case Mapping() if given and set(given) <= set(KEYS) and all(isinstance(v, str) for v in given.values()):
            return {role: find(given[k], recipe) for k, roles in KEYS.items() if k in given for role in roles}
    raise BadPrecision(whole, f"for each layer a format, or a mapping of {', '.join(map(repr, KEYS))} to formats")
