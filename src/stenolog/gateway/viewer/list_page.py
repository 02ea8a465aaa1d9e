"""Start page: the list of sessions, page by page, and search in titles, keys, tags and messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

from markupsafe import Markup
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.commands import new_key
from stenolog.agent.instance import AgentInstance
from stenolog.catalog import Catalog
from stenolog.catalog.entries import Entry, Hit, Page, State
from stenolog.catalog.index import page_cursor
from stenolog.errors import StenologError
from stenolog.gateway.api_types import AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.hidden_messages import HIDDEN, Visibility, read_visibility
from stenolog.gateway.viewer.pages import api_address, page
from stenolog.stores.base import Store

SIZE: Final = 50
"""Number of sessions on one page."""
_MAX_HITS: Final = 20
_MAX_SCANNED: Final = 5_000
"""Maximum number of sessions that one query reads to find matching ones."""


class HomeQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the session list: search words, filters and position."""

    q: Annotated[str, Meta(max_length=1_000)] = ""
    tag: Annotated[str, Meta(max_length=1_000)] = ""
    channel: Annotated[str, Meta(max_length=1_000)] = ""
    state: str = ""
    after: Annotated[str, Meta(max_length=2_000)] = ""
    part: bool = False
    """Return only the rows, for a page that is already open."""


class SessionListPage(Struct, frozen=True, kw_only=True):
    """One page of the session list, and the messages that match the search."""

    entries: Sequence[Entry]
    after: str | None
    hits: Sequence[Hit] = ()
    count: int = 0
    exact: bool = True
    reasons: Mapping[tuple[str, int], str] = {}
    """Reason why a hit is hidden, by key and seq. Visible hits are not in it."""


async def home(request: Request) -> Response:
    """Serve the list of sessions, or only the next rows of it."""
    call = parse_query(request, HomeQuery)
    found = await call.gateway.loop.run(load_list, call.agent, call.query)
    agents = [one.id or "main" for one in call.gateway.loop.registry]
    return page(
        "rows.html" if call.query.part else "home.html",
        found=found,
        query=call.query,
        agent=call.query.agent,
        agents=agents,
        marked=highlighted,
        new_key=new_key(),
        base_url=api_address(request.scope),
    )


def load_list(agent: AgentInstance, query: HomeQuery) -> SessionListPage:
    """Return the requested sessions; a search also returns the matching messages."""
    catalog = agent.catalog
    if not query.q.strip():
        found = _list_entries(catalog, query, SIZE, query.after or None)
        return SessionListPage(entries=found.entries, after=found.after)
    matches, after = matching_sessions(catalog, query)
    if query.after:
        return SessionListPage(entries=matches, after=after)
    hits = catalog.search(query.q, tag=query.tag or None, limit=_MAX_HITS)
    return SessionListPage(
        entries=matches,
        after=after,
        hits=hits.hits,
        count=hits.count,
        exact=hits.exact,
        reasons=_hidden_reasons(agent.store, hits.hits),
    )


def matching_sessions(catalog: Catalog, query: HomeQuery) -> tuple[list[Entry], str | None]:
    """Return one page of the sessions that match the words, and the position of the next page."""
    matches: list[Entry] = []
    after: str | None = query.after or None
    size = SIZE
    while len(matches) < SIZE:
        more = _list_entries(catalog, query, size, after)
        matches += filter_entries(more.entries, query.q)
        after = more.after
        if after is None:
            break
        # Start with few: the wanted session is often recent, and often many sessions match.
        size = min(2 * size, _MAX_SCANNED)
    if len(matches) > SIZE:
        # Sessions beyond this page are read again when the next page is requested.
        return matches[:SIZE], page_cursor(matches[SIZE - 1])
    return matches, after


def _list_entries(catalog: Catalog, query: HomeQuery, limit: int, after: str | None) -> Page:
    return catalog.list(
        tag=query.tag or None,
        channel=query.channel or None,
        state=_STATES.get(query.state),
        limit=limit,
        after=after,
    )


def _hidden_reasons(store: Store, hits: Sequence[Hit]) -> dict[tuple[str, int], str]:
    visibilities: dict[str, Visibility | None] = {}
    made = {}
    for hit in hits:
        if not hit.hidden:
            continue
        if hit.key not in visibilities:
            try:
                visibilities[hit.key] = read_visibility(store, store.info(hit.key))
            except StenologError:
                visibilities[hit.key] = (
                    None  # deleted since the search, or damaged; the hit is still listed
                )
        visibility = visibilities[hit.key]
        made[hit.key, hit.seq] = HIDDEN if visibility is None else visibility.why(hit.seq)
    return made


def filter_entries(entries: Iterable[Entry], words: str) -> list[Entry]:
    """Return the sessions that contain all these words in title, key or tags, ignoring case."""
    wanted = words.casefold().split()
    return [
        one
        for one in entries
        if all(word in "\n".join((one.title, one.key, *one.tags)).casefold() for word in wanted)
    ]


def highlighted(hit: Hit) -> Markup:
    """Return the snippet of a hit as HTML with the matches marked; all other text is escaped."""
    made = Markup()
    end = 0
    for first, last in hit.marks:
        made += Markup("{}<mark>{}</mark>").format(hit.snippet[end:first], hit.snippet[first:last])
        end = last
    return made + hit.snippet[end:]  # guard: snippet-escaped


_STATES: Final[dict[str, State]] = {
    "idle": "idle",
    "running": "running",
    "interrupted": "interrupted",
}
