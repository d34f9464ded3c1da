"""The dsc command in this process, on captures that are made once."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from dsc import cli
from dsc.cli import source
from dsc.debug.capture import Session

captured = source.captured


@cache
def session(model: str, target: str = "cpu", training: bool = True) -> Session:
    return captured(model, None, target, training=training)


def use_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands on a model of the zoo with its own inputs and the default pipeline take the capture of an earlier test."""

    def cached(spec: str, inputs: Any = None, target: str | None = None, **kwargs: Any) -> Session:
        if inputs or kwargs.get("options") is not None or not spec.endswith("-tiny"):
            return captured(spec, inputs, target, **kwargs)
        return session(spec, target or "cpu", kwargs.get("training", True))

    monkeypatch.setattr(source, "captured", cached)


def dsc(*arguments: str, columns: int = 80, code: int = 0) -> str:
    """What the command prints on its output; on a failure also what it says on the error stream.

    Raises:
        AssertionError: another exit code than ``code``.
    """
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result.stdout if code == 0 else result.output


def as_json(*arguments: str) -> Any:
    return json.loads(dsc(*arguments, "--json"))
