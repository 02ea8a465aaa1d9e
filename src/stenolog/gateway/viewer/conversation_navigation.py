"""Outline of prompts and search in one session, for an open conversation page."""

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
from stenolog.gateway.viewer.pages import CATALOG_WAIT, page, run_within
from stenolog.gateway.viewer.session_outline import MAX_MESSAGES, all_messages, read_outline
from stenolog.messages import ThinkingPart, read_message
from stenolog.records import Message

TURNS_PER_PART: Final = 100
_MAX_RESULTS: Final = 10_000
_MAX_CATALOG_HITS: Final = 200
_MAX_SEARCH_SECONDS: Final = 5.0
"""Seconds after which a search ends and returns the matches so far."""


class OutlineQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of a part of the outline. Without a position, the end of the outline is returned."""

    at: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    """Seq of a message."""
    turn: Annotated[int, Meta(ge=0, le=MAX_SEQ)] = 0
    """Number of a turn, from 1."""
    date: Annotated[str, Meta(max_length=40)] = ""
    """A time in ISO format. Selects the first turn at this time or later."""
    start: Annotated[int, Meta(ge=0, le=MAX_SEQ)] | None = None
    """Index of the first turn of the part."""


class FindQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of a search in one session."""

    q: Annotated[str, Meta(max_length=1_000)] = ""


class SessionSearchResult(Struct, frozen=True, kw_only=True):
    """Result of a search in one session."""

    seqs: Sequence[int]
    """Seqs of the messages that contain all words, ascending, including hidden messages."""
    words: Sequence[str]
    """Words to highlight in the matching messages."""
    complete: bool
    """Whether the whole session was searched."""


async def outline(request: Request) -> Response:
    """Serve a part of the outline."""
    call = parse_query(request, OutlineQuery)
    template_values = await call.gateway.loop.run(_load_outline, call.agent, call.key, call.query)
    return page("outline.html", **template_values, agent=call.query.agent)


async def find_messages(request: Request) -> Response:
    """Return the messages of a session that contain all words of a query."""
    call = parse_query(request, FindQuery)
    result = await call.gateway.loop.run(_search_messages, call.agent, call.key, call.query.q)
    if result.complete and result.words and not result.seqs:
        result = await _search_catalog(call) or result
    return json_response(result)


# --- outline ---------------------------------------------------------------------------------


def _load_outline(agent: AgentInstance, key: str, query: OutlineQuery) -> dict[str, Any]:
    """Return the values of the template: consecutive turns of a session."""
    store = agent.store
    info = store.info(agent.resolve_key(key))
    moment = _parse_time(query.date)
    # A jump to a turn or time needs all messages. Otherwise the outline is read in steps.
    needs_all = bool(query.turn or moment is not None)
    outline = read_outline(store, info, limit=None if needs_all else MAX_MESSAGES)
    turns = outline.turns
    if query.turn:
        index = min(query.turn, len(turns)) - 1
    elif moment is not None:
        index = outline.turn_since(moment)
    elif query.at:
        index = outline.turn_at(query.at)
    else:
        index = len(turns) - 1
    index = max(0, index)
    start = query.start
    if start is None:
        start = max(0, min(index - TURNS_PER_PART // 2, len(turns) - TURNS_PER_PART))
    return {
        "info": info,
        "turns": outline.turns_between(start, start + TURNS_PER_PART, info),
        "start": start,
        "count": len(turns),
        # `target` is the seq of the prompt at the requested position.
        "target": turns[index].seq if turns else 0,
        "number": index + 1 if turns else 0,
        "totals": outline.totals(),
        # If `complete` is False, the next request of the page reads more messages.
        "complete": outline.last_seq >= info.last_seq,
    }


def _parse_time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"date={text!r} is not a time in ISO format") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# --- search ----------------------------------------------------------------------------------

_TERM: Final = re.compile(r'"([^"]+)"|(\S+)')
_ESCAPABLE: Final = re.compile(r'["\\/\x00-\x1f]')
"""Characters that JSON may contain as an escape sequence."""


def query_words(text: str) -> list[str]:
    """Return the words and quoted phrases of a query, in lower case."""
    terms = (quoted or word.removesuffix("*") for quoted, word in _TERM.findall(text.casefold()))
    return list(dict.fromkeys(" ".join(term.split()) for term in terms if term.strip()))


def _search_messages(agent: AgentInstance, key: str, query: str) -> SessionSearchResult:
    words = query_words(query)
    if not words:
        return SessionSearchResult(seqs=(), words=(), complete=True)
    store = agent.store
    info = store.info(agent.resolve_key(key))
    deadline = monotonic() + _MAX_SEARCH_SECONDS
    seqs: list[int] = []
    for message in all_messages(store, info):
        if monotonic() > deadline:
            return SessionSearchResult(seqs=seqs, words=words, complete=False)
        if _may_contain(message, words) and _contains(message.to_dict(), words):
            seqs.append(message.seq)
            if len(seqs) >= _MAX_RESULTS:
                return SessionSearchResult(seqs=seqs, words=words, complete=False)
    return SessionSearchResult(seqs=seqs, words=words, complete=True)


def _may_contain(message: Message, words: Sequence[str]) -> bool:
    """Return whether a message may contain all words, judged by its stored JSON.

    Decoding every message would be slower.
    """
    stored_json = message.to_json()
    if b"\\u" in stored_json:
        return True
    text = stored_json.decode(errors="replace").casefold()
    return all(word in text for word in words if " " not in word and not _ESCAPABLE.search(word))


def _contains(body: Mapping[str, Any], words: Sequence[str]) -> bool:
    thoughts = (part.text for part in read_message(body) if isinstance(part, ThinkingPart))
    text = "\n".join((text_of(body), *thoughts)).casefold()
    if any(" " in word for word in words):
        text = " ".join(text.split())
    return all(word in text for word in words)


async def _search_catalog(call: ApiCall[FindQuery, None]) -> SessionSearchResult | None:
    """Search in the catalog, which also finds words with other accents.

    Returns None if the catalog finds nothing or is not ready.
    """
    agent = call.agent
    session_key = agent.resolve_key(call.key)
    query = call.query.q

    def search() -> SessionSearchResult | None:
        hits = agent.catalog.search(query, prefix=session_key, newest=True, limit=_MAX_CATALOG_HITS)
        session_hits = [hit for hit in hits.hits if hit.key == session_key]
        words = {
            hit.snippet[first:last].casefold() for hit in session_hits for first, last in hit.marks
        }
        if not session_hits:
            return None
        seqs = sorted(hit.seq for hit in session_hits)
        complete = hits.after is None
        return SessionSearchResult(seqs=seqs, words=sorted(words), complete=complete)

    return await run_within(call.gateway, 8 * CATALOG_WAIT, search)
