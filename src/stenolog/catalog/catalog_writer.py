"""Write steps to the tables of a catalog, many in one transaction."""

import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from stenolog.catalog import searchable_text, tokenizer
from stenolog.catalog import steps as sizes
from stenolog.catalog.catalog_database import BLOCK, Database, Transaction
from stenolog.catalog.fulltext import Indexed
from stenolog.catalog.query import owner_mark, role_mark, session_mark
from stenolog.catalog.steps import Step, stem_marks
from stenolog.stores import spans

_MOST_SECONDS: Final = 0.5
"""Maximum number of seconds for which steps are collected for one transaction."""


class Writer:
    """A writer that executes many steps in one transaction."""

    def __init__(self, database: Database, made: int | None) -> None:
        self._database = database
        self._sql = database.sql
        self._language = database.language
        self._made = made
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
            self._bytes += sum(len(said.text) for said in step.add)
            if self._messages >= sizes.MOST_MESSAGES or self._bytes >= sizes.MOST_BYTES:
                self.flush()
            if key in self.missed:
                return
        if self._steps and time.monotonic() - self._begun > _MOST_SECONDS:
            self.flush()

    def miss(self, key: str) -> None:
        """Record that another process changed the session."""
        self.missed.add(key)

    def flush(self) -> None:
        """Execute the collected steps in one transaction."""
        steps, self._steps = self._steps, []
        self._messages = self._bytes = 0
        if not steps:
            return
        with self._database.write() as transaction:
            [(made, _)] = transaction.execute(self._sql["about"])
            if made != self._made:
                # The catalog was built again: equal versions may belong to other rows.
                self.missed.update(step.key for step in steps)
            for step in steps:
                # After a missed step, the following steps of the session are skipped.
                if step.key not in self.missed and not self._carry_out(transaction, step):
                    self.missed.add(step.key)
            transaction.execute(self._sql["count_write"])

    def _carry_out(self, transaction: Transaction, step: Step) -> bool:
        """Execute a step. Return False if the row has another version than the step expects."""
        sql = self._sql
        found = list(transaction.execute(sql["row_version"], (step.key,)))
        if (found[0][1] if found else None) != step.version:
            return False
        if not found:
            transaction.execute(sql["add_row"], (step.key, ""))
            found = list(transaction.execute(sql["row_version"], (step.key,)))
        session: int = found[0][0]
        if step.gone:
            transaction.execute(sql["remove_tags"], (session,))
            transaction.execute(sql["remove_row"], (session,))
            return True
        if step.anew is not None:
            begun = step.anew
            values = (begun.uid, begun.generation, begun.archived, session)
            transaction.execute(sql["begin_row"], values)
        elif step.remove:
            self._remove(transaction, session, step, owner=found[0][2])
        else:
            if step.add:
                owner, mixed = step.ownership.owner, int(step.ownership.mixed)
                transaction.execute(sql["own_row"], (owner, mixed, session))
            self._add(transaction, session, step)
            if step.settled is not None:
                self._settle(transaction, session, step)
            else:
                last = (step.add[-1].seq, len(step.add), session)
                transaction.execute(sql["advance_row"], last)
        return True

    def _add(self, transaction: Transaction, session: int, step: Step) -> None:
        said = step.add
        if not said:
            return
        sql = self._sql
        [(last,)] = transaction.execute(sql["last_id"])
        numbered = list(enumerate(said, last + 1))
        transaction.executemany(
            sql["add_message"],
            [(id_, session, one.seq, one.role, one.at, one.tokens) for id_, one in numbered],
        )
        transaction.executemany(sql["add_said"], [(id_, one.text) for id_, one in numbered])
        words = [(id_, one.role, one.lines, one.stems) for id_, one in numbered]
        added = self._language.added(_words(session, step.ownership.owner, words))
        transaction.executemany(sql["add_words"], added)
        blocks: dict[int, tuple[int, int]] = {}
        for id_, one in numbered:
            oldest, newest = blocks.get(id_ // BLOCK, (one.at, one.at))
            blocks[id_ // BLOCK] = (min(oldest, one.at), max(newest, one.at))
        transaction.executemany(
            sql["add_block"], [(block, *times) for block, times in blocks.items()]
        )

    def _remove(self, transaction: Transaction, session: int, step: Step, *, owner: str) -> None:
        sql = self._sql
        found = list(transaction.execute(sql["some_messages"], (session, step.remove)))

        def again() -> list[Indexed]:
            named = [(id_, role, tokenizer.lines(text)) for id_, role, text in found]
            words = [(id_, role, lines, stem_marks(lines)) for id_, role, lines in named]
            return _words(session, owner, words)

        removed = self._language.removed([id_ for id_, _, _ in found], again)
        transaction.executemany(sql["remove_words"], removed)
        ids = [(id_,) for id_, _, _ in found]
        transaction.executemany(sql["remove_said"], ids)
        transaction.executemany(sql["remove_message"], ids)
        transaction.execute(sql["shrink_row"], (len(ids), session))

    def _settle(self, transaction: Transaction, session: int, step: Step) -> None:
        sql, settled = self._sql, step.settled
        assert settled is not None, "the last step settles"
        tokens = settled.tokens
        if tokens is None:
            tokens = 0
            for span in settled.sight:
                [(counted,)] = transaction.execute(sql["tokens_in"], (session, *span))
                tokens += counted
        prompt = settled.prompt
        if prompt is None:
            # It may be in messages that an interrupted process added.
            said = transaction.execute(sql["prompts"], (session,))
            prompt = searchable_text.prompt_from((role, text) for role, text in said)
        transaction.execute(
            sql["settle_row"],
            (
                settled.stamp,
                settled.listed,
                settled.uid,
                settled.generation,
                settled.archived,
                settled.indexed,
                len(step.add),
                spans.size(settled.sight),
                tokens,
                msgspec.json.encode(settled.sight).decode(),
                msgspec.json.encode(settled.withdrawn).decode(),
                settled.state,
                searchable_text.title_from(settled.meta, prompt),
                prompt,
                settled.created,
                settled.updated,
                searchable_text.agent_from(settled.meta),
                searchable_text.channel_of(step.key),
                settled.lost,
                settled.damaged,
                settled.problem,
                session,
            ),
        )
        transaction.execute(sql["remove_tags"], (session,))
        tags = [(tag, session) for tag in searchable_text.tags_from(settled.meta)]
        transaction.executemany(sql["add_tag"], tags)


def _words(
    session: int, owner: str, said: Sequence[tuple[int, str, tokenizer.Lines, str]]
) -> list[Indexed]:
    """Return the tokens for the full-text index, given id, role, tokens and stems per message."""
    marks = session_mark(session) + (f" {owner_mark(owner)}" if owner else "")
    return [
        Indexed(id_, lines.parts, lines.more, f"{marks} {role_mark(role)} {stems}")
        for id_, role, lines, stems in said
    ]
