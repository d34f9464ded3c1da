from pathlib import Path

import pytest

from dsc import options
from dsc.errors import BadOption, UnknownOption
from dsc.options import Options, parse
from dsc.precision.controller import PrecisionController
from dsc.runtime.state import State


def test_nothing_given_is_the_defaults() -> None:
    assert parse(None, None, {}) == parse({}, None, {"DSC_EMIT": "", "HOME": "/"}) == Options()


def test_every_key_is_accepted() -> None:
    given = {
        "target": "h100", "numerics": "fast", "emit": "cpp", "passes": "fuse", "verify": False,
        "cache_dir": "/c", "cxx": "g++", "on_compile": print, "watchers": (), "cache": False, "trace": "/t",
        "memory_budget": "40GiB", "offload": "cpu", "memory_held": 1 << 30, "memory_plan": "plan.json", "compress": "fp8",
        "state": State(),
        "precision": "fp8", "recipe": "rowwise", "error_budget": 0.01, "precision_plan": "p.json", "controller": PrecisionController(), "sparsity": "2:4",
        "attention": {"window": 64}, "tune": True, "cuda_graphs": True, "dropout": "kernel",
    }  # fmt: skip
    assert parse(given, "max-autotune", {}) == Options(**given, mode="max-autotune")
    assert set(given) == set(options.KEYS)


def test_variables_are_read_and_options_win() -> None:
    environ = {
        "DSC_CACHE_DIR": "/e", "DSC_CXX": "clang++", "DSC_EMIT": "aten", "DSC_VERIFY": "off",
        "DSC_NUMERICS": "fast", "DSC_PASSES": "fuse", "DSC_TRACE": "/t", "DSC_SOMETHING_NEWER": "1",
    }  # fmt: skip
    want = Options(cache_dir="/e", cxx="clang++", emit="aten", verify=False, numerics="fast", passes="fuse", trace="/t")
    assert parse(None, None, environ) == want
    assert parse({"emit": "cpp", "verify": True}, None, environ).emit == "cpp"
    assert parse({"verify": True}, None, environ).verify is True


@pytest.mark.parametrize("mode", options.MODES)
def test_modes_are_recorded(mode: str | None) -> None:
    assert parse(None, mode, {}).mode == mode


def test_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(UnknownOption, match="'numeric' is not an option of dsc; did you mean 'numerics'"):
        parse({"numeric": "fast"}, None, {})
    with pytest.raises(UnknownOption, match="'mode' is not an option of dsc"):
        parse({"mode": "default"}, None, {})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("numerics", "exact", "one of 'eager', 'fast'"),
        ("emit", None, "one of 'auto', 'cpp', 'triton', 'aten'"),
        ("emit", ["cpp"], "one of 'auto', 'cpp', 'triton', 'aten'"),
        ("verify", "yes", "True or False"),
        ("verify", 1, "True or False"),
        ("memory_budget", True, "bytes, a size such as '40GiB', a share such as '80%', or 'auto'"),
        ("memory_budget", 0.5, "bytes, a size such as '40GiB', a share such as '80%', or 'auto'"),
        ("passes", 3, "a string, a list, or None"),
        ("target", 3, "a string, or None"),
        ("on_compile", 3, "a function of one argument, or None"),
    ],
)
def test_bad_values(name: str, value: object, expected: str) -> None:
    with pytest.raises(BadOption, match=f"^Option '{name}' cannot be .*; give {expected}\\.$"):
        parse({name: value}, None, {})


def test_bad_variables_are_named_as_the_user_wrote_them() -> None:
    with pytest.raises(BadOption, match="'DSC_EMIT' cannot be 'rust'"):
        parse(None, None, {"DSC_EMIT": "rust"})
    with pytest.raises(BadOption, match="'DSC_VERIFY' cannot be 'maybe'; give 1 or 0"):
        parse(None, None, {"DSC_VERIFY": "maybe"})


def test_bad_mode() -> None:
    with pytest.raises(BadOption, match=r"'mode' cannot be 'fastest'; give one of 'default', 'reduce-overhead'"):
        parse(None, "fastest", {})


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert options.default_cache_dir() == Path("/x/dsc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert options.default_cache_dir() == Path("/h/.cache/dsc")
