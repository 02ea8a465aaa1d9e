"""Consolidation: make notes of finished turns, each turn exactly once, even after a kill.

Each session has a progress mark: every finished turn up to the seq of the mark is in the notes. A
run reads the turns after the progress mark, asks a model about these turns, and writes two batches
per turn to the notes of the session's scope. The first batch is the daily entry; the second batch
contains the facts that the user's own words support. After each group of turns, the run moves
the progress mark.

No turn is skipped. The progress mark moves only past turns whose notes are durable. Messages are
synced before they are read, so that a power failure cannot remove messages and reuse their seqs.

No turn is noted twice. The idempotency key of a batch consists of the session's uid, the last seq
of the turn, and the kind of the notes. The boundaries of turns do not depend on later messages (see
`transcript`). If a turn is processed again, after a kill or by another process, its idempotency
keys are the same, even if the model answers differently or the turns are grouped differently. This
works because an idempotency key belongs to a turn, not to the group of turns of one model call. A
store remembers the idempotency keys of at least its last thousand messages, and a group of turns
writes fewer messages. Even if the store forgets a key, the note gets the same id and counts as the
same note, because ids are derived from keys.

If the model fails, a later run asks again, with increasing delays. Until the model answers, no
notes are written, because the idempotency keys would preserve a poor entry permanently. The number
of attempts is stored. After the last attempt, the oldest turn gets a daily entry without a model,
and the run continues with the next turn. If an answer cannot be parsed, the model is asked about
each turn separately. A turn whose answer still cannot be parsed gets a daily entry without a model
immediately. The number of model calls per run is limited, and the result reports the remaining
turns.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from stenolog.errors import DamagedStore, LeaseLost, NoSuchSession, UsageError
from stenolog.memory.evidence import unsupported_details
from stenolog.memory.facts import (
    ExtractedFacts,
    answer_schema,
    build_prompt,
    is_supported,
    make_drafts,
    max_answer_tokens,
    parse_answer,
)
from stenolog.memory.notes import Draft, Note, Notes
from stenolog.memory.scopes import MARK_PREFIX, Scope, agent_prefix
from stenolog.memory.scopes import scope_of as own_scope
from stenolog.memory.transcript import Turn, describe_turn, finished_turns, make_turn, next_batch
from stenolog.providers.chat_model import COMPLETION_SIGNATURE, CompletionFunction, check_answer
from stenolog.records import SessionInfo, timestamp
from stenolog.redaction.redact import redact
from stenolog.sessions.usage import (
    SideUsage,
    count_answer,
    read_side_usage,
    updated_side_usage,
)
from stenolog.stores.base import Store, fork_seq_of
from stenolog.tokens import Tokens

MAX_BATCH_TOKENS: Final = 6_000
"""Maximum number of tokens of the turns in one model call."""
MAX_TURNS_PER_CALL: Final = 20
MAX_CALLS: Final = 10
"""Maximum number of model calls in one run."""
MAX_ATTEMPTS: Final = 8
"""Number of failed model calls after which a turn gets only a daily entry, without the model."""
_MIN_DELAY: Final = timedelta(minutes=1)
_MAX_DELAY: Final = timedelta(hours=6)
"""Maximum delay before the next attempt; the delay doubles from `_MIN_DELAY` with each failure."""
_LOCK_COUNT: Final = 64
"""Number of locks; each session uses one of them, chosen by its key."""

_logger = logging.getLogger("stenolog")


class ConsolidationReport(Struct, frozen=True, kw_only=True):
    """The result of a consolidation run on one session."""

    turns: int = 0
    """Number of turns that were consolidated."""
    daily: int = 0
    core: int = 0
    """Number of `core` facts that the turns produced; `daily` is the number of daily entries."""
    rejected: int = 0
    """Number of facts that are malformed or that the user's words do not support."""
    redacted: int = 0
    """Number of secrets that were redacted."""
    waiting: int = 0
    """Number of finished turns that are not consolidated yet."""
    problems: tuple[str, ...] = ()
    """Failures, one sentence each. A later run retries the remaining turns."""
    retry_at: datetime | None = None
    """Time of the next attempt after the model failed. Runs before that time do nothing."""


