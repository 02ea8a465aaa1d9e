"""Start page: the list of sessions with filters, search in titles and messages, and the trash."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlencode

from markupsafe import Markup
from msgspec import Meta, Struct
from msgspec.structs import asdict
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
from stenolog.errors import UsageError
from stenolog.gateway.requests import AgentQuery, parse_query
from stenolog.gateway.responses import without_secrets
from stenolog.gateway.viewer.pages import api_address, page
from stenolog.records import TrashedSession

SESSIONS_PER_PAGE: Final = 50
MAX_ROWS: Final = 1_000
"""Maximum number of sessions in one response, if an open page reloads all its rows."""
_MAX_SESSION_MATCHES: Final = 3
"""Number of matching sessions shown above the matching messages."""
_SEARCH_RESULTS_PER_PAGE: Final = 15
_PROJECTS_PER_PAGE: Final = 20
_MAX_BATCH_SIZE: Final = 5_000
"""Maximum number of sessions that a search reads from the catalog with one query."""
_MAX_FILTER_VALUES: Final = {False: 8, True: 100}
"""Maximum number of values per filter, by the query field `more`."""
_MAX_TRASH_ROWS: Final = 1_000
_FOLDER: Final = r".*[\\/](?=[^\\/]+[\\/])"
"""Pattern of everything before the last two parts of a path."""
NO_VALUE: Final = "-"
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
    """`project` groups the sessions by project."""
    show: Literal["", "sessions", "messages"] = ""
    """Kind of search results to show; empty: the first sessions and the first messages."""
    more: bool = False
    """Show more values of each filter."""
    after: Annotated[str, Meta(max_length=2_000)] = ""
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)] = SESSIONS_PER_PAGE
    part: bool = False
    """Return only the rows, for a page that is already open."""


_FILTERS: Final = ("tag", "channel", "state", "program", "project", "model", "failed", "since")
_LINK_FIELDS: Final = ("q", *_FILTERS, "until", "sort", "by", "show", "more")
"""Query fields that a link to the list keeps, in their order in the address."""
SORTS: Final[dict[str, str]] = {
    "": "Newest",
    "oldest": "Oldest",
    "cost": "Cost",
    "tokens": "Tokens",
    "length": "Messages",
}
"""Label of each sort order. The empty order sorts by the last message, newest first."""


class SessionListPage(Struct, frozen=True, kw_only=True):
    """One page of the session list, and the messages that match the search."""

    entries: Sequence[Entry] = ()
    after: str | None = None
    overview: Overview | None = None
    """Counts and values of the filters; None if only rows were requested."""
    projects: ProjectPage | None = None
    session_count: int = 0
    """Number of sessions that match the search. More may match if `all_sessions` is False."""
    all_sessions: bool = True
    grouped: GroupedHits | None = None


async def home(request: Request) -> Response:
    """Serve the list of sessions, or only its next rows."""
    call = parse_query(request, HomeQuery)
    query = call.query
    view = await call.gateway.loop.run(load_list, call.agent, query)
    problems: Sequence[str] = ()
    if call.gateway.read_only and not query.part:
        health = await call.gateway.loop.run(call.agent.store.admin.health)
        problems = [without_secrets(problem, call.gateway.settings) for problem in health.problems]
    return page(
        "rows.html" if query.part else "home.html",
        view=view,
        problems=problems,
        query=query,
        agent=query.agent,
        agents=[agent.id or "main" for agent in call.gateway.loop.registry],
        link=partial(link, query),
        filtered=any(getattr(query, name) for name in (*_FILTERS, "until")),
        kept=[(name, value) for name, value in _link_fields(query).items() if name != "q"],
        sorts=SORTS,
        base_name=base_name,
        project_labels=project_labels,
        shorter=short_model_name,
        marked=snippet_html,
        new_key=new_key(),
        base_url=api_address(request.scope),
    )


def _link_fields(query: HomeQuery) -> dict[str, str]:
    """Return the fields of the query that are not empty, for an address or a form."""
    agent_field = {} if query.agent == "main" else {"agent": query.agent}
    fields = {name: _field_text(getattr(query, name)) for name in _LINK_FIELDS}
    return agent_field | {name: text for name, text in fields.items() if text}


def link(query: HomeQuery, **changes: Any) -> str:
    """Return the address of the list with these fields changed. Empty fields are left out."""
    fields = _link_fields(query) | {name: _field_text(value) for name, value in changes.items()}
    parameters = urlencode({name: value for name, value in fields.items() if value})
    return f"/?{parameters}" if parameters else "/"


def _field_text(value: Any) -> str:
    return "true" if value is True else str(value or "")


def load_list(agent: AgentInstance, query: HomeQuery) -> SessionListPage:
    """Return the requested sessions; a search also returns the matching messages."""
    if query.q.strip():
        return _load_search(agent, query)
    catalog, conditions = agent.catalog, session_filter(query)
    overview, after = None, query.after or None
    if not query.part:
        max_values = 1 + _MAX_FILTER_VALUES[query.more]
        overview = catalog.overview(
            conditions, sort=_sort_order(query), limit=query.rows, after=after, values=max_values
        )
    if query.by == "project":
        projects = catalog.projects(
            conditions, limit=_PROJECTS_PER_PAGE, after=_parse_offset(query.after)
        )
        next_page = None if projects.after is None else str(projects.after)
        return SessionListPage(overview=overview, projects=projects, after=next_page)
    if overview is None:
        sessions = _list_entries(catalog, query, conditions, query.rows, after)
    else:
        sessions = overview.page
    return SessionListPage(entries=sessions.entries, after=sessions.after, overview=overview)


def _load_search(agent: AgentInstance, query: HomeQuery) -> SessionListPage:
    catalog, conditions = agent.catalog, session_filter(query)
    max_values = 1 + _MAX_FILTER_VALUES[query.more]
    overview = None if query.part else catalog.overview(conditions, limit=1, values=max_values)
    entries: list[Entry] = []
    after: str | None = None
    if query.show != "messages":
        entries, after = matching_sessions(catalog, query)
    if query.show == "sessions":
        return SessionListPage(
            entries=entries, after=after, overview=overview, session_count=len(entries)
        )
    result = catalog.search_sessions(
        query.q, conditions, limit=_SEARCH_RESULTS_PER_PAGE, after=_parse_offset(query.after)
    )
    return SessionListPage(
        entries=entries[:_MAX_SESSION_MATCHES],
        after=None if result.after is None else str(result.after),
        overview=overview,
        session_count=len(entries),
        all_sessions=after is None,
        grouped=result,
    )


def _parse_offset(after: str) -> int:
    if after and not after.isdecimal():
        raise UsageError(f"after={after!r} is not the `after` of a previous page")
    return int(after[:9] or 0)


def session_filter(query: HomeQuery) -> SessionFilter:
    """Return the conditions of the query. Raises UsageError if a day is invalid."""
    return SessionFilter(
        tag=query.tag or None,
        channel=query.channel or None,
        state=_STATES.get(query.state),
        program=_filter_value(query.program),
        project=_filter_value(query.project),
        model=_filter_value(query.model),
        failed=query.failed or None,
        since=_parse_day(query.since),
        until=_parse_day(query.until, extra_days=1),
    )


def _filter_value(field_text: str) -> str | None:
    return "" if field_text == NO_VALUE else field_text or None


def _parse_day(day: str, *, extra_days: int = 0) -> datetime | None:
    """Return the start of a day plus `extra_days`; for `7d`, the time seven days ago."""
    if not day:
        return None
    try:
        if ago := re.fullmatch(r"(\d{1,5})d", day):
            return datetime.now(UTC) - timedelta(days=int(ago[1]))
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=extra_days)
    except (ValueError, OverflowError):
        raise UsageError(f"{day!r} is not a day; write 2026-11-05 or 7d") from None


def _sort_order(query: HomeQuery) -> Sort:
    if query.sort not in SORTS:
        raise UsageError(f"sort must be one of {', '.join(filter(None, SORTS))}")
    return query.sort or "newest"  # type: ignore[return-value]


def matching_sessions(catalog: Catalog, query: HomeQuery) -> tuple[list[Entry], str | None]:
    """Return one page of the sessions that match the search, and the cursor of the next page."""
    conditions = session_filter(query)
    matches: list[Entry] = []
    after: str | None = query.after or None
    batch_size = SESSIONS_PER_PAGE
    while len(matches) < query.rows:
        next_page = _list_entries(catalog, query, conditions, batch_size, after)
        matches += filter_entries(next_page.entries, query.q)
        after = next_page.after
        if after is None:
            break
        # The first batches are small, because matching sessions are often among the newest.
        batch_size = min(2 * batch_size, _MAX_BATCH_SIZE)
    if len(matches) > query.rows:
        # Sessions beyond this page are read again when the next page is requested.
        return matches[: query.rows], page_cursor(matches[query.rows - 1], _sort_order(query))
    return matches, after


def _list_entries(
    catalog: Catalog, query: HomeQuery, conditions: SessionFilter, limit: int, after: str | None
) -> Page:
    return catalog.list(**asdict(conditions), sort=_sort_order(query), limit=limit, after=after)


def filter_entries(entries: Iterable[Entry], search_text: str) -> list[Entry]:
    """Return the sessions whose title, key or tags contain all words, ignoring case."""
    words = search_text.casefold().split()

    def matches(entry: Entry) -> bool:
        text = "\n".join((entry.title, entry.key, *entry.tags)).casefold()
        return all(word in text for word in words)

    return list(filter(matches, entries))


def snippet_html(hit: Hit) -> Markup:
    """Return the snippet as HTML. Matches are marked, text is escaped."""
    html = Markup()
    position = 0
    for first, last in hit.marks:
        html += hit.snippet[position:first]
        html += Markup("<mark>{}</mark>").format(hit.snippet[first:last])
        position = last
    return html + hit.snippet[position:]  # guard: snippet-escaped


def base_name(path: str) -> str:
    """Return the last part of a path, as the short name of a project."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def project_labels(paths: Sequence[str]) -> dict[str, str]:
    """Return the short name of each project.

    If projects have the same name, it includes the folder, and is the path if that is the same too.
    """
    counts = Counter(map(base_name, paths))
    labels = {
        path: name if counts[name := base_name(path)] == 1 else re.split(_FOLDER, path)[-1]
        for path in paths
    }
    label_counts = Counter(labels.values())
    return {path: label if label_counts[label] == 1 else path for path, label in labels.items()}


def short_model_name(model: str) -> str:
    """Return the name of a model without its server (`http://host/v1#name`) or provider (`a/b`)."""
    return re.split(r"[#/]", model)[-1] or model


_STATES: Final[dict[str, State]] = {state: state for state in get_args(State)}


# --- trash ----------------------------------------------------------------------------------------


async def trash(request: Request) -> Response:
    """Serve the deleted sessions."""
    call = parse_query(request, AgentQuery)
    deleted: list[TrashedSession] = await call.gateway.loop.run(call.agent.store.admin.list_trash)
    newest_first = sorted(deleted, key=lambda session: session.deleted, reverse=True)
    return page(
        "trash.html",
        agent=call.query.agent,
        deleted=newest_first[:_MAX_TRASH_ROWS],
        count=len(newest_first),
    )
