"""Read the new messages of changed sessions, and write them to the catalog."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

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

_MAX_READ_ATTEMPTS: Final = 20
_FIRST_TAIL_LENGTH: Final = 32
"""Number of last messages that are read first to find out whether a turn is finished."""


class StampRules(Struct, frozen=True):
    """Rules to interpret the stamps of a store. Most stamps only show that a session changed."""

    may_be_append: Callable[[str, str], bool] = lambda _before, _now: True
    """Function that returns whether the session may have only grown between two stamps."""
    recency: Callable[[str], int] = lambda _stamp: 0
    """Function that returns a higher number for the stamp of a session that changed later."""


class NotIndexable(Exception):
    """The catalog cannot process the messages of a session, because of a bug in the catalog."""

    def __init__(self, error: Exception) -> None:
        kind = type(error).__name__
        super().__init__(f"it cannot be indexed ({kind}: {error}); its messages are intact")
        self.is_temporary = isinstance(error, MemoryError)
        """Whether the next attempt may succeed."""


class Indexer:
    """One refresh of the catalog.

    `catalog_id` identifies the catalog. `known_stamps` are the stamps in the catalog, which are
    read before the store's stamps. `price_list`: version of the installed price list.
    """

    def __init__(
        self,
        store: Store,
        database: Database,
        rules: StampRules,
        *,
        catalog_id: int | None,
        known_stamps: Mapping[str, str | None],
        price_list: int = 0,
    ) -> None:
        self._known = known_stamps
        self._database = database
        self._sql = database.sql
        self._rules = rules
        self._price_list = price_list
        self._sessions = SessionReader(store, rules)
        self._writer = CatalogWriter(database, catalog_id, price_list)

    @property
    def missed_keys(self) -> set[str]:
        """Keys of the sessions that another process changed first."""
        return self._writer.missed_keys

    def index(self, stamps: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
        """Add the new messages of these sessions. `stamps`: the stamp of each session by key."""
        # Messages of about the same time get neighbouring ids, so that the newest are easy to find.
        keys = sorted(stamps, key=lambda key: self._rules.recency(stamps[key]))
        # Concurrent processes start at different sessions and share the work.
        start = int.from_bytes(os.urandom(4)) % max(1, len(keys))
        for done, key in enumerate(keys[start:] + keys[:start]):
            progress(done, len(keys))
            self._index_session(key, stamps[key])
        self._writer.flush()
        progress(len(keys), len(keys))

    def remove_sessions(self, keys: Iterable[str]) -> None:
        """Remove these sessions from the catalog, unless they exist again."""
        for key in keys:
            row = self._read_row(key)
            if row is not None and row.stamp == self._known[key]:
                self._writer.add_steps(key, steps.removal_steps(key, row))
        self._writer.flush()

    def _read_row(self, key: str) -> CatalogRow | None:
        with self._database.read_transaction() as transaction:
            for columns in list(transaction.execute(self._sql["row"], (self._price_list, key))):
                # An invalid row raises an error here: the catalog is damaged.
                return steps.decode_row(columns)
        return None

    def _index_session(self, key: str, stamp: str) -> None:
        row = self._read_row(key)
        if row is not None and row.stamp == stamp:
            return  # another process was faster
        if (row.stamp if row is not None else None) != self._known.get(key):
            # Another process changed the row, perhaps with a newer stamp than ours.
            self._writer.missed_keys.add(key)
            return
        writer = self._writer
        try:
            writer.add_steps(key, self._sessions.steps_to_current(key, stamp, row))
        except NoSuchSession:
            # The session is deleted or not completely created. The next refresh reads it again.
            writer.add_steps(key, steps.removal_steps(key, row) if row is not None else ())
        except ForeignLog:
            self._replace_row(key, row, SessionColumns(stamp=stamp, listed=False))
        except DamagedStore as error:
            self._replace_row(key, row, SessionColumns(stamp=stamp, problem=str(error)))
        except StoreUnavailable as error:
            # Without a stamp in its row, the session is read again at the next refresh.
            self._replace_row(key, row, SessionColumns(stamp=None, problem=str(error)))
        except NotIndexable as error:
            log_reports.warning("session %r: %s", key, error)
            # Steps before the failure may have changed the row.
            writer.flush()
            columns = SessionColumns(
                stamp=None if error.is_temporary else stamp, problem=str(error)
            )
            self._replace_row(key, self._read_row(key), columns)

    def _replace_row(self, key: str, row: CatalogRow | None, columns: SessionColumns) -> None:
        """Replace the row of a session by a row without messages."""
        if key not in self._writer.missed_keys:
            self._writer.add_steps(key, steps.steps_to_empty_row(key, row, columns))


class SessionReader:
    """A reader of sessions that yields steps for the catalog."""

    def __init__(self, store: Store, rules: StampRules) -> None:
        self._store = store
        self._rules = rules
        self._price = LazyPrices()

    def steps_to_current(self, key: str, stamp: str, row: CatalogRow | None) -> Iterator[Step]:
        """Yield the steps that bring `row` up to date with the store.

        Raises the errors of the store. Any other error becomes NotIndexable, because one session
        must not keep the other sessions out of the catalog.
        """
        try:
            yield from steps.update_steps(key, stamp, row, self._read(key, stamp, row), self._price)
        except StenologError:
            raise
        except Exception as error:  # guard: catalog-contains-one-session
            raise NotIndexable(error) from error

    def _read(self, key: str, stamp: str, row: CatalogRow | None) -> SessionContent:
        """Return a session's new messages, or all if old ones may differ. Raises store errors."""
        known_row = row if row is not None and row.is_complete else None
        for _ in range(_MAX_READ_ATTEMPTS):
            info_before = self._store.info(key)
            if known_row is not None and self._may_differ(info_before, stamp, known_row):
                known_row = None
            after_seq = known_row.indexed if known_row is not None else 0
            messages = self._store.get_history(key, after=after_seq, full=True)
            state, tail = self._read_state(key)
            info = self._store.info(key)
            is_consistent = info.uid == info_before.uid and (
                known_row is None
                or (
                    self._has_last_message(info, known_row, tail)
                    # A lower count means that the store no longer has some messages of the catalog.
                    and info_before.count <= known_row.count + len(messages) <= info.count
                    and _keeps_owner(known_row, messages)
                )
            )
            if is_consistent:
                visible_spans = self._visible_spans(info, messages, known_row)
                return SessionContent(info, messages, visible_spans, known_row is None, state)
            known_row = None
        raise StoreBusy(f"{key!r} keeps being deleted and created again")

    def _has_last_message(
        self, info: SessionInfo, known_row: CatalogRow, tail: Sequence[Message]
    ) -> bool:
        """Return whether the store has the catalog's last message of the session at the same seq.

        The store lacks the message if the store was replaced, for example by a backup. For an
        archived message the result is True, because reading an archive takes too long.
        """
        last = known_row.indexed
        if known_row.last_at is None or last <= info.archived:
            return True
        messages = [message for message in tail if message.seq == last]
        if not messages:
            messages = self._store.get_history(info.key, after=last - 1, full=True)[:1]
        return [(m.seq, to_microseconds(m.at)) for m in messages] == [(last, known_row.last_at)]

    def _visible_spans(
        self, info: SessionInfo, messages: Sequence[Message], known_row: CatalogRow | None
    ) -> list[Span]:
        """Return the visible seqs up to the last message that was read.

        Old messages are not read again: the cost of an append must not depend on the length of the
        history. Old messages are read again only if messages are damaged, or if the store does not
        report the visible seqs.
        """
        if known_row is None:
            return spans.union((m.seq, m.seq) for m in messages if not m.hidden)
        # guard: catalog-reads-new-only
        if info.lost or info.damaged or spans.size(info.in_sight) != info.visible:
            visible = self._store.get_history(info.key)
            return spans.union((m.seq, m.seq) for m in visible)
        return spans.clipped(info.in_sight, 1, messages[-1].seq if messages else known_row.indexed)

    def _may_differ(self, info: SessionInfo, stamp: str, row: CatalogRow) -> bool:
        """Return whether messages in the catalog may have changed in the store."""
        if info.uid != row.uid or info.last_seq < row.indexed:
            return True
        if info.generation != row.generation:
            # Archiving does not change messages, but other rewrites of a log may change them.
            return info.archived <= row.archived
        return row.stamp is not None and not self._rules.may_be_append(row.stamp, stamp)

    def _read_state(self, key: str) -> tuple[State, list[Message]]:
        """Return the state of the session, and the visible messages that determine it."""
        tail_length = _FIRST_TAIL_LENGTH
        while True:
            tail = self._store.get_history(key, last=tail_length)
            state = searchable_text.state_from(tail, whole=len(tail) < tail_length)
            if state is not None:
                return state, tail
            tail_length *= 8


