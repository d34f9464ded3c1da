"""The op table and the lowering rules name the same operators."""

from dsc import bind, ops
from dsc.ops import kinds, refusals

COMPUTED = ("pointwise", "create", "reduction", "rowwise")


def test_what_the_table_calls_computed_has_a_rule() -> None:
    assert sorted(n for n, info in ops.table().items() if info.kind in COMPUTED and n not in bind.RULES) == []


def test_every_rule_is_for_an_operator_that_the_table_knows() -> None:
    known = {n: info.kind for n, info in ops.table().items()}
    assert sorted(n for n in bind.RULES if known.get(n) not in (*COMPUTED, "view", "item")) == []


def test_reasons_and_exceptions_are_for_operators_of_the_table() -> None:
    named = {*refusals._REASONS, *refusals._INT_OK, *refusals._INDEX_ARGS, *kinds._WIDE}
    assert sorted(named - set(ops.table())) == []
