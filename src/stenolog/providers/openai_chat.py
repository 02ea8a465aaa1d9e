"""A client for OpenAI-compatible servers: OpenAI, OpenRouter, Ollama, vLLM, llama.cpp.

A request is retried as long as no part of its answer was passed on. After that, a failure is raised
to the reader, because half an answer cannot be withdrawn.
"""

import asyncio
import logging
import random
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, Self

import httpx2
from msgspec.structs import replace

from stenolog.errors import ModelRefused, ModelUnavailable, UsageError
from stenolog.providers.chat_model import Delta
from stenolog.providers.request_errors import (
    Failure,
    RequestError,
    RetryLimits,
    failure_of_response,
    is_temporary,
    seconds_to_wait,
)
from stenolog.providers.server_quirks import ServerQuirks, advice_for, encode_request, request_body
from stenolog.providers.stream_parser import ChunkReader
from stenolog.tokens import message_tokens, tools_tokens

OPENAI: Final = "https://api.openai.com/v1"
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
_CONNECT: Final = 10.0
_MAX_EVENT: Final = 16 * 2**20
_MAX_ANSWER: Final = 64 * 2**20
_EVENT_OVERHEAD: Final = 64
"""Characters counted for each event besides its data."""
_MAX_ERROR: Final = 64 * 2**10
_MIN_CHECKED_TOKENS: Final = 1_000
"""Tokens above which a reported prompt count is compared with the estimate."""
_MIN_SECRET: Final = 8
"""Minimum length of a header value that is treated as a secret, and replaced inside of words."""
_SECRET: Final = re.compile(r"auth|key|token|secret|cookie", re.IGNORECASE)
"""Names of headers whose value is a secret, whatever its length."""
_END_TIMEOUT: Final = 0.1
"""Seconds to wait for the end of the response after the last event, so that the connection can be
reused."""
_logger = logging.getLogger("stenolog")


