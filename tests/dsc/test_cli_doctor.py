"""``dsc doctor`` and ``dsc cache``, read as a person reads them."""

from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsc import cli
from dsc.codegen import archive, build, cache
from dsc.debug import doctor
from dsc.errors import BadArchive
from dsc.options import Options

SOURCE = 'extern "C" int run_0(void**, const long*) { return 41; }\n'


def invoke(*arguments: str, **environ: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "160", **environ})


def test_every_check_of_a_sound_machine(tmp_path: Path) -> None:
    result = invoke("doctor", "--json", DSC_CACHE_DIR=str(tmp_path))
    data = json.loads(result.stdout)
    rows = {c["name"]: c for c in data["checks"]}
    main = [c for c in rows.values() if c["main"]]
    assert data["healthy"] is True and result.exit_code == 0, rows
    assert len(main) >= 7 and all(c["state"] == "ok" for c in main)
    assert "right to the bit" in rows["C++ kernel"]["found"]
    assert "the gradient is eager's" in rows["train step"]["found"]
    if rows["Triton"]["state"] == "ok":
        for name in ("a100 (sm_80)", "h100, h200 (sm_90)"):
            assert "bytes of machine code" in rows[name]["found"], rows[name]


def test_a_broken_main_path_is_red_and_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton_kernel", "tool"):  # slow, and not what this is about
        monkeypatch.setattr(doctor, name, lambda _: doctor.Check("", "missing", "not tried"))
    result = invoke("doctor", DSC_CACHE_DIR=str(tmp_path), DSC_CXX="no-such-compiler")
    assert result.exit_code == 1
    assert "none of no-such-compiler" in result.output
    assert "install g++ or clang++, or name one by DSC_CXX" in result.output
    assert "Broken: C++ compiler, C++ kernel, train step." in result.output


def test_what_makes_the_main_path_broken() -> None:
    sound = doctor.Check("x", "ok", "", main=True)
    other = doctor.Check("y", "broken", "")
    assert doctor.healthy([sound, other])
    assert not doctor.healthy([replace(sound, state="missing"), other])


def test_checks_of_folders_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chmod(tmp_path, 0o777)
    found = doctor.cache_folder(tmp_path)
    assert found.state == "broken" and "others can write" in found.found
    monkeypatch.setattr(doctor, "PYTHON", (99, 0))
    assert doctor.python().todo == "use Python 99.0 or newer"
    monkeypatch.setattr(doctor, "TORCH", ((99, 0), (99, 1)))
    assert doctor.pytorch().state == "broken"
    raises = doctor.tried("t", lambda: doctor.compiler(Options(cxx="/bin/false")))
    assert (raises.name, raises.state) == ("t", "broken")
    assert doctor.installed("no-such-package-of-ours", "to test").todo == "pip install no-such-package-of-ours, to test"


