"""Files of other programs with odd names, odd ids, or damage: only they are affected, and named."""

import json
import logging
import os
import signal
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stenolog.catalog import open_catalog
from stenolog.errors import NoSuchSession
from stenolog.stores.in_memory import InMemoryStore
from stenolog.transfer import read_only_stores
from stenolog.transfer.read_only_stores import TranscriptStore
from stenolog.transfer.transcripts import chat_exports, codex, transcript
from stenolog.transfer.transcripts.chat_exports import ChatGPT
from stenolog.transfer.transcripts.claude_code import ClaudeCode
from stenolog.transfer.transcripts.codex import Codex
from stenolog.transfer.transcripts.gemini_cli import GeminiCLI
from stenolog.transfer.transcripts.llm_logs import LLMLogs
from stenolog.transfer.transcripts.programs import detect_program
from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptFile,
    TranscriptReader,
    open_transcript,
    path_and_reason,
    read_side_file,
)
from stenolog.transfer.transcripts.transcript_import import TranscriptImport
from stenolog.transfer.viewed_places import ViewedPlace, open_places, prepare_index_file
from support.resource_limits import MB, run_limited

THREADS = [f"{digit * 8}-{digit * 4}-4{digit * 3}-8{digit * 3}-{digit * 12}" for digit in "123456"]


def read_all(reader: TranscriptReader, path: Path) -> dict[str, Transcript]:
    return {file.key: reader.read(file) for file in reader.find(path)}


# --- ids and names -------------------------------------------------------------------------------


def claude_session(file: Path, text: str = "hello") -> None:
    record = {"type": "user", "uuid": text, "message": {"role": "user", "content": text}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**record, "timestamp": "2026-01-01T00:00:00Z"}) + "\n")


def chatgpt_export(folder: Path, *chats: dict[str, Any]) -> Path:
    author = {"role": "user"}
    exported = []
    for chat in chats:
        parts = chat.pop("parts", ["hello"])
        message = {"author": author, "content": {"content_type": "multimodal_text", "parts": parts}}
        node = {"id": "r", "parent": None, "message": message}
        exported.append({"title": "t", "current_node": "r", "mapping": {"r": node}, **chat})
    folder.mkdir(exist_ok=True)
    (folder / "conversations.json").write_text(json.dumps(exported))
    return folder


def test_file_name_that_is_no_text_affects_no_other_session(tmp_path: Path) -> None:
    claude_session(tmp_path / "p" / "good.jsonl")
    claude_session(tmp_path / "p" / os.fsdecode(b"\xff.jsonl"), "odd")
    with TranscriptStore([(ClaudeCode(), tmp_path)]) as store, open_catalog(store) as catalog:
        entries = {entry.title: entry for entry in catalog.list().entries}
        assert entries.keys() == {"hello", "odd"}
        assert store.problems == {}
        path = store.info(entries["odd"].key).meta["transcript"]["path"]
        assert path == f"{tmp_path}/p/\ufffd.jsonl"


@pytest.mark.parametrize("bad_id", ["k" * 3_000, "k" * 1_010, "\ud800", "\udcff" * 9])
def test_id_that_fits_into_no_key_affects_no_other_conversation(
    tmp_path: Path, bad_id: str
) -> None:
    chats = ({"conversation_id": "a"}, {"conversation_id": bad_id}, {"conversation_id": "z"})
    chatgpt_export(tmp_path, *chats)
    with TranscriptStore([(ChatGPT(), tmp_path)]) as viewed, open_catalog(viewed) as catalog:
        keys = [entry.key for entry in catalog.list().entries]
    assert len(keys) == 3
    assert {"chatgpt:a", "chatgpt:z"} < set(keys)
    batch = TranscriptImport(ChatGPT(), store := InMemoryStore())
    for file in ChatGPT().find(tmp_path):
        batch.add(file)
    batch.flush()
    assert sorted(store.list_sessions()) == sorted(keys)


def test_long_ids_have_different_keys_that_stay_the_same(tmp_path: Path) -> None:
    chatgpt_export(tmp_path, *({"conversation_id": "k" * 3_000 + end} for end in "ab"))
    keys = [file.key for file in ChatGPT().find(tmp_path)]
    assert len(set(keys)) == 2
    assert keys == [file.key for file in ChatGPT().find(tmp_path)]


