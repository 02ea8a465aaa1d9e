"""Words as a page shows them, for a page that is open: what a command answered is not stored."""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.gateway.requests import body_of
from stenolog.gateway.viewer.markdown import LONGEST
from stenolog.gateway.viewer.serving import page


class Words(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be shown."""

    text: Annotated[str, Meta(max_length=2 * LONGEST)]


async def rendered(request: Request) -> Response:
    """Markdown as HTML that can do nothing but be read."""
    wanted = await body_of(request, Words)
    return page("words.html", text=wanted.text)
