"""Choosing a session: the resume picker, a list that filters as you type, and its matching.

Titles, keys and first prompts are matched here, on entries of the catalog; the catalog searches the
messages.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from stenolog.agent.commands import new_key
from stenolog.catalog import Catalog, Entry, Hit
from stenolog.cli.agents import CHANNEL, SENDER, OpenAgent
from stenolog.cli.output import format_age, inline_output, is_interactive, one_line, printable
from stenolog.errors import StenologError

if TYPE_CHECKING:
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import Layout
    from prompt_toolkit.output import Output


# --- choices --------------------------------------------------------------------------------------
# Matching sessions while the user types, by title, key, first prompt and message content.


PAGE_SIZE: Final = 1_000
"""Number of entries that are read from the catalog at once."""
_MAX_HITS: Final = 100
"""Maximum number of hits in messages."""


class Choices:
    """The sessions that match a query, and the selected one."""

    def __init__(self, *, channel: str | None = None) -> None:
        """Start without sessions. Only those of `channel` match until `toggle_channel`."""
        self.channel = channel
        self.all_channels = channel is None
        self.loaded = False
        """Whether all sessions of the catalog were added."""
        self.query = ""
        self.matches: list[Entry] = []
        self.selected = 0
        self.hits: dict[str, Hit] = {}
        """Hits of the current query in messages, by key."""
        self._entries: dict[str, Entry] = {}
        self._words: dict[str, str] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Add sessions, in the order of the catalog."""
        for entry in entries:
            if entry.problem is None and entry.count and entry.key not in self._entries:
                self._entries[entry.key] = entry
                self._words[entry.key] = f"{entry.title}\n{entry.key}\n{entry.prompt}".casefold()
        self._update()

    def set_query(self, query: str) -> None:
        """Set the query, and drop the hits of the previous one."""
        if query != self.query:
            self.query, self.hits, self.selected = query, {}, 0
            self._update()

    def add_hits(self, query: str, hits: Iterable[Hit]) -> None:
        """Add hits in messages, best first, unless the query has changed."""
        if query == self.query:
            for hit in hits:
                self.hits.setdefault(hit.key, hit)
            self._update()

    def toggle_channel(self) -> None:
        """Switch between the sessions of the channel and all sessions."""
        if self.channel is not None:
            self.all_channels = not self.all_channels
            self.selected = 0
            self._update()

    def move(self, by: int) -> None:
        """Move the selection down by this number of rows."""
        self.selected = max(0, min(self.selected + by, len(self.matches) - 1))

    @property
    def selection(self) -> Entry | None:
        """The selected session."""
        return self.matches[self.selected] if self.matches else None

    @property
    def other_matches(self) -> int:
        """Number of matches in other channels that are hidden from the list."""
        return (
            0 if self.all_channels else sum(map(self._matches, self._entries)) - len(self.matches)
        )

    def _update(self) -> None:
        kept = self.selection.key if self.selected and self.selection is not None else None
        shown = [
            entry
            for key, entry in self._entries.items()
            if (self.all_channels or entry.channel == self.channel) and self._matches(key)
        ]
        # A match in the title ranks above one in a message.
        self.matches = [entry for entry in shown if self.is_named(entry.key)]
        self.matches += [
            self._entries[key]
            for key in self.hits
            if key in self._entries
            and not self.is_named(key)
            and (self.all_channels or self._entries[key].channel == self.channel)
        ]
        places = [at for at, entry in enumerate(self.matches) if entry.key == kept]
        self.selected = places[0] if places else min(self.selected, max(0, len(self.matches) - 1))

    def _matches(self, key: str) -> bool:
        return key in self.hits or self.is_named(key)

    def is_named(self, key: str) -> bool:
        """Return whether the title, key or first prompt contain all words of the query."""
        words = self._words[key]
        return all(word in words for word in self.query.casefold().split())


def search_words(query: str) -> str:
    """Return the query for the catalog; the last word is a prefix, as it may be incomplete."""
    return f"{query}*" if query[-1:].isalnum() else query


def hits_for(catalog: Catalog, query: str) -> Sequence[Hit]:
    """Return hits of the query in messages, best first."""
    return catalog.search(search_words(query), limit=_MAX_HITS).hits if query.strip() else ()


def load(catalog: Catalog, choices: Choices) -> None:
    """Add all sessions of the catalog to `choices`."""
    after: str | None = None
    while True:
        page = catalog.list(limit=PAGE_SIZE, after=after)
        choices.add(page.entries)
        after = page.after
        if after is None:
            choices.loaded = True
            return


