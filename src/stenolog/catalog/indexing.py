"""Read the new messages of changed sessions, and write them to the catalog."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import astuple

from stenolog.catalog import searchable_text, steps, tokenizer
from stenolog.catalog.answer_prices import price_answer
from stenolog.catalog.catalog_database import BLOCK_SIZE, Database, Transaction, to_microseconds
from stenolog.catalog.entries import State
from stenolog.catalog.query import DIALECTS, MessageTokens, owner_mark, role_mark, session_mark
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
from stenolog.stores.jsonl import JSONLStore, session_list

_MAX_READ_ATTEMPTS: Final = 20
_NEWEST_COUNT: Final = 200
"""Number of newest sessions that every process indexes first, because lists start with them."""
_FIRST_TAIL_LENGTH: Final = 32
"""Number of last messages that are read first to find the state of the last turn."""


class NotIndexable(Exception):
    """The messages of a session cannot be indexed, because of a bug or for lack of memory."""

    def __init__(self, error: Exception) -> None:
        kind = type(error).__name__
        super().__init__(f"it cannot be indexed ({kind}: {error}); its messages are intact")
        self.is_temporary = isinstance(error, MemoryError)
        """Whether the next attempt may succeed."""


class Indexer:
    """One refresh of the catalog.

    `known_stamps`: the stamps in the catalog, read before the stamps of the store. `catalog_id`:
    number that identifies the catalog. `price_list_version`: version of the installed price list.
    """

    def __init__(
        self,
        store: Store,
        database: Database,
        *,
        catalog_id: int | None,
        known_stamps: Mapping[str, str | None],
        price_list_version: int = 0,
    ) -> None:
        self._known_stamps = known_stamps
        self._database = database
        self._price_list_version = price_list_version
        self._sessions = SessionReader(store)
        self._writer = CatalogWriter(database, catalog_id, price_list_version)
        self.missed_keys = self._writer.missed_keys
        """Keys of the sessions that another process changed first."""

    def index(self, stamps: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
        """Add the new messages of these sessions. `stamps`: the stamp of each session by key."""
        keys = self._newest_first(stamps)
        first, others = keys[:_NEWEST_COUNT], keys[_NEWEST_COUNT:]
        # Concurrent processes start at different sessions of the others and share the work.
        start = int.from_bytes(os.urandom(4)) % max(1, len(others))
        for done, key in enumerate(first + others[start:] + others[:start]):
            progress(done, len(keys))
            self._index_session(key, stamps[key])
        self._writer.flush()
        progress(len(keys), len(keys))

    def _newest_first(self, stamps: Mapping[str, str]) -> list[str]:
        """Return the keys of these sessions, newest first as far as their times are known.

        Neighbours in time get neighbouring message ids, so that they share few blocks.
        """
        if self._sessions.has_log_stamps:
            return sorted(stamps, key=lambda key: -session_list.write_time(stamps[key]))
        if len(stamps) == 1:
            return list(stamps)
        # `BackgroundCatalog` adds rows with their times before it indexes any messages.
        with self._database.read_transaction() as transaction:
            known_keys = [key for (key,) in transaction.run("keys_newest_first")]
        order = {key: place for place, key in enumerate(known_keys)}
        return sorted(stamps, key=lambda key: order.get(key, -1))

    def remove_sessions(self, keys: Iterable[str]) -> None:
        """Remove these sessions from the catalog, unless another process changed their rows."""
        for key in keys:
            row = self._read_row(key)
            if row is not None and row.stamp == self._known_stamps[key]:
                self._writer.add_steps(key, steps.removal_steps(key, row))
        self._writer.flush()

    def _read_row(self, key: str) -> CatalogRow | None:
        with self._database.read_transaction() as transaction:
            rows = list(transaction.run("row", (self._price_list_version, key)))
            # Decoded in the transaction, so that an invalid row raises CatalogDamaged.
            return steps.decode_row(rows[0]) if rows else None

    def _index_session(self, key: str, stamp: str) -> None:
        row = self._read_row(key)
        if row is not None and row.stamp == stamp:
            return  # another process was faster
        if (row.stamp if row is not None else None) != self._known_stamps.get(key):
            # Another process changed the row, perhaps with a newer stamp than ours.
            self.missed_keys.add(key)
            return
        try:
            self._writer.add_steps(key, self._sessions.steps_to_current(key, stamp, row))
        except NoSuchSession:
            # The session is deleted or not completely created. The next refresh reads it again.
            self._writer.add_steps(key, steps.removal_steps(key, row) if row is not None else ())
        except ForeignLog:
            self._replace_row(key, row, SessionColumns(stamp=stamp, listed=False))
        except DamagedStore as error:
            self._replace_row(key, row, SessionColumns(stamp=stamp, problem=str(error)))
        except StoreUnavailable as error:
            # Without a stamp in its row, the session is read again at the next refresh.
            self._replace_row(key, row, SessionColumns(stamp=None, problem=str(error)))
        except NotIndexable as error:
            log_reports.warning("session %r: %s", key, error)
            # Steps before the failure may have changed the row, so read it again.
            self._writer.flush()
            new_stamp = None if error.is_temporary else stamp
            columns = SessionColumns(stamp=new_stamp, problem=str(error))
            self._replace_row(key, self._read_row(key), columns)

    def _replace_row(self, key: str, row: CatalogRow | None, columns: SessionColumns) -> None:
        """Replace the row of a session by a row without messages."""
        if key not in self.missed_keys:
            self._writer.add_steps(key, steps.steps_to_empty_row(key, row, columns))


class SessionReader:
    """A reader that compares a session with its catalog row, and yields the missing steps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.has_log_stamps = isinstance(store, JSONLStore)
        """Whether stamps show that a log has only grown. Stamps of other stores show any change."""

    def steps_to_current(self, key: str, stamp: str, row: CatalogRow | None) -> Iterator[Step]:
        """Yield the steps that bring `row` up to date with the store.

        Raises the errors of the store. Any other error becomes NotIndexable, because one session
        must not keep the other sessions out of the catalog.
        """
        try:
            yield from steps.update_steps(
                key, stamp, row, self._read_content(key, stamp, row), price_answer
            )
        except StenologError:
            raise
        except Exception as error:  # guard: catalog-contains-one-session
            raise NotIndexable(error) from error

    def _read_content(self, key: str, stamp: str, row: CatalogRow | None) -> SessionContent:
        """Return a session's new messages, or all messages if old messages may have changed.

        Raises the errors of the store.
        """
        known_row = row if row is not None and row.is_complete else None
        for _ in range(_MAX_READ_ATTEMPTS):
            info_before = self._store.info(key)
            if known_row is not None and self._may_have_changed(info_before, stamp, known_row):
                known_row = None
            after_seq = known_row.indexed if known_row is not None else 0
            messages = self._store.get_history(key, after=after_seq, full=True)
            state, tail = read_state(self._store, info_before)
            info = self._store.info(key)
            is_consistent = info.uid == info_before.uid and (
                known_row is None
                or (
                    self._has_last_indexed_message(info, known_row, tail)
                    # If `info.count` is lower, the store no longer has all messages of the catalog.
                    and info_before.count <= known_row.count + len(messages) <= info.count
                    and _keeps_owner(known_row, messages)
                )
            )
            if is_consistent:
                visible_spans = self._visible_spans(info, messages, known_row)
                return SessionContent(info, messages, visible_spans, known_row is None, state)
            known_row = None
        raise StoreBusy(f"{key!r} keeps being deleted and created again")

    def _has_last_indexed_message(
        self, info: SessionInfo, known_row: CatalogRow, tail: Sequence[Message]
    ) -> bool:
        """Return whether the store still has the last indexed message, with the same seq and time.

        The message is missing if the store was replaced, for example by a backup. For an
        archived message the result is True, because reading an archive takes too long.
        """
        last_seq = known_row.indexed
        if known_row.last_at is None or last_seq <= info.archived:
            return True
        messages = [message for message in tail if message.seq == last_seq]
        if not messages:
            messages = self._store.get_history(info.key, after=last_seq - 1, full=True)[:1]
        return [(m.seq, to_microseconds(m.at)) for m in messages] == [(last_seq, known_row.last_at)]

    def _visible_spans(
        self, info: SessionInfo, messages: Sequence[Message], known_row: CatalogRow | None
    ) -> list[Span]:
        """Return the ranges of visible seqs up to the last message that was read.

        Old messages are read again only if messages are damaged, or if the store does not report
        the visible seqs. Otherwise the cost of an append would depend on the length of the history.
        """
        if known_row is None:
            return spans.from_seqs(message.seq for message in messages if not message.hidden)
        # guard: catalog-reads-new-only
        if info.lost or info.damaged or spans.size(info.visible_spans) != info.visible:
            return spans.from_seqs(message.seq for message in self._store.get_history(info.key))
        return spans.clipped(
            info.visible_spans, 1, messages[-1].seq if messages else known_row.indexed
        )

    def _may_have_changed(self, info: SessionInfo, stamp: str, row: CatalogRow) -> bool:
        """Return whether indexed messages may have changed in the store."""
        if info.uid != row.uid or info.last_seq < row.indexed:
            return True
        if info.generation != row.generation:
            # Archiving does not change messages, but other rewrites of a log may change them.
            return info.archived <= row.archived
        if not self.has_log_stamps or row.stamp is None:
            return False
        return not session_list.has_grown(row.stamp, stamp)


