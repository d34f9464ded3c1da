"""The suites, in the order of the table."""

from __future__ import annotations

import importlib.util
from functools import partial

from conformance import architectures, case, cases, operators
from conformance.outcome import Outcome, Program, Settings, Suite, once


def case_programs(settings: Settings) -> list[Program]:
    def run(make: cases.Maker, s: Settings) -> Outcome:
        return once(lambda: case.run(make, s.backend, s.dynamic))

    return [Program("cases", n.partition("/")[0], n, partial(run, m)) for n, m in cases.PROGRAMS.items()]


def need(module: str) -> None:
    """Raises ModuleNotFoundError unless it is installed."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    importlib.import_module(module)  # once, before the programs' processes are forked


def step_programs(settings: Settings) -> list[Program]:
    need("transformers")

    def run(name: str, s: Settings) -> Outcome:
        return once(lambda: architectures.compare(name, s.backend, s.dynamic))

    return [Program("architectures", "train step", n, partial(run, n)) for n in architectures.names()]


def dropout_programs(settings: Settings) -> list[Program]:
    need("transformers")

    def run(name: str, s: Settings) -> Outcome:
        return once(lambda: architectures.compare(name, s.backend, s.dynamic, architectures.DROPOUT))

    pairs = [(family, n) for family, members in architectures.FAMILIES.items() for n in members]
    return [Program("dropout", family, n, partial(run, n)) for family, n in pairs]


def operator_programs(settings: Settings) -> list[Program]:
    need("expecttest")
    database = operators.database()
    return [
        Program("operators", operators.kind_of(o), operators.name_of(o), partial(operators.compare, o))
        for o in database
    ]


SUITES = (
    Suite(
        "cases",
        "Small programs, each a behaviour that compilers are known to change",
        case_programs,
        cases.describe,
    ),
    Suite(
        "architectures",
        "One train step of Hugging Face architectures: loss and every gradient",
        step_programs,
        lambda _: "Loss and the gradient of every parameter, in evaluation mode",
    ),
    Suite(
        "dropout",
        "Two train steps with dropout from fixed seeds: loss, every gradient, the generator",
        dropout_programs,
        lambda family: f"Train mode with dropout {architectures.DROPOUT}, the {family} family",
    ),
    Suite(
        "operators",
        "PyTorch's operator database: dtypes x samples, forward and backward",
        operator_programs,
        operators.describe,
    ),
)