class ProgressMark(Struct, frozen=True, kw_only=True):
    """The consolidation progress of a session, and the failed attempts at its next turn."""

    seq: int = 0
    """Every finished turn up to this seq is in the notes."""
    attempts: int = 0
    retry_at: datetime | None = None
    """Time of the next model call after a failure; None without a failure."""


class ConsolidationProgress:
    """The progress marks of one agent, one per session.

    The marks are stored in the notes store: deleting the notes deletes the marks, too, and
    consolidation starts from the beginning. A mark is named by the uid of its session: a session
    that was deleted and created again has no mark, and a restored session finds its mark. The mark
    does not contain the key of the session, so that a mark that is written during a purge reveals
    nothing about the user.
    """

    def __init__(self, store: Store, *, agent: str) -> None:
        """Open the progress marks of `agent` in this notes store."""
        self._store = store
        self._prefix = MARK_PREFIX + agent_prefix(agent)

    def read_mark(self, uid: str) -> ProgressMark:
        """Return the progress mark of a session; for a new session, a mark with seq 0."""
        meta = self._read_meta(uid)
        retry_at = meta.get("retry_at")
        return ProgressMark(
            seq=_positive_or_zero(meta.get("seq")),
            attempts=_positive_or_zero(meta.get("attempts")),
            retry_at=datetime.fromisoformat(retry_at) if isinstance(retry_at, str) else None,
        )

    def usage(self, uid: str) -> SideUsage:
        """Return the token counts of the model calls that made the notes of a session."""
        return read_side_usage(self._read_meta(uid), uid)

    def _read_meta(self, uid: str) -> Mapping[str, Any]:
        try:
            return self._store.info(self._prefix + uid).meta
        except NoSuchSession:
            return {}

    def move_mark(self, uid: str, seq: int, usage: SideUsage | None = None) -> None:
        """Record that every finished turn up to this seq is in the notes.

        The progress mark does not move backwards, except if two calls run at the same time. In that
        case some turns are read again, but their idempotency keys prevent duplicate notes. Raises
        the errors of the store. `usage`: token counts of model calls since the last write, which
        this call stores and clears.
        """
        if seq > self.read_mark(uid).seq:
            self._write_fields(uid, usage, seq=seq, attempts=None, retry_at=None)

    def record_failure(
        self, uid: str, *, attempts: int, retry_at: datetime, usage: SideUsage | None = None
    ) -> None:
        """Record the number of failed attempts at the next turn, and the retry time."""
        self._write_fields(uid, usage, attempts=attempts, retry_at=timestamp(retry_at))

    def _write_fields(self, uid: str, usage: SideUsage | None, **fields: Any) -> None:
        if usage:
            fields |= updated_side_usage(self._read_meta(uid), uid, usage)
            usage.clear()
        self._store.set_meta(self._prefix + uid, **fields)


def _positive_or_zero(stored: Any) -> int:
    return stored if isinstance(stored, int) and stored > 0 else 0


