"""Notes as values, and as the messages that they are in a store. Pure."""

import os
from base64 import b32encode
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.memory.scopes import Scope
from stenolog.records import Message

Kind = Literal["daily", "core"]
"""What happened, or what is true of the user."""

ROLE: Final = "note"
PURGED: Final = "purged"
"""The kind of the record that stands where a purged note stood."""
_NAME_BYTES: Final = 7
"""Of a batch's name: enough that no two batches of a scope ever have the same."""


class Draft(Struct, frozen=True, kw_only=True):
    """A note to be."""

    kind: Kind
    text: str
    about: str = ""
    """What a core fact is about, as `diet`."""
    quote: str = ""
    """What the user said, word for word."""
    session: str = ""
    """The key of the session it was learnt in; empty for a note written by hand."""
    uid: str = ""
    """Which life of that session."""
    seqs: tuple[int, ...] = ()
    """The messages it was learnt from."""
    confidence: float = 1.0
    supersedes: tuple[str, ...] = ()
    """The ids of the notes that it takes the place of."""
    at: datetime | None = None
    """When it was said; where that is not given, it is now."""


class Note(Struct, frozen=True, kw_only=True):
    """Something remembered, with where it came from and whether it still holds."""

    id: str
    scope: Scope
    at: datetime
    """When it was made (UTC)."""
    kind: Kind
    text: str
    about: str = ""
    quote: str = ""
    session: str = ""
    """The key of the session it was learnt in; empty for a note written by hand."""
    uid: str = ""
    seqs: tuple[int, ...] = ()
    confidence: float = 1.0
    supersedes: tuple[str, ...] = ()
    superseded: datetime | None = None
    """When a newer note took its place; None while none has."""
    superseded_by: str = ""
    forgotten: bool = False
    mixed: bool = False
    """Whether it was made when several sessions wrote to this scope. Nothing recalls it.

    Versions before 0012 (docs/decisions) joined sessions by the form of their keys.
    """

    @property
    def in_force(self) -> bool:
        """Whether it is neither superseded nor forgotten nor of a mixed scope."""
        return self.superseded is None and not self.forgotten and not self.mixed


class _Stored(Struct):
    """A note as it stands in a message; `kind` is any text, for what a later version may know."""

    id: str
    kind: str
    content: str = ""
    about: str = ""
    quote: str = ""
    session: str = ""
    uid: str = ""
    seqs: tuple[int, ...] = ()
    confidence: float = 1.0
    supersedes: tuple[str, ...] = ()
    forgotten: bool = False
    was: str = ""
    """The kind of a note that was purged."""


# --- from drafts to messages -----------------------------------------------------------------


def check_drafts(drafts: Sequence[Draft]) -> None:
    """Raise UsageError unless each of them can be a note."""
    for draft in drafts:
        if draft.kind not in get_args(Kind):
            raise UsageError(f"kind {draft.kind!r}: one of {', '.join(get_args(Kind))} is wanted")
        if not draft.text.strip():
            raise UsageError("a note has text; this one is empty")


def batch_name(once: str | None) -> str:
    """How the ids of a batch begin: the same for the same token, else like no other."""
    raw = (
        os.urandom(_NAME_BYTES)
        if once is None
        else sha256(once.encode("utf-8", "surrogatepass")).digest()
    )
    return b32encode(raw[:_NAME_BYTES]).decode().rstrip("=").lower()


def ids_in(batch: str, count: int) -> list[str]:
    """The ids of so many notes of one batch."""
    return [batch] if count == 1 else [f"{batch}-{number}" for number in range(1, count + 1)]


def batch_of(id: str) -> str:
    """The batch that a note was added in."""
    return id.partition("-")[0]


def message_of(draft: Draft, id: str) -> dict[str, Any]:
    """The message that a note is in a store; what says nothing is left out."""
    fields: dict[str, Any] = {
        "about": draft.about,
        "quote": draft.quote,
        "session": draft.session,
        "uid": draft.uid,
        "seqs": list(draft.seqs),
        "supersedes": list(draft.supersedes),
    }
    told = {name: value for name, value in fields.items() if value}
    if draft.confidence != 1.0:
        told["confidence"] = draft.confidence
    return {"role": ROLE, "kind": draft.kind, "id": id, "content": draft.text, **told}


