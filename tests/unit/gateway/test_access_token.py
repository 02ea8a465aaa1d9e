"""The token: made once, for its owner only, and never shown."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.errors import WrongSettings
from stenolog.gateway.access_token import Token, read_or_create_token, read_token, token_path
from stenolog.settings.file import config_path

GOOD = b"x" * 43


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the token goes, in a folder that is not there yet."""
    return tmp_path / "new" / "gateway.token"


def _written(file: Path, content: bytes, mode: int = 0o600) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    file.chmod(mode)
    return file


def test_first_start_creates_a_private_token_file(file: Path) -> None:
    umask = os.umask(0)
    try:
        made = read_or_create_token(file)
    finally:
        os.umask(umask)
    assert len(made.value) == 43
    assert file.read_bytes() == made.value + b"\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]


def test_two_tokens_are_never_the_same(tmp_path: Path) -> None:
    assert read_or_create_token(tmp_path / "a") != read_or_create_token(tmp_path / "b")


def test_concurrent_starts_get_the_same_token(file: Path) -> None:
    start, found = threading.Barrier(8), []

    def begin() -> None:
        start.wait()
        found.append(read_or_create_token(file).value)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [file.read_bytes().rstrip()] * 8
    assert list(file.parent.iterdir()) == [file]


def test_token_created_by_another_process_is_not_overwritten(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(source: Path, target: Path) -> None:
        _written(file, GOOD)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert read_or_create_token(file).value == GOOD


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o777])
def test_token_file_accessible_to_others_is_rejected(file: Path, mode: int) -> None:
    _written(file, GOOD, mode)
    with pytest.raises(WrongSettings, match=f"chmod 600 {file}"):
        read_or_create_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_token_file_of_another_user_is_rejected(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _written(file, GOOD)
    if os.geteuid() == 0:
        os.chown(file, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(WrongSettings, match="belongs to another user"):
        read_token(file)


def test_symlinked_token_file_is_rejected(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(_written(tmp_path / "real", GOOD))
    with pytest.raises(WrongSettings, match="symbolic link"):
        read_or_create_token(link)


def test_dangling_symlink_is_rejected_and_creates_no_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WrongSettings, match="symbolic link"):
        read_or_create_token(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"short",
        b"x" * 31,
        b"x" * 513,
        b"x" * 5_000,
        b"x" * 40 + b"\n" + b"y" * 40,
        b"two words " + b"x" * 40,
        b"\x00" * 40,
        "ü".encode() * 40,
    ],
)
def test_file_without_a_token_is_rejected_and_unchanged(file: Path, content: bytes) -> None:
    _written(file, content)
    with pytest.raises(WrongSettings, match="it must contain one line"):
        read_or_create_token(file)
    assert file.read_bytes() == content


@pytest.mark.parametrize("content", [b"x" * 32, b"x" * 512 + b"\r\n", b"aA0-._~+/=" * 4 + b"\n"])
def test_user_defined_token_is_accepted(file: Path, content: bytes) -> None:
    assert read_token(_written(file, content)).value == content.strip()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_token_path_that_is_not_a_regular_file_is_rejected(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "it")
    with pytest.raises(WrongSettings, match="not a regular file"):
        read_or_create_token(tmp_path / "it")


def test_error_for_a_missing_token_file_says_what_creates_it(file: Path) -> None:
    with pytest.raises(WrongSettings, match="`steno serve` creates it"):
        read_token(file)
    assert not file.parent.exists()


def test_token_file_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WrongSettings, match=r"gateway\.token_file: it cannot be created"):
        read_or_create_token(tmp_path / "file" / "gateway.token")


def test_default_token_file_is_next_to_the_config_file(tmp_path: Path) -> None:
    assert token_path("") == config_path(None, {}).parent / "gateway.token"
    assert token_path(str(tmp_path / "mine")) == tmp_path / "mine"
    assert token_path("~/mine") == Path.home() / "mine"


def test_repr_of_a_token_does_not_contain_it() -> None:
    token = Token(GOOD)
    assert GOOD.decode() not in f"{token} {token!r} {[token]} {vars(Token)}"


@given(st.binary(max_size=60))
def test_token_equals_only_itself(other: bytes) -> None:
    token = Token(GOOD)
    assert token.is_equal(GOOD)
    assert token.is_equal(other) == (other == GOOD)


def test_proof_depends_on_words_and_token_and_does_not_contain_it() -> None:
    said = [("a", "b"), ("b", "a"), ("a",), ("ab",), ("a", "b", "")]
    proofs = {Token(value).proof(*words) for words in said for value in (GOOD, b"y" * 43)}
    assert len(proofs) == 10
    assert all(GOOD.hex() not in proof and len(proof) == 64 for proof in proofs)


def test_each_purpose_has_its_own_derived_key() -> None:
    keys = {
        Token(GOOD).derive_key("a"),
        Token(GOOD).derive_key("b"),
        Token(b"y" * 43).derive_key("a"),
    }
    assert len(keys) == 3
    assert Token(GOOD).derive_key("a") == Token(GOOD).derive_key("a")
    assert GOOD not in keys
