"""`steno config`: what it shows and writes, and how wrong settings are told."""

import json
import os
import stat
from pathlib import Path

import pytest

from stenolog.cli.chat_input import InputHistory
from support.cli import Steno


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config file, in a folder that is not there yet, named by the environment."""
    file = tmp_path / "new" / "folder" / "config.toml"
    monkeypatch.setenv("STENO_CONFIG", str(file))
    return file


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o600)


def test_show_json_has_the_same_values(steno: Steno, file: Path) -> None:
    _write(file, "[agent]\nsystem = 'Hi'\n[models.m]\nheaders = {A = 'b'}")
    whole = json.loads(steno("config", "show", "--json").stdout)
    assert (whole["file"], whole["found"], whole["keys"]) == (str(file), True, [])
    assert whole["settings"]["agent.system"] == {"value": "Hi", "source": str(file)}
    assert whole["settings"]["models.m.headers"]["value"] == {"A": "***"}
    assert whole["settings"]["memory.zone"] == {"value": "", "source": "default"}


def test_p11_created_config_folders_are_private_with_any_umask(steno: Steno, file: Path) -> None:
    before = os.umask(0)
    try:
        assert steno("config", "init").exit_code == 0
        InputHistory(file.parents[1] / "state" / "stenolog" / "history").store_string("hello")
    finally:
        os.umask(before)
    made = [path for path in file.parents[1].rglob("*") if path.is_dir()]
    assert len(made) == 3
    for folder in (file.parents[1], *made):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
