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
read gets such an entry at once. A run asks so many times at the most, and says what is left.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from msgspec import Struct

from stenolog.errors import DamagedStore, LeaseLost, NoSuchSession, UsageError
from stenolog.memory import extraction, facts
from stenolog.memory.extraction import Heard
from stenolog.memory.facts import Fact
from stenolog.memory.notes import Draft, Kind, Note, Notes
from stenolog.memory.progress import Mark, Progress
from stenolog.memory.redaction import redact
from stenolog.memory.scopes import Scope
from stenolog.memory.scopes import scope_of as own_scope
from stenolog.memory.specifics import unsaid
from stenolog.memory.transcript import Turn, as_turn, batches, finished, gist
from stenolog.providers.base import ASKED_AS, Ask, check_answer
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import FORKED_AT, Store
from stenolog.tokens import Tokens

BUDGET: Final = 6_000
"""Tokens of turns that a model is asked about at once."""

MOST_TURNS: Final = 20
MOST_CALLS: Final = 10
"""How often a model is asked in one run."""
MOST_ATTEMPTS: Final = 8
_FIRST_WAIT: Final = timedelta(minutes=1)
_LONGEST_WAIT: Final = timedelta(hours=6)
_LOCKS: Final = 64

_logger = logging.getLogger("stenolog")


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
    retry_at: datetime | None = None
    """When the model is asked again after a failure; a run before that does nothing."""


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
        scope_of: Callable[[str], Scope] | None = None,
        budget: int = BUDGET,
        most_turns: int = MOST_TURNS,
        most_attempts: int = MOST_ATTEMPTS,
        tokens: Tokens | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Read the sessions here and write the notes there; `budget` in tokens per question.

        `scope_of`: whose notes those of a session are; without it, the session's own. `tokens`:
        the counter of the model that is asked.
        """
        self._store = store
        self._notes = notes
        self._ask = ask
        self._agent = agent
        self._scope_of = scope_of or partial(own_scope, agent=agent)
        self._budget = budget
        self._most_turns = most_turns
        self._most_attempts = most_attempts
        self._tokens = tokens or Tokens()
        self._clock = clock
        self._progress = Progress(notes.store, agent=agent)
        # Two threads on one session would pay for every question twice.
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def run(self, key: str, *, most_calls: int = MOST_CALLS) -> Consolidated:
        """Make notes of the finished turns behind the mark, and move it.

        Once the model was asked so many times, the rest waits for the next run. What the model does
        wrong is told by the result, and what waits; what a store raises is raised, and then a later
        run goes on where this one stopped. An unknown session gives nothing.
        """
        if most_calls < 1:
            raise UsageError(
                f"most_calls={most_calls}: how often the model may be asked, 1 or more"
            )
        with self._locks[hash(key) % _LOCKS]:
            most = None if self._ask is None else most_calls * self._most_turns
            work = self._read(key, most=most)
            if work is None:
                return Consolidated()
            tally = _Tally()
            self._settle(work, tally, most_calls)
            return tally.result()

    def waiting(self) -> list[str]:
        """The sessions that have finished turns behind their mark, by key.

        Of a session that is consolidated only what is known of it is looked at. One that cannot be
        read for its damage is left out.
        """
        found = []
        for key in self._store.list_sessions():
            try:
                info = self._store.info(key)
                mark = self._progress.read(info.uid)
                if info.last_seq > mark.seq and finished(
                    self._store.get_history(key, after=mark.seq, full=True)
                ):
                    found.append(key)
            except (NoSuchSession, DamagedStore):
                continue
        return found

    def skip(self, key: str) -> None:
        """Move the mark behind all that was said so far: none of it will be consolidated."""
        with self._locks[hash(key) % _LOCKS]:
            try:
                info = self._store.info(key)
            except NoSuchSession:
                return
            self._progress.move(info.uid, info.last_seq)

    def _read(
        self, key: str, *, most: int | None = None, upto: int | None = None
    ) -> "_Work | None":
        """The first finished turns behind the mark; None where there is no such session."""
        try:
            before = self._store.info(key)
            mark = self._progress.read(before.uid)
            # To follow is to have it synced before it is acted upon; get_history does not do that.
            messages = list(self._store.follow(key, after=mark.seq, timeout=0))
            messages = [one for one in messages if upto is None or one.seq <= upto]
            info = self._store.info(key)
        except NoSuchSession:
            return None
        if info.uid != before.uid:
            return None  # deleted and made again while it was read: the next run sees to that
        cut = finished(messages)
        now = cut[:most]
        told = [as_turn(turn, info) for turn in now if not _is_of_origin(turn, info)]
        return _Work(
            info=info,
            mark=mark,
            # After the messages were read: another sender's among them makes it the session's own.
            scope=self._scope_of(key),
            turns=[turn for turn in told if turn is not None],
            end=now[-1][-1].seq if now else mark.seq,
            later=len(cut) - len(now),
        )

    def _settle(self, work: "_Work", tally: "_Tally", most_calls: int) -> None:
        """Ask, write and move the mark, one run of turns after the other."""
        uid, attempts, turns = work.info.uid, work.mark.attempts, work.turns
        alone = 0  # so many are asked about one by one: an answer on all of them was of no use
        tally.waiting = len(turns) + work.later
        if self._is_too_early(work, tally):
            return
        while turns:
            if tally.calls >= most_calls:
                return
            # What failed is tried with the oldest turn alone: maybe there were too many.
            most = 1 if attempts or alone else self._most_turns
            batch = next(batches(turns, budget=self._budget, most=most, count=self._tokens.text))
            try:
                heard = self._hear(batch, work.scope, tally)
            except _ModelFailed as failure:
                attempts += 1
                tally.problems.append(failure.told)
                _logger.warning("no notes of %r yet: %s", work.info.key, failure.told)
                if attempts < self._most_attempts:
                    retry_at = self._clock() + _wait(attempts)
                    self._progress.failed(uid, attempts=attempts, retry_at=retry_at)
                    tally.retry_at = retry_at
                    return
                batch, heard = batch[:1], {}
            if heard is None:
                alone = len(batch)
                continue
            written = self._write(work, batch, heard, tally)
            if written is None:
                tally.waiting = 0
                return
            self._progress.move(uid, batch[-1].last)
            tally.turns += written
            attempts, turns = 0, turns[len(batch) :]
            alone = max(alone - 1, 0)
            tally.waiting = len(turns) + work.later
        # The last turns may have had nothing to note.
        if self._exists(work):
            self._progress.move(uid, work.end)

    def _is_too_early(self, work: "_Work", tally: "_Tally") -> bool:
        """Whether the model failed so lately that it is not asked again yet."""
        retry_at = work.mark.retry_at
        if self._ask is None or retry_at is None or self._clock() >= retry_at:
            return False
        tally.retry_at = retry_at
        tally.problems.append(
            f"the model failed {work.mark.attempts} times; it is asked again from "
            f"{retry_at:%Y-%m-%d %H:%M} UTC on"
        )
        return True

    # --- asking ------------------------------------------------------------------------------

    def _hear(
        self, batch: Sequence[Turn], scope: Scope, tally: "_Tally"
    ) -> dict[int, Heard] | None:
        """What the model tells of each turn, by number from 1. Raises _ModelFailed.

        None where the answer on several turns is of no use: each is to be asked about alone.
        """
        if self._ask is None:
            return {}
        names = [note.about for note in self._notes.list(scope, kind="core")]
        tally.calls += 1
        heard = self._answer(batch, extraction.subjects_of(names), self._ask)
        if heard is None and len(batch) == 1:
            told = f"the model's answer on the turn at {batch[0].last} is no JSON"
            tally.problems.append(told)
            _logger.warning("no facts of %r: %s", scope.who, told)
            return {}
        return heard

    def _answer(
        self, batch: Sequence[Turn], subjects: Sequence[str], ask: Ask
    ) -> dict[int, Heard] | None:
        count = len(batch)
        try:
            text = ask(
                extraction.question(
                    batch, subjects=subjects, budget=self._budget, count=self._tokens.text
                ),
                schema=extraction.schema(count),
                max_tokens=extraction.answer_tokens(count),
            )
            text = check_answer(text, ASKED_AS)
        except Exception as error:
            # What a client may raise is not known here, and some put keys into their errors.
            told = redact(f"{type(error).__name__}: {error}").text
            raise _ModelFailed(f"the model failed: {told}") from error
        return extraction.read_answer(text, turns=count)

    # --- writing -----------------------------------------------------------------------------

    def _write(
        self, work: "_Work", batch: Sequence[Turn], heard: dict[int, Heard], tally: "_Tally"
    ) -> int | None:
        """Store the notes of these turns; return of how many, or None if the session is gone.

        A model takes its time, and the session may be deleted or purged meanwhile. A purge at any
        moment wins: it ends the guard, which is taken before the session is looked for.
        """
        try:
            with self._notes.guarded(work.scope) as notes:
                left = self._current(work, batch)
                if left is not None:
                    self._write_turns(work, notes, batch, heard, left, tally)
                    return len(left)
        except (LeaseLost, NoSuchSession):
            if self._exists(work):
                raise
        self._notes.discard_empty(work.scope)
        return None

    def _exists(self, work: "_Work") -> bool:
        """Whether the session that was read still exists, and is not a new one of its key."""
        try:
            return self._store.info(work.info.key).uid == work.info.uid
        except NoSuchSession:
            return False

    def _current(self, work: "_Work", batch: Sequence[Turn]) -> dict[int, Turn] | None:
        """Return the turns of a batch as they are now, by last seq; None without the session."""
        if self._ask is None:
            # They were read a moment ago.
            return {turn.last: turn for turn in batch} if self._exists(work) else None
        now = self._read(work.info.key, upto=batch[-1].last)
        if now is None or now.info.uid != work.info.uid:
            return None
        return {turn.last: turn for turn in now.turns}

    def _write_turns(
        self,
        work: "_Work",
        notes: Notes,
        batch: Sequence[Turn],
        heard: dict[int, Heard],
        left: Mapping[int, Turn],
        tally: "_Tally",
    ) -> None:
        """Store both phases of each turn that is left, without facts if the turn has changed."""
        # Read after the model was asked: that takes a while, and other processes write too.
        told = any(one.facts for one in heard.values())
        known = notes.list(work.scope, kind="core") if told else []
        for number, asked in enumerate(batch, 1):
            if (turn := left.get(asked.last)) is None:
                continue
            one = heard.get(number, Heard()) if turn == asked else Heard()
            tally.redacted += turn.redacted
            self._write_daily(work, notes, turn, one, tally)
            known = self._write_core(work, notes, turn, one, known, tally)

    def _write_daily(
        self, work: "_Work", notes: Notes, turn: Turn, heard: Heard, tally: "_Tally"
    ) -> None:
        draft = Draft(
            kind="daily",
            text=self._entry(turn, heard, tally),
            session=work.info.key,
            uid=work.info.uid,
            seqs=turn.seqs,
            at=turn.at,
        )
        added = notes.add(work.scope, [draft], once=_token(work, turn, "daily"))
        tally.daily += len(added)

    def _entry(self, turn: Turn, heard: Heard, tally: "_Tally") -> str:
        """Return the model's words, or the gist if they name what nobody said in this turn."""
        said = [line.text for line in turn.lines]
        # The model is shown the time of the turn.
        said.append(f"{turn.at:%Y-%m-%d %H:%M %d %B %A} UTC")
        if unsaid(heard.daily, said):  # guard: entry-specifics-said
            return gist(turn)
        return tally.clean(heard.daily) or gist(turn)

    def _write_core(
        self,
        work: "_Work",
        notes: Notes,
        turn: Turn,
        heard: Heard,
        known: list[Note],
        tally: "_Tally",
    ) -> list[Note]:
        """The core notes in force after this turn."""
        earlier = [note.quote for note in known if note.quote]
        backed = [fact for fact in heard.facts if facts.is_backed(fact, turn.spoken, earlier)]
        tally.rejected += heard.malformed + len(heard.facts) - len(backed)
        drafts = facts.new_notes(
            [_cleaned(fact, tally) for fact in backed],
            known,
            at=turn.at,
            session=work.info.key,
            uid=work.info.uid,
            seqs=turn.seqs,
        )
        added = notes.add(work.scope, drafts, once=_token(work, turn, "core"))
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
    """Where the last of the turns ends that were looked at."""
    later: int
    """How many finished turns follow them."""


class _Tally(Struct, kw_only=True):
    """Counts while a run goes on."""

    turns: int = 0
    daily: int = 0
    core: int = 0
    rejected: int = 0
    redacted: int = 0
    waiting: int = 0
    calls: int = 0
    """How often the model was asked."""
    problems: list[str] = []
    retry_at: datetime | None = None

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
            retry_at=self.retry_at,
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
    if info.forked_from is None:
        return False
    forked_at = info.meta.get(FORKED_AT)
    if isinstance(forked_at, int):
        return turn[-1].seq <= forked_at
    return turn[-1].at <= info.created  # a fork of before that was noted


def _cleaned(fact: Fact, tally: _Tally) -> Fact:
    """The fact without secrets: a model may put together what the text did not show as one."""
    return Fact(
        text=tally.clean(fact.text),
        about=tally.clean(fact.about),
        quote=tally.clean(fact.quote),
        confidence=fact.confidence,
    )