def find_sessions(catalog: Catalog, text: str) -> Sequence[Entry]:
    """Return the session with this key, else all sessions that match the text.

    Messages are searched only if no title, key or first prompt matches.
    """
    choices = Choices()
    load(catalog, choices)
    choices.set_query(text)
    for entry in choices.matches:
        if entry.key == text:
            return [entry]
    if not choices.matches:
        choices.add_hits(text, hits_for(catalog, text))
    return choices.matches


def newest_session(catalog: Catalog, *, channel: str) -> Entry | None:
    """Return the last changed readable session of a channel; None if there is none."""
    after: str | None = None
    while True:
        page = catalog.list(channel=channel, limit=20, after=after)
        for entry in page.entries:
            if entry.problem is None and entry.count:
                return entry
        after = page.after
        if after is None:
            return None


# --- picker ---------------------------------------------------------------------------------------


_FIRST_PAGE: Final = 50
_MAX_ROWS: Final = 15
_OTHER_ROWS: Final = 5
"""Number of lines around the list."""
_SEARCH_DELAY: Final = 0.08
"""Seconds without a key press before messages are searched."""
_STYLE: Final = {
    "chosen": "reverse",
    "dim": "ansibrightblack",
    "hit": "bold",
    "running": "ansigreen",
    "interrupted": "ansiyellow",
    "head": "bold",
}


async def pick(
    catalog: Catalog,
    *,
    text: str = "",
    channel: str | None = None,
    source: "Input | None" = None,
    output: "Output | None" = None,
) -> str | None:
    """Return the key of the session that the user chooses, or None.

    `text` is the initial query. `channel` limits the list until the user switches. `source` and
    `output` are the terminal, if it is not that of the process.
    """
    picker = Picker(catalog, channel=channel)
    return await picker.run(text, source=source, output=output)


