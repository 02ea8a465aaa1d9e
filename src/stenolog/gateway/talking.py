"""From what a client sent to an answer: what is new goes into its session, and the turn runs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.events import Answer, Inbound, Tell
from stenolog.agent.loop import AgentLoop
from stenolog.agent.manner import AS_USUAL, Manner
from stenolog.agent.rewriting import rewrite
from stenolog.context.shapes import calls_of, results_of, speaks
from stenolog.context.standing import answer_to, standing
from stenolog.errors import NoSuchSession, UsageError
from stenolog.gateway.matching import Match, match, text_at
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore

_PLAIN: Final = {"role", "content"}
_REQUESTS: Final = "requests"
"""The field of a session's meta that has, for each of the last requests which changed more than the
end of the log, the client's own name for it and the seq of the last message it brought."""
_MOST_REQUESTS: Final = 20


def _nobody(key: str, seq: int) -> bool:
    del key, seq
    return False


class Wanted(Struct, frozen=True, kw_only=True):
    """What a client wants answered in a session."""

    key: str
    talk: Sequence[Mapping[str, Any]]
    agent: str | None = None
    manner: Manner = AS_USUAL
    once: str = ""
    """The client's own name for this request: made again, it is stored and answered once."""
    asked_again: bool = False
    """Whether the client has asked before and got no answer."""
    was_told: Callable[[str, int], bool] = _nobody
    """Whether a client has got the answer at this seq of a session: then it asks for another."""


async def answered(loop: AgentLoop, wanted: Wanted, tell: Tell) -> Answer:
    """The answer to what is new. Raises UsageError, and what the store raises when it is read."""
    instance = loop.registry.agent(wanted.agent)
    key = await loop.run(instance.own_key, wanted.key)
    found = await loop.run(_look, instance.sessions, key, wanted)
    if isinstance(found, Answer):
        return found
    shown, matched = found
    if matched.keep == len(shown) and len(matched.new) == 1 and _is_plain(matched.new[0]):
        # The usual message waits in the log for its turn, and not here.
        inbound = Inbound(key=key, content=matched.new[0]["content"], id=wanted.once)
        return await loop.hear(
            inbound, tell=tell, agent=wanted.agent, commands_too=False, manner=wanted.manner
        )

    async def change(sessions: SessionStore) -> Answer | None:
        return await loop.run(_take_in, sessions, key, wanted)

    return await loop.answer_after(key, change, tell=tell, agent=wanted.agent, manner=wanted.manner)


def text_told(sessions: SessionStore, answer: Answer) -> str:
    """What the client is told of an answer that was not made before its eyes."""
    if answer.seq is None:
        return answer.text
    return text_at(sessions.get_history(answer.key), answer.seq) or answer.text


def _is_plain(body: Mapping[str, Any]) -> bool:
    return body.get("role") == "user" and set(body) == _PLAIN


def _look(sessions: SessionStore, key: str, wanted: Wanted) -> tuple[list[Message], Match] | Answer:
    """What is in sight and what of the request is new; or the answer that was given to it before.

    Raises UsageError for results that nobody waits for.
    """
    shown = sessions.get_history(key)
    brought = _brought(sessions, key).get(wanted.once) if wanted.once else None
    if brought is not None:
        answer = answer_to(sessions.get_history(key, after=brought - 1, full=True), brought)
        if answer is not None:
            return Answer(key=key, text="", outcome="again", seq=answer.seq)
    found = match(shown, wanted.talk, before=_before(sessions, key))
    again = found.answered
    if wanted.asked_again and again is not None and not wanted.was_told(key, again):
        if found.handed:
            return shown, Match(keep=len(shown), new=())  # the turn hands its calls over again
        return Answer(key=key, text="", outcome="again", seq=again)
    return shown, Match(keep=found.keep, new=_awaited(shown[: found.keep], found.new))


