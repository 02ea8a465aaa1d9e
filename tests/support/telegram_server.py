"""A fake Telegram: an HTTP server with the part of the Bot API that bots use.

It can play faults. Like the real one, it delivers an update repeatedly until a higher number is
requested.
"""

import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl

from msgspec import Struct

TOKEN: Final = "1234567:AAH-a-token-that-nobody-may-see"
USERNAME: Final = "steno_test_bot"
MOST_TEXT: Final = 4_096

Fault = Literal["busy", "conflict", "unauthorized", "lost before", "lost after", "broken"]
"""Faults of the server.

busy: 429, retry after a second. lost: the connection ends before or after the request is executed.
broken: 502.
"""
_ANSWERS: Final[dict[str, tuple[int, str, dict[str, Any]]]] = {
    "busy": (429, "Too Many Requests: retry after 1", {"retry_after": 1}),
    "conflict": (409, "Conflict: terminated by other getUpdates request", {}),
    "unauthorized": (401, "Unauthorized", {}),
    "broken": (502, "Bad Gateway", {}),
}


class Sent(Struct, frozen=True, kw_only=True):
    """A message from the bot."""

    chat: int
    text: str
    thread: int | None = None


class TelegramServer:
    """The server, from its creation until it is closed; thread-safe."""

    def __init__(self, *, token: str = TOKEN) -> None:
        self.token = token
        self.sent: list[Sent] = []
        self.typing: list[int] = []
        """Chats in which the bot showed that it types."""
        self.offsets: list[int | None] = []
        """Offset of each request for updates."""
        self.most_polls = 0
        """Maximum number of concurrent requests for updates."""
        self._polls = 0
        self._updates: dict[int, dict[str, Any]] = {}
        self._next_update = 1_000
        self._next_message = 1
        self._faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._closing = False
        self._http = _Http(("127.0.0.1", 0), self)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="telegram"
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Address for `base_url`."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def unconfirmed(self) -> list[int]:
        """Updates that would be delivered again."""
        with self._changed:
            return sorted(self._updates)

    def texts(self, chat: int) -> list[str]:
        """Return the bot's texts in a chat."""
        with self._changed:
            return [one.text for one in self.sent if one.chat == chat]

    def say(
        self,
        text: str | None,
        *,
        user: int = 1001,
        name: str = "alice",
        chat: int | None = None,
        thread: int | None = None,
        message: int | None = None,
        **fields: Any,
    ) -> int:
        """Send a user's message; return the number of the update. `message` repeats a message."""
        with self._changed:
            number, self._next_update = self._next_update, self._next_update + 1
            if message is None:
                message, self._next_message = self._next_message, self._next_message + 1
            group = chat is not None
            body: dict[str, Any] = {
                "message_id": message,
                "date": 1_800_000_000,
                "from": {"id": user, "is_bot": False, "first_name": name, "username": name},
                "chat": {"id": chat if group else user, "type": "group" if group else "private"},
                **fields,
            }
            if text is not None:
                body["text"] = text
            if thread is not None:
                body |= {"message_thread_id": thread, "is_topic_message": True}
            self._updates[number] = {"update_id": number, "message": body}
            self._changed.notify_all()
            return number

    def play(self, method: str, *faults: Fault) -> None:
        """Play these faults at the next calls of a method."""
        with self._changed:
            self._faults[method].extend(faults)

    def played(self, method: str) -> bool:
        """Return whether all faults of a method were played."""
        with self._changed:
            return not self._faults[method]

    def wait_until(self, met: Callable[[], bool], *, timeout: float = 20.0) -> bool:
        """Wait until a condition on the server holds; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(met, timeout)

    def close(self) -> None:
        """End all calls and stop; a second call does nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    # --- the Bot API -------------------------------------------------------------------------

    def call(self, token: str, method: str, given: dict[str, str]) -> tuple[int, Any] | None:
        """Return status and body of the answer, or None if the connection is to be lost."""
        with self._changed:
            faults = self._faults[method]
            fault = faults.popleft() if faults else None
            self._changed.notify_all()
        if token != self.token:
            fault = "unauthorized"
        if fault == "lost before":
            return None
        if fault in _ANSWERS:
            status, words, parameters = _ANSWERS[fault]
            return status, {
                "ok": False,
                "error_code": status,
                "description": words,
                "parameters": parameters,
            }
        found = getattr(self, f"_{method}", None)
        if found is None:
            return 404, {"ok": False, "error_code": 404, "description": "Not Found"}
        with self._changed:
            status, result = found(given)
            self._changed.notify_all()
        if fault == "lost after":
            return None
        if status != 200:
            return status, {"ok": False, "error_code": status, "description": result}
        return status, {"ok": True, "result": result}

    # Handlers, named as in the API and called with the lock held.

    def _getMe(self, given: dict[str, str]) -> tuple[int, Any]:  # noqa: N802
        del given
        return 200, {"id": 1234567, "is_bot": True, "first_name": "steno", "username": USERNAME}

    def _getUpdates(self, given: dict[str, str]) -> tuple[int, Any]:  # noqa: N802
        offset = int(given["offset"]) if "offset" in given else None
        self.offsets.append(offset)
        self._changed.notify_all()
        for number in [one for one in self._updates if offset is not None and one < offset]:
            del self._updates[number]
        wait = float(given.get("timeout", 0))
        self._polls += 1
        self.most_polls = max(self._polls, self.most_polls)
        self._changed.wait_for(lambda: self._updates or self._closing, wait)
        self._polls -= 1
        return 200, [self._updates[number] for number in sorted(self._updates)][:100]

    def _sendMessage(self, given: dict[str, str]) -> tuple[int, Any]:  # noqa: N802
        text = given.get("text", "")
        if not text.strip():
            return 400, "Bad Request: message text is empty"
        if len(text.encode("utf-16-le")) // 2 > MOST_TEXT:
            return 400, "Bad Request: message is too long"
        thread = given.get("message_thread_id")
        chat = int(given["chat_id"])
        self.sent.append(Sent(chat=chat, text=text, thread=None if thread is None else int(thread)))
        message, self._next_message = self._next_message, self._next_message + 1
        kind = "private" if chat > 0 else "group"
        return 200, {
            "message_id": message,
            "date": 1_800_000_000,
            "chat": {"id": chat, "type": kind},
            "text": text,
        }

    def _sendChatAction(self, given: dict[str, str]) -> tuple[int, Any]:  # noqa: N802
        self.typing.append(int(given["chat_id"]))
        return 200, True


class _Http(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, address: tuple[str, int], telegram: TelegramServer) -> None:
        self.telegram = telegram
        super().__init__(address, _Call)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Call(BaseHTTPRequestHandler):
    server: _Http

    def do_POST(self) -> None:
        """Handle one call of the API."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        _, bot, method = self.path.split("/", 2)
        given = dict(parse_qsl(body, keep_blank_values=True))
        answer = self.server.telegram.call(bot.removeprefix("bot"), method, given)
        if answer is None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, result = answer
        content = json.dumps(result).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
