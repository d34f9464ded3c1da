"""Golden files: ``tests/<folder>/golden/<module>/<test>[.<part>].txt`` next to the test module.

``--update-golden`` rewrites them. A missing file fails; a file that no test asked for fails the whole run of its module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_SEEN: pytest.StashKey[dict[Path, set[Path]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SEEN] = {}
    os.environ["DSC_CACHE"] = "0"  # a test that changes the compiler must not get what another compiled


def folder_of(module: Path) -> Path:
    return module.parent / "golden" / module.stem.removeprefix("test_")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``golden(text)``, or ``golden(text, "part")`` for a test with several texts."""
    folder = folder_of(request.path)
    update = bool(request.config.getoption("--update-golden"))
    test = re.sub(r"[^\w.-]+", "_", request.node.name.removeprefix("test_")).strip("_")

    def check(text: str, part: str = "", suffix: str = "txt") -> None:
        file = folder / ".".join([test, *([part] if part else []), suffix])
        request.config.stash[_SEEN].setdefault(folder, set()).add(file)
        if update:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        if not file.exists():
            pytest.fail(f"no golden file {file}: run pytest --update-golden, and read what it writes")
        assert text == file.read_text(), f"differs from {file}"

    return check


@pytest.fixture(scope="module", autouse=True)
def _no_orphans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails where a golden file is left that no test of the module uses, if all its tests ran here."""
    yield
    config = request.config
    folder = folder_of(request.path)
    if folder.parent.is_dir():
        lost = [f.name for f in folder.parent.iterdir() if not (request.path.parent / f"test_{f.name}.py").exists()]
        assert not lost, f"golden folders without a test module: {lost}"
    selected = config.option.keyword or config.option.markexpr or any("::" in a for a in config.args)
    if selected or hasattr(config, "workerinput") or request.session.shouldstop or not folder.is_dir():
        return
    if (
        config.getoption("lf", False)
        or config.getoption("failedfirst", False)
        or config.getoption("collectonly", False)
    ):
        return
    orphans = set(folder.iterdir()) - config.stash[_SEEN].get(folder, set())
    if config.getoption("--update-golden"):
        for file in orphans:
            file.unlink()
    elif orphans and not request.session.testsfailed:
        pytest.fail(f"golden files that no test uses: {sorted(f.name for f in orphans)}")