def test_half_an_emoji_in_a_title_costs_no_other_conversation(tmp_path: Path) -> None:
    bad = {"conversation_id": "b", "title": "cut \ud83d", "parts": ["a \ud83d b"]}
    chatgpt_export(tmp_path, {"conversation_id": "a"}, bad, {"conversation_id": "c"})
    batch = TranscriptImport(ChatGPT(), store := InMemoryStore())
    for file in ChatGPT().find(tmp_path):
        batch.add(file)
    batch.flush()
    assert [report.problems for report in batch.reports] == [[], [], []]
    assert [store.info(f"chatgpt:{name}").count for name in "abc"] == [1, 1, 1]
    with TranscriptStore([(ChatGPT(), tmp_path)]) as viewed, open_catalog(viewed) as catalog:
        assert sorted(entry.title for entry in catalog.list().entries) == ["cut ?", "t", "t"]


def test_ids_of_a_database_may_be_numbers(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "logs.db")) as connection, connection:
        connection.execute("CREATE TABLE conversations (id, name)")
        connection.executemany("INSERT INTO conversations VALUES (?, 'a')", [(7,), (None,)])
    with TranscriptStore([(LLMLogs(), tmp_path)]) as store:
        assert store.list_sessions() == ["llm:7", "llm:None"]
        assert store.info("llm:7").meta["title"] == "a"


def test_folder_whose_name_is_no_text_is_shown(tmp_path: Path) -> None:
    exports = [
        chatgpt_export(tmp_path / name, {"conversation_id": "a"})
        for name in ("x", os.fsdecode(b"\xfe"), os.fsdecode(b"\xff"))
    ]
    places = [ViewedPlace(program="chatgpt", where=str(export)) for export in exports]
    index_file = prepare_index_file(places, tmp_path / "cache")
    with open_places(places, catalog=index_file) as store, open_catalog(store) as catalog:
        keys = sorted(entry.key for entry in catalog.list().entries)
    assert keys[0] == "x/chatgpt:a"
    assert [key.partition("-")[0] for key in keys[1:]] == ["\ufffd", "\ufffd"]


# --- files that cannot be read -------------------------------------------------------------------


class _Counting(Codex):
    """A reader that records what it reads."""

    def __init__(self) -> None:
        self.read_keys: list[str] = []

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        self.read_keys.append(file.key)
        super().fill(transcript, file)


@pytest.fixture
def _list_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only_stores, "LIST_SECONDS", -1.0)


def rollout(folder: Path, thread: str, *lines: object, ending: str = "") -> Path:
    file = folder / f"rollout-2026-01-01T00-00-00-{thread}.jsonl{ending}"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def said(thread: str, number: int) -> dict[str, Any]:
    content = [{"type": "input_text", "text": f"{thread[0]}.{number}"}]
    payload = {"type": "message", "role": "user", "content": content}
    return {"timestamp": "t", "ordinal": number, "type": "response_item", "payload": payload}


@pytest.mark.usefixtures("_list_every_time")
def test_session_that_cannot_be_read_is_a_problem_and_others_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("zstandard")
    rollout(tmp_path, THREADS[0], said(THREADS[0], 1))
    bad = rollout(tmp_path, THREADS[1], "not compressed", ending=".zst")
    bad_key, reader = f"codex:{THREADS[1]}", _Counting()
    with (
        caplog.at_level(logging.WARNING),
        TranscriptStore([(reader, tmp_path)]) as store,
        open_catalog(store) as catalog,
    ):
        for _ in range(3):
            assert [entry.count for entry in catalog.list().entries if entry.count] == [1]
            with pytest.raises(NoSuchSession):
                store.info(bad_key)
        [(name, reason)] = store.problems.items()
        assert (name, reason.partition(":")[0]) == (str(bad), "the compressed file is damaged")
        assert store.admin.health().problems == (f"{name}: {reason}",)
        [warning] = caplog.messages
        assert warning == f"{name} cannot be read: {reason}"
        # The unchanged file is not read again; a changed file is.
        assert reader.read_keys.count(bad_key) == 1
        bad.unlink()
        rollout(tmp_path, THREADS[1], said(THREADS[1], 1))
        assert [entry.count for entry in catalog.list().entries] == [1, 1]
        assert store.problems == {}


# --- forks of Codex ------------------------------------------------------------------------------


