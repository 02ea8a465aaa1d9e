"""Read the new messages of changed sessions, and write them to the catalog."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from stenolog.catalog import searchable_text, steps, tokenizer
from stenolog.catalog.answer_prices import LazyPrices
from stenolog.catalog.catalog_database import BLOCK_SIZE, Database, Transaction, to_microseconds
from stenolog.catalog.entries import State
from stenolog.catalog.query import MessageTokens, owner_mark, role_mark, session_mark
from stenolog.catalog.steps import CatalogRow, SessionColumns, SessionContent, Step, stem_marks
from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import log_reports, spans
from stenolog.stores.base import Store

_MAX_ATTEMPTS: Final = 20
_TAIL: Final = 32
"""Number of last messages that mostly suffices to find out whether a turn is finished."""


class StampRules(Struct, frozen=True):
    """How to interpret the stamps of a store. Most stamps only show that something changed."""

    may_be_append: Callable[[str, str], bool] = lambda _before, _now: True
    """Whether the change between two stamps can have been only an append."""
    age: Callable[[str], int] = lambda _stamp: 0
    """Return a number that is higher for sessions that changed later."""


class NotIndexable(Exception):
    """The catalog cannot process the messages of a session: a bug in the catalog."""

    def __init__(self, error: Exception) -> None:
        kind = type(error).__name__
        super().__init__(f"it cannot be indexed ({kind}: {error}); its messages are intact")
        self.is_temporary = isinstance(error, MemoryError)
        """Whether the next attempt may succeed."""


class Indexer:
    """One refresh, based on the catalog before the store was asked for its stamps.

    `catalog_id` identifies that catalog; `known` are the stamps that it had. `price_list`: version
    of the installed price list.
    """

    def __init__(
        self,
        store: Store,
        database: Database,
        rules: StampRules,
        *,
        catalog_id: int | None,
        known: Mapping[str, str | None],
        price_list: int = 0,
    ) -> None:
        self._known = known
        self._store = store
        self._database = database
        self._sql = database.sql
        self._rules = rules
        self._price_list = price_list
        self._sessions = SessionReader(store, rules)
        self._writer = CatalogWriter(database, catalog_id, price_list)

    @property
    def missed(self) -> set[str]:
        """Keys of the sessions that another process changed first."""
        return self._writer.missed

    def index(self, changed: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
        """Add the new messages of the sessions with these stamps."""
        # Messages of about the same time get neighbouring ids, so that the newest are easy to find.
        keys = sorted(changed, key=lambda key: self._rules.age(changed[key]))
        # Concurrent processes start at different sessions and share the work.
        begin = int.from_bytes(os.urandom(4)) % max(1, len(keys))
        for done, key in enumerate(keys[begin:] + keys[:begin]):
            progress(done, len(keys))
            self._index(key, changed[key])
        self._writer.flush()
        progress(len(keys), len(keys))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove these sessions from the catalog, unless they came back."""
        for key in keys:
            row = self._row(key)
            if row is not None and row.stamp == self._known[key]:
                self._writer.put(key, steps.removal_steps(key, row))
        self._writer.flush()

    def _row(self, key: str) -> CatalogRow | None:
        with self._database.read() as transaction:
            for found in list(transaction.execute(self._sql["row"], (self._price_list, key))):
                # An invalid row means that the catalog is broken, and is detected here.
                return steps.decode_row(found)
        return None

    def _index(self, key: str, stamp: str) -> None:
        row = self._row(key)
        if row is not None and row.stamp == stamp:
            return  # another process was faster
        if (row.stamp if row is not None else None) != self._known.get(key):
            # Another process changed the row, perhaps with a newer stamp than ours.
            self._writer.mark_missed(key)
            return
        writer = self._writer
        try:
            writer.put(key, self._sessions.steps(key, stamp, row))
        except NoSuchSession:
            # Deleted, or not completely created: read again at the next refresh.
            writer.put(key, steps.removal_steps(key, row) if row is not None else ())
        except ForeignLog:
            self._replace_row(key, row, SessionColumns(stamp=stamp, listed=False))
        except DamagedStore as error:
            self._replace_row(key, row, SessionColumns(stamp=stamp, problem=str(error)))
        except StoreUnavailable as error:
            # It may be readable at the next refresh without a change.
            self._replace_row(key, row, SessionColumns(stamp=None, problem=str(error)))
        except NotIndexable as error:
            log_reports.warning("session %r: %s", key, error)
            # Steps before the failure may have changed the row.
            writer.flush()
            columns = SessionColumns(
                stamp=None if error.is_temporary else stamp, problem=str(error)
            )
            self._replace_row(key, self._row(key), columns)

    def _replace_row(self, key: str, row: CatalogRow | None, columns: SessionColumns) -> None:
        """Replace the row of a session by one without messages."""
        if key not in self._writer.missed:
            self._writer.put(key, steps.empty_steps(key, row, columns=columns))


