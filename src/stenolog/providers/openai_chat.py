"""A client for OpenAI-compatible servers: OpenAI, OpenRouter, Ollama, vLLM, llama.cpp.

A request is retried only if the caller has not received any part of the answer. A failure in the
middle of an answer is raised, because the first half cannot be withdrawn.
"""

import asyncio
import logging
import random
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from importlib.util import find_spec
from typing import Any, Final, NoReturn

from msgspec.structs import replace

from stenolog.errors import ModelRefused, ModelUnavailable, UsageError, install_command
from stenolog.providers.chat_model import Delta
from stenolog.providers.openai_protocol import (
    ChunkReader,
    ServerQuirks,
    advice_for,
    encode_request,
    make_request_body,
)
from stenolog.providers.request_errors import (
    Failure,
    RetryLimits,
    failure_of_response,
    is_temporary,
    seconds_to_wait,
)
from stenolog.tokens import message_tokens, tools_tokens

with suppress(ModuleNotFoundError):  # OpenAIChat reports a missing package with the pip command.
    import httpx2

OPENAI_URL: Final = "https://api.openai.com/v1"
LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
_CONNECT_TIMEOUT_SECONDS: Final = 10.0
_MAX_EVENT_SIZE: Final = 16 * 2**20
_MAX_ANSWER_SIZE: Final = 64 * 2**20
"""Maximum size of an answer: characters of a stream, or bytes of a JSON body."""
_EVENT_OVERHEAD: Final = 64
"""Characters counted for each event besides its data, so that empty events are limited, too."""
_MAX_ERROR_BYTES: Final = 64 * 2**10
"""Number of bytes of an error body that are read."""
_MIN_CHECKED_TOKENS: Final = 1_000
"""The reported prompt tokens are checked only if the estimate is above this number."""
_MIN_SECRET_LENGTH: Final = 8
"""Length from which the value of any extra header counts as a secret.

In error texts, a shorter secret is replaced only where it is a whole word.
"""
_SECRET_HEADER_NAME: Final = re.compile(r"auth|key|token|secret|cookie", re.IGNORECASE)
"""Pattern of header names whose value is a secret of any length."""
_END_WAIT_SECONDS: Final = 0.1
"""Seconds to wait, after a complete answer, for the end of the response.

The connection can be reused only if the response has ended.
"""
_logger = logging.getLogger("stenolog")