def fork(folder: Path, thread: str, parent: str, count: int, *, end: int = 10**6) -> Path:
    """Write a thread of `count` messages that copies the messages of a parent."""
    base = {"thread_id": parent, "end_ordinal_exclusive": end}
    payload = {"id": thread, "forked_from_id": parent, "history_base": base}
    meta = {"timestamp": "t", "type": "session_meta", "payload": payload}
    return rollout(folder, thread, meta, *(said(thread, n) for n in range(1, count + 1)))


def texts(transcript: Transcript) -> list[str]:
    return [message.body["content"] for message in transcript.messages]


@pytest.mark.parametrize("size", [2, 3])
def test_threads_that_are_forks_of_each_other_are_read_once(tmp_path: Path, size: int) -> None:
    ring = THREADS[:size]
    for position, thread in enumerate(ring):
        fork(tmp_path, thread, ring[position - 1], 300)

    def read() -> None:
        transcripts = read_all(Codex(), tmp_path)
        for position, thread in enumerate(ring):
            transcript = transcripts[f"codex:{thread}"]
            order = [*ring[position + 1 :], *ring[: position + 1]]
            expected = [f"{one[0]}.{number}" for one in order for number in range(1, 301)]
            assert texts(transcript) == expected
            assert [problem.partition(":")[0] for problem in transcript.problems] == [
                "copied messages are left out"
            ]

    run_limited(read, cpu=20, memory=500 * MB)


def test_a_fork_of_a_fork_has_the_messages_before_each_fork(tmp_path: Path) -> None:
    rollout(tmp_path, THREADS[0], *(said(THREADS[0], number) for number in range(1, 5)))
    fork(tmp_path, THREADS[1], THREADS[0], 3, end=3)
    last = fork(tmp_path, THREADS[2], THREADS[1], 1, end=2)
    (transcript,) = read_all(Codex(), last).values()
    assert texts(transcript) == ["1.1", "2.1", "3.1"]
    assert transcript.facts["forked_after"] == transcript.messages[1].identity


def test_of_a_long_chain_of_forks_only_the_nearest_are_read(tmp_path: Path) -> None:
    chain = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(200)]
    rollout(tmp_path, chain[0], said(chain[0], 1))
    for parent, thread in pairwise(chain):
        last = fork(tmp_path, thread, parent, 1)
    (transcript,) = read_all(Codex(), last).values()
    assert len(transcript.messages) == codex.MAX_FORK_DEPTH + 1
    assert len(transcript.problems) == 1


@pytest.mark.parametrize("pattern", ["*", "?" * 36, f"[1]{THREADS[0][1:]}", f"../{THREADS[0]}"])
def test_an_id_is_no_file_pattern(tmp_path: Path, pattern: str) -> None:
    rollout(tmp_path, THREADS[0], said(THREADS[0], 1))
    file = fork(tmp_path, THREADS[1], pattern, 1)
    (transcript,) = read_all(Codex(), file).values()
    assert texts(transcript) == ["2.1"]


# --- large conversations -------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_chain_of_answers_without_a_question_is_read_once(tmp_path: Path, role: str) -> None:
    count = 30_000
    parts = {"content_type": "text", "parts": ["x"]}
    message = {"author": {"role": role}, "content": parts}
    nodes = {
        f"n{n}": {"id": f"n{n}", "parent": f"n{n - 1}" if n else None, "message": message}
        for n in range(count)
    }
    nodes["n0"]["message"] = {**message, "author": {"role": "assistant"}, "recipient": "python"}
    chatgpt_export(tmp_path, {"id": "a", "mapping": nodes, "current_node": f"n{count - 1}"})

    def read() -> None:
        (transcript,) = read_all(ChatGPT(), tmp_path).values()
        assert len(transcript.messages) == count
        assert not any(one.hidden for one in transcript.messages)
        if role == "tool":
            calls = {one.body["tool_call_id"] for one in transcript.messages[1:]}
            assert calls == {"n0"}

    run_limited(read, cpu=30)


def test_results_in_a_ring_of_nodes_belong_to_no_call(tmp_path: Path) -> None:
    message = {"author": {"role": "tool"}, "content": {"content_type": "text", "parts": ["x"]}}
    nodes = {
        name: {"id": name, "parent": parent, "message": message}
        for name, parent in ("ab", "bc", "ca", "da")
    }
    chatgpt_export(tmp_path, {"id": "a", "mapping": nodes, "current_node": "d"})
    (transcript,) = read_all(ChatGPT(), tmp_path).values()
    assert [one.body["tool_call_id"] for one in transcript.messages] == [""] * 4


