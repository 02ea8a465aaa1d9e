"""A scripted model with an HTTP API, for tests, docs and the demo: no network, no API key.

The server rejects requests that a strict provider would reject, records all requests, and can
simulate failures. `python -m stenolog.testing.model_server` starts a server and prints the
server's address as one line.
"""

import argparse
import hmac
import json
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

import msgspec
from msgspec import Struct

from stenolog.providers.chat_model import Delta, Usage
from stenolog.testing.model_server_errors import find_fault
from stenolog.testing.scripted_model import (
    ScriptedMessage,
    answer_by_rule,
    as_message,
    estimated_usage,
    split_message,
)

MODEL: Final = "scripted"
_MAX_BODY_BYTES: Final = 64 * 2**20
_STALL_SECONDS: Final = 3_600.0
"""Maximum time that `stall_after` keeps a connection open."""


class ScriptedResponse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of the model server for one request. The fields can be combined.

    Times are in seconds; pieces are the chunks of a streamed answer.
    """

    status: int = 200
    """HTTP status; any status other than 200 is sent as an error."""
    body: str | None = None
    """Body to send instead of the default error; with status 200, instead of the answer.

    With the content type `text/event-stream`, the body can be any broken stream.
    """
    content_type: str = "application/json"
    """Content type of `body`."""
    retry_after: str = ""
    """Value of the header `Retry-After`; empty: no header."""
    first_byte: float = 0.0
    """Delay before the first byte of the response."""
    first_piece: float = 0.0
    """Delay between the headers and the first piece."""
    pause: float = 0.0
    """Delay between two pieces."""
    stall_after: int | None = None
    """Stop sending after this many pieces, and keep the connection open."""
    cut_after: int | None = None
    """Close the connection after this many pieces, like a server that crashes."""
    answer: dict[str, Any] | str | None = None
    """Answer to send; None: the `answer` function of the server makes the answer."""


_NORMAL_RESPONSE: Final = ScriptedResponse()


class ModelServer:
    """A model server on this machine, which runs until it is closed.

    `answer`: a function that returns the answer to a request. `responses`: behaviour for the first
    requests, one value per request. Later requests are answered normally. `pause`: seconds between
    two pieces of an answer, unless its response sets a pause. `context`: maximum estimated tokens
    of a request. `key`: the required API key. `rejected_fields`: request fields that the server
    rejects as unknown. Thread-safe.
    """

    def __init__(
        self,
        answer: Callable[[Mapping[str, Any]], ScriptedMessage] = answer_by_rule,
        *,
        responses: Iterable[ScriptedResponse] = (),
        context: int | None = None,
        pause: float = 0.0,
        key: str = "",
        rejected_fields: Iterable[str] = (),
        port: int = 0,
        max_requests: int = 1_000,
    ) -> None:
        self._answer = answer
        self._responses = deque(responses)
        self._context = context
        self._pause = pause
        self._key = key
        self._rejected_fields = frozenset(rejected_fields)
        self._lock = threading.Condition()
        self._requests: deque[dict[str, Any]] = deque(maxlen=max_requests)
        self._faults: deque[str] = deque(maxlen=max_requests)
        self._counts = {"asked": 0, "refused": 0, "left": 0}
        self._closing = threading.Event()
        self._http = _HttpServer(("127.0.0.1", port), self)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="model server"
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Address for `base_url`."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The last `max_requests` requests, oldest first, including rejected requests."""
        with self._lock:
            return list(self._requests)

    @property
    def request_faults(self) -> list[str]:
        """The last `max_requests` faults for which requests were rejected, oldest first."""
        with self._lock:
            return list(self._faults)

    @property
    def request_count(self) -> int:
        """Number of requests, including requests that are no longer in `requests`."""
        return self._counts["asked"]

    @property
    def rejected_count(self) -> int:
        """Number of requests that were rejected with status 400 because they had a fault.

        Scripted errors are not counted.
        """
        return self._counts["refused"]

    @property
    def disconnect_count(self) -> int:
        """Number of clients that disconnected during a request or an answer."""
        return self._counts["left"]

    def respond(self, *responses: ScriptedResponse) -> None:
        """Add scripted behaviour for the next requests, one value per request."""
        with self._lock:
            self._responses.extend(responses)

    def wait_until(self, condition: Callable[[], bool], *, timeout: float = 10.0) -> bool:
        """Wait until `condition()` is true; return False on timeout.

        The condition is checked whenever a counter changes.
        """
        with self._lock:
            return self._lock.wait_for(condition, timeout)

    def close(self) -> None:
        """End all answers and stop. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._http.shutdown()
        self._thread.join()
        self._http.end_connections()
        self._http.server_close()

    # --- called by the threads that handle requests ------------------------------------------

    def count(self, name: str) -> None:
        """Increment a counter."""
        with self._lock:
            self._counts[name] += 1
            self._lock.notify_all()

    def record_fault(self, fault: str) -> None:
        """Record the fault for which a request is rejected."""
        with self._lock:
            self._faults.append(fault)
        self.count("refused")

    def record_request(self, request: Any) -> ScriptedResponse:
        """Record a request, and return the scripted behaviour for the request."""
        with self._lock:
            self._requests.append(request)
            response = self._responses.popleft() if self._responses else _NORMAL_RESPONSE
        self.count("asked")
        if self._pause and not response.pause:
            return msgspec.structs.replace(response, pause=self._pause)
        return response

    def find_fault(self, request: Any) -> str | None:
        """Return the fault that a strict provider would report for a request, or None."""
        field_names = set(request) if isinstance(request, Mapping) else set()
        if rejected := sorted(self._rejected_fields & field_names):
            return f"Unrecognized request argument supplied: {rejected[0]}"
        return find_fault(request)

    def overflow_error(self, request: Mapping[str, Any]) -> str | None:
        """Return the error for a request with too many tokens, or None."""
        prompt_tokens = estimated_usage(request["messages"], request.get("tools") or (), {}).prompt
        if self._context is None or prompt_tokens <= self._context:
            return None
        return (
            f"This model's maximum context length is {self._context} tokens. However, your "
            f"messages resulted in {prompt_tokens} tokens. Please reduce their length."
        )

    def make_answer(self, request: Mapping[str, Any], response: ScriptedResponse) -> dict[str, Any]:
        """Return the answer as an assistant message."""
        return as_message(self._answer(request) if response.answer is None else response.answer)

    def is_allowed(self, authorization: str) -> bool:
        """Return whether an `Authorization` header has the API key, if a key is required."""
        # Compare bytes, because compare_digest rejects texts that are not ASCII.
        expected_header = f"Bearer {self._key}".encode()
        return not self._key or hmac.compare_digest(authorization.encode(), expected_header)

    def is_closing(self) -> bool:
        """Return whether the server is closing, so that all answers must end."""
        return self._closing.is_set()


class _Disconnected(Exception):
    """The client has disconnected, or the script ended the connection."""


class _HttpServer(ThreadingHTTPServer):
    # `close` waits for the threads, so that no thread is left running.
    daemon_threads = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], model: ModelServer) -> None:
        self.model = model
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        try:
            if self.model.is_closing():
                # The connection may have been opened after `end_connections` ran.
                self.shutdown_request(request)
            else:
                super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.discard(request)

    def end_connections(self) -> None:
        """Shut down all connections, which ends the threads that wait for another request."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the current error, unless the client has disconnected."""
        if not isinstance(sys.exception(), _Disconnected | ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Connection(BaseHTTPRequestHandler):
    """The handler of the requests on one connection."""

    protocol_version = "HTTP/1.1"
    server: _HttpServer
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:  # name required by the library
        """Send the list of models."""
        if self.path.rstrip("/") == "/v1/models":
            self._send(200, json.dumps(_MODELS))
        else:
            self._send(404, _error_body(f"Invalid URL (GET {self.path})"))

    def do_POST(self) -> None:  # name required by the library
        """Send the model's answer to a chat request."""
        content_length = self.headers.get("Content-Length", "")
        if not content_length.isdigit() or int(content_length) > _MAX_BODY_BYTES:
            self.close_connection = True
            self._send(413, _error_body("Request entity too large"))
            return
        body = self.rfile.read(int(content_length))
        if len(body) < int(content_length):
            # The client disconnected while sending, which does not count as a rejected request.
            self.close_connection = True
            self.server.model.count("left")
            return
        if self.path.partition("?")[0].rstrip("/") != "/v1/chat/completions":
            self._send(404, _error_body(f"Invalid URL (POST {self.path})"))
            return
        try:
            self._answer_chat(body)
        except (_Disconnected, ConnectionError, TimeoutError):
            self.close_connection = True

    def _answer_chat(self, body: bytes) -> None:
        model = self.server.model
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None
        response = model.record_request(request)
        self._wait(response.first_byte)
        if not model.is_allowed(self.headers.get("Authorization", "")):
            self._send(401, _error_body("Incorrect API key provided.", code="invalid_api_key"))
            return
        # Requests are checked even if the scripted response is an error.
        if (fault := model.find_fault(request)) is not None:
            model.record_fault(fault)
            self._send(400, _error_body(fault))
        elif (overflow := model.overflow_error(request)) is not None:
            self._send(400, _error_body(overflow, code="context_length_exceeded"))
        elif response.status != 200 or response.body is not None:
            default_body = _error_body(_DEFAULT_ERRORS.get(response.status, "Error"))
            body_text = default_body if response.body is None else response.body
            self._send(
                response.status,
                body_text,
                content_type=response.content_type,
                retry_after=response.retry_after,
            )
        else:
            self._send_answer(request, response)

    def _send_answer(self, request: Mapping[str, Any], response: ScriptedResponse) -> None:
        message = self.server.model.make_answer(request, response)
        usage = estimated_usage(request["messages"], request.get("tools") or (), message)
        if not request.get("stream"):
            self._send(200, json.dumps(_completion(request, message, usage)))
            return
        stream_options = request.get("stream_options") or {}
        sent_usage = usage if stream_options.get("include_usage") else None
        self._stream_answer(request, response, message, sent_usage)

    def _stream_answer(
        self,
        request: Mapping[str, Any],
        response: ScriptedResponse,
        message: Mapping[str, Any],
        usage: Usage | None,
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._wait(response.first_piece)
        chunks = [_chunk(request, [choice]) for choice in _streamed_choices(message)]
        pieces = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
        if usage is not None:
            pieces.append(json.dumps({**_chunk(request, []), "usage": _usage_body(usage)}))
        for sent_count, piece in enumerate([*pieces, "[DONE]"]):
            if sent_count == response.stall_after:
                self._wait(_STALL_SECONDS)
            if sent_count == response.cut_after:
                raise _Disconnected
            self._wait(response.pause if 0 < sent_count < len(chunks) else 0.0)
            self._send_event(piece)
        self._write(b"0\r\n\r\n")

    # --- bytes -------------------------------------------------------------------------------

    def _send(
        self,
        status: int,
        body: str,
        *,
        content_type: str = "application/json",
        retry_after: str = "",
    ) -> None:
        body_bytes = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body_bytes)))
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self._write(body_bytes)

    def _send_event(self, data: str) -> None:
        event = "".join(f"data: {line}\n" for line in data.split("\n")) + "\n"
        event_bytes = event.encode()
        self._write(f"{len(event_bytes):x}\r\n".encode() + event_bytes + b"\r\n")

    def _write(self, data: bytes) -> None:
        try:
            self.wfile.write(data)
        except OSError:
            self.server.model.count("left")
            raise _Disconnected from None

    def _wait(self, seconds: float) -> None:
        """Wait `seconds`. Raises _Disconnected if the client disconnects or the server closes."""
        deadline = time.monotonic() + seconds
        while (seconds_left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self.connection], [], [], min(seconds_left, 0.05))
            if self.server.model.is_closing():
                raise _Disconnected
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.server.model.count("left")
                raise _Disconnected
            if readable:
                # The next request has arrived, so `select` returns at once: sleep instead.
                time.sleep(min(seconds_left, 0.01))


