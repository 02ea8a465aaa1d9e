"""The turn of a chat request: store its new messages in the session, and answer them.

A request without a session is answered, but nothing is stored or remembered.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.session_history import replace_history
from stenolog.agent.stored_answers import (
    HIDDEN_UNANSWERED_TEXT,
    answer_from_log,
    find_answer,
    find_lost,
)
from stenolog.agent.turn_events import (
    DEFAULT_OPTIONS,
    Answer,
    EventHandler,
    InboundMessage,
    TextDelta,
    ThinkingDelta,
    TurnOptions,
    UsageReported,
)
from stenolog.catalog.message_metadata import (
    answered_seqs,
    mark_received,
    mark_request,
    request_of,
)
from stenolog.context.turn_state import is_finished_answer, turn_state
from stenolog.context.window import build_window
from stenolog.errors import (
    AnswerUnknown,
    NoSuchSession,
    OnceConflict,
    SessionDeleted,
    StenologError,
    UsageError,
)
from stenolog.gateway.history_matching import Match, answer_text_at, match_history
from stenolog.messages import calls_of, has_text, results_of
from stenolog.providers.chat_model import StreamedAnswer
from stenolog.records import Message
from stenolog.stores import spans
from stenolog.stores.base import SessionView, Store, find_view, fork_seq_of
from stenolog.stores.withdrawn_messages import withdrawn_seqs

# Each entry has the idempotency key of a request, the seq of its last message, and its digest.
_REQUESTS_FIELD: Final = "requests"
"""Session meta field: the last requests with an idempotency key, except single plain prompts."""
_MAX_STORED_REQUESTS: Final = 20
_RESPONSE_FIELD: Final = "last_response"
"""Session meta field: seq of the last answer that an HTTP client received completely."""
_DELETED_ADVICE: Final = (
    "restore it, use another key, or send `new_session: true` to start a new session with this key"
)
_MAX_SCANNED_MESSAGES: Final = 200
"""Number of newest messages that are searched for the idempotency key of a request."""

_logger = logging.getLogger("stenolog")


class ChatTurnRequest(Struct, frozen=True, kw_only=True, dict=True):
    """A chat request for a session."""

    key: str
    messages: Sequence[Mapping[str, Any]]
    agent: str | None = None
    options: TurnOptions = DEFAULT_OPTIONS
    once: str = ""
    """Idempotency key of the request: a retry with the same key is not stored or answered again."""
    is_retry: bool = False
    """Whether the client marks this request as a retry."""
    marks_retries: bool = False
    """Whether the client marks its retries. If true, the digest of the request is stored."""
    new_session: bool = False
    """Whether to start a new session if the session with this key was deleted."""

    @cached_property
    def digest(self) -> str:
        """Digest of the messages and the client's tools, equal for a request and its retries."""
        digest_source: list[Any] = list(self.messages)
        if self.options.tools:  # guard: idempotency-key-other-tools
            digest_source = [digest_source, list(self.options.tools)]
        encoded = json.dumps(digest_source, sort_keys=True, default=str)
        return hashlib.sha256(encoded.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    @property
    def is_plain(self) -> bool:
        """Whether the request is one plain message without idempotency key or retry header."""
        is_single = len(self.messages) == 1 and _is_plain_prompt(self.messages[0])
        return is_single and not (self.is_marked or self.is_retry)

    @property
    def is_marked(self) -> bool:
        """Whether the idempotency key and the digest are stored, to recognise retries."""
        return bool(self.once) or self.marks_retries


async def answer_chat(loop: AgentLoop, request: ChatTurnRequest, on_event: EventHandler) -> Answer:
    """Answer the new messages. Raises UsageError, or StenologError if the store cannot be read."""
    instance = loop.registry.agent(request.agent)
    handle = partial(
        loop.handle,
        on_event=on_event,
        agent=request.agent,
        allow_commands=False,
        options=request.options,
    )
    if request.is_plain:
        # Fastest path: one thread call matches and stores the message.
        inbound = InboundMessage(key=request.key, content=request.messages[0]["content"])
        try:
            return await handle(inbound, prepare=partial(_prepare_plain_request, instance, request))
        except _NotPlainRequest as error:
            key, view, result = error.prepared
    else:
        key, view, result = await loop.run(_prepare_request, instance, request)
    if isinstance(result, Answer):
        return result
    if _is_one_new_prompt(view, result):
        # Fast path: store the message without waiting for the lease. Its turn follows.
        inbound = InboundMessage(
            key=key,
            content=result.new_messages[0]["content"],
            id=request.once,
            request_digest=request.digest if request.is_marked else "",
        )
        return await handle(inbound, view=view)

    async def change(store: Store) -> Answer | None:
        return await loop.run(_store_new_messages, store, key, request, view)

    return await loop.change_and_answer(
        key, change, on_event=on_event, agent=request.agent, options=request.options, view=view
    )


async def answer_without_session(
    loop: AgentLoop,
    instance: AgentInstance,
    messages: Sequence[Mapping[str, Any]],
    options: TurnOptions,
    on_event: EventHandler,
) -> Answer:
    """Return the model's answer to the newest messages that fit the model's context.

    The agent's tools are not offered to the model. Raises UsageError, and StenologError for errors
    of the model's server.
    """
    model = await loop.run(instance.model_for, options.model)
    context = await loop.run(instance.context, model)
    window = await loop.run(
        build_window,
        messages,
        "",
        system=options.system or "",
        tools=options.tools,
        limits=context.limits,
        needs=instance.spec.needs,
        tokens=context.tokens,
    )
    stream = model.stream(
        window.messages, tools=options.tools, schema=options.schema, max_tokens=options.max_tokens
    )
    reply = StreamedAnswer()
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            reply.add(delta)
            if delta.reasoning:
                on_event(ThinkingDelta(text=delta.reasoning))
            if delta.text:
                on_event(TextDelta(text=delta.text))
    if reply.usage is not None:
        on_event(UsageReported(usage=reply.usage))
    calls = tuple(reply.calls)
    return Answer(
        key="",
        text=reply.text,
        outcome="calls" if calls else "answered",
        calls=calls,
        finish=reply.finish,
        saved=False,
    )


def resolve_session(
    agent: AgentInstance, key: str, *, new_session: bool
) -> tuple[str, SessionView | None]:
    """Return the key of the session that a client names, and a view of the session. Blocks.

    Raises SessionDeleted if the session is in the trash, unless `new_session` is set.
    """
    session_key, view = agent.resolve(key)
    may_be_deleted = view is None and not new_session
    if may_be_deleted and any(
        deleted.key == session_key for deleted in agent.store.admin.list_trash()
    ):
        raise SessionDeleted(key, advice=_DELETED_ADVICE)
    return session_key, view


_PreparedRequest = tuple[str, SessionView | None, Match | Answer]
"""Key of the session, its view, and the match. For a retry, the stored answer is the last item."""


class _NotPlainRequest(Exception):
    """The request does not simply add one plain message to an existing session."""

    def __init__(self, prepared: _PreparedRequest) -> None:
        self.prepared = prepared
        super().__init__()


def _prepare_request(instance: AgentInstance, request: ChatTurnRequest) -> _PreparedRequest:
    """Find the session and match its messages with the request. Blocks."""
    key, view = resolve_session(instance, request.key, new_session=request.new_session)
    return key, view, _match_request(instance.store, key, request, view)


def _prepare_plain_request(instance: AgentInstance, request: ChatTurnRequest) -> SessionView:
    """Return the view of the session if the request only adds one new message. Blocks.

    Raises _NotPlainRequest for any other request.
    """
    prepared = key, view, result = _prepare_request(instance, request)
    is_plain = not isinstance(result, Answer) and _is_one_new_prompt(view, result)
    if view is None or key != request.key or not is_plain:
        raise _NotPlainRequest(prepared)
    return view


def text_for_client(store: Store, answer: Answer) -> str:
    """Return the text of an answer for a client that has not received the text in pieces.

    Other texts of its turn belong to it, also if they are hidden, but not those of an attempt that
    was hidden before the answer. Raises AnswerUnknown if a message of the turn cannot be read.
    """
    if answer.seq is None:
        return answer.text
    key, seq = answer.key, answer.seq
    stored = store.get_history(key, after=seq - 1, full=True)[:1]
    first = min((stored and answered_seqs(stored[0].to_dict())) or [seq])
    history = store.get_history(key, after=first - 1, full=True)
    view = store.view(key, last=1)
    lost = find_lost(store, view, history, first)
    if any(span_first < seq for span_first, _ in lost):  # guard: partial-answer
        reason = f"message {lost[0][0]} of its turn cannot be read, see `steno doctor`"
        raise AnswerUnknown(key, first, reason)
    withdrawn, floor = withdrawn_seqs(view.info.meta), view.info.floor

    def is_kept(message: Message) -> bool:
        is_summarized = message.seq <= floor and not spans.contains(withdrawn, message.seq)
        return not message.hidden or is_summarized

    if stored and is_kept(stored[0]):  # guard: text-of-hidden-attempt
        history = list(filter(is_kept, history))
    return answer_text_at(history, seq) or answer.text


def _is_one_new_prompt(view: SessionView | None, match: Match) -> bool:
    keeps_all = view is None or match.kept_count == len(view.messages)
    return keeps_all and len(match.new_messages) == 1 and _is_plain_prompt(match.new_messages[0])


def _is_plain_prompt(body: Mapping[str, Any]) -> bool:
    return body.get("role") == "user" and body.keys() == {"role", "content"}


def _match_request(
    store: Store, key: str, request: ChatTurnRequest, view: SessionView | None
) -> Match | Answer:
    """Match the request with the visible messages. For a retry, return the stored answer.

    Raises OnceConflict if the idempotency key was used for other messages, and UsageError for
    tool results without a pending call.
    """
    if view is None:
        return Match(kept_count=0, new_messages=_without_known_results((), request.messages))
    visible = view.messages
    request_seq, last_seq = None, 0
    if request.once:
        request_seq, last_seq = _find_request(store, request, view)
    elif request.is_retry:
        request_seq = _find_retried_seq(store, request, view)
    stored = _match_stored(store, view, request_seq, last_seq, may_be_new=not request.once)
    if stored is not None:
        return stored

    def read_hidden() -> list[Message]:
        return [m for m in store.get_history(key, full=True) if m.hidden]

    match = match_history(
        visible, request.messages, read_hidden=read_hidden if view.info.floor else None
    )
    if request.is_retry and match.answer_seq is not None and _is_retry(request, view, match):
        if match.has_calls:
            # Without new messages, the turn returns its tool calls to the client again.
            return Match(kept_count=len(visible), new_messages=())
        return Answer(key=key, text="", outcome="again", seq=match.answer_seq)
    is_long = view.info.last_seq > _MAX_SCANNED_MESSAGES
    if request.once and request_seq is None and is_long and not _is_one_new_prompt(view, match):
        # The store recognizes the key of a single new message. Any other request is searched for
        # in the whole session, because it changes the history.
        request_seq, last_seq = _find_request(store, request, view, last=None)
        stored = _match_stored(store, view, request_seq, last_seq, may_be_new=False)
        if stored is not None:
            return stored
    new_messages = _without_known_results(visible[: match.kept_count], match.new_messages)
    if match.new_messages and not new_messages:  # guard: repeated-tool-result
        # Others may have asked and got an answer since these results were answered.
        seq = _find_result(visible, match.new_messages[-1])
        stored = _match_stored(store, view, seq, 0, may_be_new=False)
        if stored is not None:
            return stored
    return Match(kept_count=match.kept_count, new_messages=new_messages)


def _match_stored(
    store: Store, view: SessionView, seq: int | None, last_seq: int, *, may_be_new: bool
) -> Match | Answer | None:
    """Return the result for a request that is stored; None if it is new, or was purged.

    `seq`: seq of its last message, or None if it is new. `last_seq`: see `_find_request`.
    `may_be_new`: the request is new if the client has received the answer.
    """
    if seq is None:
        return None
    found = find_answer(store, view.key, seq, view, after=last_seq)
    if found.state == "unanswered":
        # Everything is stored: the turn answers, or returns its tool calls to the client again.
        stored = Match(kept_count=len(view.messages), new_messages=(), is_stored=True)
        if _is_pending(view, seq):
            return stored  # guard: stored-request
        if any(seq < m.seq <= last_seq and is_finished_answer(m.to_dict()) for m in view.messages):
            return None  # the answer that the request replaces is still visible
        # guard: retry-of-passed-over-message
        return Answer(key=view.key, text=HIDDEN_UNANSWERED_TEXT, outcome="again")
    answer = answer_from_log(view.key, found, "again")
    is_new = may_be_new and answer is not None and _was_received(view, answer.seq)
    return None if is_new else answer


def _is_pending(view: SessionView, seq: int) -> bool:
    """Return whether a turn of the session would answer the message at this seq.

    A message that was hidden and is visible again is not pending, if a later answer has seen it.
    """
    state = turn_state(view.messages, view.info.lost_spans)
    return seq in state.questions


def _without_known_results(
    visible: Sequence[Message], bodies: Sequence[Mapping[str, Any]]
) -> tuple[Any, ...]:
    """Return the messages `bodies` without the tool results that are already in `visible`.

    Raises UsageError for a new result without a pending call.
    """
    if all(has_text(body) or not results_of(body) for body in bodies):
        return tuple(bodies)
    pending_ids = {call.id for call in turn_state(visible).client_calls}
    known_results = {
        (result.id, str(result.content))
        for message in visible
        for result in results_of(message.to_dict())
    }
    new_bodies = []
    for body in bodies:
        pending_ids |= {call.id for call in calls_of(body)}
        results = [] if has_text(body) else results_of(body)
        unpaired = [result for result in results if result.id not in pending_ids]
        if not unpaired:
            new_bodies.append(body)
        elif any((result.id, str(result.content)) not in known_results for result in unpaired):
            raise UsageError(
                f"messages: there is no pending tool call {unpaired[0].id!r} for this result; the "
                "call must come before its result, in the session or in the request"
            )
    return tuple(new_bodies)


def _find_result(visible: Sequence[Message], body: Mapping[str, Any]) -> int | None:
    """Return the seq of the newest of these messages with a result that `body` repeats."""
    repeated = {(result.id, str(result.content)) for result in results_of(body)}
    for message in reversed(visible):
        results = results_of(message.to_dict())
        if not repeated.isdisjoint((result.id, str(result.content)) for result in results):
            return message.seq
    return None


def _store_new_messages(
    store: Store, key: str, request: ChatTurnRequest, earlier_view: SessionView | None
) -> Answer | None:
    """Store the new messages of the request. Return an Answer only if no turn must run.

    Only the lease holder may call this function. `earlier_view` is a view that was read before the
    lease was acquired.
    """
    if earlier_view is None:
        view = find_view(store, key)
    else:
        view = earlier_view.merged(store.view(earlier_view.key, since=earlier_view))
        if view.uid != earlier_view.uid:
            raise SessionDeleted(key, recreated=True)
    match = _match_request(store, key, request, view)
    if isinstance(match, Answer):
        return match
    if match.is_stored:
        return None
    if view is not None and match.kept_count < len(view.messages):
        if request.once and match.kept_count and not match.new_messages:
            # No message gets the key, so it is stored before the last answer is hidden.
            last_kept = view.messages[match.kept_count - 1]
            _remember_request(store, request, view, last_kept.seq)  # guard: key-before-hiding
            return _replace_last_messages(store, view, request, match)
        failure = _replace_last_messages(store, view, request, match)
        if failure is not None:
            return failure
    elif match.new_messages:
        bodies = _mark_messages(request, match.new_messages)
        store.add_messages(key, bodies, once=request.once or None)
    if request.once and (new_view := find_view(store, key, last=_MAX_SCANNED_MESSAGES)):
        if match.new_messages:
            # The last message may be another client's.
            mark = (request.once, request.digest)
            seqs = [m.seq for m in new_view.messages if request_of(m.to_dict()) == mark]
        else:
            seqs = [] if view is None else [m.seq for m in view.messages]
        if seqs:
            _remember_request(store, request, new_view, seqs[-1])
    return None


def _mark_messages(
    request: ChatTurnRequest, bodies: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Mark user messages as received, and the last message with the request's key and digest.

    The messages have no sender: a client may pass any session key, so the author is unknown.
    """
    marked = [mark_received(body) if body.get("role") == "user" else body for body in bodies]
    if not bodies or not request.is_marked:
        return marked
    return [*marked[:-1], mark_request(marked[-1], id=request.once, digest=request.digest)]


def _is_retry(request: ChatTurnRequest, view: SessionView, match: Match) -> bool:
    """Return whether the request is a retry of the request that was answered last.

    The request is new if its idempotency key or its digest differs, or if the client has received
    the answer. The decision depends only on the store, so that every gateway makes the same
    decision.
    """
    prompt = next((message for message in view.messages if message.seq == match.question_seq), None)
    if prompt is None or prompt.seq <= fork_seq_of(view.info):
        return False
    was_received = _was_received(view, match.answer_seq)
    return request_of(prompt.to_dict()) == (request.once, request.digest) and not was_received


def _was_received(view: SessionView, answer_seq: int | None) -> bool:
    """Return whether an HTTP client has received this answer completely."""
    return answer_seq is not None and bool(view.info.meta.get(_RESPONSE_FIELD) == answer_seq)


def store_receipt(store: Store, key: str, seq: int) -> None:
    """Store that a client has received the answer at this seq. Errors are logged."""
    try:
        store.info(key)  # set_meta would recreate a deleted session
        store.set_meta(key, **{_RESPONSE_FIELD: seq})
    except NoSuchSession:
        return
    except StenologError as error:
        _logger.warning("%s: could not record the receipt of answer %s: %s", key, seq, error)


def _replace_last_messages(
    store: Store, view: SessionView, request: ChatTurnRequest, match: Match
) -> Answer | None:
    def new_history(history: Sequence[Message]) -> list[Message | Mapping[str, Any]] | None:
        # A client must not hide unanswered messages that others have sent in the meantime.
        unanswered_seqs = turn_state(history, view.info.lost_spans).unanswered
        sent_contents = [body.get("content") for body in request.messages]
        if any(
            message.seq in unanswered_seqs and message.to_dict().get("content") not in sent_contents
            for message in history[match.kept_count :]
        ):
            return None
        return [*history[: match.kept_count], *_mark_messages(request, match.new_messages)]

    if replace_history(store, view.key, new_history, view) != "done":
        text = "other messages in this session are being answered; try again in a moment"
        return Answer(key=view.key, text=text, outcome="failed")
    return None


def _find_request(
    store: Store,
    request: ChatTurnRequest,
    view: SessionView,
    *,
    last: int | None = _MAX_SCANNED_MESSAGES,
) -> tuple[int | None, int]:
    """Return where the request with this idempotency key is stored.

    The first number is the seq of its last message; None if the request is new. The second is the
    last seq of the session when the request was stored: later than its last message if the request
    replaced an answer. Raises OnceConflict if the request with this key had other messages. `last`:
    number of newest messages that are searched, or None for all.
    """
    fork_seq = fork_seq_of(view.info)
    requests = [row[1:] for row in _read_requests(view) if row[0] == request.once]
    for message in store.get_history(view.key, last=last, full=True):
        request_mark = request_of(message.to_dict())
        if request_mark is not None and request_mark[0] == request.once and message.seq > fork_seq:
            requests.append((message.seq, request_mark[1], message.seq))
    if not requests:
        return None, 0
    # An older row may name a message that was purged before the key was used again.
    seq, digest, last_seq = max(requests, key=itemgetter(0, 2))
    if digest != request.digest:  # guard: idempotency-key-other-body
        raise OnceConflict(view.key, request.once, seq)
    return seq, last_seq


def _find_retried_seq(store: Store, request: ChatTurnRequest, view: SessionView) -> int | None:
    """Return the seq of the newest message of a client if it ends the retried request."""
    messages: Sequence[Message] = view.messages
    if view.info.visible < view.info.count:
        messages = store.get_history(view.key, last=_MAX_SCANNED_MESSAGES, full=True)
    for message in reversed(messages):
        body = message.to_dict()
        if has_text(body) or request_of(body) is not None:
            is_own = message.seq > fork_seq_of(view.info)
            is_retried = request_of(body) == ("", request.digest)
            return message.seq if is_own and is_retried else None
    return None


def _read_requests(view: SessionView) -> list[tuple[str, int, str, int]]:
    """Return the rows of the requests in the session's meta.

    A row has the idempotency key, the seq of the last message, the digest, and the last seq of the
    session when the request was stored.
    """
    field_value = view.info.meta.get(_REQUESTS_FIELD)
    rows = field_value if isinstance(field_value, list) else []
    return [
        (row[0], row[1], row[2], row[3]) for row in rows if isinstance(row, list) and len(row) == 4
    ]


def _remember_request(store: Store, request: ChatTurnRequest, view: SessionView, seq: int) -> None:
    """Store in the session's meta that the last message of the request is at this seq."""
    other_rows = [row for row in _read_requests(view) if row[0] != request.once]
    rows = [*other_rows, (request.once, seq, request.digest, view.info.last_seq)]
    newest_rows = [list(row) for row in rows[-_MAX_STORED_REQUESTS:]]
    store.set_meta(view.key, **{_REQUESTS_FIELD: newest_rows})
