"""Compiled templates are stored like Python's compiled modules."""

import sys
from pathlib import Path

import pytest
from jinja2 import Environment

from stenolog.gateway.viewer.templating import new_environment

_TEMPLATE = "failure.html"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path


def compile_template() -> None:
    new_environment().get_template(_TEMPLATE)


def files_in(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_template_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_template()
    assert len(files_in(cache)) == 1
    monkeypatch.setattr(Environment, "compile", lambda *_: pytest.fail("compiled again"))
    compile_template()


def test_incomplete_file_is_replaced(cache: Path) -> None:
    compile_template()
    [file] = files_in(cache)
    complete = file.read_bytes()
    for length in (0, 10, 30, len(complete) // 2, len(complete) - 1):
        file.write_bytes(complete[:length])
        compile_template()
        assert (files_in(cache), file.read_bytes()) == ([file], complete)


def test_code_of_another_template_is_not_used(cache: Path) -> None:
    compile_template()
    [file] = files_in(cache)
    complete = file.read_bytes()
    new_environment().get_template("empty.html")
    [other] = set(files_in(cache)) - {file}
    file.write_bytes(other.read_bytes())
    compile_template()
    assert file.read_bytes() == complete


def test_template_is_compiled_if_its_code_cannot_be_stored(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("not a folder")
    monkeypatch.setattr(sys, "pycache_prefix", str(cache / "file"))
    compile_template()
    monkeypatch.setattr(sys, "pycache_prefix", str(cache / "folder"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compile_template()
    assert files_in(cache) == [cache / "file"]