_MODELS: Final = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "owned_by": "script"}],
}
_DEFAULT_ERRORS: Final = {
    429: "Rate limit reached for requests. Please try again later.",
    500: "The server had an error while processing your request. Sorry about that!",
    502: "Bad gateway",
    503: "The engine is currently overloaded, please try again later",
}


def _error_body(message: str, *, code: str | None = None) -> str:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json.dumps({"error": error})


def _response_fields(request: Mapping[str, Any], object_type: str) -> dict[str, Any]:
    model = request.get("model")
    return {
        "id": "chatcmpl-script",
        "object": object_type,
        "created": int(time.time()),
        "model": model,
    }


def _chunk(request: Mapping[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {**_response_fields(request, "chat.completion.chunk"), "choices": choices}


def _completion(
    request: Mapping[str, Any], message: Mapping[str, Any], usage: Usage
) -> dict[str, Any]:
    finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    fields = _response_fields(request, "chat.completion")
    return {**fields, "choices": [choice], "usage": _usage_body(usage)}


def _usage_body(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.answer,
        "total_tokens": usage.prompt + usage.answer,
    }


def _streamed_choices(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of a message, each as an element of `choices` in one chunk."""
    yield _choice({"role": "assistant", "content": ""})
    for delta in split_message(message):
        yield _choice({} if delta.finish else _delta_body(delta), finish=delta.finish or None)


def _choice(delta: Mapping[str, Any], *, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def _delta_body(delta: Delta) -> dict[str, Any]:
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    if delta.details:
        return {"reasoning_details": list(delta.details)}
    if not delta.calls:
        return {"content": delta.text}
    call = delta.calls[0]
    id_fields = {"id": call.id, "type": "function"} if call.id else {}
    name_field = {"name": call.name} if call.name else {}
    function = {**name_field, "arguments": call.arguments}
    return {"tool_calls": [{"index": call.index, **call.extra, **id_fields, "function": function}]}


def main(arguments: list[str] | None = None) -> None:
    """Run a server until SIGTERM or Ctrl-C. The first printed line is the server's address."""
    response_fields = ", ".join(ScriptedResponse.__struct_fields__)
    parser = argparse.ArgumentParser(
        prog="python -m stenolog.testing.model_server",
        description="A scripted model behind HTTP; the first line that it prints is its address.",
        epilog=f"Fields of --response: {response_fields}.",
    )
    add_option = parser.add_argument
    add_option("--port", type=int, default=0, help="port to listen on [default: any free port]")
    add_option(
        "--context", type=int, help="maximum tokens of a request; longer requests get an error"
    )
    add_option("--pause", type=float, default=0.0, help="seconds between two pieces of an answer")
    add_option("--key", default="", help="API key that requests must have")
    add_option(
        "--response", action="append", default=[], help="behaviour for the next request, as JSON"
    )
    options = vars(parser.parse_args(arguments))
    try:
        responses = [
            msgspec.json.decode(response, type=ScriptedResponse)
            for response in options.pop("response")
        ]
    except msgspec.DecodeError as error:
        parser.error(f"--response takes a JSON object, as in '{{\"pause\": 0.5}}': {error}")
    # Block the signals before the server's threads start, so that only `sigwait` receives them.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with ModelServer(responses=responses, **options) as server:
        print(server.url, flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
