import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MOVED = ("passes", "codegen", "models")


def packages() -> set[str]:
    found = set()
    for top in ("dsc", *MOVED):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            if parts[0] == "dsc" and len(parts) > 1 and parts[1] in MOVED:
                continue  # the links
            found.add(".".join(parts if parts[0] == "dsc" else ("dsc", *parts)))
    return found


def test_the_list_of_packages_is_complete() -> None:
    assert set(SETUPTOOLS["packages"]) == packages()


def test_every_folder_with_sources_is_a_package() -> None:
    folders = {p.parent for top in ("dsc", *MOVED) for p in (ROOT / top).rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", MOVED)
def test_links_and_package_dir_agree(name: str) -> None:
    link = ROOT / "dsc" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert SETUPTOOLS["package-dir"][f"dsc.{name}"] == name


def test_a_build_holds_every_source(tmp_path: Path) -> None:
    """What ``pip wheel`` copies, without its seconds: setuptools' own build step into an empty folder."""
    pytest.importorskip("setuptools")
    from setuptools import Distribution

    d = Distribution(
        {"name": "dsc-compiler", "packages": SETUPTOOLS["packages"], "package_data": SETUPTOOLS["package-data"]}
    )
    d.package_dir = {k: str(ROOT / v) for k, v in SETUPTOOLS["package-dir"].items()}
    d.script_name = "setup.py"
    build = d.get_command_obj("build_py")
    build.build_lib = str(tmp_path)
    build.ensure_finalized()
    build.run()
    built = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.py")}
    want = {
        p.relative_to(ROOT).as_posix() if top == "dsc" else "dsc/" + p.relative_to(ROOT).as_posix()
        for top in ("dsc", *MOVED)
        for p in (ROOT / top).rglob("*.py")
        if not (top == "dsc" and p.relative_to(ROOT).parts[1] in MOVED)
    }
    assert built == want
    assert (tmp_path / "dsc" / "py.typed").exists()