class OpenAIChat:
    """A ChatModel on an OpenAI-compatible server.

    `timeout`: maximum seconds between two pieces of an answer; `first_byte_timeout`: maximum
    seconds until the first piece, which may take long for a long prompt on a small machine.
    `extra`: more fields of each request (`temperature` …). `key_name`: the source of the key, named
    in the error if the key is rejected. Raises UsageError for an invalid base_url or key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = OPENAI,
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
        self.model = model
        self.base_url = base_url
        self._url = _check_url(base_url)
        self._key_name = key_name
        self._name = name or model
        self._timeout = timeout
        self._first_byte_timeout = first_byte_timeout
        self._patience = RetryLimits(
            retries=retries,
            # On this machine a retry would only add to the load that makes the server slow.
            after_silence=0 if self._url.host in LOOPBACK else 1,
            backoff=backoff,
            longest=longest_wait,
        )
        self._extra = dict(extra or {})
        self._fallbacks = ServerQuirks()
        self._headers = _headers(key.strip(), dict(headers))
        self._secrets = _secrets(key.strip(), dict(headers))
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
        wanted = request_body(
            self.model, messages, tools=tools, schema=schema, max_tokens=max_tokens
        )
        wanted = {**self._extra, **wanted}
        tried = 0
        while True:
            sent = self._fallbacks.applied(wanted)
            yielded = False
            tried += 1
            try:
                async with aclosing(self._try(encode_request(sent))) as deltas:
                    async for delta in deltas:
                        yielded = True
                        yield _without_implausible_usage(delta, sent)
            except RequestError as trouble:
                failure = trouble.failure
            else:
                return
            if yielded:
                self._give_up(failure, tried)
            learnt = self._fallbacks.learn(sent, failure)
            if learnt is not None:
                # Not a failed attempt: the error says how the request must change.
                tried -= 1
                if learnt:
                    yield Delta(notice=learnt)
                continue
            await self._wait(failure, tried)

    async def close(self) -> None:
        """Close connections. A second call does nothing."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _wait(self, failure: Failure, tried: int) -> None:
        now = datetime.now(UTC)
        seconds = seconds_to_wait(
            failure, self._patience, tried=tried, now=now, chance=random.random()
        )
        if seconds is None:
            self._give_up(failure, tried)
        _logger.info("%s; retrying in %.1f s", self._told(failure), seconds)
        await asyncio.sleep(seconds)

    def _give_up(self, failure: Failure, tried: int) -> NoReturn:
        said = self._told(failure)
        if not is_temporary(failure):
            raise ModelRefused(said)
        later = f"; Retry-After: {failure.retry_after}" if failure.retry_after else ""
        times = f" (after {tried} tries)" if tried > 1 else ""
        raise ModelUnavailable(f"{said}{later}{times}")

    def _told(self, failure: Failure) -> str:
        where = f"{self._url.scheme}://{self._url.netloc.decode('ascii')}{self._url.path}"
        said = f"{self.model} at {where} {failure.what}"
        advice = advice_for(failure, model=self.model, base_url=where, key_name=self._key_name)
        said = f"{said.rstrip('.')}. {advice}" if advice else said
        return self._secrets.sub("[key]", said)  # guard: model-error-redacted

    # --- one try -----------------------------------------------------------------------------

    async def _try(self, body: bytes) -> AsyncGenerator[Delta, None]:
        """Send one request and stream its answer. Raises RequestError for every failure."""
        reader = ChunkReader(new_id=lambda: f"call_{secrets.token_hex(8)}")
        begins = asyncio.get_running_loop().time() + self._first_byte_timeout
        try:
            async with asyncio.timeout_at(begins):
                response = await self._send(body)
        except TimeoutError:
            raise RequestError(Failure(_silence(self._first_byte_timeout), silent=True)) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise RequestError(Failure(_connection_failure("cannot be reached", error))) from error
        try:
            await self._check(response)
            async with aclosing(self._deltas(response, reader, begins)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            await response.aclose()

    async def _send(self, body: bytes) -> httpx2.Response:
        client = self._open_client()
        path = f"{self._url.path.rstrip('/')}/chat/completions"
        request = client.build_request(
            "POST", self._url.copy_with(path=path), content=body, headers=self._headers
        )
        return await client.send(request, stream=True)

    def _open_client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the event loop that opened them.
            self._loop = loop
            self._client = httpx2.AsyncClient(
                timeout=httpx2.Timeout(None, connect=_CONNECT),
                # Servers on this machine are reached without a proxy.
                trust_env=self._url.host not in LOOPBACK,
                # Loading certificates takes a tenth of a second, and plain HTTP does not need them.
                verify=self._url.scheme == "https",
            )
        return self._client

    async def _check(self, response: httpx2.Response) -> None:
        """Raise RequestError unless the status is a success."""
        status = response.status_code
        if 200 <= status < 300:
            return
        failure = failure_of_response(status, await self._body(response, _MAX_ERROR, cut=True))
        if 300 <= status < 400:
            other = str(response.headers.get("location", ""))[:500]
            failure = Failure(f"answered {status}, so base_url has moved to {other!r}", 400)
        later = str(response.headers.get("retry-after", ""))[:100]
        raise RequestError(Failure(failure.what, failure.status, later))

    async def _deltas(
        self, response: httpx2.Response, reader: ChunkReader, begins: float
    ) -> AsyncGenerator[Delta, None]:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/html":
            raise RequestError(
                Failure("answered with a web page, so base_url is not the address of an API", 404)
            )
        if kind.endswith("json") and "event" not in kind:
            delta = reader.whole(await self._body(response, _MAX_ANSWER, cut=False))
        else:
            response.headers["content-type"] = "text/event-stream"
            async with aclosing(self._streamed(response, reader, begins)) as deltas:
                async for delta in deltas:
                    yield delta
            delta = None
        for last in (delta, reader.rest()):
            if last is not None:
                yield last

    async def _streamed(
        self, response: httpx2.Response, reader: ChunkReader, begins: float
    ) -> AsyncGenerator[Delta, None]:
        events = aiter(httpx2.EventSource(response, max_event_size=_MAX_EVENT))
        loop = asyncio.get_running_loop()
        until, seconds, size = begins, self._first_byte_timeout, 0
        while not reader.done:
            try:
                async with asyncio.timeout_at(until):
                    event = await anext(events)
            except StopAsyncIteration:
                break
            except (TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
                if reader.finished:
                    # The answer is complete; only the usage may be missing.
                    return
                silent = isinstance(error, TimeoutError)
                what = _silence(seconds) if silent else _connection_failure("broke off", error)
                raise RequestError(
                    Failure(f"{what}: the answer is incomplete", silent=silent)
                ) from error
            # Events without data count, too.
            size += len(event.data) + _EVENT_OVERHEAD
            if size > _MAX_ANSWER:
                raise RequestError(Failure("sent more data than an answer can have", 400))
            delta = reader.read(event.data)
            if delta is not None:
                yield delta
                # The timeout starts after the reader has processed the piece.
                until, seconds = loop.time() + self._timeout, self._timeout
        if not reader.done and not reader.finished:
            raise RequestError(Failure("broke off in the middle: the answer is incomplete"))
        await _read_rest(events)

    async def _body(self, response: httpx2.Response, most: int, *, cut: bool) -> str:
        """Return at most `most` bytes of the body as text. Raises RequestError."""
        read = bytearray()
        try:
            async with (
                asyncio.timeout(self._first_byte_timeout),
                aclosing(response.aiter_bytes()) as pieces,
            ):
                async for piece in pieces:
                    read += piece
                    if len(read) > most:
                        break
        except (TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            if not cut:
                silent = isinstance(error, TimeoutError)
                raise RequestError(
                    Failure(_connection_failure("broke off", error), silent=silent)
                ) from error
        if len(read) > most and not cut:
            raise RequestError(Failure("sent more data than an answer can have", 400))
        return read[:most].decode("utf-8", "replace")


class OllamaChat(OpenAIChat):
    """A ChatModel on an Ollama, of which is known how many tokens it sees."""

    def __init__(self, model: str, *, context: int, **options: Any) -> None:
        super().__init__(model, **options)
        self.context = context


def _check_url(base_url: str) -> httpx2.URL:
    try:
        url = httpx2.URL(base_url)
    except (httpx2.InvalidURL, TypeError, ValueError):
        raise UsageError(f"base_url is not a URL: {base_url!r}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"base_url must start with http:// or https://, not {base_url!r}")
    if url.userinfo:
        raise UsageError("base_url must not contain a user name or password; pass a header instead")
    return url


def _headers(key: str, further: Mapping[str, str]) -> dict[str, str]:
    headers = {"Accept": "text/event-stream, application/json", **further}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        # The HTTP library would include the complete value in its error.
        if not value.isascii() or not value.isprintable():
            what = "the key" if value.endswith(key) and key else f"the header {name!r}"
            raise UsageError(f"{what} contains characters that HTTP headers do not allow")
    return headers | {"Content-Type": "application/json"}


def _secrets(key: str, headers: Mapping[str, str]) -> re.Pattern[str]:
    """Return a pattern for texts that errors must not contain: the key, and secrets in headers."""
    found = {key}
    for name, value in headers.items():
        if _SECRET.search(name):
            # The server may quote the secret without a scheme such as `Bearer`.
            found |= {value, value.split()[-1] if value.strip() else ""}
        elif len(value) >= _MIN_SECRET:
            found.add(value)
    # A short secret matches only whole words, so that other parts of the message stay intact.
    told = [
        re.escape(one) if len(one) >= _MIN_SECRET else rf"(?<!\w){re.escape(one)}(?!\w)"
        for one in sorted(found, key=len, reverse=True)
        if one
    ]
    return re.compile("|".join(told) or "(?!)")


def _without_implausible_usage(delta: Delta, sent: Mapping[str, Any]) -> Delta:
    """Return the delta without an implausible prompt count."""
    usage = delta.usage
    if usage is None or not usage.prompt:
        return delta
    expected = sum(map(message_tokens, sent["messages"])) + tools_tokens(sent.get("tools") or ())
    if expected <= _MIN_CHECKED_TOKENS or 2 * usage.prompt >= expected:
        return delta
    # The server has truncated the prompt, or reports only tokens that it had not cached. Used as
    # the size of the request, the count would let later requests exceed the model's context.
    return replace(delta, usage=replace(usage, prompt=0, cached=0))


def _silence(seconds: float) -> str:
    return f"was silent for {seconds:g} s"


def _connection_failure(what: str, error: Exception) -> str:
    said = str(error).strip()
    return f"{what} ({type(error).__name__}{': ' + said if said else ''})"


async def _read_rest(events: AsyncIterator[httpx2.ServerSentEvent]) -> None:
    """Read the rest of the response, if it ends soon."""
    try:
        async with asyncio.timeout(_END_TIMEOUT):
            async for _ in events:
                pass
    except (TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError):
        pass