# --- the cache


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A folder with one real library, and with files that are none of ours."""
    folder = tmp_path / "cache"
    compiler = build.find_compiler()
    assert compiler is not None
    build.build(SOURCE, folder, compiler)
    (folder / "notes.txt").write_text("mine")
    return folder


def stand_in(folder: Path, number: int, size: int, used: float) -> str:
    """An entry of ``size`` bytes last used at ``used``."""
    key = f"{number:032x}"
    for suffix, content in ((".so", b"x" * (size - 1)), (".cpp", b"y")):
        path = folder / (key + suffix)
        path.write_bytes(content)
        os.utime(path, (used, used))
    return key


def test_stats_and_clear(full: Path) -> None:
    env = {"DSC_CACHE_DIR": str(full)}
    shown = invoke("cache", **env).output
    assert shown.startswith("Kernel libraries: 1, ") and str(full) in shown
    data = json.loads(invoke("cache", "--stats", "--json", **env).output)
    assert data["libraries"] == 1 and data["bytes"] > 1000 and data["limit"] == cache.LIMIT
    cleared = json.loads(invoke("cache", "--clear", "--json", **env).output)
    assert (cleared["deleted"], cleared["bytes"]) == (1, data["bytes"])
    assert [p.name for p in full.iterdir()] == ["notes.txt"], "only files of our naming are deleted"
    assert json.loads(invoke("cache", "--json", **env).output)["libraries"] == 0
    assert invoke("cache", "--clear", "--stats", **env).exit_code == 2


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    keys = [stand_in(tmp_path, i, 100, used=1000.0 + i) for i in range(4)]
    cache.mark_used(tmp_path / f"{keys[0]}.so")
    assert cache.evict(tmp_path, limit=400) == 0
    assert cache.evict(tmp_path, limit=250, spare=keys[1]) == 200
    assert [e.key for e in cache.entries(tmp_path)] == [keys[1], keys[0]]
    out = invoke("cache", "--limit", "0", DSC_CACHE_DIR=str(tmp_path)).output
    assert out.startswith("Deleted 200 B")
    assert cache.entries(tmp_path) == []


def test_a_new_library_drives_out_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, 1, 100, used=1000.0)
    evict = cache.evict
    monkeypatch.setattr(cache, "evict", lambda folder, spare: evict(folder, 50, spare))
    compiler = build.find_compiler()
    assert compiler is not None
    library = build.build(SOURCE, tmp_path, compiler)
    assert [e.key for e in cache.entries(tmp_path)] == [library.path.stem]
    library.path.unlink()
    assert build.build(SOURCE, tmp_path, compiler).path.exists(), "what was deleted is built again"


def test_kernels_travel_to_a_like_machine(full: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "kernels.tgz", tmp_path / "other"
    assert "Wrote libraries and graphs: 1" in invoke("cache", "--export", str(file), DSC_CACHE_DIR=str(full)).output
    taken = json.loads(invoke("cache", "--import", str(file), "--json", DSC_CACHE_DIR=str(other)).output)
    assert (taken["taken"], taken["present"], taken["foreign"]) == (1, 0, 0)
    ours, theirs = cache.entries(full), cache.entries(other)
    assert [e.key for e in ours] == [e.key for e in theirs]
    assert [p.read_bytes() for p in ours[0].files] == [p.read_bytes() for p in theirs[0].files]
    again = json.loads(invoke("cache", "--import", str(file), "--json", DSC_CACHE_DIR=str(other)).output)
    assert (again["taken"], again["present"]) == (0, 1)


def tampered(file: Path, change: dict[str, bytes], add: dict[str, bytes]) -> None:
    """The archive with files of other content, and with more files."""
    contents = {**archive.members(file), **add}
    for suffix, data in change.items():
        name = next(n for n in contents if n.endswith(suffix))
        contents[name] = data
    with tarfile.open(file, "w:gz") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("suffix", [".so", ".cpp"])
def test_changed_files_are_not_taken(full: Path, tmp_path: Path, suffix: str) -> None:
    file, other = tmp_path / "kernels.tgz", tmp_path / "other"
    archive.write(full, file)
    tampered(file, {suffix: b"something else"}, {"../../evil.so": b"x", "notes.txt": b"x"})
    compiler = build.find_compiler()
    assert compiler is not None
    assert archive.read(file, other, compiler) == archive.Imported(0, 0, 1)
    assert list(other.iterdir()) == []
    assert not (tmp_path / "evil.so").exists()


def test_a_source_that_is_not_what_its_name_says_is_not_taken(tmp_path: Path) -> None:
    """As from a machine with another processor or compiler: the hash of the source is another one here."""
    folder, file = tmp_path / "cache", tmp_path / "kernels.tgz"
    folder.mkdir(mode=0o700)
    stand_in(folder, 7, 100, used=1000.0)
    assert archive.write(folder, file)[0] == 1
    compiler = build.find_compiler()
    assert compiler is not None
    assert archive.read(file, tmp_path / "other", compiler) == archive.Imported(0, 0, 1)


def test_what_is_no_archive(tmp_path: Path) -> None:
    bad = tmp_path / "bad.tgz"
    bad.write_text("hello")
    result = invoke("cache", "--import", str(bad), DSC_CACHE_DIR=str(tmp_path / "c"))
    assert result.exit_code == 2
    assert "it is no gzipped tar, or it was cut off" in result.output
    with pytest.raises(BadArchive, match="no such file"):
        archive.members(tmp_path / "none.tgz")
    with tarfile.open(bad, "w:gz"):
        pass
    with pytest.raises(BadArchive, match="it has no manifest"):
        archive.read(bad, tmp_path / "c", "g++")
