"""Tests the command in error messages that installs an extra."""

import shlex
from pathlib import Path
from typing import Any

import pytest

import stenolog
from stenolog.errors import install_command
from support.installations import write_metadata


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'stenolog[sqlite]'"),
        (
            {"url": "file:///opt/steno%20log", "dir_info": {}},
            "pip install '/opt/steno log[sqlite]'",
        ),
        (
            {"url": "file:///opt/stenolog", "dir_info": {"editable": True}},
            "pip install -e '/opt/stenolog[sqlite]'",
        ),
        (
            {"url": "file:///tmp/stenolog-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/stenolog-0.1.0-py3-none-any.whl[sqlite]'",
        ),
        (
            {"url": "https://example.org/stenolog.git", "vcs_info": {"vcs": "git"}},
            "pip install 'stenolog[sqlite]'",
        ),
    ],
    ids=["index", "clone", "editable", "wheel", "git"],
)
def test_install_command_names_the_origin_of_the_package(
    direct_url: dict[str, Any] | None,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(write_metadata(tmp_path, direct_url))
    assert install_command("sqlite") == command


def test_install_command_quotes_the_folder_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = "/home of/it's $HOME"
    origin = {"url": f"file://{clone.replace(' ', '%20')}", "dir_info": {}}
    monkeypatch.syspath_prepend(write_metadata(tmp_path, origin))
    assert shlex.split(install_command("sqlite")) == ["pip", "install", f"{clone}[sqlite]"]


def test_sources_have_no_install_command_of_their_own() -> None:
    package = Path(stenolog.__file__).parent
    found = [
        path.name for path in package.rglob("*.py") if "install 'stenolog[" in path.read_text()
    ]
    assert found == []