class SessionReader:
    """A reader of sessions that yields steps for the catalog."""

    def __init__(self, store: Store, rules: StampRules) -> None:
        self._store = store
        self._rules = rules
        self._price = LazyPrices()

    def steps(self, key: str, stamp: str, row: CatalogRow | None) -> Iterator[Step]:
        """Yield the steps from `row` to the current content of the store.

        Raises the errors of the store, and NotIndexable if the content causes any other error: one
        session must not keep the others out of the catalog.
        """
        try:
            yield from steps.update_steps(key, stamp, row, self._read(key, stamp, row), self._price)
        except StenologError:
            raise
        except Exception as error:  # guard: catalog-contains-one-session
            raise NotIndexable(error) from error

    def _read(self, key: str, stamp: str, row: CatalogRow | None) -> SessionContent:
        """Return the new part of the session, or all of it. Raises the errors of the store."""
        # A row that is being emptied does not count.
        known = row if row is not None and row.uid and (row.indexed or not row.count) else None
        if known is not None and known.is_outdated:
            known = None
        for _ in range(_MAX_ATTEMPTS):
            before = self._store.info(key)
            if known is not None and self._may_differ(before, stamp, known):
                known = None
            after = known.indexed if known is not None else 0
            messages = self._store.get_history(key, after=after, full=True)
            state, tail = self._state(key)
            info = self._store.info(key)
            if info.uid != before.uid:
                known = None
                continue
            if known is not None and not self._continues(info, known, tail):
                known = None
                continue
            if known is not None:
                count = known.count + len(messages)
                if not before.count <= count <= info.count:
                    # Messages in the catalog no longer exist in the store.
                    known = None
                    continue
                owner = known.ownership.after(messages).owner
                if known.count and owner != known.ownership.owner:
                    # The owner is stored with every message, including earlier ones.
                    known = None
                    continue
            visible_spans = self._visible_spans(info, messages, known)
            return SessionContent(info, messages, visible_spans, known is None, state)
        raise StoreBusy(f"{key!r} keeps being deleted and created again")

    def _continues(self, info: SessionInfo, known: CatalogRow, tail: Sequence[Message]) -> bool:
        """Whether the last message in the catalog is the one that the store has at its seq.

        It is not if the store was replaced, for example by a backup. An archived message is not
        compared: reading it would cost too much.
        """
        last = known.indexed
        if known.last_at is None or last <= info.archived:
            return True
        found = [message for message in tail if message.seq == last]
        if not found:
            found = self._store.get_history(info.key, after=last - 1, full=True)[:1]
        # guard: catalog-checks-last-message
        return [(one.seq, to_microseconds(one.at)) for one in found] == [(last, known.last_at)]

    def _visible_spans(
        self, info: SessionInfo, messages: Sequence[Message], known: CatalogRow | None
    ) -> list[Span]:
        """Return the visible seqs, as far as messages were read.

        Messages are not read again for it: the cost of an append must not depend on the length of
        the history. Exceptions are damaged messages, and stores that do not report visible seqs.
        """
        if known is None:
            return spans.union((one.seq, one.seq) for one in messages if not one.hidden)
        # guard: catalog-reads-new-only
        if info.lost or info.damaged or spans.size(info.in_sight) != info.visible:
            visible = self._store.get_history(info.key)
            return spans.union((one.seq, one.seq) for one in visible)
        return spans.clipped(info.in_sight, 1, messages[-1].seq if messages else known.indexed)

    def _may_differ(self, info: SessionInfo, stamp: str, row: CatalogRow) -> bool:
        """Whether messages in the catalog may have changed in the store."""
        if info.uid != row.uid or info.last_seq < row.indexed:
            return True
        if info.generation != row.generation:
            # Archiving does not change messages; other rewrites of a log may.
            return info.archived <= row.archived
        return row.stamp is not None and not self._rules.may_be_append(row.stamp, stamp)

    def _state(self, key: str) -> tuple[State, list[Message]]:
        """Return the state of the session, and the visible messages that determine it."""
        last = _TAIL
        while True:
            tail = self._store.get_history(key, last=last)
            state = searchable_text.state_from(tail, whole=len(tail) < last)
            if state is not None:
                return state, tail
            last *= 8