class Consolidator(Struct, eq=False):
    """A writer of notes about the sessions of one store. Thread-safe.

    Without a model every turn still gets its daily entry, but no facts. `store`: the store of the
    sessions. `scope_of` returns the scope for the notes of a session; None means the session's own
    scope. `tokens`: the token counter of the model.
    """

    store: Store
    notes: Notes
    complete: CompletionFunction | None
    agent: str = "main"
    scope_of: Callable[[str], Scope] | None = None
    max_turns: int = MAX_TURNS_PER_CALL
    tokens: Tokens = Tokens()
    clock: Callable[[], datetime] = partial(datetime.now, UTC)
    # Without a lock, two threads on one session would make each model call twice.
    locks: list[threading.Lock] = field(
        default_factory=lambda: [threading.Lock() for _ in range(_LOCK_COUNT)]
    )

    @property
    def progress(self) -> ConsolidationProgress:
        """The progress marks of the sessions."""
        return ConsolidationProgress(self.notes.store, agent=self.agent)

    def run(self, key: str, *, most_calls: int = MAX_CALLS) -> ConsolidationReport:
        """Make notes of the finished turns that are not consolidated yet.

        After `most_calls` model calls the remaining turns wait for the next run. The result reports
        failures of the model. Raises the errors of the store; a later run continues after the last
        consolidated turn. Returns an empty result for an unknown session.
        """
        if most_calls < 1:
            raise UsageError(f"most_calls must be 1 or more, not {most_calls}")
        with self.locks[hash(key) % _LOCK_COUNT]:
            limit = None if self.complete is None else most_calls * self.max_turns
            run = self._read_turns(key, limit=limit)
            if run is None:
                return ConsolidationReport()
            self._process_turns(run, most_calls)
            return msgspec.convert(run, ConsolidationReport, from_attributes=True)

    def waiting_sessions(self) -> list[str]:
        """Return the keys of the sessions with finished turns that are not consolidated yet.

        Messages of consolidated sessions are not read. Damaged sessions are left out.
        """
        keys = []
        for key in self.store.list_sessions():
            try:
                info = self.store.info(key)
                mark = self.progress.read_mark(info.uid)
                if info.last_seq > mark.seq and finished_turns(
                    self.store.get_history(key, after=mark.seq, full=True)
                ):
                    keys.append(key)
            except (NoSuchSession, DamagedStore):
                continue
        return keys

    def skip_session(self, key: str) -> None:
        """Exclude all current messages of a session from consolidation."""
        with self.locks[hash(key) % _LOCK_COUNT], suppress(NoSuchSession):
            info = self.store.info(key)
            self.progress.move_mark(info.uid, info.last_seq)

    def _read_turns(
        self, key: str, *, limit: int | None = None, upto: int | None = None
    ) -> "_Run | None":
        """Return a run with the next turns to consolidate; None if the session does not exist.

        `limit`: maximum number of turns. `upto`: last seq to read.
        """
        try:
            info_before = self.store.info(key)
            mark = self.progress.read_mark(info_before.uid)
            # Unlike get_history, follow syncs messages before it returns them.
            messages = list(self.store.follow(key, after=mark.seq, timeout=0))
            info = self.store.info(key)
        except NoSuchSession:
            return None
        if info.uid != info_before.uid:
            return None  # the session was created again during the read; the next run reads it
        all_turns = finished_turns(m for m in messages if upto is None or m.seq <= upto)
        turns = all_turns[:limit]
        # Turns that a fork copied are consolidated only in the original session.
        fork_seq = fork_seq_of(info)
        parsed_turns = (make_turn(turn, info) for turn in turns if turn[-1].seq > fork_seq)
        return _Run(
            info=info,
            mark=mark,
            # Choose the scope after the read: a message of a second sender changes the scope.
            scope=(self.scope_of or partial(own_scope, agent=self.agent))(key),
            new_turns=[turn for turn in parsed_turns if turn is not None],
            last_seq=turns[-1][-1].seq if turns else mark.seq,
            later_turn_count=len(all_turns) - len(turns),
        )

    def _process_turns(self, run: "_Run", most_calls: int) -> None:
        """For each group of turns, ask the model, write notes and move the progress mark."""
        uid, attempts, turns = run.info.uid, run.mark.attempts, run.new_turns
        single_count = 0  # number of next turns to ask about one by one
        run.waiting = len(turns) + run.later_turn_count
        retry_at = run.mark.retry_at
        if self.complete is not None and retry_at is not None and self.clock() < retry_at:
            run.retry_at = retry_at
            run.problems.append(
                f"the model failed {attempts} times; the next attempt is "
                f"possible at {retry_at:%Y-%m-%d %H:%M} UTC"
            )
            return
        while turns:
            if run.model_calls >= most_calls:
                return
            # After a failure, try the oldest turn alone: the group may have been too large.
            limit = 1 if attempts or single_count else self.max_turns
            batch = next_batch(
                turns, budget=MAX_BATCH_TOKENS, limit=limit, count_tokens=self.tokens.text
            )
            try:
                facts_by_turn = self._ask_model(run, batch)
            except _ModelFailed as failure:
                attempts += 1
                run.problems.append(str(failure))
                _logger.warning("no notes of %r yet: %s", run.info.key, failure)
                if attempts < MAX_ATTEMPTS:
                    delay = min(_MIN_DELAY * (1 << (attempts - 1)), _MAX_DELAY)
                    run.retry_at = self.clock() + delay
                    self.progress.record_failure(
                        uid, attempts=attempts, retry_at=run.retry_at, usage=run.usage
                    )
                    return
                batch, facts_by_turn = batch[:1], {}
            if facts_by_turn is None:
                single_count = len(batch)
                continue
            written_count = self._write_notes(run, batch, facts_by_turn)
            if written_count is None:
                run.waiting = 0
                return
            self.progress.move_mark(uid, batch[-1].last_seq, run.usage)
            run.turns += written_count
            attempts, turns = 0, turns[len(batch) :]
            single_count = max(single_count - 1, 0)
            run.waiting = len(turns) + run.later_turn_count
        # The last turns may have no content to note, so the mark moves past them here.
        if self._session_exists(run):
            self.progress.move_mark(uid, run.last_seq, run.usage)

    def _ask_model(self, run: "_Run", batch: Sequence[Turn]) -> dict[int, ExtractedFacts] | None:
        """Return the model's answer about each turn, by turn number from 1. Raises _ModelFailed.

        Returns None if an answer about several turns is unusable, so that the caller asks about
        each turn separately.
        """
        if self.complete is None:
            return {}
        subjects = [note.about for note in self.notes.list(run.scope, kind="core")]
        turn_count = len(batch)
        run.model_calls += 1
        try:
            prompt = build_prompt(
                batch, subjects=subjects, budget=MAX_BATCH_TOKENS, count_tokens=self.tokens.text
            )
            answer = self.complete(
                prompt,
                schema=answer_schema(turn_count),
                max_tokens=max_answer_tokens(turn_count),
            )
            text = check_answer(answer, COMPLETION_SIGNATURE)
            count_answer(run.usage, text)
        except Exception as error:
            # Clients raise exceptions of any type, and some include API keys in the text.
            text = redact(f"{type(error).__name__}: {error}").text
            raise _ModelFailed(f"the model failed: {text}") from error
        facts_by_turn = parse_answer(text, turn_count=turn_count)
        if facts_by_turn is None and turn_count == 1:
            problem = f"the model's answer about the turn at {batch[0].last_seq} is not JSON"
            run.problems.append(problem)
            _logger.warning("no facts of %r: %s", run.scope.who, problem)
            return {}
        return facts_by_turn

    # --- writing -----------------------------------------------------------------------------

    def _write_notes(
        self, run: "_Run", batch: Sequence[Turn], facts_by_turn: Mapping[int, ExtractedFacts]
    ) -> int | None:
        """Store the notes of these turns, and return the number of turns.

        Returns None if the session was deleted or purged while the model answered. A purge always
        wins: the lease of `guarded` is taken before the session is looked up, and a purge
        invalidates the lease.
        """
        try:
            with self.notes.guarded(run.scope) as notes:
                current_turns = self._reread_turns(run, batch)
                if current_turns is not None:
                    _write_turns(run, notes, batch, facts_by_turn, current_turns)
                    return len(current_turns)
        except (LeaseLost, NoSuchSession):
            if self._session_exists(run):
                raise
        self.notes.discard_empty(run.scope)
        return None

    def _session_exists(self, run: "_Run") -> bool:
        """Whether the session that was read still exists and was not created again."""
        try:
            return self.store.info(run.info.key).uid == run.info.uid
        except NoSuchSession:
            return False

    def _reread_turns(self, run: "_Run", batch: Sequence[Turn]) -> dict[int, Turn] | None:
        """Return the current turns of a batch by last seq; None if the session was deleted."""
        new_run = self._read_turns(run.info.key, upto=batch[-1].last_seq)
        if new_run is None or new_run.info.uid != run.info.uid:
            return None
        return {turn.last_seq: turn for turn in new_run.new_turns}