# --- files beside transcripts --------------------------------------------------------------------

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(64)
PICTURE_ID = "file_0000abcd"


def export_with_picture(folder: Path, pointer: str = f"sediment://{PICTURE_ID}") -> Path:
    part = {"content_type": "image_asset_pointer", "asset_pointer": pointer}
    return chatgpt_export(folder / "export", {"id": "a", "parts": [part, "hello"]})


def pictures_of(export: Path) -> list[str]:
    (transcript,) = read_all(ChatGPT(), export).values()
    [message] = transcript.messages
    parts = message.body["content"]
    return [part["image_url"]["url"][:14] for part in parts if part["type"] == "image_url"]


@pytest.mark.parametrize(
    "name",
    [
        f"{PICTURE_ID}.png",
        f"{PICTURE_ID}-a photo.JPG",
        f"{PICTURE_ID}.dat",
        f"dalle-generations/{PICTURE_ID}-1234-5678.webp",
        f"user-Ab1/{PICTURE_ID}-sanitized.png",
    ],
)
def test_picture_with_a_name_of_the_export_is_shown(tmp_path: Path, name: str) -> None:
    export = export_with_picture(tmp_path)
    (export / name).parent.mkdir(exist_ok=True)
    (export / name).write_bytes(PICTURE)
    # The content tells the type, not the name.
    assert pictures_of(export) == ["data:image/png"]


@pytest.mark.parametrize(
    ("pointer", "name"),
    [
        ("sediment://passw", "file_passwords.png"),
        ("sediment://file_pass", "file_passwords.png"),
        ("sediment://file_pass", "file_pass-x.txt"),
        ("sediment://file_pass", "file_pass"),
        ("sediment://", "file_.png"),
        ("sediment://file_pass", "private/file_pass.png"),
        ("sediment://file_pass", "user-1/private/file_pass.png"),
        ("sediment://user-1/file_pass", "user-1/file_pass.png"),
        ("sediment://../file_pass", "../file_pass.png"),
    ],
)
def test_file_without_the_exact_name_of_the_picture_is_not_read(
    tmp_path: Path, pointer: str, name: str
) -> None:
    export = export_with_picture(tmp_path, pointer)
    (export / name).parent.mkdir(parents=True, exist_ok=True)
    (export / name).write_bytes(PICTURE)
    assert pictures_of(export) == []


@pytest.mark.parametrize("content", [b"TOP SECRET", b"", b"<svg>", b" " + PICTURE])
def test_file_that_is_no_picture_is_not_shown(tmp_path: Path, content: bytes) -> None:
    export = export_with_picture(tmp_path)
    (export / f"{PICTURE_ID}.png").write_bytes(content)
    assert pictures_of(export) == []
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.write(export / "conversations.json", "conversations.json")
        archive.writestr(f"{PICTURE_ID}.png", content)
    assert pictures_of(tmp_path / "export.zip") == []


def test_a_picture_that_is_too_large_or_shown_too_often_becomes_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = export_with_picture(tmp_path)
    monkeypatch.setattr(chat_exports, "MAX_PICTURE_BYTES", len(PICTURE))
    (export / f"{PICTURE_ID}.png").write_bytes(PICTURE)
    assert len(pictures_of(export)) == 1
    (export / f"{PICTURE_ID}.png").write_bytes(PICTURE + b"x")
    assert pictures_of(export) == []
    monkeypatch.setattr(chat_exports, "MAX_PICTURES_BYTES", 3 * len(PICTURE))
    part = {"content_type": "image_asset_pointer", "asset_pointer": f"sediment://{PICTURE_ID}"}
    chatgpt_export(export, {"id": "a", "parts": [part] * 9})
    (export / f"{PICTURE_ID}.png").write_bytes(PICTURE)
    assert len(pictures_of(export)) == 3


class _SideFile(NamedTuple):
    """A file that a reader opens beside a transcript."""

    reader: type[TranscriptReader]
    folder: Path
    path: str
    content: bytes

    def is_read(self) -> bool:
        (transcript,) = read_all(self.reader(), self.folder).values()
        return b"SECRET" in json.dumps([transcript.title, transcript.facts]).encode() or (
            "data:image" in json.dumps(transcript.messages[0].body)
        )


