"""Memory as an agent loop holds it: notes, how they are made after a turn, and what is recalled."""

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from typing import Final, Literal, Self, overload
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stenolog.catalog import Catalog, open_catalog
from stenolog.errors import StoreClosed, UsageError
from stenolog.memory.consolidation import MOST_CALLS, Consolidated, Consolidation
from stenolog.memory.facts import about_the_same, subject
from stenolog.memory.notes import Draft, Kind, Note, Notes, PurgedNote
from stenolog.memory.recall import Recalled, recall
from stenolog.memory.redaction import redact
from stenolog.memory.scopes import Scope, scope_of
from stenolog.providers.base import Ask, check_ask
from stenolog.sessions.aliases import Aliases
from stenolog.sessions.folders import NOTES, find_place
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store
from stenolog.stores.opening import open_store
from stenolog.tokens import Tokens

AGENT: Final = "main"
"""The agent of a workspace in which none has a name."""

HALF_LIFE_DAYS: Final = 30.0
RECALL_TOKENS: Final = 1_500


class Memory:
    """What an agent remembers of its users. A context manager; may be used by several threads.

    Whose memory is meant is said by `key`, a session's or an alias of one, or by `scope`. Each
    session has a memory of its own. `threads`: sessions in which every user message carries the
    mark of the same verified sender share one memory, that of the sender (`Inbound.sender`). The
    form of a key joins nothing.
    """

    def __init__(
        self,
        sessions: Store,
        notes: Store,
        *,
        agent: str = AGENT,
        threads: bool = False,
        ask: Ask | None = None,
        consolidation: bool = True,
        half_life_days: float = HALF_LIFE_DAYS,
        tokens: Tokens | None = None,
        zone: tzinfo | str = UTC,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """Over two open stores, which are not closed with it.

        `tokens`: the counter of the model in use. `zone`: that of the users, for dates and for
        words such as "yesterday"; a name such as "Europe/Zurich" will do. Raises UsageError for
        what is no store, no model or no zone.
        """
        check_store(sessions, "sessions=")
        check_store(notes, "notes=")
        if ask is not None:
            check_ask(ask)
        self.agent = agent
        self.notes = Notes(notes)
        """All notes, of all scopes."""
        self._sessions = sessions
        self._aliases = Aliases(sessions)
        self._threads = threads
        self._tokens = tokens
        self._zone = _zone_of(zone)
        self._half_life_days = half_life_days
        self._clock = clock or (lambda: datetime.now(UTC))
        self._consolidation = (
            Consolidation(
                sessions,
                self.notes,
                ask,
                agent=agent,
                scope_of=self._scope_of,
                tokens=tokens,
                clock=self._clock,
            )
            if consolidation
            else None
        )
        self._mutex = threading.Lock()
        self._catalog: Catalog | None = None
        self._closed = False
        self._closes: tuple[Store, ...] = ()
        """The stores that were opened with it, and are closed with it."""

    def __repr__(self) -> str:
        return f"Memory({self._sessions!r}, {self.notes.store!r}, agent={self.agent!r})"

    def consolidate(self, key: str, *, most_calls: int = MOST_CALLS) -> Consolidated:
        """Make notes of the finished turns of a session that were not consolidated yet.

        It asks the model, so that a loop calls it after a turn, in a thread; at most so many times,
        and then `waiting` in the result says how many turns are left for the next call. Where
        consolidation is switched off it does nothing, and what was said meanwhile waits for the day
        it is on again. Raises what the stores raise, and UsageError for less than one call.
        """
        if self._consolidation is None:
            return Consolidated()
        return self._consolidation.run(self._aliases.own_key(key), most_calls=most_calls)

    def waiting(self) -> list[str]:
        """The sessions that have finished turns which were not consolidated yet, by key.

        None where consolidation is switched off. A session that is up to date costs one look at
        what is known of it, so that a loop asks when it starts, and now and then.
        """
        return [] if self._consolidation is None else self._consolidation.waiting()

    def skip(self, key: str) -> None:
        """Leave all that was said in a session so far out of consolidation, for good."""
        if self._consolidation is not None:
            self._consolidation.skip(self._aliases.own_key(key))

    def recall(
        self,
        question: str,
        *,
        key: str | None = None,
        scope: Scope | None = None,
        budget: int = RECALL_TOKENS,
        asking: str | None = None,
    ) -> Recalled:
        """What notes and past messages of one scope say to a question, as one marked block.

        With the key of the session that asks, what that session has in sight is left out.
        `asking`: that key, no alias, if the scope was looked up before.
        """
        own = asking if key is None else self._aliases.own_key(key)
        return recall(
            question,
            scope=self.scope(key=key, scope=scope),
            notes=self.notes,
            catalog=self._index(),
            budget=budget,
            half_life_days=self._half_life_days,
            now=self._clock().astimezone(self._zone),
            exclude_session=own,
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
        """Add a note by hand, without its secrets. Raises UsageError where it has no text.

        A core note takes the place of those about the same.
        """
        whose = self.scope(key=key, scope=scope)
        named = subject(redact(about).text)
        known = self.notes.list(whose, kind="core") if kind == "core" and named else []
        draft = Draft(
            kind=kind,
            text=redact(text).text,
            about=named,
            supersedes=tuple(note.id for note in about_the_same(named, known)),
        )
        [note] = self.notes.add(whose, [draft])
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
        self,
        id: str,
        *,
        key: str | None = None,
        scope: Scope | None = None,
        purge: Literal[True],
    ) -> PurgedNote: ...

    def forget(
        self,
        id: str,
        *,
        key: str | None = None,
        scope: Scope | None = None,
        purge: bool = False,
    ) -> Note | PurgedNote:
        """Take a note out of sight. Raises NoSuchNote.

        `purge`: delete its text for good; what is returned then says what may still tell of it.
        """
        whose = self.scope(key=key, scope=scope)
        return self.notes.purge(whose, id) if purge else self.notes.forget(whose, id)

    def scope(self, *, key: str | None = None, scope: Scope | None = None) -> Scope:
        """Whose memory it is. Raises UsageError unless one of the two is given.

        With both, the scope must be that of the session: of its sender, or of the session alone.
        """
        if scope is not None and key is None:
            return scope
        if key is None:
            raise UsageError("whose memory? give the key of a session, or a scope")
        own_key = self._aliases.own_key(key)
        own = self._scope_of(own_key)
        if scope is None or scope == own:
            return own
        if scope != scope_of(own_key, agent=self.agent):
            raise UsageError(f"the session {key!r} is of {own.name!r}, not of {scope.name!r}")
        return scope

    def _scope_of(self, key: str) -> Scope:
        """Return the scope of the sender of a session, or that of the session alone."""
        sender = self._index().sender(key) if self._threads else ""
        if sender:
            return Scope(agent=self.agent, who=sender, of="sender")
        return scope_of(key, agent=self.agent)

    def close(self) -> None:
        """Let go of the index, and of the stores that were opened with it; twice does nothing."""
        with self._mutex:
            catalog, self._catalog, self._closed = self._catalog, None, True
        if catalog is not None:
            catalog.close()
        for store in self._closes:
            store.close()

    def _index(self) -> Catalog:
        # Made at the first recall: who only consolidates does not wait for it.
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
    agent: str = AGENT,
    threads: bool = False,
    ask: Ask | None = None,
    consolidation: bool = True,
    half_life_days: float = HALF_LIFE_DAYS,
    tokens: Tokens | None = None,
    zone: tzinfo | str = UTC,
    sessions: Store | None = None,
) -> Memory:
    """The memory of an agent at a place: what `open_store` takes is taken here.

    `sessions`: the store in which they are, where it is open already; it is not closed. Otherwise
    it is that of the agent of this name, and for "main" the one without a name. `ask`: the model
    that consolidates, a small one will do. `consolidation`: False switches it off. The other
    options are those of `Memory`. Raises what `open_store` and `Memory` raise.
    """
    opened: list[Store] = []
    try:
        if sessions is None:
            place = find_place(where, None if agent == AGENT else agent)
            sessions = open_store(place.where, namespace=place.namespace)
            opened.append(sessions)
        notes = open_store(where, namespace=NOTES)
        opened.append(notes)
        memory = Memory(
            sessions,
            notes,
            agent=agent,
            threads=threads,
            ask=ask,
            consolidation=consolidation,
            half_life_days=half_life_days,
            tokens=tokens,
            zone=zone,
        )
    except BaseException:
        for store in opened:
            store.close()
        raise
    memory._closes = tuple(opened)
    return memory


def _zone_of(zone: object) -> tzinfo:
    if isinstance(zone, tzinfo):
        return zone
    try:
        if isinstance(zone, str):
            return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        words = "this system knows no such time zone; pip install tzdata if it knows none"
        raise UsageError(f"zone={zone!r}: {words}") from error
    raise UsageError(f'zone={zone!r}: a tzinfo is wanted, or a name such as "Europe/Zurich"')