class Picker:
    """Interactive list of choices, filled from the catalog while it is shown."""

    def __init__(self, catalog: Catalog, *, channel: str | None = None) -> None:
        self._catalog = catalog
        self.choices = Choices(channel=channel)
        self.problem = ""
        self._top = 0
        self._done = False
        self._entered = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, text: str = "", *, source: "Input | None" = None, output: "Output | None" = None
    ) -> str | None:
        """Show the list until the user chooses a session or cancels."""
        page = await asyncio.to_thread(self._catalog.list, limit=_FIRST_PAGE)
        self.choices.add(page.entries)
        self.choices.loaded = page.after is None
        app = self._application(text, source, output)
        if page.after is not None:
            self._begin(self._load(app, page.after))
        if text:
            self._begin(self._search(app, text, at_once=True))
        try:
            return await app.run_async()
        finally:
            # Searches are short and must not outlive the catalog.
            self._done = True
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- content -----------------------------------------------------------------------------

    def head(self) -> "StyleAndTextTuples":
        """Return the headline: which sessions are listed, and their number."""
        choices = self.choices
        whose = "all channels" if choices.all_channels else f"channel {choices.channel}"
        count = f"{len(choices.matches):,}{'' if choices.loaded else '+'}"
        return [("class:head", "Resume a session"), ("class:dim", f"  {whose} · {count}")]

    def rows(self, width: int, height: int) -> "StyleAndTextTuples":
        """Return the part of the list around the selection, one line per session."""
        choices = self.choices
        if not choices.matches:
            return [("class:dim", self._empty_text())]
        self._top = min(self._top, choices.selected)
        self._top = max(self._top, choices.selected - height + 1)
        self._top = max(0, min(self._top, len(choices.matches) - height))
        now = datetime.now(UTC)
        lines: StyleAndTextTuples = []
        for at, entry in enumerate(choices.matches[self._top : self._top + height], self._top):
            chosen = at == choices.selected
            lines += self._row(entry, now, width - 1, chosen=chosen)
            lines.append(("", "\n"))
        return lines[:-1]

    def detail(self, width: int) -> "StyleAndTextTuples":
        """Return details of the selection: the hit or the first prompt, and the key."""
        entry = self.choices.selection
        if entry is None:
            return []
        hit = self.choices.hits.get(entry.key)
        said = f"[{hit.seq}] {hit.role}: {hit.snippet}" if hit is not None else entry.prompt
        key = _fit_width(f"  {one_line(entry.key)} · ≈{entry.tokens:,} tokens", width - 1)
        return [
            (
                "class:dim",
                f"{_fit_width('  ' + ' '.join(printable(said).split()), width - 1)}\n{key}",
            ),
        ]

    def legend(self) -> "StyleAndTextTuples":
        """Return the help line, or the problem that occurred."""
        if self.problem:
            return [("class:interrupted", self.problem)]
        keys = "type to filter · ↑↓ select · Enter resume · Esc cancel"
        if self.choices.channel is not None:
            other = "this channel" if self.choices.all_channels else "all channels"
            keys = f"{keys} · Tab {other}"
        return [("class:dim", keys)]

    def _row(
        self, entry: Entry, now: datetime, width: int, *, chosen: bool
    ) -> "StyleAndTextTuples":
        style = "class:chosen" if chosen else ""
        when = format_age(entry.updated, now) if entry.updated is not None else "-"
        mark = {"running": "●", "interrupted": "◐"}.get(entry.state, " ")
        title = one_line(printable(entry.title)) or one_line(entry.key)
        if entry.key in self.choices.hits and not self.choices.is_named(entry.key):
            title = f"{title}  …{one_line(printable(self.choices.hits[entry.key].snippet))}"
        start = f"{'>' if chosen else ' '} {when:>10} {entry.visible:>6,} "
        rest = _fit_width(f" {title}", width - len(start) - 1)
        state = f"class:{entry.state}" if entry.state != "idle" else ""
        return [(style, start), (f"{style} {state}", mark), (style, rest)]

    def _empty_text(self) -> str:
        choices = self.choices
        if not choices.loaded:
            return "  …"
        if choices.other_matches:
            return f"  No match in this channel; Tab shows {choices.other_matches:,} in others."
        return "  No matching sessions." if choices.query else "  No sessions yet."

    # --- loading -----------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, app: "Application[Any]", after: str | None) -> None:
        while after is not None and not self._done:
            try:
                page = await asyncio.to_thread(self._catalog.list, limit=PAGE_SIZE, after=after)
            except StenologError as error:
                self.problem = f"The list is incomplete: {error}"
                break
            self.choices.add(page.entries)
            after = page.after
            self._refresh(app)
        self.choices.loaded = True
        app.invalidate()

    async def _search(self, app: "Application[Any]", query: str, *, at_once: bool = False) -> None:
        if not at_once:
            await asyncio.sleep(_SEARCH_DELAY)
        if query != self.choices.query or self._done:
            return
        try:
            hits = await asyncio.to_thread(hits_for, self._catalog, query)
        except StenologError as error:
            self.problem = f"Messages cannot be searched: {error}"
        else:
            self.choices.add_hits(query, hits)
        self._refresh(app)

    def _refresh(self, app: "Application[Any]") -> None:
        """Repaint; if Enter was pressed before a match was loaded, choose the match now."""
        chosen = self.choices.selection
        if self._entered and chosen is not None and not app.is_done:
            app.exit(result=chosen.key)
        app.invalidate()

    # --- the application ---------------------------------------------------------------------

    def _application(
        self, text: str, source: "Input | None", output: "Output | None"
    ) -> "Application[str | None]":
        # Imported late: slow, and only needed for this list.
        from prompt_toolkit.application import Application
        from prompt_toolkit.buffer import Buffer
        from prompt_toolkit.document import Document
        from prompt_toolkit.layout import Layout
        from prompt_toolkit.styles import Style

        def typed(buffer: Buffer) -> None:
            self._entered = False
            self.choices.set_query(buffer.text.strip())
            self._begin(self._search(app, self.choices.query))

        buffer = Buffer(document=Document(text), multiline=False)
        self.choices.set_query(text.strip())
        buffer.on_text_changed += typed
        layout: Layout = self._layout(buffer)
        app: Application[str | None] = Application(
            layout=layout,
            key_bindings=self._keys(),
            style=Style.from_dict(_STYLE),
            erase_when_done=True,
            input=source,
            output=output or inline_output(),
        )
        # Esc is a key here; do not wait long for the rest of an escape sequence.
        app.ttimeoutlen = 0.05
        return app

    def _layout(self, buffer: Any) -> "Layout":
        from prompt_toolkit.application import get_app
        from prompt_toolkit.layout import BufferControl, FormattedTextControl, HSplit, Layout
        from prompt_toolkit.layout import Window as Shown

        def width() -> int:
            return get_app().output.get_size().columns

        def height() -> int:
            return max(1, min(_MAX_ROWS, get_app().output.get_size().rows - _OTHER_ROWS))

        line = Shown(
            BufferControl(buffer), height=1, get_line_prefix=lambda _line, _wrap: [("", "> ")]
        )
        return Layout(
            HSplit(
                [
                    Shown(FormattedTextControl(self.head), height=1),
                    line,
                    Shown(
                        FormattedTextControl(lambda: self.rows(width(), height())), height=height
                    ),
                    Shown(FormattedTextControl(lambda: self.detail(width())), height=2),
                    Shown(FormattedTextControl(self.legend), height=1),
                ]
            ),
            focused_element=line,
        )

    def _keys(self) -> "KeyBindings":
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.key_binding.key_processor import KeyPressEvent as Press

        keys = KeyBindings()
        for names, by in (
            (("up", "c-p"), -1),
            (("down", "c-n"), 1),
            (("pageup",), -_MAX_ROWS),
            (("pagedown",), _MAX_ROWS),
        ):
            for name in names:
                keys.add(name)(lambda _press, by=by: self.choices.move(by))

        keys.add("tab")(lambda _press: self.choices.toggle_channel())

        @keys.add("enter")
        def _(press: Press) -> None:
            # If the search is slower than the user, Enter applies when the result arrives.
            self._entered = True
            self._refresh(press.app)

        @keys.add("escape", eager=True)
        @keys.add("c-c")
        @keys.add("c-d")
        @keys.add("<sigint>")
        def _(press: Press) -> None:
            press.app.exit(result=None)

        return keys


