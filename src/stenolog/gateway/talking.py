"""From what a client sent to an answer: what is new goes into its session, and the turn runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from stenolog.agent.events import Answer, Inbound, Tell
from stenolog.agent.loop import AgentLoop
from stenolog.agent.manner import AS_USUAL, Manner
from stenolog.agent.rewriting import rewrite
from stenolog.errors import NoSuchSession
from stenolog.gateway.matching import Match, match, text_at
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore

_PLAIN = {"role", "content"}


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


async def answered(loop: AgentLoop, wanted: Wanted, tell: Tell) -> Answer:
    """The answer to what is new. Raises UsageError; all else that fails is told by the answer."""
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
    shown = sessions.get_history(key)
    found = match(shown, wanted.talk, before=_before(sessions, key))
    if wanted.asked_again and found.answered is not None:
        return Answer(key=key, text="", outcome="again", seq=found.answered)
    return shown, found


def _take_in(sessions: SessionStore, key: str, wanted: Wanted) -> Answer | None:
    """Make what was sent what is in sight, by who has the turn; None: now it can be answered."""
    found = _look(sessions, key, wanted)
    if isinstance(found, Answer):
        return found
    shown, matched = found
    if matched.keep == len(shown):
        return _appended(sessions, key, matched.new, once=wanted.once)

    def tail_replaced(history: list[Message]) -> list[Message | Mapping[str, Any]]:
        now = match(history, wanted.talk, before=_before(sessions, key))
        return [*history[: now.keep], *now.new]

    match rewrite(sessions, key, tail_replaced):
        case "not saved":
            return _not_saved(sessions, key)
        case "others speak":
            words = "others speak in this session all the time; try again in a moment"
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
