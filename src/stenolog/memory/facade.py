"""The memory of an agent: writes notes about finished turns, recalls notes and past messages."""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, tzinfo
from io import BytesIO
from pathlib import Path
from typing import Final, Literal, Self, overload
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stenolog.catalog import Catalog, open_catalog
from stenolog.errors import StoreClosed, UsageError
from stenolog.memory.consolidation import MAX_CALLS, ConsolidationReport, Consolidator
from stenolog.memory.facts import normalize_subject, notes_with_subject
from stenolog.memory.notes import Draft, Kind, Note, Notes, PurgedNote
from stenolog.memory.recall import RecallResult, recall
from stenolog.memory.scopes import Scope, scope_of
from stenolog.providers.chat_model import CompletionFunction, check_completion_function
from stenolog.redaction.redact import redact
from stenolog.sessions.aliases import Aliases
from stenolog.sessions.folders import NOTES, locate_sessions
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.tokens import Tokens

DEFAULT_AGENT: Final = "main"
"""Name of the default agent of a workspace."""

HALF_LIFE_DAYS: Final = 30.0
"""Default age in days at which half of the maximum score reduction by age applies."""
RECALL_TOKENS: Final = 1_500
"""Default maximum tokens of a recalled block."""


class Memory:
    """The memory of an agent about its users. A context manager. Thread-safe.

    `key` (a session's key or an alias) or `scope` selects the memory. Each session has a separate
    memory. With `threads`, sessions in which every user message has the same verified sender
    (`InboundMessage.sender`) share the memory of that sender. Sessions never share a memory only
    because their keys look alike.
    """

    def __init__(
        self,
        sessions: Store,
        notes: Store,
        *,
        agent: str = DEFAULT_AGENT,
        threads: bool = False,
        complete: CompletionFunction | None = None,
        consolidation: bool = True,
        half_life_days: float = HALF_LIFE_DAYS,
        tokens: Tokens | None = None,
        zone: tzinfo | str = UTC,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Create a memory on two open stores, which `close` does not close.

        `tokens`: the token counter of the model. `zone`: the users' time zone for dates and words
        such as "yesterday", as a tzinfo or a name such as "Europe/Zurich". Raises UsageError if a
        store, the model or the time zone is invalid.
        """
        check_store(sessions, "sessions=")
        check_store(notes, "notes=")
        if complete is not None:
            check_completion_function(complete)
        self.agent = agent
        self.notes = Notes(notes)
        """The notes of all scopes."""
        self._sessions = sessions
        self._aliases = Aliases(sessions)
        self._threads = threads
        self._tokens = tokens
        self._zone = zone if isinstance(zone, tzinfo) else load_zone(zone)
        self._half_life_days = half_life_days
        self._clock = clock or (lambda: datetime.now(UTC))
        self._consolidator: Consolidator | None = None
        if consolidation:
            self._consolidator = Consolidator(
                sessions,
                self.notes,
                complete,
                agent=agent,
                scope_of=self._scope_of,
                tokens=tokens or Tokens(),
                clock=self._clock,
            )
        self._mutex = threading.Lock()
        self._catalog: Catalog | None = None
        self._closed = False
        self._opened_stores = ExitStack()
        """Stores that `open_memory` opened and `close` closes."""

    def __repr__(self) -> str:
        return f"Memory({self._sessions!r}, {self.notes.store!r}, agent={self.agent!r})"

    def consolidate(self, key: str, *, most_calls: int = MAX_CALLS) -> ConsolidationReport:
        """Make notes of the finished turns of a session that are not consolidated yet.

        Calls the model at most `most_calls` times, so run this method in a thread after a turn.
        `waiting` in the result is the number of turns left for the next call. If consolidation is
        disabled, this method does nothing, and the turns wait until consolidation is enabled.
        Raises errors of the stores, and UsageError if `most_calls` is less than 1.
        """
        if self._consolidator is None:
            return ConsolidationReport()
        return self._consolidator.run(self._aliases.resolve_key(key), most_calls=most_calls)

    def waiting(self) -> list[str]:
        """Return the keys of the sessions with finished turns that are not consolidated yet.

        Returns an empty list if consolidation is disabled. Messages of consolidated sessions
        are not read, so an agent can call this method at the start and from time to time.
        """
        return [] if self._consolidator is None else self._consolidator.waiting_sessions()

    def skip(self, key: str) -> None:
        """Exclude all current messages of a session from consolidation, permanently."""
        if self._consolidator is not None:
            self._consolidator.skip_session(self._aliases.resolve_key(key))

    def recall(
        self,
        question: str,
        *,
        key: str | None = None,
        scope: Scope | None = None,
        budget: int = RECALL_TOKENS,
        asking: str | None = None,
    ) -> RecallResult:
        """Return notes and past messages of one scope that match a question, as one marked block.

        `key`: the session that asks; its visible messages are left out. `asking`: the key of that
        session, not an alias, for callers that pass `scope` instead of `key`.
        """
        session_key = asking if key is None else self._aliases.resolve_key(key)
        return recall(
            question,
            scope=self.scope(key=key, scope=scope),
            notes=self.notes,
            catalog=self._open_catalog(),
            budget=budget,
            half_life_days=self._half_life_days,
            now=self._clock().astimezone(self._zone),
            exclude_session=session_key,
            tokens=self._tokens,
        )

    def remember(
        self,
        text: str,
        *,
        key: str | None = None,
        scope: Scope | None = None,
        about: str = "",
        kind: Kind = "core",
    ) -> Note:
        """Add a note; secrets in its text are redacted. Raises UsageError if the text is empty.

        A core note supersedes core notes with the same `about`.
        """
        owner = self.scope(key=key, scope=scope)
        subject = normalize_subject(redact(about).text)
        core_notes = self.notes.list(owner, kind="core") if kind == "core" and subject else []
        draft = Draft(
            kind=kind,
            text=redact(text).text,
            about=subject,
            supersedes=tuple(note.id for note in notes_with_subject(subject, core_notes)),
        )
        [note] = self.notes.add(owner, [draft])
        return note

    @overload
    def forget(
        self,
        id: str,
        *,
        key: str | None = None,
        scope: Scope | None = None,
        purge: Literal[False] = False,
    ) -> Note: ...

    @overload
    def forget(
        self, id: str, *, key: str | None = None, scope: Scope | None = None, purge: Literal[True]
    ) -> PurgedNote: ...

    def forget(
        self, id: str, *, key: str | None = None, scope: Scope | None = None, purge: bool = False
    ) -> Note | PurgedNote:
        """Hide a note. Raises UsageError if there is no such note.

        `purge`: delete the text of the note permanently. The result lists places that may still
        contain the text.
        """
        owner = self.scope(key=key, scope=scope)
        return self.notes.purge(owner, id) if purge else self.notes.forget(owner, id)

    def scope(self, *, key: str | None = None, scope: Scope | None = None) -> Scope:
        """Return the scope of a session, or the given scope. Raises UsageError if both are None.

        If both are given, `scope` must be the scope of the session or of its sender.
        """
        if scope is not None and key is None:
            return scope
        if key is None:
            raise UsageError("give the key of a session or a scope")
        session_key = self._aliases.resolve_key(key)
        session_scope = self._scope_of(session_key)
        if scope is None or scope == session_scope:
            return session_scope
        if scope != scope_of(session_key, agent=self.agent):
            owner, other = session_scope.name, scope.name
            raise UsageError(f"the session {key!r} belongs to {owner!r}, not to {other!r}")
        return scope

    def _scope_of(self, key: str) -> Scope:
        """Return the scope of a session's sender, or the scope of the session alone."""
        sender = self._open_catalog().sender(key) if self._threads else ""
        if sender:
            return Scope(agent=self.agent, who=sender, of="sender")
        return scope_of(key, agent=self.agent)

    def close(self) -> None:
        """Close the catalog and the stores that `open_memory` opened. Idempotent."""
        with self._mutex:
            catalog, self._catalog, self._closed = self._catalog, None, True
        if catalog is not None:
            catalog.close()
        self._opened_stores.close()

    def _open_catalog(self) -> Catalog:
        # The catalog is opened on first use, because consolidation may not need it.
        with self._mutex:
            if self._closed:
                raise StoreClosed("the memory was closed before this call")
            if self._catalog is None:
                self._catalog = open_catalog(self._sessions)
            return self._catalog

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_memory(
    where: str | os.PathLike[str],
    *,
    agent: str = DEFAULT_AGENT,
    threads: bool = False,
    complete: CompletionFunction | None = None,
    consolidation: bool = True,
    half_life_days: float = HALF_LIFE_DAYS,
    tokens: Tokens | None = None,
    zone: tzinfo | str = UTC,
    sessions: Store | None = None,
) -> Memory:
    """Open the memory of an agent. `where` is a place as for `open_store`.

    `sessions`: an open store of sessions, which `close` does not close. [default: the sessions of
    `agent` at `where`] `complete`: the model for consolidation; a small model is sufficient.
    `consolidation`: whether to write notes. The other options are those of `Memory`. Raises the
    errors of `open_store` and `Memory`.
    """
    with ExitStack() as opened_stores:
        if sessions is None:
            place = locate_sessions(where, None if agent == DEFAULT_AGENT else agent)
            sessions = opened_stores.enter_context(
                open_store(place.where, namespace=place.namespace)
            )
        notes = opened_stores.enter_context(open_store(where, namespace=NOTES))
        memory = Memory(
            sessions,
            notes,
            agent=agent,
            threads=threads,
            complete=complete,
            consolidation=consolidation,
            half_life_days=half_life_days,
            tokens=tokens,
            zone=zone,
        )
        memory._opened_stores = opened_stores.pop_all()
        return memory


def load_zone(name: str) -> tzinfo:
    """Return the time zone with this name, such as `Europe/Berlin`.

    An empty name means the zone of this machine. Raises UsageError for an unknown zone.
    """
    if not name:
        return _load_machine_zone()
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, TypeError, ValueError, OSError) as error:
        raise UsageError(f"unknown time zone {name!r}; use a name such as Europe/Berlin") from error


def _load_machine_zone() -> tzinfo:
    # Prefer zone data: a fixed offset is wrong after a change to or from daylight saving time.
    name = os.environ.get("TZ", "").removeprefix(":")
    with suppress(KeyError, OSError, ValueError):
        if name and not name.startswith("/"):
            return ZoneInfo(name)
        zone_data = Path(name or "/etc/localtime").read_bytes()
        if zone_data.endswith(b"\n"):  # `from_file` never returns if the last line is incomplete
            return ZoneInfo.from_file(BytesIO(zone_data))
    offset_zone = datetime.now().astimezone().tzinfo
    assert offset_zone is not None
    return offset_zone