class _ModelFailed(Exception):
    """The model call raised an error."""


class _Run(Struct, kw_only=True):
    """One run on a session: the turns to consolidate, and the fields of the report."""

    info: SessionInfo
    mark: ProgressMark
    scope: Scope
    new_turns: list[Turn]
    """Turns to consolidate that have content to note."""
    last_seq: int
    """Last seq of the turns that were read."""
    later_turn_count: int
    """Number of finished turns after `last_seq`."""
    turns: int = 0
    daily: int = 0
    core: int = 0
    rejected: int = 0
    redacted: int = 0
    waiting: int = 0
    model_calls: int = 0
    """Number of model calls."""
    problems: list[str] = []
    usage: SideUsage = {}
    """Token counts of model calls that are not stored yet."""
    retry_at: datetime | None = None

    def redact(self, text: str) -> str:
        """Return the text without secrets, and add the number of secrets to `redacted`."""
        redacted = redact(text)
        self.redacted += redacted.count
        return redacted.text


def _write_turns(
    run: _Run,
    notes: Notes,
    batch: Sequence[Turn],
    answers: Mapping[int, ExtractedFacts],
    current_turns: Mapping[int, Turn],
) -> None:
    """Store a daily entry for each turn that still exists, and facts if the turn did not change."""
    # Read the known facts after the slow model call, because other processes write notes, too.
    has_facts = any(answer.facts for answer in answers.values())
    known_facts = notes.list(run.scope, kind="core") if has_facts else []
    for turn_number, sent_turn in enumerate(batch, 1):
        if (turn := current_turns.get(sent_turn.last_seq)) is None:
            continue
        answer = (answers.get(turn_number) if turn == sent_turn else None) or ExtractedFacts()
        run.redacted += turn.redacted
        draft = Draft(
            kind="daily",
            text=_choose_daily_text(run, turn, answer),
            session=run.info.key,
            uid=run.info.uid,
            seqs=turn.seqs,
            at=turn.at,
        )
        # The seq of its last message identifies a turn, see the start of this module.
        idempotency_key = f"{run.info.uid}:{turn.last_seq}:daily"
        run.daily += len(notes.add(run.scope, [draft], once=idempotency_key))
        known_facts = _write_facts(run, notes, turn, answer, known_facts)


