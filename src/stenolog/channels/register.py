"""Which messages of a program came before: each has a number, the same whenever it comes again.

Programs give ids and no numbers. Without one nobody could say in which session a message was said,
once the chat goes on in another; and the log, which has every message once, has no commands. So the
ids of a chat stand in a session of the store of claims, in the order in which they came.
"""

import hashlib
import logging
import secrets
from contextlib import suppress
from typing import Final

from stenolog.agent.instance import AgentInstance
from stenolog.channels.base import Arrival
from stenolog.channels.claims import Claims, said_in
from stenolog.errors import OnceConflict, StenologError, UsageError

_UNDONE: Final = "undone-"
"""Begins the field of a command that was begun, and not carried out."""
_logger = logging.getLogger("stenolog")


class Register:
    """The messages of the chats of a channel whose app has no numbers."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    async def number_of(self, instance: AgentInstance, own: str, arrival: Arrival) -> int:
        """Its place among the messages of its chat; 0 where that cannot be stored.

        Raises OnceConflict where the id was another message's.
        """
        said = _digest(arrival.sender, arrival.text)
        place = said_in(instance.id, own)
        try:
            return await self._claims.counted(place, _digest(arrival.id), said)
        except UsageError:
            raise
        except StenologError as error:
            # It is taken in all the same, as where the log cannot be written.
            _logger.warning("if a message in %r comes again, it may be new: %s", own, error)
            return 0

    async def begin(self, instance: AgentInstance, own: str, arrival: Arrival) -> bool:
        """Whether a command is to be carried out: not where somebody has begun to before.

        So it is not carried out again after a crash, either: nobody knows how far it came.
        """
        if not arrival.number:
            return True
        place = said_in(instance.id, own)
        try:
            # What differs each time is taken from one only, of however many processes.
            await self._claims.counted(place, f"{_digest(arrival.id)}-begun", secrets.token_hex(8))
        except OnceConflict:
            undone = f"{_UNDONE}{arrival.number}"
            if not (await self._claims.noted(place)).get(undone):
                return False
            await self._claims.note(place, **{undone: None})
        except UsageError:
            raise
        except StenologError as error:
            _logger.warning("if a command in %r comes again, it is obeyed again: %s", own, error)
        return True

    async def undo(self, instance: AgentInstance, own: str, arrival: Arrival) -> None:
        """A command was refused after all, and is to be carried out when it comes again."""
        if arrival.number:
            with suppress(StenologError):
                place = said_in(instance.id, own)
                await self._claims.note(place, **{f"{_UNDONE}{arrival.number}": True})


def _digest(*words: str) -> str:
    # Ids and texts of all kinds and lengths are tokens so.
    told = "\0".join(words).encode("utf-8", "surrogatepass")
    return hashlib.sha256(told).hexdigest()
