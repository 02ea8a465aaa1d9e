"""A session as one JSON file, the format of SessionManager.

The file has the five fields of picoclaw's older store (`key`, `messages`, `summary`, `created`,
`updated`) and a field `stenolog`, which picoclaw ignores. The field `stenolog` has the seq of the
first message in `messages`, the idempotency key and time of each message, the hidden messages, the
meta, and the undo steps. This module does no I/O: sessions/session_manager.py reads and writes the
files.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from json import loads
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from stenolog.codec import check_once, encode_object
from stenolog.errors import RefusedMessage, UsageError
from stenolog.records import Message, Undo, timestamp
from stenolog.stores import spans
from stenolog.stores.file_names import escape_key
from stenolog.stores.snapshots import Snapshot, token_of

SUFFIX: Final = ".json"
META_SUFFIX: Final = ".meta.json"
"""Suffix of metadata files of picoclaw's newer store, which are not sessions."""
NO_TIME: Final = datetime(1, 1, 2, tzinfo=UTC)
"""Latest time that means "no time", because Go writes year 1 for a missing time."""


class NotASession(ValueError):
    """The file does not contain a session; the text of the error is the reason."""

    def __init__(self, reason: str, *, is_other_json: bool = False) -> None:
        self.is_other_json = is_other_json
        """Whether the file is valid JSON of another kind."""
        super().__init__(reason)


class JSONMessage(Struct, frozen=True):
    """One message of a session file.

    The seq of a message is its position among all messages, including hidden ones.
    """

    payload: bytes
    at: datetime | None = None
    once: str | None = None
    """Idempotency key; the messages of a batch have the same key."""
    hidden: bool = False


class JSONSession(Struct, frozen=True, kw_only=True):
    """A session as stored in a file."""

    key: str | None
    messages: tuple[JSONMessage, ...] = ()
    summary: str = ""
    first_summary: str = ""
    """Summary of the session when SessionManager first wrote the file."""
    created: datetime | None = None
    updated: datetime | None = None
    is_ours: bool = False
    """Whether stenolog wrote the file, not picoclaw."""
    uid: str = ""
    """Uid of the session; empty in a file of picoclaw."""
    change_number: int = 0
    meta: dict[str, Any] = {}
    undo_steps: tuple[Undo, ...] = ()
    dropped: int = 0
    """Number of messages in the file that could not be read or stored."""
    problems: tuple[str, ...] = ()
    """Sentences about the parts of the file that could not be read."""

    def visible(self) -> list[int]:
        """Return the seqs of the visible messages."""
        return [seq for seq, message in enumerate(self.messages, 1) if not message.hidden]

    def floor(self) -> int:
        """Return the floor: the seq up to which every message is hidden."""
        visible = self.visible()
        return visible[0] - 1 if visible else len(self.messages)


def parse_go_time(text: object) -> datetime | None:
    """Parse a time as Go writes it (RFC 3339, up to nanoseconds).

    Return None for Go's zero time and for any other value.
    """
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment if moment > NO_TIME else None


def parse(text: bytes) -> JSONSession:
    """Parse the session in a file. Raises NotASession."""
    try:
        data = loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise NotASession(f"it is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages", ""), list | None):
        raise NotASession(
            "it is JSON, but not a session: it has no list of messages", is_other_json=True
        )
    problems: list[str] = []
    key = data.get("key")
    messages = data.get("messages") or []
    visible = [
        message
        for position, value in enumerate(messages, 1)
        if (message := _parse_message(value, f"message {position}", problems)) is not None
    ]
    session = JSONSession(
        key=key if isinstance(key, str) and key else None,
        messages=tuple(visible),
        summary=data["summary"] if isinstance(data.get("summary"), str) else "",
        created=parse_go_time(data.get("created")),
        updated=parse_go_time(data.get("updated")),
        dropped=len(messages) - len(visible),
        problems=tuple(problems),
    )
    stenolog_field = data.get("stenolog")
    if stenolog_field is None:
        return session
    try:
        return _add_hidden_messages(session, stenolog_field)
    except (KeyError, TypeError, ValueError, StopIteration, UsageError, msgspec.MsgspecError):
        problem = "the field `stenolog` is malformed: its tokens and hidden messages are skipped"
        return replace(session, problems=(*session.problems, problem))


