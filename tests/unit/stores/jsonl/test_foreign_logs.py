"""Tests that files of other programs are never repaired, appended to or listed."""

import shutil
from pathlib import Path

import pytest

from stenolog import JSONLStore, open_store
from stenolog.errors import ForeignLog
from stenolog.stores.file_names import log_name

SAMPLES = Path(__file__).parents[3] / "samples"

# The key of each sample, as its program understands it.
KEYS = {
    "picoclaw/cli_torn-1001.jsonl": "cli:torn-1001",
    "picoclaw/slack_C1001_1700000000.000100.jsonl": "slack:C1001/1700000000.000100",
    "picoclaw/telegram_1001.jsonl": "telegram:1001",
    "zeroclaw/telegram_1001_alice.jsonl": "telegram_1001_alice",
}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("sample", sorted(path.name for path in SAMPLES.iterdir() if path.is_dir()))
def test_folder_of_another_program_is_not_changed(sample: str, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / sample, tmp_path / "sessions")
    before = bytes_of(tmp_path)
    with open_store(tmp_path) as store:
        assert store.list_sessions() == []
        for path, key in KEYS.items():
            if path.startswith(f"{sample}/"):
                with pytest.raises(ForeignLog, match="steno import"):
                    store.add_message(key, "user", "hello")
        for name in [path.name for path in (tmp_path / "sessions").glob("*.jsonl")]:
            key = name.removesuffix(".jsonl")
            if log_name(key) == name:
                with pytest.raises(ForeignLog):
                    store.get_history(key)
                with pytest.raises(ForeignLog):
                    store.add_message(key, "user", "hello")
                with pytest.raises(ForeignLog):
                    store.truncate_history(key, 1)
    assert bytes_of(tmp_path) == before


def test_every_sample_log_has_an_expected_key() -> None:
    logs = {
        str(path.relative_to(SAMPLES))
        for program in ("picoclaw", "zeroclaw")
        for path in (SAMPLES / program).glob("*.jsonl")
    }
    assert logs == set(KEYS)


def test_session_does_not_block_a_key_with_a_similar_file_name(tmp_path: Path) -> None:
    """The file name picoclaw would use for `telegram:1001` is another session here."""
    with JSONLStore(tmp_path) as store:
        store.add_message("telegram_1001", "user", "one")
        store.add_message("telegram:1001", "user", "two")
        assert [m.content for m in store.get_history("telegram_1001")] == ["one"]
        assert [m.content for m in store.get_history("telegram:1001")] == ["two"]


@pytest.mark.parametrize("text", [b"hello\n", b"{}\n", b'{"role":"user"}\n', b"\xff\xfe", b"{"])
def test_file_with_foreign_content_is_not_changed(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir(mode=0o700)
    path = tmp_path / "sessions" / "a.jsonl"
    path.write_bytes(text)
    with JSONLStore(tmp_path) as store:
        if text == b"{":
            # It may be the first byte of our own log whose writer was killed.
            assert store.add_message("a", "user", "hello") == 1
            assert path.read_bytes().startswith(b"{\n")
        else:
            with pytest.raises(ForeignLog):
                store.add_message("a", "user", "hello")
            assert path.read_bytes() == text
            assert store.list_sessions() == []