def _picture_in(folder: str) -> Callable[[Path], _SideFile]:
    def write(place: Path) -> _SideFile:
        path = f"{folder}{PICTURE_ID}.png"
        return _SideFile(ChatGPT, export_with_picture(place), path, PICTURE)

    return write


def _gemini(place: Path) -> _SideFile:
    chats = place / "tmp" / "river" / "chats"
    chats.mkdir(parents=True)
    record = {"sessionId": "s"}, {"id": "m", "type": "user", "content": "hello"}
    text = "".join(json.dumps(line) + "\n" for line in record)
    (chats / "session-1.jsonl").write_text(text)
    return _SideFile(GeminiCLI, place / "tmp", "river/.project_root", b"/SECRET")


def _claude_code(path: str, content: dict[str, str]) -> Callable[[Path], _SideFile]:
    def write(place: Path) -> _SideFile:
        claude_session(place / "p" / "s.jsonl")
        return _SideFile(ClaudeCode, place, f"p/{path}", json.dumps(content).encode())

    return write


def _codex(place: Path) -> _SideFile:
    rollout(place / "sessions" / "2026", THREADS[0], said(THREADS[0], 1))
    line = {"id": THREADS[0], "thread_name": "SECRET"}
    return _SideFile(Codex, place, "session_index.jsonl", json.dumps(line).encode() + b"\n")