def _awaited(shown: Sequence[Message], new: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What is new without results that are there already. Raises UsageError for other strangers."""
    waiting = {call.id for call in standing(shown).of_client}
    given = {
        (result.id, str(result.content))
        for message in shown
        for result in results_of(message.to_dict())
    }
    kept = []
    for body in new:
        waiting |= {call.id for call in calls_of(body)}
        results = [] if speaks(body) else results_of(body)
        unknown = [result for result in results if result.id not in waiting]
        if unknown and all((one.id, str(one.content)) in given for one in unknown):
            continue
        if unknown:
            raise UsageError(
                f"messages: nobody waits for the result of the call {unknown[0].id!r}; the call "
                "must stand before it, in this session or in the request"
            )
        kept.append(body)
    return tuple(kept)


def _take_in(sessions: SessionStore, key: str, wanted: Wanted) -> Answer | None:
    """Make what was sent what is in sight, by who has the turn; None: now it can be answered."""
    found = _look(sessions, key, wanted)
    if isinstance(found, Answer):
        return found
    shown, matched = found
    failed = (
        _appended(sessions, key, matched.new, once=wanted.once)
        if matched.keep == len(shown)
        else _replaced(sessions, key, wanted)
    )
    if failed is None and wanted.once:
        _note_request(sessions, key, wanted.once)
    return failed


def _replaced(sessions: SessionStore, key: str, wanted: Wanted) -> Answer | None:
    def tail_replaced(history: list[Message]) -> list[Message | Mapping[str, Any]] | None:
        now = match(history, wanted.talk, before=_before(sessions, key))
        # What others have said meanwhile is not the client's to take back before it is answered.
        unanswered = standing(history).unanswered
        sent = [body.get("content") for body in wanted.talk]
        if any(
            message.seq in unanswered and message.content not in sent
            for message in history[now.keep :]
        ):
            return None
        return [*history[: now.keep], *_awaited(history[: now.keep], now.new)]

    match rewrite(sessions, key, tail_replaced):
        case "not saved":
            return _not_saved(sessions, key)
        case "nothing" | "others speak":
            words = "others wait for an answer in this session; try again in a moment"
            return Answer(key=key, text=words, outcome="failed")
    return None


def _appended(
    sessions: SessionStore, key: str, new: Sequence[Mapping[str, Any]], *, once: str
) -> Answer | None:
    if not new:
        return None
    if sessions.store is not None:
        sessions.store.add_messages(key, new, once=once or None)
        return None
    for number, body in enumerate(new):
        token = f"{once}:{number}" if once else None
        if sessions.add_full_message(key, body, once=token) is None:
            return _not_saved(sessions, key)
    return None


def _brought(sessions: SessionStore, key: str) -> dict[str, int]:
    """The last message of each of the last requests that had a name."""
    if sessions.store is None:
        return {}
    try:
        kept = sessions.store.info(key).meta.get(_REQUESTS)
    except NoSuchSession:
        return {}
    pairs = kept if isinstance(kept, list) else []
    return {one[0]: one[1] for one in pairs if isinstance(one, list) and len(one) == 2}


def _note_request(sessions: SessionStore, key: str, once: str) -> None:
    if sessions.store is None:
        return
    last = sessions.get_history(key, last=1)
    if last:
        kept = {**_brought(sessions, key), once: last[0].seq}
        pairs = [[name, seq] for name, seq in kept.items()][-_MOST_REQUESTS:]
        sessions.store.set_meta(key, **{_REQUESTS: pairs})


def _before(sessions: SessionStore, key: str) -> "partial[list[Message]] | None":
    """Gives what is no longer in sight; None where everything is."""
    store = sessions.store
    if store is None:
        return None
    try:
        info = store.info(key)
    except NoSuchSession:
        return None
    return partial(_hidden, sessions, key) if info.floor else None


def _hidden(sessions: SessionStore, key: str) -> list[Message]:
    return [message for message in sessions.get_history(key, full=True) if message.hidden]


def _not_saved(sessions: SessionStore, key: str) -> Answer:
    words = f"this could not be saved: {sessions.health().last_error}"
    return Answer(key=key, text=words, outcome="failed", saved=False)
