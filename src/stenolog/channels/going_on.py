"""In which session a chat goes on, after /new, /resume and /fork: kept in the meta of its own one.

A message that an app hands over once more after that belongs where it was said at first; so the
place of the command in its chat is kept, too.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.channels.base import Arrival
from stenolog.errors import NoSuchSession, StenologError

FIELD: Final = "goes_on_in"
_MOST_EARLIER: Final = 50
"""So many moves before the last one are kept."""
_REMEMBERED: Final = 10_000
_logger = logging.getLogger("stenolog")


class GoesOn(Struct, frozen=True, kw_only=True):
    """Where a chat goes on, since which message, and where it was before."""

    key: str
    before: str
    chat: str
    number: int
    earlier: tuple[tuple[int, str], ...] = ()
    """The moves of this chat before that: the number of the command, and where it was before."""


def session_of(own: str, goes_on: GoesOn | None, arrival: Arrival) -> str | None:
    """The session that a message belongs to; None for the very command that was obeyed already."""
    if goes_on is None:
        return own
    if not arrival.number or not goes_on.number or (arrival.chat or "") != goes_on.chat:
        return goes_on.key
    for number, before in (*goes_on.earlier, (goes_on.number, goes_on.before)):
        if arrival.number == number:
            return None
        if arrival.number < number:
            return before
    return goes_on.key


def _moves(goes_on: GoesOn | None, chat: str) -> tuple[tuple[int, str], ...]:
    """The moves of a chat so far, the oldest first."""
    if goes_on is None or goes_on.chat != chat or not goes_on.number:
        return ()
    return (*goes_on.earlier, (goes_on.number, goes_on.before))[-_MOST_EARLIER:]


class GoingOn:
    """Where the chats of a channel go on."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self._kept: dict[tuple[str | None, str], GoesOn] = {}
        """Those that could not be stored."""

    async def session_of(self, instance: AgentInstance, own: str, arrival: Arrival) -> str | None:
        """The session that a message belongs to; `own` is that of its chat."""
        return session_of(own, await self._found(instance, own), arrival)

    async def session_now(self, instance: AgentInstance, own: str) -> str:
        """The session in which the chat goes on now."""
        goes_on = await self._found(instance, own)
        return own if goes_on is None else goes_on.key

    async def go_on(
        self, instance: AgentInstance, own: str, arrival: Arrival, *, before: str, key: str
    ) -> None:
        """From this message on the chat goes on in another session."""
        chat = arrival.chat or ""
        earlier: tuple[tuple[int, str], ...] = ()
        with suppress(StenologError):  # the command is carried out by now
            earlier = _moves(await self._found(instance, own), chat)
        place = GoesOn(key=key, before=before, chat=chat, number=arrival.number, earlier=earlier)
        self._kept[instance.id, own] = place
        while len(self._kept) > _REMEMBERED:
            del self._kept[next(iter(self._kept))]
        if instance.store is None:
            return
        fields = {name: getattr(place, name) for name in GoesOn.__struct_fields__}
        try:
            await self._loop.run(instance.store.set_meta, own, **{FIELD: fields})
        except StenologError as error:
            _logger.warning("after a restart %r goes on where it was: %s", own, error)
        else:
            del self._kept[instance.id, own]

    async def _found(self, instance: AgentInstance, own: str) -> GoesOn | None:
        return self._kept.get((instance.id, own)) or await self._stored(instance, own)

    async def _stored(self, instance: AgentInstance, own: str) -> GoesOn | None:
        if instance.store is None:
            return None
        try:
            return _read((await self._loop.run(instance.store.info, own)).meta)
        except NoSuchSession:
            return None
        # What may pass is not caught: the message would be stored in another session.


def _read(meta: Mapping[str, Any]) -> GoesOn | None:
    told = meta.get(FIELD)
    if not isinstance(told, Mapping):
        return None
    key, before = told.get("key"), told.get("before")
    chat, number = told.get("chat"), told.get("number")
    if not (isinstance(key, str) and isinstance(before, str) and key and before):
        return None
    if not isinstance(chat, str) or not isinstance(number, int):
        return GoesOn(key=key, before=before, chat="", number=0)
    told_earlier = told.get("earlier", ())
    earlier = told_earlier if isinstance(told_earlier, list | tuple) else ()
    moves = tuple(
        (move[0], move[1])
        for move in earlier
        if isinstance(move, list | tuple)
        and len(move) == 2
        and isinstance(move[0], int)
        and isinstance(move[1], str)
    )
    return GoesOn(key=key, before=before, chat=chat, number=number, earlier=moves)
