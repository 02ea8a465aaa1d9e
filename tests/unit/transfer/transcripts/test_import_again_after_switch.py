"""Repeated imports of conversations that switch branches: the same result as one import."""

import json
import os
import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store
from stenolog.transfer.transcripts.programs import PROGRAMS
from stenolog.transfer.transcripts.transcript_import import TranscriptReport, import_transcript
from support.transcripts import SAMPLES

SESSION = "11111111-1111-4111-8111-111111111111"


@pytest.fixture(params=["jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    place = tmp_path / "store"
    with open_store(place if request.param == "jsonl" else f"sqlite:{place}.db") as opened:
        yield opened


class Node(Struct):
    """A message of a conversation that can have several branches."""

    number: int
    parent: "Node | None"
    role: str
    text: str

    def branch(self) -> list["Node"]:
        return [*(self.parent.branch() if self.parent else []), self]

    @property
    def id(self) -> str:
        return f"{self.number:08d}-1111-4111-8111-111111111111"

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent.id

    @property
    def time(self) -> str:
        return f"2026-11-18T10:{self.number // 60:02d}:{self.number % 60:02d}.000Z"


class Program(ABC):
    """Writer of one program's files."""

    name: str
    can_edit = True
    names_current = True
    """Whether the file names the current branch. Otherwise the newest message does."""

    @abstractmethod
    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None: ...


class ChatGPT(Program):
    name = "chatgpt"

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:
        mapping = {
            node.id: {
                "id": node.id,
                "parent": node.parent_id,
                "message": {
                    "id": node.id,
                    "author": {"role": node.role},
                    "create_time": 1763460000.0 + node.number,
                    "content": {"content_type": "text", "parts": [node.text]},
                    "metadata": {},
                },
            }
            for node in nodes
        }
        chat = {"id": "c", "title": "t", "mapping": mapping, "current_node": leaf.id}
        (folder / "conversations.json").write_text(json.dumps([chat]))


class OpenWebUI(Program):
    name = "open-webui"

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:
        messages = {
            node.id: {
                "id": node.id,
                "parentId": node.parent_id,
                "role": node.role,
                "content": node.text,
                "timestamp": 1763460000 + node.number,
            }
            for node in nodes
        }
        history = {"messages": messages, "currentId": leaf.id}
        chat = {"id": "c", "title": "t", "chat": {"history": history}}
        (folder / "export.json").write_text(json.dumps([chat]))


class ClaudeAI(Program):
    """The newest leaf is current, so a switch is a new message below another message."""

    name = "claude-ai"
    names_current = False

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:  # noqa: ARG002
        messages = [
            {
                "uuid": node.id,
                "parent_message_uuid": node.parent_id or "00000000-0000-4000-8000-000000000000",
                "sender": "human" if node.role == "user" else "assistant",
                "text": node.text,
                "content": [{"type": "text", "text": node.text}],
                "created_at": node.time,
            }
            for node in nodes
        ]
        chat = {"uuid": "c", "name": "t", "chat_messages": messages}
        (folder / "conversations.json").write_text(json.dumps([chat]))


class ClaudeCode(Program):
    """The file only grows; a rewind is a new record below an older one."""

    name = "claude-code"
    can_edit = False
    names_current = False

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:  # noqa: ARG002
        path = folder / f"{SESSION}.jsonl"
        with path.open("w") as file:
            for node in nodes:
                content = (
                    node.text if node.role == "user" else [{"type": "text", "text": node.text}]
                )
                message = {"role": node.role, "content": content}
                if node.role == "assistant":
                    message |= {"id": f"msg_{node.number}", "model": "m"}
                record = {
                    "type": node.role,
                    "uuid": node.id,
                    "parentUuid": node.parent_id,
                    "sessionId": SESSION,
                    "timestamp": node.time,
                    "message": message,
                }
                file.write(json.dumps(record) + "\n")


class GeminiCLI(Program):
    """A log of changes: `$set` replaces the current messages."""

    name = "gemini-cli"

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:
        records = {
            node.id: {
                "id": node.id,
                "timestamp": node.time,
                "type": "user" if node.role == "user" else "gemini",
                "content": node.text,
            }
            for node in nodes
        }
        head = {"sessionId": SESSION, "projectHash": "p", "startTime": nodes[0].time}
        branch = [records[node.id] for node in leaf.branch()]
        lines = [head, *records.values(), {"$set": {"messages": branch}}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "session-2026-11-18T10-00-11111111.jsonl").write_text(text)


class Codex(Program):
    """The file only grows; a rollback drops the newest turns of the current branch."""

    name = "codex"
    can_edit = False
    names_current = False

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:  # noqa: ARG002
        kinds = {"user": "input_text", "assistant": "output_text"}
        lines = [_codex_line(nodes[0], "session_meta", {"id": SESSION})]
        branch: list[Node] = []
        for node in nodes:
            kept = branch.index(node.parent) + 1 if node.parent in branch else len(branch)
            dropped = [other for other in branch[kept:] if other.role == "user"]
            if dropped and node.role == "user":
                rollback = {"type": "thread_rolled_back", "num_turns": len(dropped)}
                lines.append(_codex_line(node, "event_msg", rollback))
                branch = branch[: branch.index(dropped[0])]
            branch.append(node)
            content = [{"type": kinds[node.role], "text": node.text}]
            item = {"type": "message", "role": node.role, "content": content}
            lines.append(_codex_line(node, "response_item", item))
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"rollout-2026-11-18T10-00-00-{SESSION}.jsonl").write_text(text)


def _codex_line(node: Node, kind: str, payload: dict[str, Any]) -> str:
    return json.dumps({"timestamp": node.time, "type": kind, "payload": payload})


class OpenCode(Program):
    """A revert hides all messages from one on; there are no other branches."""

    name = "opencode"

    def write(self, folder: Path, nodes: list[Node], leaf: Node) -> None:
        path = folder / "opencode.db"
        if not path.exists():
            shutil.copy(SAMPLES / "opencode" / "opencode.db", path)
        with closing(sqlite3.connect(path)) as connection:
            for table in ("part", "message", "session WHERE id<>(SELECT min(id) FROM session)"):
                connection.execute(f"DELETE FROM {table}")  # noqa: S608
            [(session,)] = connection.execute("SELECT id FROM session")
            revert = [json.dumps({"messageID": n.id}) for n in nodes if n.number > leaf.number]
            connection.execute("UPDATE session SET revert=?", [*revert, None][:1])
            for node in nodes:
                rows: dict[str, dict[str, Any]] = {
                    "message": {"data": json.dumps({"role": node.role})},
                    "part": {
                        "data": json.dumps({"type": "text", "text": node.text}),
                        "message_id": node.id,
                    },
                }
                for table, row in rows.items():
                    row |= {"id": node.id, "session_id": session}
                    row |= {"time_created": node.number, "time_updated": node.number}
                    columns, marks = ", ".join(row), ", ".join("?" * len(row))
                    sql = f"INSERT INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608
                    connection.execute(sql, list(row.values()))
            connection.commit()


def imported(program: str, place: Path, store: Store) -> list[TranscriptReport]:
    reader = PROGRAMS[program]()
    return [import_transcript(reader, file, store) for file in reader.find(place)]


def shown(store: Store) -> list[tuple[str, str]]:
    [key] = store.list_sessions()
    return [(m.to_dict()["role"], m.to_dict()["content"]) for m in store.get_history(key)]


class Talk:
    """A conversation that changes at random, and its file."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.nodes = [Node(number=1, parent=None, role="user", text="1")]
        self.leaf = self.nodes[0]
        self.is_edited = False
        self.changes = 0

    def change(self, action: str, choice: int) -> None:
        chosen = self.nodes[choice % len(self.nodes)]
        if action == "edit" and self.program.can_edit:
            chosen.text += "+"
            self.is_edited = True
            return
        if action == "switch":
            self.leaf = chosen
        if action == "grow" or not self.program.names_current:
            number = len(self.nodes) + 1
            role = "assistant" if self.leaf.role == "user" else "user"
            self.leaf = Node(number=number, parent=self.leaf, role=role, text=str(number))
            self.nodes.append(self.leaf)

    def import_into(self, store: Store) -> None:
        self.changes += 1
        self.program.write(self.folder, self.nodes, self.leaf)
        for path in self.folder.iterdir():
            os.utime(path, ns=(self.changes * 10**9, self.changes * 10**9))
        imported(self.program.name, self.folder, store)


PROGRAM_WRITERS = [
    ChatGPT(),
    OpenWebUI(),
    ClaudeAI(),
    ClaudeCode(),
    GeminiCLI(),
    Codex(),
    OpenCode(),
]
actions = st.tuples(st.sampled_from(["grow", "grow", "switch", "edit"]), st.integers(0, 20))


@pytest.mark.quick(2)
@pytest.mark.parametrize("program", PROGRAM_WRITERS, ids=lambda program: str(program.name))
@given(imports=st.lists(st.lists(actions, max_size=5), min_size=1, max_size=6))
@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
def test_repeated_imports_show_what_one_import_shows(
    program: Program, imports: list[list[tuple[str, int]]]
) -> None:
    with TemporaryDirectory() as folder:
        talk, repeated = Talk(program, Path(folder)), InMemoryStore()
        for steps in imports:
            for action, choice in steps:
                talk.change(action, choice)
            talk.import_into(repeated)
            fresh = InMemoryStore()
            talk.import_into(fresh)
            if talk.is_edited:
                # A new version of a message is appended, so that it is not in its old place.
                assert sorted(shown(repeated)) == sorted(shown(fresh))
            else:
                assert shown(repeated) == shown(fresh)


# --- what the user hid ---------------------------------------------------------------------------


class Switching:
    """A ChatGPT conversation: question, two answers, and a follow-up to the first answer."""

    def __init__(self, folder: Path, store: Store) -> None:
        folder.mkdir()
        self.talk, self.store = Talk(ChatGPT(), folder), store
        one = self.talk.nodes[0]
        two = Node(number=2, parent=one, role="assistant", text="2")
        three = Node(number=3, parent=two, role="user", text="3")
        four = Node(number=4, parent=one, role="assistant", text="4")
        self.talk.nodes += [two, three, four]
        self.go(4)

    def go(self, number: int) -> None:
        self.talk.leaf = self.talk.nodes[number - 1]
        self.talk.import_into(self.store)

    def grow(self) -> None:
        self.talk.change("grow", 0)
        self.talk.import_into(self.store)

    def texts(self) -> list[str]:
        return [text for _, text in shown(self.store)]


@pytest.fixture
def switching(store: Store, tmp_path: Path) -> Switching:
    return Switching(tmp_path / "export", store)


KEY = "chatgpt:c"


def test_a_branch_is_shown_again_and_no_message_is_added(
    switching: Switching, store: Store
) -> None:
    assert switching.texts() == ["1", "4"]
    switching.go(3)
    assert switching.texts() == ["1", "2", "3"]
    switching.go(4)
    assert switching.texts() == ["1", "4"]
    assert store.info(KEY).last_seq == 4


@pytest.mark.parametrize(
    "hide",
    [
        lambda store: store.truncate_history(KEY, 1),
        lambda store: store.clear(KEY),
        lambda store: store.admin.hide(KEY, 1, 2),
        lambda store: store.checkpoint(KEY, summary="mine", upto=3),
    ],
    ids=["truncate", "clear", "hide", "checkpoint"],
)
def test_what_the_user_hid_stays_hidden(switching: Switching, store: Store, hide: Any) -> None:
    # The first import hid the messages with the seqs 2 and 3.
    hide(store)
    hidden = {m.seq for m in store.get_history(KEY, full=True) if m.hidden}
    summary = store.get_summary(KEY)
    switching.go(3)
    switching.grow()
    assert hidden <= {m.seq for m in store.get_history(KEY, full=True) if m.hidden}
    assert store.get_summary(KEY) == summary


def test_a_message_that_the_user_hid_does_not_keep_others_hidden(
    switching: Switching, store: Store
) -> None:
    switching.go(3)
    switching.grow()
    assert store.pop(KEY) is not None
    switching.go(4)
    switching.go(5)
    assert switching.texts() == ["1", "2", "3"]


def test_an_import_that_was_killed_while_it_hid_messages_shows_them_later(
    switching: Switching, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_meta, calls = type(store).set_meta, 0

    def killed_at_the_end(*args: Any, **fields: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        set_meta(*args, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "set_meta", killed_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            switching.go(3)
    assert switching.texts() == ["1", "2", "3"]
    switching.go(4)
    assert switching.texts() == ["1", "4"]


def test_a_continued_session_shows_no_message_again(switching: Switching, store: Store) -> None:
    store.add_message(KEY, "user", "here")
    switching.go(3)
    assert switching.texts() == ["1", "4", "here"]


def test_a_summary_that_the_user_wrote_stays_until_the_program_writes_another(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "conversations.json"

    def write(summary: str, count: int) -> None:
        messages = [
            {"uuid": str(n), "sender": "human", "text": str(n), "created_at": f"2026-01-0{n + 1}"}
            for n in range(count)
        ]
        chat = {"uuid": "c", "name": "t", "summary": summary, "chat_messages": messages}
        path.write_text(json.dumps([chat]))
        imported("claude-ai", path, store)

    key = "claude-ai:c"
    write("first", 2)
    assert store.get_summary(key) == "first"
    store.set_summary(key, "mine")
    write("first", 3)
    assert store.get_summary(key) == "mine"
    write("second", 4)
    assert store.get_summary(key) == "second"
    write("", 5)
    assert store.get_summary(key) == ""


# --- one session in several files ----------------------------------------------------------------


def write_copy(path: Path, texts: list[str], modified: int, *, title: str = "") -> None:
    """Write a session of Claude Code, whose records have no parents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = [
        {
            "type": "user",
            "uuid": f"{number:08d}-1111-4111-8111-111111111111",
            "parentUuid": f"{number - 1:08d}-1111-4111-8111-111111111111" if number else None,
            "timestamp": f"2026-11-18T10:00:{number:02d}.000Z",
            "message": {"role": "user", "content": text},
        }
        for number, text in enumerate(texts)
    ]
    records.append({"type": "custom-title", "customTitle": title})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.utime(path, ns=(modified * 10**9, modified * 10**9))


@pytest.mark.parametrize("newest", ["a", "b"])
def test_unchanged_files_of_one_session_write_nothing(
    store: Store, tmp_path: Path, newest: str
) -> None:
    places = {name: tmp_path / "projects" / name / f"{SESSION}.jsonl" for name in ("a", "b")}
    for name, path in places.items():
        texts = ["one", "two", "three"][: 3 if name == "a" else 2]
        write_copy(path, texts, 2 if name == newest else 1, title=name)
    key = f"claude-code:{SESSION}"
    for _ in range(2):
        imported("claude-code", tmp_path / "projects", store)
        info = store.info(key)
    again = imported("claude-code", tmp_path / "projects", store)
    assert not any(report.added or report.changed for report in again)
    assert store.info(key).change == info.change
    assert store.info(key).updated == info.updated
    assert (info.count, info.meta["title"]) == (3, newest)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_file_that_changed_last_decides(store: Store, tmp_path: Path, order: str) -> None:
    places = {name: tmp_path / name / f"{SESSION}.jsonl" for name in "ab"}
    write_copy(places["a"], ["old text", "of a", "only in a"], 1, title="a")
    write_copy(places["b"], ["new text", "of b"], 2, title="b")
    for name in order:
        imported("claude-code", places[name], store)
    assert sorted(text for _, text in shown(store)) == ["new text", "of b", "only in a"]
    key = f"claude-code:{SESSION}"
    assert store.info(key).meta["title"] == "b"
    write_copy(places["a"], ["old text", "of a", "only in a", "more"], 3, title="a")
    for name in order:
        imported("claude-code", places[name], store)
    assert sorted(text for _, text in shown(store)) == ["more", "of a", "old text", "only in a"]
    assert store.info(key).meta["title"] == "a"
    places["a"].unlink()
    imported("claude-code", places["b"], store)
    assert sorted(text for _, text in shown(store)) == ["more", "of a", "old text", "only in a"]
    assert store.info(key).meta["title"] == "a", "an older copy does not take over"
    write_copy(places["b"], ["new text", "of b"], 4, title="b again")
    imported("claude-code", places["b"], store)
    assert store.info(key).meta["title"] == "b again"
