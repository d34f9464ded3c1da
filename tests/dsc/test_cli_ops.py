"""``dsc ops``: every operator of the table is asked about, and what is said of it is so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from dsc import cli, ops
from dsc.debug import op_report


@pytest.fixture(scope="module")
def rows() -> dict[str, op_report.Row]:
    return {r.name: r for r in op_report.rows()}


def dsc(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["ops", *words], env={"COLUMNS": "120"})
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_every_operator_of_the_table_is_there_and_can_be_called(rows: dict[str, op_report.Row]) -> None:
    wanted = {n for n, info in ops.table().items() if info.kind in op_report.COMPUTED and not n.startswith("dsc.")}
    assert {n for n, r in rows.items() if r.kernels} == wanted  # f32 or i64 at least, so each sample call is right
    assert all(why for r in rows.values() for _, why in r.aten)


def test_each_odd_call_is_left_to_aten(rows: dict[str, op_report.Row]) -> None:
    for name, calls in op_report.ODD.items():
        assert set(calls) <= {what for what, _ in rows[name].aten}, name


def test_what_the_rows_say(rows: dict[str, op_report.Row]) -> None:
    assert rows["exp.default"].kernels == ("f32", "bf16", "f16", "f64")
    assert dict(rows["exp.default"].aten)["i64"] == "not floating point"
    assert "f32" not in rows["bitwise_not.default"].kernels + tuple(dict(rows["bitwise_not.default"].aten))
    assert rows["sort.default"].kind == "opaque"
    assert rows["bernoulli.p"].kind == "random"
    assert rows["mm.default"].aten[0][1].startswith("libraries")
    assert not any(n.endswith("_.default") and not n.startswith("_") for n in rows if n.count("_") == 1)


def test_says_what_the_compiler_does() -> None:
    """A call that the report leaves to ATen is an ATen call of the compiled program, one that it does not is not."""
    for fn, calls in ((lambda x: (x * 2).exp() + 1, 0), (lambda x: (x * 2).erfinv() + 1, 1)):
        seen: list[Any] = []
        torch._dynamo.reset()
        torch.compile(fn, backend="dsc", options={"on_compile": seen.append})(torch.rand(5))
        assert seen[0].numbers["aten_calls"] == calls


def test_table_for_people() -> None:
    text = dsc("clamp")
    assert "clamp_min.Tensor" in text and "not floating point" in text
    assert "pointwise: an element" in text and "exp.default" not in text


def test_all_names_or_counts() -> None:
    short = dsc()
    assert "such as" in short and "Left to ATen in every call" in short
    assert "grid_sampler_2d" in dsc("--all") and "grid_sampler_2d" not in short


def test_json() -> None:
    data = json.loads(dsc("softmax", "--json"))
    names = {o["name"]: o for o in data["operators"]}
    assert names["_softmax.default"]["kernels"][0] == "f32"
    assert names["_softmax_backward_data.default"]["aten"]["transposed operands"] == "strides that only ATen knows"
    assert data["everywhere"]


def test_an_unknown_name() -> None:
    assert (
        dsc("no_such_operator", code=2) == "No operator has 'no_such_operator' in its name; dsc ops --all lists them.\n"
    )
