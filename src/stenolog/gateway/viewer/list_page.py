"""Start page: the list of sessions with filters, search in titles and messages, and the trash."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from markupsafe import Markup
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.commands import new_key
from stenolog.agent.instance import AgentInstance
from stenolog.catalog import Catalog
from stenolog.catalog.entries import (
    Entry,
    GroupedHits,
    Hit,
    Overview,
    Page,
    ProjectPage,
    SessionFilter,
    Sort,
    State,
)
from stenolog.catalog.index import page_cursor
from stenolog.errors import StenologError, UsageError
from stenolog.gateway.api_types import AgentQuery
from stenolog.gateway.requests import parse_query
from stenolog.gateway.viewer.hidden_messages import HIDDEN, Visibility, read_visibility
from stenolog.gateway.viewer.pages import api_address, page
from stenolog.records import Trashed
from stenolog.stores.base import Store

SIZE: Final = 50
"""Number of sessions on one page."""
MAX_ROWS: Final = 1_000
"""Maximum number of sessions in one response, for a page that had loaded more before."""
_MAX_TITLES: Final = 3
"""Number of matching sessions shown above the matching messages."""
_GROUPS: Final = 15
"""Number of sessions with matching messages on one page."""
_PROJECTS: Final = 20
"""Number of projects on one page."""
_MAX_SCANNED: Final = 5_000
"""Maximum number of sessions that one query reads to find matching ones."""
_VALUES: Final = 8
"""Number of values of each filter; `more` shows up to _MORE_VALUES."""
_MORE_VALUES: Final = 100
_MAX_TRASH: Final = 1_000
"""Maximum number of deleted sessions on the trash page."""
NONE: Final = "-"
"""Value of a filter that selects sessions without a program, project or model."""

_Text = Annotated[str, Meta(max_length=1_000)]


class HomeQuery(AgentQuery, frozen=True, kw_only=True):
    """Query of the session list: search words, filters, order and position."""

    q: _Text = ""
    tag: _Text = ""
    channel: _Text = ""
    state: str = ""
    program: _Text = ""
    project: _Text = ""
    model: _Text = ""
    failed: bool = False
    since: Annotated[str, Meta(max_length=30)] = ""
    until: Annotated[str, Meta(max_length=30)] = ""
    sort: Annotated[str, Meta(max_length=30)] = ""
    by: Literal["", "project"] = ""
    """Group the sessions."""
    show: Literal["", "sessions", "messages"] = ""
    """Part of the search results; empty: the first of both."""
    more: bool = False
    """Show more values of each filter."""
    after: Annotated[str, Meta(max_length=2_000)] = ""
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)] = SIZE
    part: bool = False
    """Return only the rows, for a page that is already open."""


_FILTERS: Final = ("tag", "channel", "state", "program", "project", "model", "failed", "since")
_FIELDS: Final = ("q", *_FILTERS, "until", "sort", "by", "show", "more")
"""Fields that a link to the list keeps, in the order of the address."""
SORTS: Final[dict[str, str]] = {
    "": "Newest",
    "oldest": "Oldest",
    "cost": "Cost",
    "tokens": "Tokens",
    "length": "Messages",
}
"""Names of the orders; empty: by the last message, newest first."""


class SessionListPage(Struct, frozen=True, kw_only=True):
    """One page of the session list, and the messages that match the search."""

    entries: Sequence[Entry] = ()
    after: str | None = None
    overview: Overview | None = None
    """Counts and values of the filters; None if only rows were requested."""
    projects: ProjectPage | None = None
    session_count: int = 0
    """Number of sessions that match the search; a lower bound unless `all_sessions`."""
    all_sessions: bool = True
    grouped: GroupedHits | None = None
    reasons: Mapping[tuple[str, int], str] = {}
    """Reason why a hit is hidden, by key and seq. Visible hits are not in it."""


async def home(request: Request) -> Response:
    """Serve the list of sessions, or only the next rows of it."""
    call = parse_query(request, HomeQuery)
    query = call.query
    found = await call.gateway.loop.run(load_list, call.agent, query)
    agents = [one.id or "main" for one in call.gateway.loop.registry]
    return page(
        "rows.html" if query.part else "home.html",
        found=found,
        query=query,
        agent=query.agent,
        agents=agents,
        link=partial(link, query),
        filtered=any(getattr(query, name) for name in (*_FILTERS, "until")),
        kept=[(name, value) for name, value in _kept(query).items() if name != "q"],
        sorts=SORTS,
        base_name=base_name,
        shorter=shorter,
        marked=highlighted,
        new_key=new_key(),
        base_url=api_address(request.scope),
    )


def _kept(query: HomeQuery) -> dict[str, str]:
    """Return the fields of the query that are not empty, for an address or a form."""
    agent = {} if query.agent == "main" else {"agent": query.agent}
    fields = {name: getattr(query, name) for name in _FIELDS}
    return agent | {
        name: "true" if value is True else str(value) for name, value in fields.items() if value
    }


def link(query: HomeQuery, **changes: Any) -> str:
    """Return the address of the list with these changes. Empty fields are left out."""
    fields = {**_kept(query), **{name: _text(value) for name, value in changes.items()}}
    told = urlencode({name: value for name, value in fields.items() if value})
    return f"/?{told}" if told else "/"


def _text(value: Any) -> str:
    return ("true" if value else "") if isinstance(value, bool) else str(value or "")


def load_list(agent: AgentInstance, query: HomeQuery) -> SessionListPage:
    """Return the requested sessions; a search also returns the matching messages."""
    catalog = agent.catalog
    where = session_filter(query)
    if query.q.strip():
        return _load_search(agent, query, where)
    overview = None
    if not query.part:
        values = _MORE_VALUES if query.more else _VALUES
        overview = catalog.overview(
            where, sort=_sort(query), limit=query.rows, after=query.after or None, values=values + 1
        )
    if query.by == "project":
        projects = catalog.projects(where, limit=_PROJECTS, after=_offset(query.after))
        after = None if projects.after is None else str(projects.after)
        return SessionListPage(overview=overview, projects=projects, after=after)
    found = (
        overview.page
        if overview is not None
        else _list_entries(catalog, query, where, query.rows, query.after or None)
    )
    return SessionListPage(entries=found.entries, after=found.after, overview=overview)


def _load_search(agent: AgentInstance, query: HomeQuery, where: SessionFilter) -> SessionListPage:
    catalog = agent.catalog
    values = _MORE_VALUES if query.more else _VALUES
    overview = None if query.part else catalog.overview(where, limit=1, values=values + 1)
    entries: list[Entry] = []
    after: str | None = None
    if query.show != "messages":
        entries, after = matching_sessions(catalog, query)
    if query.show == "sessions":
        return SessionListPage(
            entries=entries, after=after, overview=overview, session_count=len(entries)
        )
    grouped = catalog.search_sessions(query.q, where, limit=_GROUPS, after=_offset(query.after))
    hits = [hit for one in grouped.sessions for hit in one.hits]
    return SessionListPage(
        entries=entries[:_MAX_TITLES],
        after=None if grouped.after is None else str(grouped.after),
        overview=overview,
        session_count=len(entries),
        all_sessions=after is None,
        grouped=grouped,
        reasons=_hidden_reasons(agent.store, hits),
    )


def _offset(after: str) -> int:
    if after and not after.isdecimal():
        raise UsageError(f"after={after!r} is not the `after` of a previous page")
    return int(after[:9] or 0)


def session_filter(query: HomeQuery, now: datetime | None = None) -> SessionFilter:
    """Return the conditions of the query. Raises UsageError if a time is invalid."""
    return SessionFilter(
        tag=query.tag or None,
        channel=query.channel or None,
        state=_STATES.get(query.state),
        program=_named(query.program),
        project=_named(query.project),
        model=_named(query.model),
        failed=query.failed or None,
        since=_time(query.since, now),
        until=_time(query.until, now, days=1),
    )


def _named(value: str) -> str | None:
    return "" if value == NONE else value or None


def _time(value: str, now: datetime | None = None, *, days: int = 0) -> datetime | None:
    """Return the start of a day (`2026-11-05`), or the time so many days ago (`7d`)."""
    if not value:
        return None
    try:
        if ago := re.fullmatch(r"(\d{1,5})d", value):
            return (now or datetime.now(UTC)) - timedelta(days=int(ago[1]))
        return datetime.strptime(value, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=days)
    except (ValueError, OverflowError):
        raise UsageError(f"{value!r} is not a day; write 2026-11-05 or 7d") from None


def _sort(query: HomeQuery) -> Sort:
    if query.sort not in SORTS:
        raise UsageError(f"sort must be one of {', '.join(filter(None, SORTS))}")
    return query.sort or "newest"  # type: ignore[return-value]


def matching_sessions(catalog: Catalog, query: HomeQuery) -> tuple[list[Entry], str | None]:
    """Return one page of the sessions that match the words, and the position of the next page."""
    where = session_filter(query)
    matches: list[Entry] = []
    after: str | None = query.after or None
    size = SIZE
    while len(matches) < query.rows:
        more = _list_entries(catalog, query, where, size, after)
        matches += filter_entries(more.entries, query.q)
        after = more.after
        if after is None:
            break
        # Start with few: the wanted session is often recent, and often many sessions match.
        size = min(2 * size, _MAX_SCANNED)
    if len(matches) > query.rows:
        # Sessions beyond this page are read again when the next page is requested.
        return matches[: query.rows], page_cursor(matches[query.rows - 1], _sort(query))
    return matches, after


def _list_entries(
    catalog: Catalog, query: HomeQuery, where: SessionFilter, limit: int, after: str | None
) -> Page:
    return catalog.list(
        tag=where.tag,
        channel=where.channel,
        state=where.state,
        program=where.program,
        project=where.project,
        model=where.model,
        failed=where.failed,
        since=where.since,
        until=where.until,
        sort=_sort(query),
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


def base_name(path: str) -> str:
    """Return the last part of a path, for a short name of a project."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def shorter(model: str) -> str:
    """Return the name of a model without its server or provider: `http://host/v1#name`, `a/b`."""
    return re.split(r"[#/]", model)[-1] or model


_STATES: Final[dict[str, State]] = {
    "idle": "idle",
    "running": "running",
    "interrupted": "interrupted",
}


# --- trash ----------------------------------------------------------------------------------------


async def trash(request: Request) -> Response:
    """Serve the deleted sessions."""
    call = parse_query(request, AgentQuery)
    found: list[Trashed] = await call.gateway.loop.run(call.agent.store.list_trash)
    newest = sorted(found, key=lambda one: one.deleted, reverse=True)
    return page(
        "trash.html",
        agent=call.query.agent,
        deleted=newest[:_MAX_TRASH],
        count=len(newest),
    )
