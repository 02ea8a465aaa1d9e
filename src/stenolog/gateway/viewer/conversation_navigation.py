"""Outline of prompts and search in one session, for an open conversation page."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.searchable_text import text_of
from stenolog.errors import UsageError
from stenolog.gateway.api_types import MAX_SEQ, AgentQuery, json_response
from stenolog.gateway.requests import ApiCall, parse_query
from stenolog.gateway.viewer.pages import CATALOG_WAIT, page
from stenolog.gateway.viewer.session_outline import MAX_STEP, Turn, all_messages, read_outline
from stenolog.messages import ThinkingPart, read_message
from stenolog.records import Message, SessionInfo
from stenolog.stores import spans

WINDOW: Final = 100
"""Number of turns in one part of the outline."""
MAX_FOUND: Final = 10_000
"""Maximum number of messages that a search returns."""
_MAX_CATALOG_HITS: Final = 200
_MAX_SECONDS: Final = 5.0
"""Seconds after which a search returns what it has found."""


class OutlineQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of a part of the outline: one of these positions, otherwise the end."""

    at: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    """Seq of a message."""
    turn: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    """Number of a turn, from 1."""
    date: Annotated[str, Meta(max_length=40)] = ""
    """A time in ISO format. Selects the first turn at this time or later."""
    start: Annotated[int, Meta(ge=0, le=MAX_SEQ)] | None = None
    """Index of the first turn of the part."""


class OutlinePart(Struct, frozen=True, kw_only=True):
    """Consecutive turns of a session."""

    turns: Sequence[Turn]
    start: int
    """Index of the first of them."""
    count: int
    """Number of turns of the session, as far as it has been read."""
    target: int
    """Seq of the prompt at the requested position; 0 if the session has no prompts."""
    number: int
    """Number of that turn, from 1."""
    failed: int
    """Number of turns with a failed tool."""
    cost: float | None
    complete: bool
    """Whether all messages have been read. If not, the next request continues."""


class FindQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of a search in one session."""

    q: Annotated[str, Meta(max_length=1_000)] = ""


class Found(Struct, frozen=True, kw_only=True):
    """Result of a search in one session."""

    seqs: Sequence[int]
    """Messages that contain all words, in order, including hidden ones."""
    words: Sequence[str]
    """Words to mark in these messages."""
    complete: bool
    """Whether the whole session was searched."""


async def outline(request: Request) -> Response:
    """Serve a part of the outline."""
    call = parse_query(request, OutlineQuery)
    info, part = await call.gateway.loop.run(_load_outline, call.agent, call.key, call.query)
    return page("outline.html", info=info, part=part, agent=call.query.agent)


async def find(request: Request) -> Response:
    """Return the messages of a session that contain all words of a query."""
    call = parse_query(request, FindQuery)
    found = await call.gateway.loop.run(_search, call.agent, call.key, call.query.q)
    if found.complete and found.words and not found.seqs:
        found = await _search_catalog(call) or found
    return json_response(found)


# --- outline ---------------------------------------------------------------------------------


def _load_outline(
    agent: AgentInstance, key: str, query: OutlineQuery
) -> tuple[SessionInfo, OutlinePart]:
    store = agent.store
    info = store.info(agent.resolve_key(key))
    moment = _moment(query.date)
    # A jump needs all messages; the outline of an open page is read in steps.
    whole = bool(query.turn or moment is not None)
    found = read_outline(store, info, limit=None if whole else MAX_STEP)
    turns = found.turns
    if query.turn:
        place = min(query.turn, len(turns)) - 1
    elif moment is not None:
        place = found.turn_since(moment)
    elif query.at:
        place = found.turn_at(query.at)
    else:
        place = len(turns) - 1
    place = max(0, place)
    start = query.start
    if start is None:
        start = max(0, min(place - WINDOW // 2, len(turns) - WINDOW))
    totals = found.totals()
    return info, OutlinePart(
        turns=[_with_visibility(one, info) for one in turns[start : start + WINDOW]],
        start=start,
        count=len(turns),
        target=turns[place].seq if turns else 0,
        number=place + 1 if turns else 0,
        failed=totals.failed,
        cost=totals.cost,
        complete=found.last_seq >= info.last_seq,
    )


def _with_visibility(turn: Turn, info: SessionInfo) -> Turn:
    """Update whether the prompt is hidden: the cached value may be old."""
    turn.hidden = not spans.contains(info.in_sight, turn.seq)
    return turn


def _moment(text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"date={text!r} is not a time in ISO format") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# --- search ----------------------------------------------------------------------------------

_WORD: Final = re.compile(r'"([^"]+)"|(\S+)')
_ESCAPED: Final = re.compile(r'["\\/\x00-\x1f]')
"""Characters that JSON may contain in another form."""


def query_words(text: str) -> list[str]:
    """Return the words and quoted phrases of a query, in lower case."""
    found = (quoted or word.removesuffix("*") for quoted, word in _WORD.findall(text.casefold()))
    return list(dict.fromkeys(" ".join(one.split()) for one in found if one.strip()))


def _search(agent: AgentInstance, key: str, query: str) -> Found:
    words = query_words(query)
    if not words:
        return Found(seqs=(), words=(), complete=True)
    store = agent.store
    info = store.info(agent.resolve_key(key))
    end = monotonic() + _MAX_SECONDS
    seqs: list[int] = []
    for message in all_messages(store, info):
        if monotonic() > end:
            return Found(seqs=seqs, words=words, complete=False)
        if _may_contain(message, words) and _contains(message.to_dict(), words):
            seqs.append(message.seq)
            if len(seqs) >= MAX_FOUND:
                return Found(seqs=seqs, words=words, complete=False)
    return Found(seqs=seqs, words=words, complete=True)


def _may_contain(message: Message, words: Sequence[str]) -> bool:
    """Look for the words in the stored JSON, which is much faster than decoding it."""
    stored = message.to_json()
    if b"\\u" in stored:
        return True
    text = stored.decode(errors="replace").casefold()
    return all(word in text for word in words if " " not in word and not _ESCAPED.search(word))


def _contains(body: Mapping[str, Any], words: Sequence[str]) -> bool:
    thoughts = (part.text for part in read_message(body) if isinstance(part, ThinkingPart))
    text = "\n".join((text_of(body), *thoughts)).casefold()
    if any(" " in word for word in words):
        text = " ".join(text.split())
    return all(word in text for word in words)


async def _search_catalog(call: ApiCall[FindQuery, None]) -> Found | None:
    """Search like the list of sessions, which also finds words with other accents.

    Returns None if nothing is found or the catalog is not ready.
    """
    agent = call.agent
    own = agent.resolve_key(call.key)
    query = call.query.q

    def search() -> Found | None:
        hits = agent.catalog.search(query, prefix=own, newest=True, limit=_MAX_CATALOG_HITS)
        here = [one for one in hits.hits if one.key == own]
        words = {one.snippet[first:last].casefold() for one in here for first, last in one.marks}
        return (
            Found(
                seqs=sorted(one.seq for one in here),
                words=sorted(words),
                complete=hits.after is None,
            )
            if here
            else None
        )

    asked = call.gateway.keep_task(asyncio.create_task(call.gateway.loop.run(search)))
    await asyncio.wait({asked}, timeout=8 * CATALOG_WAIT)
    if asked.done():
        return asked.result()
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    return None