def compose_file(session: JSONSession) -> bytes:
    """Return the content of a session's file."""
    visible = [message for message in session.messages if not message.hidden]
    hidden = [(seq, m) for seq, m in enumerate(session.messages, 1) if m.hidden]
    fields = {
        "key": session.key,
        "messages": [Raw(message.payload) for message in visible],
        "summary": _encode_text(session.summary),
        "created": _format_time(session.created),
        "updated": _format_time(session.updated),
        "stenolog": {
            "first": session.floor() + 1,
            "tokens": [_encode_text(m.once) for m in visible],
            "times": [_format_time(m.at) for m in visible],
            "hidden": [
                [seq, _encode_text(m.once), _format_time(m.at), Raw(m.payload)] for seq, m in hidden
            ],
            "began_with": _encode_text(session.first_summary),
            "uid": session.uid,
            "change": session.change_number,
            "meta": Raw(encode_object(session.meta)),
            "undo": _encode_value(msgspec.to_builtins(session.undo_steps)),
        },
    }
    return msgspec.json.encode(fields) + b"\n"


def file_name(key: str) -> str:
    """Return the name of a session's file, which never ends in `.meta.json`."""
    stem = escape_key(key)
    return (stem[: -len(".meta")] + "%2Emeta" if stem.endswith(".meta") else stem) + SUFFIX


def is_session_name(name: str) -> bool:
    """Return whether a file with this name may contain a session."""
    return name.endswith(SUFFIX) and not name.endswith(META_SUFFIX) and not name.startswith(".")


# --- conversion from and to the session of a store ----------------------------------------------


def snapshot_of(session: JSONSession, *, new_uid: bool = False) -> Snapshot:
    """Return the snapshot of a session. A session of picoclaw always gets a new uid."""
    times = [message.at for message in session.messages if message.at is not None]
    created = session.created or min(times, default=NO_TIME)
    floor = session.floor()
    hidden_seqs = [seq for seq, message in enumerate(session.messages, 1) if message.hidden]
    return Snapshot(
        key=session.key or "",
        uid=os.urandom(8).hex() if new_uid or not session.uid else session.uid,
        created=timestamp(created),
        updated=timestamp(session.updated or max(times, default=created)),
        last_seq=len(session.messages),
        floor=floor,
        hidden=spans.from_seqs(seq for seq in hidden_seqs if seq > floor),
        number=session.change_number,
        summary=session.summary,
        meta=session.meta,
        undo=list(session.undo_steps),
    )


def messages_of(session: JSONSession) -> Iterator[Message]:
    """Yield the messages for a snapshot: the first message of a batch has its idempotency key."""
    seq = 0
    for once, group in groupby(session.messages, key=attrgetter("once")):
        batch = list(group)
        for index, message in enumerate(batch):
            seq += 1
            has_key = once is not None and index == 0
            yield Message(
                seq=seq,
                _at=timestamp(message.at or session.created or NO_TIME),
                _body=Raw(message.payload),
                _once=once if has_key else None,
                _part=(1, len(batch)) if has_key and len(batch) > 1 else None,
            )


