"""Consolidation: from finished turns to notes, each turn once, whatever is killed in between.

Idea. A session has a mark: every finished turn up to it is in the notes. A run reads what lies
behind the mark, asks a model about it, and for each turn writes two batches to the notes of the
session's scope: the daily entry, and then the facts that the user's own words bear out. Then the
mark moves.

No turn is skipped: the mark only moves past turns whose batches are durable, and what is read was
synced first, so that no power cut can take it back and give its seq to other words.

No turn is noted twice: each batch has a token made of the session's uid, the seq that the turn ends
at, and the phase. The cuts between turns depend on nothing that comes later (see `transcript`), so
whoever repeats a turn, after a kill or beside another process, repeats its tokens too, although the
model may answer otherwise and the turns may be asked about in other company. That is why the tokens
are the turns', and not those of the runs of turns that one call to the model is about. A store
remembers the tokens of its last thousand messages and more, and one run of turns writes fewer;
should a token be forgotten all the same, the note has the id that it made, and is the same note.

A model that fails is asked again later, at growing distances, and nothing is written meanwhile: the
tokens would keep a poor entry for good. The count of attempts is durable. After the last one the
oldest turn gets a daily entry without a model and the next one is tried. An answer that cannot be
read is not asked for again: the turns of it are asked about one by one, and what still cannot be
read gets such an entry at once.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from stenolog.errors import NoSuchSession
from stenolog.memory import extraction, facts
from stenolog.memory.extraction import Heard
from stenolog.memory.facts import Fact
from stenolog.memory.notes import Draft, Kind, Note, Notes
from stenolog.memory.progress import Mark, Progress
from stenolog.memory.redaction import redact
from stenolog.memory.scopes import Scope, scope_of
from stenolog.memory.transcript import Turn, as_turn, batches, finished, gist
from stenolog.providers.base import Ask
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Store

BUDGET: Final = 6_000
"""Tokens of turns that a model is asked about at once."""

MOST_TURNS: Final = 20
MOST_ATTEMPTS: Final = 8
_FIRST_WAIT: Final = timedelta(minutes=1)
_LONGEST_WAIT: Final = timedelta(hours=6)
_LOCKS: Final = 64


class Consolidated(Struct, frozen=True, kw_only=True):
    """What a run made of a session."""

    turns: int = 0
    """How many turns the mark went past."""
    daily: int = 0
    core: int = 0
    """How many notes of each kind these turns gave."""
    rejected: int = 0
    """How many facts the user's words did not bear out."""
    redacted: int = 0
    """How many secrets were taken out of what was read."""
    waiting: int = 0
    """How many finished turns are still behind the mark."""
    problems: tuple[str, ...] = ()
    """What went wrong, each as a sentence; what waits is tried again by a later run."""


