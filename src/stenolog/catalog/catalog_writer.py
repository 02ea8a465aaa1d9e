"""Write steps to the tables of a catalog, many in one transaction."""

import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from stenolog.catalog import searchable_text, tokenizer
from stenolog.catalog import steps as sizes
from stenolog.catalog.catalog_database import BLOCK_SIZE, Database, Transaction
from stenolog.catalog.fulltext import MessageTokens
from stenolog.catalog.query import owner_mark, role_mark, session_mark
from stenolog.catalog.steps import Step, stem_marks
from stenolog.stores import spans

_MAX_SECONDS: Final = 0.5
"""Maximum number of seconds for which steps are collected for one transaction."""


class CatalogWriter:
    """A writer that executes many steps in one transaction."""

    def __init__(self, database: Database, catalog_id: int | None) -> None:
        self._database = database
        self._sql = database.sql
        self._fulltext = database.fulltext
        self._catalog_id = catalog_id
        self._steps: list[Step] = []
        self._messages = self._bytes = 0
        self._begun = 0.0
        self.missed: set[str] = set()
        """Keys of the sessions that another process changed before our step."""

    def put(self, key: str, steps: Iterable[Step]) -> None:
        """Execute these steps of one session soon, if possible in one transaction."""
        for step in steps:
            if not self._steps:
                self._begun = time.monotonic()
            self._steps.append(step)
            self._messages += len(step.add) + step.remove
            self._bytes += sum(len(messages.text) for messages in step.add)
            if self._messages >= sizes.MAX_MESSAGES or self._bytes >= sizes.MAX_BYTES:
                self.flush()
            if key in self.missed:
                return
        if self._steps and time.monotonic() - self._begun > _MAX_SECONDS:
            self.flush()

    def mark_missed(self, key: str) -> None:
        """Record that another process changed the session."""
        self.missed.add(key)

    def flush(self) -> None:
        """Execute the collected steps in one transaction."""
        steps, self._steps = self._steps, []
        self._messages = self._bytes = 0
        if not steps:
            return
        with self._database.write() as transaction:
            [(catalog_id, _)] = transaction.execute(self._sql["about"])
            if catalog_id != self._catalog_id:
                # The catalog was built again: equal versions may belong to other rows.
                self.missed.update(step.key for step in steps)
            for step in steps:
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
            begun = step.start
            values = (begun.uid, begun.generation, begun.archived, session)
            transaction.execute(sql["begin_row"], values)
        elif step.remove:
            self._remove(transaction, session, step, owner=found[0][2])
        else:
            if step.add:
                owner, mixed = step.ownership.owner, int(step.ownership.mixed)
                transaction.execute(sql["own_row"], (owner, mixed, session))
            self._add(transaction, session, step)
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
            [(id_, session, one.seq, one.role, one.at, one.tokens) for id_, one in numbered],
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
            for span in columns.sight:
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
                spans.size(columns.sight),
                tokens,
                msgspec.json.encode(columns.sight).decode(),
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