def updated_session(
    old: JSONSession, snapshot: Snapshot, new_messages: Sequence[Message]
) -> JSONSession:
    """Return the session of a snapshot, whose messages are those of `old` and new ones."""
    added_messages = (
        JSONMessage(message.to_json(), message.at, once)
        for message, once in zip(new_messages, _idempotency_keys(new_messages), strict=True)
    )
    hidden_spans = [(1, snapshot.floor), *snapshot.hidden]
    messages = tuple(
        replace(message, hidden=spans.contains(hidden_spans, seq))
        for seq, message in enumerate((*old.messages, *added_messages), 1)
    )
    return JSONSession(
        key=snapshot.key,
        messages=messages,
        summary=snapshot.summary,
        first_summary=old.first_summary if old.is_ours else old.summary,
        created=datetime.fromisoformat(snapshot.created),
        updated=datetime.fromisoformat(snapshot.updated),
        is_ours=True,
        uid=snapshot.uid,
        change_number=snapshot.number,
        meta=snapshot.meta,
        undo_steps=tuple(snapshot.undo),
    )


def _idempotency_keys(messages: Iterable[Message]) -> Iterator[str]:
    """Yield the idempotency key of each message, a new one if its caller gave none.

    By this key, a later import recognizes messages that it has already imported.
    """
    once, remaining = "", 0
    for message in messages:
        if (start := token_of(message)) is not None:
            once, remaining = start
        elif remaining == 0:
            once, remaining = f"json:{os.urandom(10).hex()}", 1
        remaining -= 1
        yield once


# --- fields of the file -------------------------------------------------------------------------


def _parse_message(value: object, label: str, problems: list[str]) -> JSONMessage | None:
    if not isinstance(value, dict):
        problems.append(f"{label} is not an object")
        return None
    try:
        payload = encode_object(value)
    except RefusedMessage as error:
        problems.append(f"{label}: {error}")
        return None
    return JSONMessage(payload, parse_go_time(value.get("created_at")))


def _add_hidden_messages(session: JSONSession, stenolog_field: Any) -> JSONSession:
    """Return the session with idempotency keys, times and hidden messages from `stenolog_field`."""
    visible = [
        JSONMessage(message.payload, parse_go_time(at), _parse_token(once))
        for message, once, at in zip(
            session.messages, stenolog_field["tokens"], stenolog_field["times"], strict=True
        )
    ]
    hidden: dict[int, JSONMessage] = {}
    for seq, once, at, fields in stenolog_field["hidden"]:
        if type(seq) is not int or type(fields) is not dict:
            raise TypeError("a hidden message is a seq, a token, a time and an object")
        hidden[seq] = JSONMessage(
            encode_object(fields), parse_go_time(at), _parse_token(once), True
        )
    remaining_visible = iter(visible)
    message_count = len(visible) + len(stenolog_field["hidden"])
    messages = [
        hidden.pop(seq) if seq in hidden else next(remaining_visible)
        for seq in range(1, message_count + 1)
    ]
    if hidden or not isinstance(stenolog_field["began_with"], str):
        raise ValueError("a seq occurs twice, or is above the last one")
    complete_session = replace(
        session,
        messages=tuple(messages),
        first_summary=stenolog_field["began_with"],
        is_ours=True,
        uid=msgspec.convert(stenolog_field.get("uid", ""), str),
        change_number=msgspec.convert(stenolog_field.get("change", 0), int),
        meta=msgspec.convert(stenolog_field.get("meta", {}), dict[str, Any]),
        undo_steps=msgspec.convert(stenolog_field.get("undo", ()), tuple[Undo, ...]),
    )
    if stenolog_field["first"] != complete_session.floor() + 1:
        raise ValueError("the first visible message has another seq")
    return complete_session


def _parse_token(once: Any) -> str | None:
    check_once(once)
    return once if isinstance(once, str) else None


def _encode_text(text: str | None) -> Raw | None:
    return None if text is None else _encode_value(text)


def _encode_value(value: Any) -> Raw:
    """Encode a value as JSON, including lone surrogates, which msgspec alone would reject."""
    return Raw(encode_object({"": value})[4:-1])


def _format_time(moment: datetime | None) -> str | None:
    return None if moment is None else timestamp(moment)