class Consolidation:
    """Makes notes of the sessions of one store. May be used by several threads.

    Without a model every turn still gets its daily entry, and no facts.
    """

    def __init__(
        self,
        store: Store,
        notes: Notes,
        ask: Ask | None,
        *,
        agent: str = "main",
        budget: int = BUDGET,
        most_turns: int = MOST_TURNS,
        most_attempts: int = MOST_ATTEMPTS,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Read the sessions here and write the notes there; `budget` in tokens per question."""
        self._store = store
        self._notes = notes
        self._ask = ask
        self._agent = agent
        self._budget = budget
        self._most_turns = most_turns
        self._most_attempts = most_attempts
        self._clock = clock
        self._progress = Progress(notes.store, agent=agent)
        # Two threads on one session would pay for every question twice.
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def run(self, key: str) -> Consolidated:
        """Make notes of all finished turns behind the mark, and move it.

        What the model does wrong is told by the result; what a store raises is raised, and then a
        later run goes on where this one stopped. An unknown session gives nothing.
        """
        with self._locks[hash(key) % _LOCKS]:
            work = self._read(key)
            if work is None:
                return Consolidated()
            tally = _Tally()
            self._settle(work, tally)
            return tally.result()

    def skip(self, key: str) -> None:
        """Move the mark behind all that was said so far: none of it will be consolidated."""
        with self._locks[hash(key) % _LOCKS]:
            try:
                info = self._store.info(key)
            except NoSuchSession:
                return
            self._progress.move(info.uid, info.last_seq, session=key)

    def _read(self, key: str) -> "_Work | None":
        """The finished turns behind the mark; None where there is no such session."""
        try:
            before = self._store.info(key)
            mark = self._progress.read(before.uid)
            # To follow is to have it synced before it is acted upon; get_history does not do that.
            messages = list(self._store.follow(key, after=mark.seq, timeout=0))
            info = self._store.info(key)
        except NoSuchSession:
            return None
        if info.uid != before.uid:
            return None  # deleted and made again while it was read: the next run sees to that
        cut = finished(messages)
        told = [as_turn(turn, info) for turn in cut if not _is_of_origin(turn, info)]
        return _Work(
            info=info,
            mark=mark,
            scope=scope_of(key, agent=self._agent),
            turns=[turn for turn in told if turn is not None],
            end=cut[-1][-1].seq if cut else mark.seq,
        )

    def _settle(self, work: "_Work", tally: "_Tally") -> None:
        """Ask, write and move the mark, one run of turns after the other."""
        uid, attempts, turns = work.info.uid, work.mark.attempts, work.turns
        if self._is_too_early(work, tally):
            return
        while turns:
            # What failed is tried with the oldest turn alone: maybe there were too many.
            most = 1 if attempts else self._most_turns
            batch = next(batches(turns, budget=self._budget, most=most))
            try:
                heard = self._hear(batch, work.scope, tally)
            except _ModelFailed as failure:
                attempts += 1
                tally.problems.append(failure.told)
                if attempts < self._most_attempts:
                    retry_at = self._clock() + _wait(attempts)
                    self._progress.failed(
                        uid, attempts=attempts, retry_at=retry_at, session=work.info.key
                    )
                    tally.waiting = len(turns)
                    return
                batch, heard = batch[:1], {}
            self._write(work, batch, heard, tally)
            self._progress.move(uid, batch[-1].last, session=work.info.key)
            tally.turns += len(batch)
            attempts, turns = 0, turns[len(batch) :]
        # Turns of which nothing was left to tell may stand at the end.
        self._progress.move(uid, work.end, session=work.info.key)

    def _is_too_early(self, work: "_Work", tally: "_Tally") -> bool:
        """Whether the model failed so lately that it is not asked again yet."""
        retry_at = work.mark.retry_at
        if self._ask is None or retry_at is None or self._clock() >= retry_at:
            return False
        tally.waiting = len(work.turns)
        tally.problems.append(
            f"the model failed {work.mark.attempts} times; it is asked again from "
            f"{retry_at:%Y-%m-%d %H:%M} UTC on"
        )
        return True

    # --- asking ------------------------------------------------------------------------------

    def _hear(self, batch: Sequence[Turn], scope: Scope, tally: "_Tally") -> dict[int, Heard]:
        """What the model tells of each turn, by number from 1. Raises _ModelFailed."""
        if self._ask is None:
            return {}
        names = [note.about for note in self._notes.list(scope, kind="core")]
        heard = self._answer(batch, extraction.subjects_of(names), self._ask)
        if heard is not None:
            return heard
        if len(batch) == 1:
            tally.problems.append(f"the model's answer on the turn at {batch[0].last} is no JSON")
            return {}
        found = {n: self._hear([turn], scope, tally) for n, turn in enumerate(batch, 1)}
        return {number: heard[1] for number, heard in found.items() if 1 in heard}

    def _answer(
        self, batch: Sequence[Turn], subjects: Sequence[str], ask: Ask
    ) -> dict[int, Heard] | None:
        count = len(batch)
        try:
            text = ask(
                extraction.question(batch, subjects=subjects, budget=self._budget),
                schema=extraction.schema(count),
                max_tokens=extraction.answer_tokens(count),
            )
        except Exception as error:
            # What a client may raise is not known here, and some put keys into their errors.
            told = redact(f"{type(error).__name__}: {error}").text
            raise _ModelFailed(f"the model failed: {told}") from error
        return extraction.read_answer(text, turns=count)

    # --- writing -----------------------------------------------------------------------------

    def _write(
        self, work: "_Work", batch: Sequence[Turn], heard: dict[int, Heard], tally: "_Tally"
    ) -> None:
        """Both phases of each turn."""
        # Read after the model was asked: that takes a while, and others write as well.
        told = any(one.facts for one in heard.values())
        known = self._notes.list(work.scope, kind="core") if told else []
        for number, turn in enumerate(batch, 1):
            one = heard.get(number, Heard())
            tally.redacted += turn.redacted
            self._write_daily(work, turn, one, tally)
            known = self._write_core(work, turn, one, known, tally)

    def _write_daily(self, work: "_Work", turn: Turn, heard: Heard, tally: "_Tally") -> None:
        draft = Draft(
            kind="daily",
            text=tally.clean(heard.daily) or gist(turn),
            session=work.info.key,
            uid=work.info.uid,
            seqs=turn.seqs,
            at=turn.at,
        )
        added = self._notes.add(work.scope, [draft], once=_token(work, turn, "daily"))
        tally.daily += len(added)

    def _write_core(
        self,
        work: "_Work",
        turn: Turn,
        heard: Heard,
        known: list[Note],
        tally: "_Tally",
    ) -> list[Note]:
        """The core notes in force after this turn."""
        backed = [fact for fact in heard.facts if facts.is_backed(fact, turn.spoken)]
        tally.rejected += heard.malformed + len(heard.facts) - len(backed)
        drafts = facts.new_notes(
            [_cleaned(fact, tally) for fact in backed],
            known,
            at=turn.at,
            session=work.info.key,
            uid=work.info.uid,
            seqs=turn.seqs,
        )
        added = self._notes.add(work.scope, drafts, once=_token(work, turn, "core"))
        tally.core += len(added)
        gone = {id for note in added for id in note.supersedes}
        here = {note.id for note in added}
        return [note for note in known if note.id not in gone | here] + added


class _Work(Struct, frozen=True, kw_only=True):
    """What there is to do in one session."""

    info: SessionInfo
    mark: Mark
    scope: Scope
    turns: list[Turn]
    """Those behind the mark of which something is to be told."""
    end: int
    """Where the last finished turn ends."""


class _Tally(Struct, kw_only=True):
    """Counts while a run goes on."""

    turns: int = 0
    daily: int = 0
    core: int = 0
    rejected: int = 0
    redacted: int = 0
    waiting: int = 0
    problems: list[str] = []

    def clean(self, text: str) -> str:
        """The text without secrets, which are counted."""
        found = redact(text)
        self.redacted += found.count
        return found.text

    def result(self) -> Consolidated:
        return Consolidated(
            turns=self.turns,
            daily=self.daily,
            core=self.core,
            rejected=self.rejected,
            redacted=self.redacted,
            waiting=self.waiting,
            problems=tuple(self.problems),
        )


class _ModelFailed(Exception):
    """The model gave no answer at all."""

    def __init__(self, told: str) -> None:
        self.told = told
        super().__init__(told)


def _token(work: _Work, turn: Turn, phase: Kind) -> str:
    return f"{work.info.uid}:{turn.last}:{phase}"


def _wait(attempts: int) -> timedelta:
    """How long to leave a model alone that failed so many times in a row."""
    return min(_FIRST_WAIT * (1 << (attempts - 1)), _LONGEST_WAIT)


def _is_of_origin(turn: Sequence[Message], info: SessionInfo) -> bool:
    """Whether a turn of a fork came with it: then it is consolidated where it was said."""
    return info.forked_from is not None and turn[-1].at <= info.created


def _cleaned(fact: Fact, tally: _Tally) -> Fact:
    """The fact without secrets: a model may put together what the text did not show as one."""
    return Fact(
        text=tally.clean(fact.text),
        about=tally.clean(fact.about),
        quote=tally.clean(fact.quote),
        confidence=fact.confidence,
    )
