"""A session to take along: as it is stored, or as a document to share."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stenolog.gateway.requests import key_of, query_of
from stenolog.gateway.shapes import OfAgent
from stenolog.gateway.state import gateway_of
from stenolog.gateway.viewer.serving import agent_of, store_of
from stenolog.memory.sharing import Sharing
from stenolog.records import Message, SessionInfo
from stenolog.sessions.exporting.writing import FOR_READERS, Form, pieces

FORMS: Final[dict[str, tuple[Form, str]]] = {
    "jsonl": ("jsonl", "application/x-ndjson"),
    "md": ("markdown", "text/markdown"),
    "html": ("html", "text/html"),
}
"""What a name ends with, what is written then, and of which type that is."""


_CHUNK: Final = 256 * 1024
"""Bytes; each chunk goes through a thread of its own."""


class ExportQuery(OfAgent, frozen=True, kw_only=True):
    """What is wanted of a session."""

    full: bool = False
    """What is out of sight, too."""


async def export(request: Request) -> Response:
    """Every message, as a file. Documents are without secrets, as `steno export` writes them."""
    gateway = gateway_of(request)
    query = query_of(request, ExportQuery)
    agent = agent_of(gateway, query.agent)
    key = key_of(request)
    suffix = request.path_params["form"]
    if suffix not in FORMS:
        raise HTTPException(404)
    form, kind = FORMS[suffix]

    def read() -> tuple[SessionInfo, Sequence[Message]]:
        store = store_of(agent)
        own = agent.own_key(key)
        return store.info(own), store.get_history(own, full=query.full)

    info, history = await gateway.loop.run(read)
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in key)[:80]
    return StreamingResponse(
        _gathered(pieces(form, info, history, Sharing(wanted=form in FOR_READERS))),
        media_type=kind,
        headers={"Content-Disposition": f'attachment; filename="{name}.{suffix}"'},
    )


def _gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= _CHUNK:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk)
