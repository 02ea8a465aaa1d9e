"""From a chat request to its answer: stores the new messages in the session and runs the turn."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.history_changes import find_view, replace_history
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.turn_events import (
    DEFAULT_OPTIONS,
    Answer,
    EventHandler,
    InboundMessage,
    TurnOptions,
)
from stenolog.catalog.message_metadata import mark_received, mark_request, request_of
from stenolog.context.turn_state import answer_to, turn_state
from stenolog.errors import (
    NoSuchSession,
    OnceConflict,
    SessionDeleted,
    StenologError,
    UsageError,
)
from stenolog.gateway.history_matching import Match, match, text_at
from stenolog.messages import calls_of, has_text, results_of
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView, forked_at

_PLAIN: Final = {"role", "content"}
_REQUESTS: Final = "requests"
"""Meta field of a session: the last requests that changed more than the end of the log.

Each entry has the idempotency key, the seq of the last visible message after it, and a digest.
"""
_MAX_REQUESTS: Final = 20
_RESPONSE: Final = "last_response"
"""Meta field of a session: seq of the last answer that an HTTP client received completely."""
_ADVICE: Final = (
    "restore it, use another key, or send `new_session: true` to start a new session with this key"
)
_SCANNED: Final = 200
"""Number of messages that are searched for the mark of a request."""

_logger = logging.getLogger("stenolog")


class ChatTurnRequest(Struct, frozen=True, kw_only=True, dict=True):
    """A chat request for a session."""

    key: str
    talk: Sequence[Mapping[str, Any]]
    agent: str | None = None
    options: TurnOptions = DEFAULT_OPTIONS
    once: str = ""
    """The idempotency key of the request: a retry is stored and answered once."""
    asked_again: bool = False
    """Whether the client marks this request as a retry."""
    retries: bool = False
    """Whether the client marks its retries, so that its requests must be recognisable."""
    new_session: bool = False
    """Whether to start a new session if the one with this key was deleted."""

    @cached_property
    def digest(self) -> str:
        """Digest of the messages and the client's tools, equal for a request and its retries."""
        sent: list[Any] = list(self.talk)
        if self.options.tools:  # guard: idempotency-key-other-tools
            sent = [sent, list(self.options.tools)]
        encoded = json.dumps(sent, sort_keys=True, default=str)
        return hashlib.sha256(encoded.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    @property
    def is_marked(self) -> bool:
        """Whether a later request may have to be compared with this one."""
        return bool(self.once) or self.retries


async def answer_chat(loop: AgentLoop, wanted: ChatTurnRequest, on_event: EventHandler) -> Answer:
    """Answer the new messages. Raise UsageError and errors of reading the store."""
    instance = loop.registry.agent(wanted.agent)
    key, view, found = await loop.run(_prepare, instance, wanted)
    if isinstance(found, Answer):
        return found
    shown, matched = found
    if matched.keep == len(shown) and len(matched.new) == 1 and _is_plain(matched.new[0]):
        # Fast path: the message is stored first and waits for its turn in the log.
        inbound = InboundMessage(
            key=key,
            content=matched.new[0]["content"],
            id=wanted.once,
            request_digest=wanted.digest if wanted.is_marked else "",
        )
        return await loop.handle(
            inbound,
            on_event=on_event,
            agent=wanted.agent,
            allow_commands=False,
            options=wanted.options,
            view=view,
        )

    async def change(sessions: SessionStore) -> Answer | None:
        return await loop.run(_store_request, sessions, key, wanted, view)

    return await loop.change_and_answer(
        key, change, on_event=on_event, agent=wanted.agent, options=wanted.options, view=view
    )


def resolve_session(
    agent: AgentInstance, key: str, *, new_session: bool
) -> tuple[str, SessionView | None]:
    """Return the key of the session that a client names, and a view of it. Blocks.

    Raises SessionDeleted if the session with this key is in the trash and there is no other, unless
    the client asks for a new one.
    """
    own, view = agent.resolve(key)
    refused = view is None and not new_session
    if refused and any(deleted.key == own for deleted in agent.store.list_trash()):
        # guard: deleted-session-stays-deleted
        raise SessionDeleted(key, advice=_ADVICE)
    return own, view


def _prepare(
    instance: AgentInstance, wanted: ChatTurnRequest
) -> "tuple[str, SessionView | None, tuple[Sequence[Message], Match] | Answer]":
    """Resolve the session and compare it with the request, in one thread call."""
    key, view = resolve_session(instance, wanted.key, new_session=wanted.new_session)
    return key, view, _compare(instance.sessions, key, wanted, view)


def text_for_client(sessions: SessionStore, answer: Answer) -> str:
    """Return the text for the client of an answer that it has not received in pieces."""
    if answer.seq is None:
        return answer.text
    return text_at(sessions.get_history(answer.key), answer.seq) or answer.text


def _is_plain(body: Mapping[str, Any]) -> bool:
    return body.get("role") == "user" and set(body) == _PLAIN


def _compare(
    sessions: SessionStore, key: str, wanted: ChatTurnRequest, view: SessionView | None
) -> tuple[Sequence[Message], Match] | Answer:
    """Return the visible messages and the new ones, or the answer that was given before.

    Raises OnceConflict if the idempotency key was used for other messages, and UsageError for
    results without a pending call.
    """
    if view is None:
        return (), Match(keep=0, new=_without_known_results((), match((), wanted.talk).new))
    shown = view.messages
    brought = _seq_of_request(sessions, wanted, view) if wanted.once else None
    if brought is not None:
        answer = answer_to(sessions.get_history(key, after=brought - 1, full=True), brought)
        if answer is not None:
            return Answer(key=key, text="", outcome="again", seq=answer.seq)
    found = match(shown, wanted.talk, before=_hidden_reader(sessions, view))
    again = found.answered
    if wanted.asked_again and again is not None and _is_retry(wanted, view, found):
        if found.handed:
            return shown, Match(keep=len(shown), new=())  # the turn returns its calls again
        return Answer(key=key, text="", outcome="again", seq=again)
    return shown, Match(keep=found.keep, new=_without_known_results(shown[: found.keep], found.new))


def _without_known_results(
    shown: Sequence[Message], new: Sequence[Mapping[str, Any]]
) -> tuple[Any, ...]:
    """Return the new messages without repeated results. Raise UsageError for unknown results."""
    waiting = {call.id for call in turn_state(shown).client_calls}
    given = {
        (result.id, str(result.content))
        for message in shown
        for result in results_of(message.to_dict())
    }
    kept = []
    for body in new:
        waiting |= {call.id for call in calls_of(body)}
        results = [] if has_text(body) else results_of(body)
        unknown = [result for result in results if result.id not in waiting]
        if unknown and all((one.id, str(one.content)) in given for one in unknown):
            continue
        if unknown:
            raise UsageError(
                f"messages: there is no pending tool call {unknown[0].id!r} for this result; the "
                "call must come before it, in the session or in the request"
            )
        kept.append(body)
    return tuple(kept)


def _store_request(
    sessions: SessionStore, key: str, wanted: ChatTurnRequest, before: SessionView | None
) -> Answer | None:
    """Make the sent messages visible; return None if they can be answered now.

    Only the lease holder may call this. `before`: a view from before the lease was acquired.
    """
    store = sessions.store
    if before is None:
        view = find_view(sessions, key)
    else:
        view = before.merged(store.refresh(before))
        if view.uid != before.uid:
            raise SessionDeleted(key, recreated=True)
    found = _compare(sessions, key, wanted, view)
    if isinstance(found, Answer):
        return found
    shown, matched = found
    failed = None
    if view is not None and matched.keep < len(shown):
        failed = _replace_tail(sessions, view, wanted, matched)
    elif matched.new:
        new = _with_request(wanted, matched.new)
        store.add_messages(key, new, once=wanted.once or None)
    if failed is None and wanted.once:
        _note_request(sessions, key, wanted)
    return failed


def _with_request(
    wanted: ChatTurnRequest, new: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Mark the user messages as received, and the last message with the request.

    They have no sender: a client may pass any session key, so their author is unknown.
    """
    marked = [mark_received(body) if body.get("role") == "user" else body for body in new]
    if not new or not wanted.is_marked:
        return marked
    return [*marked[:-1], mark_request(marked[-1], id=wanted.once, digest=wanted.digest)]


def _is_retry(wanted: ChatTurnRequest, view: SessionView, found: Match) -> bool:
    """Return whether the client retries the request whose answer is the last in the log.

    Otherwise the request repeats the same text as a new message: the last request was a different
    one, or its client has received the answer. Only the store decides, so that every gateway
    decides alike.
    """
    asked = next((one for one in view.messages if one.seq == found.asked), None)
    mark = None if asked is None else request_of(asked.to_dict())
    if asked is None or mark is None or asked.seq <= forked_at(view.info):
        return False
    is_received = view.info.meta.get(_RESPONSE) == found.answered
    return mark == (wanted.once, wanted.digest) and not is_received


def note_response(sessions: SessionStore, key: str, seq: int) -> None:
    """Store that a client has received the answer at this seq. Errors are logged."""
    store = sessions.store
    try:
        store.info(key)  # set_meta would recreate a deleted session
        store.set_meta(key, **{_RESPONSE: seq})
    except NoSuchSession:
        return
    except StenologError as error:
        _logger.warning("%s: could not store that answer %s was received: %s", key, seq, error)


def _replace_tail(
    sessions: SessionStore, view: SessionView, wanted: ChatTurnRequest, found: Match
) -> Answer | None:
    def tail_replaced(history: Sequence[Message]) -> list[Message | Mapping[str, Any]] | None:
        # A client must not hide unanswered messages that others have sent in the meantime.
        unanswered = turn_state(history).unanswered
        sent = [body.get("content") for body in wanted.talk]
        if any(
            message.seq in unanswered and message.to_dict().get("content") not in sent
            for message in history[found.keep :]
        ):
            return None
        return [*history[: found.keep], *_with_request(wanted, found.new)]

    if replace_history(sessions, view.key, tail_replaced, view) != "done":
        words = "other messages in this session are being answered; try again in a moment"
        return Answer(key=view.key, text=words, outcome="failed")
    return None


def _seq_of_request(
    sessions: SessionStore, wanted: ChatTurnRequest, view: SessionView
) -> int | None:
    """Return the seq of the last message of the request with this idempotency key, or None.

    Raises OnceConflict if that request had other messages.
    """
    copied = forked_at(view.info)
    found = [one for one in _noted_requests(view) if one[0] == wanted.once]
    for message in sessions.get_history(view.key, last=_SCANNED, full=True):
        mark = request_of(message.to_dict())
        if mark is not None and mark[0] == wanted.once and message.seq > copied:
            found.append((wanted.once, message.seq, mark[1]))
    if not found:
        return None
    _, seq, digest = found[0]
    # Older versions stored no digest.
    if digest and digest != wanted.digest:  # guard: idempotency-key-other-body
        raise OnceConflict(view.key, wanted.once, seq)
    return seq


def _noted_requests(view: SessionView) -> list[tuple[str, int, str]]:
    """Return idempotency key, seq and digest of the requests in the meta."""
    kept = view.info.meta.get(_REQUESTS)
    rows = kept if isinstance(kept, list) else []
    return [
        (row[0], row[1], row[2] if len(row) > 2 else "")
        for row in rows
        if isinstance(row, list) and len(row) in (2, 3)
    ]


def _note_request(sessions: SessionStore, key: str, wanted: ChatTurnRequest) -> None:
    view = find_view(sessions, key, last=1)
    if view is not None and view.messages:
        others = [row for row in _noted_requests(view) if row[0] != wanted.once]
        rows = [*others, (wanted.once, view.messages[0].seq, wanted.digest)][-_MAX_REQUESTS:]
        sessions.store.set_meta(key, **{_REQUESTS: [list(row) for row in rows]})


def _hidden_reader(
    sessions: SessionStore, view: SessionView | None
) -> "partial[list[Message]] | None":
    """Return a function that reads the hidden messages; None if nothing is summarized."""
    if view is None or not view.info.floor:
        return None
    return partial(_hidden, sessions, view.key)


def _hidden(sessions: SessionStore, key: str) -> list[Message]:
    return [message for message in sessions.get_history(key, full=True) if message.hidden]