def _keeps_owner(known_row: CatalogRow, messages: Sequence[Message]) -> bool:
    """Return whether the owner, which is indexed with every message, stays the same."""
    owner = known_row.ownership.owner
    return not known_row.count or known_row.ownership.with_messages(messages).owner == owner


# --- writer ----------------------------------------------------------------------------------


_MAX_COLLECTING_SECONDS: Final = 0.5
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
        self._message_count = self._byte_count = 0
        self._collecting_since = 0.0
        self.missed_keys: set[str] = set()
        """Keys of the sessions that another process changed before this writer."""

    def add_steps(self, key: str, session_steps: Iterable[Step]) -> None:
        """Collect the steps of one session; many steps are executed in one transaction."""
        for step in session_steps:
            if not self._steps:
                self._collecting_since = time.monotonic()
            self._steps.append(step)
            self._message_count += len(step.messages) + step.remove_count
            self._byte_count += sum(len(message.text) for message in step.messages)
            if self._message_count >= steps.MAX_MESSAGES or self._byte_count >= steps.MAX_BYTES:
                self.flush()
            if key in self.missed_keys:
                return
        if self._steps and time.monotonic() - self._collecting_since > _MAX_COLLECTING_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Execute the collected steps in one transaction."""
        collected_steps, self._steps = self._steps, []
        self._message_count = self._byte_count = 0
        if not collected_steps:
            return
        with self._database.write_transaction() as transaction:
            [(catalog_id, _)] = transaction.execute(self._sql["about"])
            if catalog_id != self._catalog_id:
                # The catalog was built again, so the versions in the steps are not comparable.
                self.missed_keys.update(step.key for step in collected_steps)
            for step in collected_steps:
                # If a step of a session was not applied, its following steps are skipped.
                if step.key not in self.missed_keys and not self._apply_step(transaction, step):
                    self.missed_keys.add(step.key)
            transaction.execute(self._sql["count_write"])

    def _apply_step(self, transaction: Transaction, step: Step) -> bool:
        """Execute a step. Return False if the row has another version than the step expects."""
        sql = self._sql
        rows = list(transaction.execute(sql["row_version"], (step.key,)))
        if (rows[0][1] if rows else None) != step.version:
            return False
        if not rows:
            transaction.execute(sql["add_row"], (step.key, ""))
            rows = list(transaction.execute(sql["row_version"], (step.key,)))
        session: int = rows[0][0]
        if step.delete_row:
            transaction.execute(sql["remove_tags"], (session,))
            transaction.execute(sql["remove_row"], (session,))
            return True
        if step.start is not None:
            transaction.execute(sql["begin_row"], (*step.start, self._price_list, session))
        elif step.remove_count:
            self._remove(transaction, session, step, owner=rows[0][2])
        else:
            if step.messages:
                owner, mixed = step.ownership.owner, int(step.ownership.mixed)
                transaction.execute(sql["own_row"], (owner, mixed, session))
                self._add_messages(transaction, session, step)
                values = (*astuple(step.usage), self._price_list, session)
                transaction.execute(sql["add_usage"], values)
            if step.columns is not None:
                self._replace_row(transaction, session, step, step.columns)
            else:
                row_values = (step.messages[-1].seq, len(step.messages), session)
                transaction.execute(sql["advance_row"], row_values)
        return True

    def _add_messages(self, transaction: Transaction, session: int, step: Step) -> None:
        sql = self._sql
        [(last_id,)] = transaction.execute(sql["last_id"])
        numbered = list(enumerate(step.messages, last_id + 1))
        rows = [(id_, session, m.seq, m.role, m.at, m.tokens, m.speech) for id_, m in numbered]
        transaction.executemany(sql["add_message"], rows)
        transaction.executemany(sql["add_said"], [(id_, m.text) for id_, m in numbered])
        words = [(id_, m.role, m.lines, m.stems) for id_, m in numbered]
        tokens = self._fulltext.tokens_to_add(_message_tokens(session, step.ownership.owner, words))
        transaction.executemany(sql["add_words"], tokens)
        blocks: dict[int, tuple[int, int]] = {}
        for id_, m in numbered:
            oldest, newest = blocks.get(id_ // BLOCK_SIZE, (m.at, m.at))
            blocks[id_ // BLOCK_SIZE] = (min(oldest, m.at), max(newest, m.at))
        block_rows = [(block, *oldest_and_newest) for block, oldest_and_newest in blocks.items()]
        transaction.executemany(sql["add_block"], block_rows)

    def _remove(self, transaction: Transaction, session: int, step: Step, *, owner: str) -> None:
        sql = self._sql
        messages = list(transaction.execute(sql["some_messages"], (session, step.remove_count)))

        def added_tokens() -> list[MessageTokens]:
            lines_by_id = [(id_, role, tokenizer.token_lines(text)) for id_, role, text in messages]
            words = [(id_, role, lines, stem_marks(lines)) for id_, role, lines in lines_by_id]
            return _message_tokens(session, owner, words)

        token_rows = self._fulltext.tokens_to_remove([id_ for id_, _, _ in messages], added_tokens)
        transaction.executemany(sql["remove_words"], token_rows)
        id_rows = [(id_,) for id_, _, _ in messages]
        transaction.executemany(sql["remove_said"], id_rows)
        transaction.executemany(sql["remove_message"], id_rows)
        transaction.execute(sql["shrink_row"], (len(id_rows), session))

    def _replace_row(
        self, transaction: Transaction, session: int, step: Step, columns: SessionColumns
    ) -> None:
        sql, meta = self._sql, columns.meta
        tokens = columns.tokens
        if tokens is None:
            tokens = 0
            for span in columns.visible_spans:
                [(counted,)] = transaction.execute(sql["tokens_in"], (session, *span))
                tokens += counted
        prompt = columns.prompt
        if prompt is None:
            # The prompt may be in messages that an interrupted process added.
            prompt = searchable_text.prompt_from(transaction.execute(sql["prompts"], (session,)))
        version = (columns.stamp, columns.listed, columns.uid, columns.generation, columns.archived)
        counts = (columns.indexed, len(step.messages), spans.size(columns.visible_spans), tokens)
        seqs = [msgspec.json.encode(s).decode() for s in (columns.visible_spans, columns.withdrawn)]
        texts = (columns.state, searchable_text.title_from(meta, prompt), prompt)
        times = (columns.created, columns.updated)
        names = (searchable_text.agent_from(meta), searchable_text.channel_of(step.key))
        damage = (columns.lost, columns.damaged, columns.problem)
        transcript = (searchable_text.program_from(meta), searchable_text.project_from(meta))
        fork = (columns.forked_from or searchable_text.source_from(meta), columns.forked_at)
        about = (*names, *damage, *transcript, *fork, 0 if columns.indexed else columns.created)
        values = (*version, *counts, *seqs, *texts, *times, *about, session)
        transaction.execute(sql["settle_row"], values)
        transaction.execute(sql["remove_tags"], (session,))
        tags = [(tag, session) for tag in searchable_text.tags_from(meta)]
        transaction.executemany(sql["add_tag"], tags)


def _message_tokens(
    session: int, owner: str, messages: Sequence[tuple[int, str, tokenizer.TokenLines, str]]
) -> list[MessageTokens]:
    """Return the tokens for the full-text index, given id, role, tokens and stems per message."""
    marks = session_mark(session) + (f" {owner_mark(owner)}" if owner else "")
    return [
        MessageTokens(id_, lines.parts, lines.extra, f"{marks} {role_mark(role)} {stems}")
        for id_, role, lines, stems in messages
    ]