def _fit_width(text: str, width: int) -> str:
    """Return the text padded or shortened to exactly this width of the terminal."""
    from prompt_toolkit.utils import get_cwidth

    if get_cwidth(text) > width:
        kept = ""
        for character in text:
            if get_cwidth(kept + character) > max(0, width - 1):
                break
            kept += character
        text = f"{kept}…" if width > 0 else ""
    return text + " " * (width - get_cwidth(text))


# --- start of a chat ------------------------------------------------------------------------------


_MAX_LISTED: Final = 10
"""Maximum number of sessions listed if several match."""
_MAX_TITLE: Final = 60


class ChatStart(Struct, frozen=True, kw_only=True):
    """The session in which a chat starts."""

    key: str
    description: str
    """Description in one line."""
    resumes: bool
    """Whether the session already has messages."""


async def find_start(
    opened: OpenAgent,
    *,
    key: str | None = None,
    continue_last: bool = False,
    text: str | None = None,
) -> ChatStart | None:
    """Find the session to start in; return None if the user was asked and chose none.

    `continue_last` selects the last session of channel cli, `text` one that matches it. Raises
    StenologError, and ClickException if there is no terminal to ask in.
    """
    catalog = opened.agent.catalog
    if key is not None:
        return _start_with_key(opened, key)
    if text is not None:
        return await _choose_start(catalog, text)
    last = await asyncio.to_thread(newest_session, catalog, channel=CHANNEL)
    if not continue_last:
        words = "New session."
        if last is not None:
            words = f"New session. `steno chat -c` continues the last one: {_title(last)}"
        if last is not None and last.state == "interrupted":
            words = (
                "New session. The last one was interrupted; `steno chat -c` finishes the answer: "
                f"{_title(last)}"
            )
        return ChatStart(key=new_key(CHANNEL, SENDER), description=words, resumes=False)
    if last is None:
        words = "There is no earlier session to continue. This is a new one."
        return ChatStart(key=new_key(CHANNEL, SENDER), description=words, resumes=False)
    return _resume_start(last)


async def _choose_start(catalog: Catalog, text: str) -> ChatStart | None:
    found = await asyncio.to_thread(find_sessions, catalog, text)
    if len(found) == 1:
        return _resume_start(found[0])
    if is_interactive():
        key = await pick(catalog, text=text, channel=CHANNEL)
        if key is None:
            return None
        return _resume_start(next(iter(await asyncio.to_thread(find_sessions, catalog, key))))
    if not found:
        raise click.ClickException(
            f"No session matches {one_line(text)!r}. `steno list` lists all sessions."
        )
    raise click.ClickException("\n".join(_ambiguous_lines(found, text)))


def _ambiguous_lines(found: Sequence[Entry], text: str) -> list[str]:
    named = [f"  {one_line(entry.key)}  {_title(entry)}" for entry in found[:_MAX_LISTED]]
    more = [f"  … and {len(found) - _MAX_LISTED:,} more"] if len(found) > _MAX_LISTED else []
    what = f"{len(found):,} sessions match {one_line(text)!r}." if text else "Which session?"
    return [f"{what} Choose one by its key: steno chat KEY", *named, *more]


def _start_with_key(opened: OpenAgent, key: str) -> ChatStart:
    own = opened.agent.resolve_key(key)
    if opened.agent.sessions.get_history(own, last=1):
        return ChatStart(key=own, description="", resumes=True)
    return ChatStart(key=own, description="New session with this key.", resumes=False)


def _resume_start(entry: Entry) -> ChatStart:
    said = "1 message" if entry.visible == 1 else f"{entry.visible:,} messages"
    when = "" if entry.updated is None else f", {_ago(entry.updated)}"
    return ChatStart(key=entry.key, description=f"{_title(entry)} ({said}{when})", resumes=True)


def _ago(at: datetime) -> str:
    ago = format_age(at, datetime.now(UTC))
    return "just now" if ago == "now" else ago if "-" in ago else f"{ago} ago"


def _title(entry: Entry) -> str:
    title = one_line(printable(entry.title)) or one_line(entry.key)
    return title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE - 1]}…"