def _choose_daily_text(run: _Run, turn: Turn, extracted: ExtractedFacts) -> str:
    """Return the model's daily entry, or `describe_turn` if the entry has unsupported details."""
    known_texts = [line.text for line in turn.lines]
    # The model was shown the time of the turn, so the entry may mention the time.
    known_texts.append(f"{turn.at:%Y-%m-%d %H:%M %d %B %A} UTC")
    if unsupported_details(extracted.daily, known_texts):  # guard: entry-specifics-said
        return describe_turn(turn)
    return run.redact(extracted.daily) or describe_turn(turn)


def _write_facts(
    run: _Run, notes: Notes, turn: Turn, extracted: ExtractedFacts, known_facts: list[Note]
) -> list[Note]:
    """Add the facts of a turn, and return the core notes in force afterwards."""
    quotes = [note.quote for note in known_facts if note.quote]
    supported = [fact for fact in extracted.facts if is_supported(fact, turn.user_texts, quotes)]
    run.rejected += extracted.malformed + len(extracted.facts) - len(supported)
    drafts = make_drafts(
        # A model may assemble a secret from parts of the text, so redact its answer, too.
        [
            replace(
                fact,
                text=run.redact(fact.text),
                about=run.redact(fact.about),
                quote=run.redact(fact.quote),
            )
            for fact in supported
        ],
        known_facts,
        at=turn.at,
        session=run.info.key,
        uid=run.info.uid,
        seqs=turn.seqs,
    )
    added_notes = notes.add(run.scope, drafts, once=f"{run.info.uid}:{turn.last_seq}:core")
    run.core += len(added_notes)
    replaced_ids = {id for note in added_notes for id in (note.id, *note.supersedes)}
    return [note for note in known_facts if note.id not in replaced_ids] + added_notes