def read_state(store: Store, info: SessionInfo) -> tuple[State, list[Message]]:
    """Return the state of the last turn, and the messages that determine it.

    Reads only as many messages as needed. Raises the errors of the store.
    """
    state, tail = _read_state(store, info.key, full=False)
    if state == "interrupted" and searchable_text.program_from(info.meta):
        # A compaction of another program may hide the answer and keep the prompt visible.
        return _read_state(store, info.key, full=True)
    return state, tail


def _read_state(store: Store, key: str, *, full: bool) -> tuple[State, list[Message]]:
    tail_length = _FIRST_TAIL_LENGTH
    while True:
        tail = store.get_history(key, last=tail_length, full=full)
        state = searchable_text.state_from(tail, whole=len(tail) < tail_length)
        if state is not None:
            return state, tail
        tail_length *= 8


def _keeps_owner(known_row: CatalogRow, messages: Sequence[Message]) -> bool:
    """Return whether the session has the same owner after these new messages.

    The owner is indexed with every message, so a new owner requires indexing all messages again.
    """
    owner = known_row.ownership.owner
    return not known_row.count or known_row.ownership.with_messages(messages).owner == owner


# --- writer ----------------------------------------------------------------------------------


_MAX_COLLECTING_SECONDS: Final = 0.5
"""Maximum number of seconds for which steps are collected for one transaction."""


