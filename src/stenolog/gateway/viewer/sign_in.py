"""What a browser is shown that has no cookie: where to get in, and nothing else."""

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE: Final = b"""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>stenolog</title>
<h1>stenolog</h1>
<p>This gateway does not know this browser yet. On the machine it runs on, type</p>
<pre>steno open</pre>
<p>and open the link that it prints. A link works once, and for a minute.</p>
</html>
"""


class SignInPage:
    """Tells a person in a page what programs are told in JSON: that they have to sign in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; only what a refusal looks like is changed."""
        if scope["type"] != "http" or not _wants_a_page(scope):
            await self._app(scope, receive, send)
            return
        refused = False

        async def told(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
                headers = MutableHeaders(scope=message)
                headers["Content-Type"] = "text/html; charset=utf-8"
                headers["Content-Length"] = str(len(_PAGE))
            elif refused and message["type"] == "http.response.body":
                last = not message.get("more_body", False)
                # The page takes the place of the words, once.
                message = {**message, "body": _PAGE if last and scope["method"] != "HEAD" else b""}
            await send(message)

        await self._app(scope, receive, told)


def _wants_a_page(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "text/html" in headers.get("accept", "") and "authorization" not in headers