SIDE_FILES = {
    "picture": _picture_in(""),
    "picture of a user": _picture_in("user-1/"),
    "picture by dalle": _picture_in("dalle-generations/"),
    "project of gemini": _gemini,
    "title of claude": _claude_code("s/custom-title.json", {"customTitle": "SECRET"}),
    "codex index": _codex,
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind", SIDE_FILES)
@pytest.mark.parametrize("what", ["file", "link", "pipe", "folder", "large"])
def test_only_regular_files_beside_a_transcript_are_read(
    tmp_path: Path, kind: str, what: str
) -> None:
    (tmp_path / "place").mkdir()
    side_file = SIDE_FILES[kind](tmp_path / "place")
    path = side_file.folder / side_file.path
    elsewhere = tmp_path / "elsewhere" / path.name
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(side_file.content)
    path.parent.mkdir(exist_ok=True)
    match what:
        case "file":
            path.write_bytes(side_file.content)
        case "link":
            path.symlink_to(elsewhere)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "large":
            path.write_bytes(side_file.content)
            with path.open("ab") as file:
                file.truncate(1 << 40)
    run_limited(lambda: _assert_read(side_file, read=what == "file"), cpu=20, memory=200 * MB)


@pytest.mark.parametrize("kind", ["picture of a user", "picture by dalle", "title of claude"])
def test_links_on_the_way_to_a_file_beside_a_transcript_are_not_followed(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "place").mkdir()
    side_file = SIDE_FILES[kind](tmp_path / "place")
    path = side_file.folder / side_file.path
    elsewhere = tmp_path / "elsewhere" / path.name
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(side_file.content)
    path.parent.symlink_to(elsewhere.parent)
    assert not side_file.is_read()


def _assert_read(side_file: _SideFile, *, read: bool) -> None:
    signal.alarm(60)  # a pipe without a writer would block for ever
    assert side_file.is_read() is read


@pytest.mark.parametrize("names", [("..", "a"), ("b/../a",), ("/etc/passwd",), ("",), (".",)])
def test_side_file_is_never_outside_its_folder(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_text("x")
    assert read_side_file(tmp_path, "a") == b"x"
    assert read_side_file(tmp_path, *names) == b""
    assert read_side_file(tmp_path / "b", *names) == b""


def test_transcript_may_be_a_link_but_no_pipe_or_device(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    with open_transcript(tmp_path / "link") as file:
        assert file.read() == b"x"
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with (
            pytest.raises(OSError, match=r"not a regular file|Is a directory"),
            open_transcript(path),
        ):
            pass
        assert path.is_dir() or detect_program(path) is None


# --- sizes ---------------------------------------------------------------------------------------


def failure_of(reader: TranscriptReader, path: Path) -> None:
    """Check that `path` cannot be read, soon and in little memory, and that the error names it."""

    def read() -> None:
        try:
            read_all(reader, path)
        except OSError as error:
            name, reason = path_and_reason(error, path)
            assert path.name in name + reason
            assert "bytes" in reason
        else:
            raise AssertionError("it was read")

    run_limited(read, cpu=30, memory=100 * MB)


def write_zip(path: Path, *sizes: int) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number, size in enumerate(sizes):
            with archive.open(f"conversations-{number}.json", "w") as file:
                file.write(b'[{"conversation_id":"a%d","title":"' % number)
                for _ in range(size // MB):
                    file.write(b"a" * MB)
                file.write(b'","mapping":{}}]')


@pytest.mark.parametrize("sizes", [[150 * MB], [60 * MB] * 3])
def test_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, sizes: list[int]) -> None:
    write_zip(tmp_path / "bomb.zip", *sizes)
    failure_of(ChatGPT(), tmp_path / "bomb.zip")


def test_zip_with_an_ordinary_ratio_is_limited_in_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MAX_UNPACKED_BYTES", 2 * MB)
    write_zip(tmp_path / "a.zip", MB)
    assert len(read_all(ChatGPT(), tmp_path / "a.zip")) == 1
    write_zip(tmp_path / "b.zip", MB, MB)
    failure_of(ChatGPT(), tmp_path / "b.zip")


def test_zip_with_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_exports, "MAX_ZIP_ENTRIES", 3)
    write_zip(tmp_path / "a.zip", *[0] * 3)
    assert len(read_all(ChatGPT(), tmp_path / "a.zip")) == 3
    write_zip(tmp_path / "b.zip", *[0] * 4)
    with pytest.raises(OSError, match=r"b\.zip has more than 3 files"):
        read_all(ChatGPT(), tmp_path / "b.zip")


def test_conversation_that_is_too_large_costs_no_other_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_exports, "MAX_RECORD_BYTES", 10_000)
    large = {"id": "b", "parts": ["x" * 20_000]}
    chatgpt_export(tmp_path, {"id": "a"}, large, {"id": "c"})
    with pytest.raises(OSError, match=r"its conversation number 2 has 20,\d+ bytes: .*\.json"):
        read_all(ChatGPT(), tmp_path)
    with TranscriptStore([(ChatGPT(), tmp_path)]) as store:
        assert store.list_sessions() == ["chatgpt:a", "chatgpt:c"]
        [(name, _)] = store.problems.items()
        assert name == str(tmp_path / "conversations.json")


def test_damaged_file_of_an_export_hides_no_other_file(tmp_path: Path) -> None:
    chatgpt_export(tmp_path, {"id": "z"})
    (tmp_path / "conversations.json").rename(tmp_path / "conversations-9.json")
    write_zip(tmp_path / "conversations-1.json", 20 * MB)
    with TranscriptStore([(ChatGPT(), tmp_path)]) as store:
        assert store.list_sessions() == ["chatgpt:z"]
        [(name, _)] = store.problems.items()
        assert name == str(tmp_path / "conversations-1.json")


def write_compressed(path: Path, chunk: bytes, count: int) -> None:
    zstandard = pytest.importorskip("zstandard")
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as stream:
        for _ in range(count):
            stream.write(chunk)
        stream.write(b"\n")


@pytest.mark.parametrize(
    "chunk",
    [
        b" " * MB,
        pytest.param(b"\n" * MB, marks=pytest.mark.slow),
        (b" " * 1_023 + b"\n") * 1_024,
    ],
)
def test_compressed_bomb_ends_soon(tmp_path: Path, chunk: bytes) -> None:
    file = rollout(tmp_path, THREADS[0], ending=".zst")
    write_compressed(file, chunk, 300)
    failure_of(Codex(), file)


def test_line_that_is_too_long_is_reported_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MAX_RECORD_BYTES", 10_000)
    claude_session(tmp_path / "p" / "good.jsonl")
    claude_session(tmp_path / "p" / "long.jsonl", "x" * 20_000)
    with TranscriptStore([(ClaudeCode(), tmp_path)]) as store, open_catalog(store) as catalog:
        assert [entry.title for entry in catalog.list().entries if entry.count] == ["hello"]
        assert store.problems == {
            str(tmp_path / "p" / "long.jsonl"): "a line has more than 10,000 bytes"
        }