# --- from messages to notes ------------------------------------------------------------------


class Standing(Struct, frozen=True):
    """What one message says of one note."""

    seq: int
    note: Note
    """As if none had taken its place."""
    purged: bool
    listed: bool
    """Whether it is a note to show: not purged, nor of a kind that only a later version knows."""


def standing_of(scope: Scope, message: Message) -> Standing | None:
    """What a message says of a note; None where it is no note."""
    stored = _stored(message)
    if stored is None:
        return None
    hidden = message.hidden or stored.forgotten
    return Standing(
        seq=message.seq,
        note=_note(scope, message, stored, forgotten=hidden),
        purged=stored.kind == PURGED,
        listed=stored.kind in get_args(Kind),
    )


def in_order(note: Note) -> tuple[datetime, str, int]:
    """What notes are sorted by: their time, and within a batch as they were given."""
    batch, _, number = note.id.partition("-")
    return note.at, batch, int(number) if number.isdecimal() else 0


def _note(scope: Scope, message: Message, stored: _Stored, *, forgotten: bool) -> Note:
    return Note(
        id=stored.id,
        scope=scope,
        at=message.at,
        kind=cast(Kind, stored.was or stored.kind),
        text=stored.content,
        about=stored.about,
        quote=stored.quote,
        session=stored.session,
        uid=stored.uid,
        seqs=stored.seqs,
        confidence=stored.confidence,
        supersedes=stored.supersedes,
        forgotten=forgotten,
    )


def _stored(message: Message) -> _Stored | None:
    """What a message holds; None where it is no note, or none that this version knows."""
    fields = message.to_dict()
    if fields.get("role") != ROLE:
        return None
    try:
        return msgspec.convert(fields, _Stored)
    except msgspec.ValidationError:
        return None


# --- purging one of them ---------------------------------------------------------------------


class PurgePlan(Struct, frozen=True):
    """How one note is purged from a store that only purges from its beginning."""

    append: Sequence[dict[str, Any]]
    """What has to stand behind it first: the messages before it, and the mark of the purge."""
    at: Sequence[datetime]
    """The times of these."""
    before: int
    """The seq below which everything goes; 0 where nothing is left to go."""
    note: Note
    """The note as it was; without text where a purge has been through before."""


def plan_purge(
    scope: Scope, messages: Sequence[Message], id: str, *, now: datetime
) -> PurgePlan | None:
    """How to purge a note, or to end what was cut off; None where there is no such note."""
    stored = [(message, _stored(message)) for message in messages]
    own = [(message, one) for message, one in stored if one is not None and one.id == id]
    texts = [(message, one) for message, one in own if one.kind != PURGED]
    if not own:
        return None
    message, one = (texts or own)[-1]
    note = _note(scope, message, one, forgotten=True)
    if not texts:
        return PurgePlan((), (), 0, note)
    if own[-1][1].kind == PURGED:
        return PurgePlan((), (), message.seq + 1, note)
    kept = _carried(stored, id, upto=message.seq)
    return PurgePlan(
        [*map(_copy_of, kept), _mark(one)],
        [*(found.at for found in kept), now],
        message.seq + 1,
        note,
    )


def _mark(purged: _Stored) -> dict[str, Any]:
    """What stays of a purged note.

    It says whose place the note had taken: else these would be in force again beside the one that
    has taken its own.
    """
    mark = {"role": ROLE, "kind": PURGED, "id": purged.id, "was": purged.kind}
    return {**mark, "supersedes": list(purged.supersedes)} if purged.supersedes else mark


def _carried(
    stored: Sequence[tuple[Message, _Stored | None]], id: str, *, upto: int
) -> list[Message]:
    """The messages up to a seq that are to stay: all but the note, and what stands later too."""
    last = {one.id: message.seq for message, one in stored if one is not None}
    return [
        message
        for message, one in stored
        if message.seq <= upto and (one is None or (one.id != id and last[one.id] == message.seq))
    ]


def _copy_of(message: Message) -> dict[str, Any]:
    """A message to be carried forward; what is out of sight stays forgotten."""
    fields = message.to_dict()
    return {**fields, "forgotten": True} if message.hidden else fields