class OpenAIChat:
    """A ChatModel on an OpenAI-compatible server.

    `timeout`: maximum seconds between two pieces of an answer; `first_byte_timeout`: maximum
    seconds until the first piece, which may take long for a long prompt on a small machine.
    `retries`, `backoff`, `longest_wait`: see RetryLimits. `extra`: more fields of each request
    (`temperature` …). `key_name`: the source of the key, named in the error if the key is rejected.
    Raises UsageError if base_url, the key or a header is invalid, or httpx2 is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = OPENAI_URL,
        key: str = "",
        key_name: str = "",
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        timeout: float = 120.0,
        first_byte_timeout: float = 300.0,
        retries: int = 4,
        backoff: float = 0.5,
        longest_wait: float = 60.0,
        extra: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> None:
        if find_spec("httpx2") is None:
            raise UsageError(f"OpenAIChat needs the package httpx2: {install_command('app')}")
        self.model = model
        self.base_url = base_url
        self._url = _parse_url(base_url)
        self._key_name = key_name
        self._name = name or model
        self._timeout = timeout
        self._first_byte_timeout = first_byte_timeout
        self._retry_limits = RetryLimits(
            retries=retries,
            # A retry would only add to the load that makes a server on this machine slow.
            retries_after_silence=0 if self._url.host in LOOPBACK_HOSTS else 1,
            backoff=backoff,
            max_delay=longest_wait,
        )
        self._extra = dict(extra or {})
        self._quirks = ServerQuirks()
        self._headers = _make_headers(key.strip(), dict(headers))
        self._secrets = _make_secret_pattern(key.strip(), dict(headers))
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"OpenAIChat({self.model!r}, base_url={self.base_url!r})"

    @property
    def name(self) -> str:
        """Name for status lines: the model's name, unless `name` was given."""
        return self._name

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer; see ChatModel.

        Raises UsageError if JSON cannot represent the request.
        """
        request = self._extra | make_request_body(
            self.model, messages, tools=tools, schema=schema, max_tokens=max_tokens
        )
        attempts = 0
        while True:
            sent_request = self._quirks.apply_changes(request)
            has_yielded = False
            attempts += 1
            try:
                async with aclosing(self._send_once(encode_request(sent_request))) as deltas:
                    async for delta in deltas:
                        has_yielded = True
                        yield _without_implausible_usage(delta, sent_request)
            except Failure as error:
                # Copy the error, because its traceback would keep the request in memory.
                failure = Failure(
                    error.description, error.status, error.retry_after, silent=error.silent
                )
            else:
                return
            if has_yielded:
                self._give_up(failure, attempts)
            notice = self._quirks.learn_from(sent_request, failure)
            if notice is None:
                await self._wait_to_retry(failure, attempts)
                continue
            # Do not count this attempt: the error says how the request must change.
            attempts -= 1
            if notice:
                yield Delta(notice=notice)

    async def close(self) -> None:
        """Close connections. A second call does nothing."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _wait_to_retry(self, failure: Failure, attempts: int) -> None:
        seconds = seconds_to_wait(
            failure, self._retry_limits, attempts=attempts, random_fraction=random.random()
        )
        if seconds is None:
            self._give_up(failure, attempts)
        _logger.info("%s; retrying in %.1f s", self._describe_failure(failure), seconds)
        await asyncio.sleep(seconds)

    def _give_up(self, failure: Failure, attempts: int) -> NoReturn:
        message = self._describe_failure(failure)
        if not is_temporary(failure):
            raise ModelRefused(message)
        retry_hint = f"; Retry-After: {failure.retry_after}" if failure.retry_after else ""
        attempts_text = f" (after {attempts} tries)" if attempts > 1 else ""
        raise ModelUnavailable(f"{message}{retry_hint}{attempts_text}")

    def _describe_failure(self, failure: Failure) -> str:
        address = f"{self._url.scheme}://{self._url.netloc.decode('ascii')}{self._url.path}"
        message = f"{self.model} at {address} {failure.description}"
        advice = advice_for(failure, model=self.model, base_url=address, key_name=self._key_name)
        message = f"{message.rstrip('.')}. {advice}" if advice else message
        return self._secrets.sub("[key]", message)

    # --- one attempt -------------------------------------------------------------------------

    async def _send_once(self, body: bytes) -> AsyncGenerator[Delta, None]:
        """Send one request and stream its answer. Raises Failure for every failure."""
        reader = ChunkReader(new_id=lambda: f"call_{secrets.token_hex(8)}")
        deadline = asyncio.get_running_loop().time() + self._first_byte_timeout
        try:
            async with asyncio.timeout_at(deadline):
                client = self._open_client()
                url = self._url.copy_with(path=f"{self._url.path.rstrip('/')}/chat/completions")
                request = client.build_request("POST", url, content=body, headers=self._headers)
                response = await client.send(request, stream=True)
        except TimeoutError:
            description = _describe_silence(self._first_byte_timeout)
            raise Failure(description, silent=True) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise Failure(_describe_error("cannot be reached", error)) from error
        try:
            await self._check_status(response)
            content_type = response.headers.get("content-type", "").partition(";")[0]
            content_type = content_type.strip().lower()
            if content_type == "text/html":
                reason = "answered with a web page, so base_url is not the address of an API"
                raise Failure(reason, 404)
            if content_type.endswith("json") and "event" not in content_type:
                answer = await self._read_body(response, _MAX_ANSWER_SIZE, truncate=False)
                if (delta := reader.read_complete(answer)) is not None:
                    yield delta
            else:
                response.headers["content-type"] = "text/event-stream"
                async with aclosing(self._read_events(response, reader, deadline)) as deltas:
                    async for delta in deltas:
                        yield delta
            if (rest := reader.read_rest()) is not None:
                yield rest
        finally:
            await response.aclose()

    def _open_client(self) -> "httpx2.AsyncClient":
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the event loop that opened them.
            self._loop = loop
            self._client = httpx2.AsyncClient(
                timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_SECONDS),
                # Servers on this machine are reached without a proxy.
                trust_env=self._url.host not in LOOPBACK_HOSTS,
                # Loading certificates takes a tenth of a second, and plain HTTP does not need them.
                verify=self._url.scheme == "https",
            )
        return self._client

    async def _check_status(self, response: "httpx2.Response") -> None:
        """Raise Failure unless the status is a success."""
        status = response.status_code
        if 200 <= status < 300:
            return
        body = await self._read_body(response, _MAX_ERROR_BYTES, truncate=True)
        failure = failure_of_response(status, body)
        if 300 <= status < 400:
            location = str(response.headers.get("location", ""))[:500]
            failure = Failure(f"answered {status}, so base_url has moved to {location!r}", 400)
        failure.retry_after = str(response.headers.get("retry-after", ""))[:100]
        raise failure

    async def _read_events(
        self, response: "httpx2.Response", reader: ChunkReader, deadline: float
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of an event stream. The first delta must arrive before `deadline`."""
        events = aiter(httpx2.EventSource(response, max_event_size=_MAX_EVENT_SIZE))
        loop = asyncio.get_running_loop()
        timeout, size = self._first_byte_timeout, 0
        while not reader.done:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await anext(events)
            except StopAsyncIteration:
                break
            except (TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                if reader.finished:
                    # The answer is complete; only the usage may be missing.
                    return
                is_silent = isinstance(error, TimeoutError)
                description = _describe_error("broke off", error)
                reason = _describe_silence(timeout) if is_silent else description
                raise Failure(f"{reason}: the answer is incomplete", silent=is_silent) from error
            size += len(event.data) + _EVENT_OVERHEAD
            if size > _MAX_ANSWER_SIZE:
                raise Failure("sent more data than an answer can have", 400)
            delta = reader.read_event(event.data)
            if delta is not None:
                yield delta
                # The timeout for the next piece starts when the caller has processed this piece.
                deadline, timeout = loop.time() + self._timeout, self._timeout
        if not reader.done and not reader.finished:
            raise Failure("broke off in the middle: the answer is incomplete")
        await _read_rest(events)

    async def _read_body(
        self, response: "httpx2.Response", max_bytes: int, *, truncate: bool
    ) -> str:
        """Return the body as text.

        With `truncate`, a body that breaks off or is longer than `max_bytes` is cut. Without
        `truncate`, Failure is raised instead.
        """
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._first_byte_timeout),
                aclosing(response.aiter_bytes()) as pieces,
            ):
                async for piece in pieces:
                    body += piece
                    if len(body) > max_bytes:
                        break
        except (TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            if not truncate:
                is_silent = isinstance(error, TimeoutError)
                reason = _describe_error("broke off", error)
                raise Failure(reason, silent=is_silent) from error
        if len(body) > max_bytes and not truncate:
            raise Failure("sent more data than an answer can have", 400)
        return body[:max_bytes].decode("utf-8", "replace")


class OllamaChat(OpenAIChat):
    """A ChatModel on an Ollama server with a known context size."""

    def __init__(self, model: str, *, context: int, **options: Any) -> None:
        super().__init__(model, **options)
        self.context = context


def _parse_url(base_url: str) -> "httpx2.URL":
    try:
        url = httpx2.URL(base_url)
    except (httpx2.InvalidURL, TypeError, ValueError):
        raise UsageError(f"base_url is not a URL: {base_url!r}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"base_url must start with http:// or https://, not {base_url!r}")
    if url.userinfo:
        raise UsageError("base_url must not contain a user name or password; pass a header instead")
    return url


def _make_headers(key: str, extra_headers: Mapping[str, str]) -> dict[str, str]:
    headers = {"Accept": "text/event-stream, application/json", **extra_headers}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        # Check the value here, because the HTTP library's error would contain the value.
        if not value.isascii() or not value.isprintable():
            subject = "the key" if value.endswith(key) and key else f"the header {name!r}"
            raise UsageError(f"{subject} contains characters that HTTP headers do not allow")
    return headers | {"Content-Type": "application/json"}


def _make_secret_pattern(key: str, headers: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern for texts that errors must not contain: the key, and secrets in headers."""
    secret_texts = {key}
    for name, value in headers.items():
        if _SECRET_HEADER_NAME.search(name):
            # The server may quote the secret without a scheme such as `Bearer`.
            secret_texts |= {value, value.split()[-1] if value.strip() else ""}
        elif len(value) >= _MIN_SECRET_LENGTH:
            secret_texts.add(value)
    # A short secret matches only whole words, so that other parts of the message stay intact.
    patterns = [
        re.escape(text) if len(text) >= _MIN_SECRET_LENGTH else rf"(?<!\w){re.escape(text)}(?!\w)"
        for text in sorted(secret_texts - {""}, key=len, reverse=True)
    ]
    return re.compile("|".join(patterns) or "(?!)")


def _without_implausible_usage(delta: Delta, sent_request: Mapping[str, Any]) -> Delta:
    """Return the delta with a prompt count of 0 if the reported count is implausible."""
    usage = delta.usage
    if usage is None or not usage.prompt:
        return delta
    estimate = sum(map(message_tokens, sent_request["messages"])) + tools_tokens(
        sent_request.get("tools") or ()
    )
    if estimate <= _MIN_CHECKED_TOKENS or 2 * usage.prompt >= estimate:
        return delta
    # The server has truncated the prompt, or reports only tokens that it had not cached.
    # If this count were believed, later requests could exceed the model's context.
    return replace(delta, usage=replace(usage, prompt=0, cached=0))


def _describe_silence(seconds: float) -> str:
    return f"was silent for {seconds:g} s"


def _describe_error(description: str, error: Exception) -> str:
    message = str(error).strip()
    return f"{description} ({type(error).__name__}{': ' + message if message else ''})"


async def _read_rest(events: "AsyncIterator[httpx2.ServerSentEvent]") -> None:
    """Read the rest of the response, if it ends soon."""
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError):
        async with asyncio.timeout(_END_WAIT_SECONDS):
            async for _ in events:
                pass