class CatalogWriter:
    """A writer that executes many steps in one transaction."""

    def __init__(self, database: Database, catalog_id: int | None, price_list_version: int) -> None:
        self._price_list_version = price_list_version
        self._database = database
        self._catalog_id = catalog_id
        self._steps: list[Step] = []
        self._message_count = self._text_size = 0
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
            self._text_size += sum(len(message.text) for message in step.messages)
            if self._message_count >= steps.MAX_MESSAGES or self._text_size >= steps.MAX_CHARACTERS:
                self.flush()
            if key in self.missed_keys:
                return
        if self._steps and time.monotonic() - self._collecting_since > _MAX_COLLECTING_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Execute the collected steps in one transaction."""
        collected_steps, self._steps = self._steps, []
        self._message_count = self._text_size = 0
        if not collected_steps:
            return
        with self._database.write_transaction() as transaction:
            [(catalog_id, _)] = transaction.run("about")
            if catalog_id != self._catalog_id:
                # The catalog was built again, so the versions in the steps are not comparable.
                self.missed_keys.update(step.key for step in collected_steps)
            for step in collected_steps:
                # If a step was not applied, the following steps of the same session are skipped.
                if step.key not in self.missed_keys and not self._apply_step(transaction, step):
                    self.missed_keys.add(step.key)
            transaction.run("count_write")

    def _apply_step(self, transaction: Transaction, step: Step) -> bool:
        """Execute a step. Return False if the row has another version than the step expects."""
        rows = list(transaction.run("row_version", (step.key,)))
        if (rows[0][1] if rows else None) != step.version:
            return False
        if not rows:
            transaction.run("add_row", (step.key,))
            rows = list(transaction.run("row_version", (step.key,)))
        session_id: int = rows[0][0]
        if step.delete_row:
            transaction.run("remove_tags", (session_id,))
            transaction.run("remove_row", (session_id,))
            return True
        if step.reset_to is not None:
            values = (*step.reset_to, self._price_list_version, session_id)
            transaction.run("begin_row", values)
        elif step.remove_count:
            self._remove_messages(transaction, session_id, step, owner=rows[0][2])
        else:
            if step.messages:
                owner, mixed = step.ownership.owner, int(step.ownership.mixed)
                transaction.run("own_row", (owner, mixed, session_id))
                self._add_messages(transaction, session_id, step)
                usage_values = (*astuple(step.usage), self._price_list_version, session_id)
                transaction.run("add_usage", usage_values)
            if step.columns is not None:
                self._write_columns(transaction, session_id, step, step.columns)
            else:
                row_values = (step.messages[-1].seq, len(step.messages), session_id)
                transaction.run("advance_row", row_values)
        return True

    def _add_messages(self, transaction: Transaction, session_id: int, step: Step) -> None:
        [(last_id,)] = transaction.run("last_id")
        ids_and_messages = list(enumerate(step.messages, last_id + 1))
        rows = [
            (id_, session_id, m.seq, m.role, m.at, m.tokens, m.speech)
            for id_, m in ids_and_messages
        ]
        transaction.run_many("add_message", rows)
        transaction.run_many("add_said", [(id_, m.text) for id_, m in ids_and_messages])
        word_rows = [(id_, m.role, m.lines, m.stems) for id_, m in ids_and_messages]
        tokens = _make_message_tokens(session_id, step.ownership.owner, word_rows)
        transaction.run_many("add_words", DIALECTS[transaction.fulltext].tokens_to_add(tokens))
        blocks: dict[int, tuple[int, int]] = {}
        for id_, m in ids_and_messages:
            oldest, newest = blocks.get(id_ // BLOCK_SIZE, (m.at, m.at))
            blocks[id_ // BLOCK_SIZE] = (min(oldest, m.at), max(newest, m.at))
        block_rows = [(block, *oldest_and_newest) for block, oldest_and_newest in blocks.items()]
        transaction.run_many("add_block", block_rows)

    def _remove_messages(
        self, transaction: Transaction, session_id: int, step: Step, *, owner: str
    ) -> None:
        messages = list(transaction.run("some_messages", (session_id, step.remove_count)))

        def read_added_tokens() -> list[MessageTokens]:
            token_rows = [(id_, role, tokenizer.token_lines(text)) for id_, role, text in messages]
            word_rows = [(id_, role, lines, stem_marks(lines)) for id_, role, lines in token_rows]
            return _make_message_tokens(session_id, owner, word_rows)

        ids = [id_ for id_, _, _ in messages]
        values = DIALECTS[transaction.fulltext].tokens_to_remove(ids, read_added_tokens)
        transaction.run_many("remove_words", values)
        id_rows = [(id_,) for id_ in ids]
        transaction.run_many("remove_said", id_rows)
        transaction.run_many("remove_message", id_rows)
        transaction.run("shrink_row", (len(id_rows), session_id))

    def _write_columns(
        self, transaction: Transaction, session_id: int, step: Step, columns: SessionColumns
    ) -> None:
        meta, tokens = columns.meta, columns.tokens
        if tokens is None:
            tokens = 0
            for span in columns.visible_spans:
                [(span_tokens,)] = transaction.run("tokens_in", (session_id, *span))
                tokens += span_tokens
        prompt = columns.prompt
        if prompt is None:
            # The prompt may be in messages that an interrupted process added.
            prompt = searchable_text.prompt_from(transaction.run("prompts", (session_id,)))
        values = (
            columns.stamp,
            columns.listed,
            columns.uid,
            columns.generation,
            columns.archived,
            columns.indexed,
            len(step.messages),
            spans.size(columns.visible_spans),
            tokens,
            msgspec.json.encode(columns.visible_spans).decode(),
            msgspec.json.encode(columns.withdrawn_spans).decode(),
            columns.state,
            searchable_text.title_from(meta, prompt),
            prompt,
            columns.created,
            columns.updated,
            searchable_text.agent_from(meta),
            searchable_text.channel_of(step.key),
            columns.lost,
            columns.damaged,
            columns.problem,
            searchable_text.program_from(meta),
            searchable_text.project_from(meta),
            columns.forked_from or searchable_text.source_from(meta),
            columns.fork_seq,
            0 if columns.indexed else columns.created,
            session_id,
        )
        transaction.run("settle_row", values)
        transaction.run("remove_tags", (session_id,))
        tags = [(tag, session_id) for tag in searchable_text.tags_from(meta)]
        transaction.run_many("add_tag", tags)


def _make_message_tokens(
    session_id: int, owner: str, messages: Sequence[tuple[int, str, tokenizer.TokenLines, str]]
) -> list[MessageTokens]:
    """Return the tokens for the full-text index. `messages`: id, role, token lines and stems."""
    marks = session_mark(session_id) + (f" {owner_mark(owner)}" if owner else "")
    return [
        MessageTokens(id_, lines.parts, lines.extra_tokens, f"{marks} {role_mark(role)} {stems}")
        for id_, role, lines, stems in messages
    ]