# --- writer ----------------------------------------------------------------------------------


_MAX_SECONDS: Final = 0.5
"""Maximum number of seconds for which steps are collected for one transaction."""


class CatalogWriter:
    """A writer that executes many steps in one transaction."""

    def __init__(self, database: Database, catalog_id: int | None, price_list: int) -> None:
        self._price_list = price_list
        self._database = database
        self._sql = database.sql
        self._fulltext = database.fulltext
        self._catalog_id = catalog_id
        self._steps: list[Step] = []
        self._messages = self._bytes = 0
        self._collecting_since = 0.0
        self.missed: set[str] = set()
        """Keys of the sessions that another process changed before our step."""

    def put(self, key: str, session_steps: Iterable[Step]) -> None:
        """Execute these steps of one session soon, if possible in one transaction."""
        for step in session_steps:
            if not self._steps:
                self._collecting_since = time.monotonic()
            self._steps.append(step)
            self._messages += len(step.add) + step.remove
            self._bytes += sum(len(messages.text) for messages in step.add)
            if self._messages >= steps.MAX_MESSAGES or self._bytes >= steps.MAX_BYTES:
                self.flush()
            if key in self.missed:
                return
        if self._steps and time.monotonic() - self._collecting_since > _MAX_SECONDS:
            self.flush()

    def mark_missed(self, key: str) -> None:
        """Record that another process changed the session."""
        self.missed.add(key)

    def flush(self) -> None:
        """Execute the collected steps in one transaction."""
        collected, self._steps = self._steps, []
        self._messages = self._bytes = 0
        if not collected:
            return
        with self._database.write() as transaction:
            [(catalog_id, _)] = transaction.execute(self._sql["about"])
            if catalog_id != self._catalog_id:
                # The catalog was built again: equal versions may belong to other rows.
                self.missed.update(step.key for step in collected)
            for step in collected:
                # After a missed step, the following steps of the session are skipped.
                if step.key not in self.missed and not self._apply_step(transaction, step):
                    self.missed.add(step.key)
            transaction.execute(self._sql["count_write"])

    def _apply_step(self, transaction: Transaction, step: Step) -> bool:
        """Execute a step. Return False if the row has another version than the step expects."""
        sql = self._sql
        found = list(transaction.execute(sql["row_version"], (step.key,)))
        if (found[0][1] if found else None) != step.version:
            return False
        if not found:
            transaction.execute(sql["add_row"], (step.key, ""))
            found = list(transaction.execute(sql["row_version"], (step.key,)))
        session: int = found[0][0]
        if step.delete_row:
            transaction.execute(sql["remove_tags"], (session,))
            transaction.execute(sql["remove_row"], (session,))
            return True
        if step.start is not None:
            start = step.start
            values = (start.uid, start.generation, start.archived, self._price_list, session)
            transaction.execute(sql["begin_row"], values)
        elif step.remove:
            self._remove(transaction, session, step, owner=found[0][2])
        else:
            if step.add:
                owner, mixed = step.ownership.owner, int(step.ownership.mixed)
                transaction.execute(sql["own_row"], (owner, mixed, session))
            self._add(transaction, session, step)
            self._add_usage(transaction, session, step)
            if step.columns is not None:
                self._replace_row(transaction, session, step)
            else:
                last = (step.add[-1].seq, len(step.add), session)
                transaction.execute(sql["advance_row"], last)
        return True

    def _add(self, transaction: Transaction, session: int, step: Step) -> None:
        messages = step.add
        if not messages:
            return
        sql = self._sql
        [(last,)] = transaction.execute(sql["last_id"])
        numbered = list(enumerate(messages, last + 1))
        transaction.executemany(
            sql["add_message"],
            [
                (id_, session, one.seq, one.role, one.at, one.tokens, one.speech)
                for id_, one in numbered
            ],
        )
        transaction.executemany(sql["add_said"], [(id_, one.text) for id_, one in numbered])
        words = [(id_, one.role, one.lines, one.stems) for id_, one in numbered]
        added = self._fulltext.tokens_to_add(_message_tokens(session, step.ownership.owner, words))
        transaction.executemany(sql["add_words"], added)
        blocks: dict[int, tuple[int, int]] = {}
        for id_, one in numbered:
            oldest, newest = blocks.get(id_ // BLOCK_SIZE, (one.at, one.at))
            blocks[id_ // BLOCK_SIZE] = (min(oldest, one.at), max(newest, one.at))
        transaction.executemany(
            sql["add_block"], [(block, *times) for block, times in blocks.items()]
        )

    def _add_usage(self, transaction: Transaction, session: int, step: Step) -> None:
        if step.add:
            used = step.usage
            values = (
                used.model,
                used.last_message,
                used.answers,
                used.unpriced,
                self._price_list,
                used.input_tokens,
                used.output_tokens,
                used.cost,
                used.failed,
                session,
            )
            transaction.execute(self._sql["add_usage"], values)

    def _remove(self, transaction: Transaction, session: int, step: Step, *, owner: str) -> None:
        sql = self._sql
        found = list(transaction.execute(sql["some_messages"], (session, step.remove)))

        def again() -> list[MessageTokens]:
            named = [(id_, role, tokenizer.lines(text)) for id_, role, text in found]
            words = [(id_, role, lines, stem_marks(lines)) for id_, role, lines in named]
            return _message_tokens(session, owner, words)

        removed = self._fulltext.tokens_to_remove([id_ for id_, _, _ in found], again)
        transaction.executemany(sql["remove_words"], removed)
        ids = [(id_,) for id_, _, _ in found]
        transaction.executemany(sql["remove_said"], ids)
        transaction.executemany(sql["remove_message"], ids)
        transaction.execute(sql["shrink_row"], (len(ids), session))

    def _replace_row(self, transaction: Transaction, session: int, step: Step) -> None:
        sql, columns = self._sql, step.columns
        assert columns is not None, "the last step settles"
        tokens = columns.tokens
        if tokens is None:
            tokens = 0
            for span in columns.visible_spans:
                [(counted,)] = transaction.execute(sql["tokens_in"], (session, *span))
                tokens += counted
        prompt = columns.prompt
        if prompt is None:
            # It may be in messages that an interrupted process added.
            messages = transaction.execute(sql["prompts"], (session,))
            prompt = searchable_text.prompt_from((role, text) for role, text in messages)
        transaction.execute(
            sql["settle_row"],
            (
                columns.stamp,
                columns.listed,
                columns.uid,
                columns.generation,
                columns.archived,
                columns.indexed,
                len(step.add),
                spans.size(columns.visible_spans),
                tokens,
                msgspec.json.encode(columns.visible_spans).decode(),
                msgspec.json.encode(columns.withdrawn).decode(),
                columns.state,
                searchable_text.title_from(columns.meta, prompt),
                prompt,
                columns.created,
                columns.updated,
                searchable_text.agent_from(columns.meta),
                searchable_text.channel_of(step.key),
                columns.lost,
                columns.damaged,
                columns.problem,
                searchable_text.program_from(columns.meta),
                searchable_text.project_from(columns.meta),
                columns.forked_from or searchable_text.source_from(columns.meta),
                columns.forked_at,
                0 if columns.indexed else columns.created,
                session,
            ),
        )
        transaction.execute(sql["remove_tags"], (session,))
        tags = [(tag, session) for tag in searchable_text.tags_from(columns.meta)]
        transaction.executemany(sql["add_tag"], tags)


def _message_tokens(
    session: int, owner: str, messages: Sequence[tuple[int, str, tokenizer.Lines, str]]
) -> list[MessageTokens]:
    """Return the tokens for the full-text index, given id, role, tokens and stems per message."""
    marks = session_mark(session) + (f" {owner_mark(owner)}" if owner else "")
    return [
        MessageTokens(id_, lines.parts, lines.more, f"{marks} {role_mark(role)} {stems}")
        for id_, role, lines, stems in messages
    ]
