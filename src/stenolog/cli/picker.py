"""Interactive list from which the user chooses a session. Typing filters the list.

This module compares the typed text with titles, keys and first prompts of the catalog's entries.
The catalog searches the messages.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from stenolog.agent.commands import new_key
from stenolog.agent.threads import start_task
from stenolog.catalog import Catalog, Entry, Hit
from stenolog.cli.agents import CHANNEL, SENDER, OpenAgent
from stenolog.cli.output import (
    format_age,
    inline_output,
    one_line,
    plural,
    printable,
    shorten,
)
from stenolog.cli.workspace import matching_keys
from stenolog.errors import StenologError

if TYPE_CHECKING:
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import Layout
    from prompt_toolkit.output import Output


# --- choices --------------------------------------------------------------------------------------


PAGE_SIZE: Final = 1_000
"""Number of sessions that are read from the catalog at once."""
_MAX_HITS: Final = 100
"""Maximum number of hits in messages."""


class Choices:
    """The sessions that match a query, and the selected session."""

    def __init__(self, *, channel: str | None = None) -> None:
        """Start empty. Only sessions of `channel` match until `toggle_channel` is called."""
        self.channel = channel
        self.all_channels = channel is None
        self.is_loaded = False
        """Whether all sessions of the catalog were added, or loading them failed."""
        self.query = ""
        self.matches: list[Entry] = []
        self.selected_row = 0
        self.hits: dict[str, Hit] = {}
        """Hits of the current query in messages, by key."""
        self._entries: dict[str, Entry] = {}
        self._searched_texts: dict[str, str] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the readable sessions that have messages, in the order of the catalog."""
        for entry in entries:
            if entry.problem is None and entry.count and entry.key not in self._entries:
                self._entries[entry.key] = entry
                searched_text = f"{entry.title}\n{entry.key}\n{entry.prompt}"
                self._searched_texts[entry.key] = searched_text.casefold()
        self._update_matches()

    def set_query(self, query: str) -> None:
        """Set the query, and drop the hits of the previous query."""
        if query != self.query:
            self.query, self.hits, self.selected_row = query, {}, 0
            self._update_matches()

    def add_hits(self, query: str, hits: Iterable[Hit]) -> None:
        """Add hits in messages, best first, unless the query has changed."""
        if query == self.query:
            for hit in hits:
                self.hits.setdefault(hit.key, hit)
            self._update_matches()

    def toggle_channel(self) -> None:
        """Switch between the sessions of the channel and all sessions."""
        if self.channel is not None:
            self.all_channels = not self.all_channels
            self.selected_row = 0
            self._update_matches()

    def move(self, rows: int) -> None:
        """Move the selection down by this number of rows, or up if the number is negative."""
        self.selected_row = max(0, min(self.selected_row + rows, len(self.matches) - 1))

    @property
    def selection(self) -> Entry | None:
        """The selected session, or None if no session matches."""
        return self.matches[self.selected_row] if self.matches else None

    @property
    def other_match_count(self) -> int:
        """Number of matching sessions in other channels, which are not in the list."""
        if self.all_channels:
            return 0
        matches = (key in self.hits or self.matches_title_or_key(key) for key in self._entries)
        return sum(matches) - len(self.matches)

    def _update_matches(self) -> None:
        old_key = self.selection.key if self.selected_row and self.selection is not None else None
        entries = {
            key: entry
            for key, entry in self._entries.items()
            if self.all_channels or entry.channel == self.channel
        }
        keys = [key for key in entries if self.matches_title_or_key(key)]
        # A match in the title ranks above a match in a message.
        keys += [key for key in self.hits if key in entries and not self.matches_title_or_key(key)]
        self.matches = [entries[key] for key in keys]
        if old_key in keys:
            self.selected_row = keys.index(old_key)
        else:
            self.selected_row = min(self.selected_row, max(0, len(keys) - 1))

    def matches_title_or_key(self, key: str) -> bool:
        """Return whether the title, key or first prompt contain all words of the query."""
        searched_text = self._searched_texts[key]
        return all(word in searched_text for word in self.query.casefold().split())


def prefix_query(query: str) -> str:
    """Return the query for the catalog. Its last word is a prefix, because it may be incomplete."""
    return f"{query}*" if query[-1:].isalnum() else query


def search_messages(catalog: Catalog, query: str) -> Sequence[Hit]:
    """Return hits of the query in messages, best first."""
    return catalog.search(prefix_query(query), limit=_MAX_HITS).hits if query.strip() else ()


def _iterate_entries(catalog: Catalog, *, page_size: int, channel: str | None) -> Iterator[Entry]:
    """Yield the sessions of the catalog, read in pages of this size, last changed first."""
    page = catalog.list(channel=channel, limit=page_size)
    yield from page.entries
    while page.after is not None:
        page = catalog.list(channel=channel, limit=page_size, after=page.after)
        yield from page.entries


def load_sessions(catalog: Catalog, choices: Choices) -> None:
    """Add all sessions of the catalog to `choices`."""
    choices.add(_iterate_entries(catalog, page_size=PAGE_SIZE, channel=None))
    choices.is_loaded = True


def find_sessions(catalog: Catalog, search_text: str) -> Sequence[Entry]:
    """Return the session with this key, else all sessions that match the text.

    Messages are searched only if no title, key or first prompt matches.
    """
    choices = Choices()
    load_sessions(catalog, choices)
    choices.set_query(search_text)
    for entry in choices.matches:
        if entry.key == search_text:
            return [entry]
    if not choices.matches:
        choices.add_hits(search_text, search_messages(catalog, search_text))
    return choices.matches


def find_last_session(catalog: Catalog, *, channel: str) -> Entry | None:
    """Return the channel's last changed session that is readable and has messages, or None."""
    entries = _iterate_entries(catalog, page_size=20, channel=channel)
    return next((entry for entry in entries if entry.problem is None and entry.count), None)


# --- picker ---------------------------------------------------------------------------------------


_FIRST_PAGE_SIZE: Final = 50
"""Number of sessions that are read before the list is shown."""
_MAX_ROWS: Final = 15
_RESERVED_ROWS: Final = 5
"""Number of rows of the terminal that are not used for the list."""
_SEARCH_DELAY_SECONDS: Final = 0.08
"""Seconds without a key press before messages are searched."""
_STYLE: Final = {
    "chosen": "reverse",
    "dim": "ansibrightblack",
    "running": "ansigreen",
    "interrupted": "ansiyellow",
    "head": "bold",
}


class Picker:
    """Interactive list of sessions, filled from the catalog while the list is shown."""

    def __init__(self, catalog: Catalog, *, channel: str | None = None) -> None:
        """Create the list. It has only sessions of `channel` until the user shows all sessions."""
        self._catalog = catalog
        self.choices = Choices(channel=channel)
        self.problem = ""
        self._top_row = 0
        self._is_done = False
        self._enter_pressed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, query: str = "", *, source: "Input | None" = None, output: "Output | None" = None
    ) -> str | None:
        """Return the key of the session that the user chooses, or None.

        `query` is the initial query. `source` and `output` are used instead of the terminal.
        """
        page = await asyncio.to_thread(self._catalog.list, limit=_FIRST_PAGE_SIZE)
        self.choices.add(page.entries)
        self.choices.is_loaded = page.after is None
        app = self._make_application(query, source, output)
        if page.after is not None:
            start_task(self._load_sessions(app, page.after), self._tasks)
        if query:
            start_task(self._search_messages(app, query, without_delay=True), self._tasks)
        try:
            return await app.run_async()
        finally:
            # Wait for running searches, which are short: they must not outlive the catalog.
            self._is_done = True
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- content -----------------------------------------------------------------------------

    def headline(self) -> "StyleAndTextTuples":
        """Return the headline: which sessions are listed, and their number."""
        choices = self.choices
        channel_text = "all channels" if choices.all_channels else f"channel {choices.channel}"
        count = f"{len(choices.matches):,}{'' if choices.is_loaded else '+'}"
        sessions = f"{count} {'session' if count == '1' else 'sessions'}"
        return [("class:head", "Resume a session"), ("class:dim", f"  {channel_text} · {sessions}")]

    def session_rows(self, width: int, height: int) -> "StyleAndTextTuples":
        """Return the part of the list around the selection, one line per session."""
        choices = self.choices
        if not choices.matches:
            return [("class:dim", self._empty_text())]
        self._top_row = min(self._top_row, choices.selected_row)
        self._top_row = max(self._top_row, choices.selected_row - height + 1)
        self._top_row = max(0, min(self._top_row, len(choices.matches) - height))
        now = datetime.now(UTC)
        lines: StyleAndTextTuples = []
        for entry in choices.matches[self._top_row : self._top_row + height]:
            is_selected = entry is choices.selection
            lines += self._session_row(entry, now, width - 1, is_selected=is_selected)
            lines.append(("", "\n"))
        return lines[:-1]

    def selection_detail(self, width: int) -> "StyleAndTextTuples":
        """Return details of the selection: the hit or the first prompt, and the key."""
        entry = self.choices.selection
        if entry is None:
            return []
        hit = self.choices.hits.get(entry.key)
        text = f"[{hit.seq}] {hit.role}: {hit.snippet}" if hit is not None else entry.prompt
        text_line = _fit_width(f"  {' '.join(printable(text).split())}", width - 1)
        counts = f"{plural(entry.visible, 'message')} · ≈{entry.tokens:,} tokens"
        key_line = _fit_width(f"  {one_line(entry.key)} · {counts}", width - 1)
        return [("class:dim", f"{text_line}\n{key_line}")]

    def help_line(self) -> "StyleAndTextTuples":
        """Return the help line, or the problem that occurred."""
        if self.problem:
            return [("class:interrupted", self.problem)]
        help_text = "type to filter · ↑↓ select · Enter resume · Esc cancel"
        if self.choices.channel is not None:
            other_list = "this channel" if self.choices.all_channels else "all channels"
            help_text = f"{help_text} · Tab {other_list}"
        return [("class:dim", help_text)]

    def _session_row(
        self, entry: Entry, now: datetime, width: int, *, is_selected: bool
    ) -> "StyleAndTextTuples":
        style = "class:chosen" if is_selected else ""
        age = format_age(entry.updated, now) if entry.updated is not None else "-"
        state_mark = {"running": "●", "interrupted": "◐"}.get(entry.state, " ")
        title = one_line(printable(entry.title)) or one_line(entry.key)
        if entry.key in self.choices.hits and not self.choices.matches_title_or_key(entry.key):
            title = f"{title}  …{one_line(printable(self.choices.hits[entry.key].snippet))}"
        row_start = f"{'>' if is_selected else ' '} {age:>10} {entry.visible:>6,} "
        title_text = _fit_width(f" {title}", width - len(row_start) - 1)
        state_style = f"class:{entry.state}" if entry.state != "idle" else ""
        return [(style, row_start), (f"{style} {state_style}", state_mark), (style, title_text)]

    def _empty_text(self) -> str:
        choices = self.choices
        if not choices.is_loaded:
            return "  …"
        if choices.other_match_count:
            return f"  No match in this channel; Tab shows {choices.other_match_count:,} in others."
        return "  No matching sessions." if choices.query else "  No sessions yet."

    # --- loading -----------------------------------------------------------------------------

    async def _load_sessions(self, app: "Application[Any]", after: str | None) -> None:
        while after is not None and not self._is_done:
            try:
                page = await asyncio.to_thread(self._catalog.list, limit=PAGE_SIZE, after=after)
            except StenologError as error:
                self.problem = f"The list is incomplete: {error}"
                break
            self.choices.add(page.entries)
            after = page.after
            self._choose_or_repaint(app)
        self.choices.is_loaded = True
        app.invalidate()

    async def _search_messages(
        self, app: "Application[Any]", query: str, *, without_delay: bool = False
    ) -> None:
        if not without_delay:
            await asyncio.sleep(_SEARCH_DELAY_SECONDS)
        if query != self.choices.query or self._is_done:
            return
        try:
            hits = await asyncio.to_thread(search_messages, self._catalog, query)
        except StenologError as error:
            self.problem = f"Messages cannot be searched: {error}"
        else:
            self.choices.add_hits(query, hits)
        self._choose_or_repaint(app)

    def _choose_or_repaint(self, app: "Application[Any]") -> None:
        """Choose the selected session if Enter was pressed and there is one; repaint the list."""
        entry = self.choices.selection
        if self._enter_pressed and entry is not None and not app.is_done:
            app.exit(result=entry.key)
        app.invalidate()

    # --- the application ---------------------------------------------------------------------

    def _make_application(
        self, query: str, source: "Input | None", output: "Output | None"
    ) -> "Application[str | None]":
        # These imports are slow and only needed for this list.
        from prompt_toolkit.application import Application
        from prompt_toolkit.buffer import Buffer
        from prompt_toolkit.document import Document
        from prompt_toolkit.styles import Style

        def on_text_changed(buffer: Buffer) -> None:
            self._enter_pressed = False
            self.choices.set_query(buffer.text.strip())
            start_task(self._search_messages(app, self.choices.query), self._tasks)

        buffer = Buffer(document=Document(query), multiline=False)
        self.choices.set_query(query.strip())
        buffer.on_text_changed += on_text_changed
        app: Application[str | None] = Application(
            layout=self._make_layout(buffer),
            key_bindings=self._make_key_bindings(),
            style=Style.from_dict(_STYLE),
            erase_when_done=True,
            input=source,
            output=output or inline_output(),
        )
        # Escape sequences start with Esc, so a long timeout would delay the Esc key.
        app.ttimeoutlen = 0.05
        return app

    def _make_layout(self, buffer: Any) -> "Layout":
        from prompt_toolkit.application import get_app
        from prompt_toolkit.layout import BufferControl, HSplit, Layout, Window
        from prompt_toolkit.layout import FormattedTextControl as TextControl

        def width() -> int:
            return get_app().output.get_size().columns

        def height() -> int:
            return max(1, min(_MAX_ROWS, get_app().output.get_size().rows - _RESERVED_ROWS))

        query_row = Window(BufferControl(buffer), height=1, get_line_prefix=lambda *_: [("", "> ")])
        windows = [
            Window(TextControl(self.headline), height=1),
            query_row,
            Window(TextControl(lambda: self.session_rows(width(), height())), height=height),
            Window(TextControl(lambda: self.selection_detail(width())), height=2),
            Window(TextControl(self.help_line), height=1),
        ]
        return Layout(HSplit(windows), focused_element=query_row)

    def _make_key_bindings(self) -> "KeyBindings":
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.key_binding.key_processor import KeyPressEvent as Press

        keys = KeyBindings()
        for names, rows in (
            (("up", "c-p"), -1),
            (("down", "c-n"), 1),
            (("pageup",), -_MAX_ROWS),
            (("pagedown",), _MAX_ROWS),
        ):
            for name in names:
                keys.add(name)(lambda _press, rows=rows: self.choices.move(rows))

        keys.add("tab")(lambda _press: self.choices.toggle_channel())

        @keys.add("enter")
        def choose_session(press: Press) -> None:
            # If Enter is pressed before a match is found, the first match is chosen later.
            self._enter_pressed = True
            self._choose_or_repaint(press.app)

        @keys.add("escape", eager=True)
        @keys.add("c-c")
        @keys.add("c-d")
        @keys.add("<sigint>")
        def cancel_choice(press: Press) -> None:
            press.app.exit(result=None)

        return keys


def _fit_width(text: str, width: int) -> str:
    """Return the text padded or shortened to exactly this width of the terminal."""
    from prompt_toolkit.utils import get_cwidth

    if get_cwidth(text) > width:
        fitting_text = ""
        for character in text:
            if get_cwidth(fitting_text + character) > max(0, width - 1):
                break
            fitting_text += character
        text = f"{fitting_text}…" if width > 0 else ""
    return text + " " * (width - get_cwidth(text))


# --- start of a chat ------------------------------------------------------------------------------


_MAX_TITLE_LENGTH: Final = 60


class ChatStart(Struct, frozen=True, kw_only=True):
    """The session in which a chat starts."""

    key: str
    description: str
    """Description of the session in one line; may be empty."""
    resumes: bool
    """Whether the session already has messages."""


async def find_start(
    opened_agent: OpenAgent,
    *,
    key: str | None = None,
    continue_last: bool = False,
    search_text: str | None = None,
) -> ChatStart | None:
    """Find the session to start in; return None if the user chose no session.

    `key` names the session, `continue_last` selects the last session of channel cli, and
    `search_text` selects a session that matches it; otherwise the session is new. Raises
    StenologError.
    """
    catalog = opened_agent.agent.catalog
    if key is not None:
        key = opened_agent.agent.resolve_key(key)
        resumes = bool(opened_agent.agent.sessions.get_history(key, last=1))
        description = ""
        if not resumes:
            description = "New session with this key."
            # `steno list` shows a part of a long key, which is a new key here.
            matches = matching_keys(opened_agent.agent.store.list_sessions(), key)
            if len(matches) == 1:
                description += f" To continue {one_line(matches[0])}, use the whole key."
        return ChatStart(key=key, description=description, resumes=resumes)
    if search_text is not None:
        return await _choose_existing_session(catalog, search_text)
    last_entry = await asyncio.to_thread(find_last_session, catalog, channel=CHANNEL)
    if not continue_last:
        description = "New session."
        if last_entry is not None:
            hint = "`steno chat -c` continues the last one"
            if last_entry.state == "interrupted":
                hint = "The last one was interrupted; `steno chat -c` finishes the answer"
            description = f"New session. {hint}: {_short_title(last_entry)}"
    elif last_entry is not None:
        return _start_from_entry(last_entry)
    else:
        description = "There is no earlier session to continue. This is a new one."
    return ChatStart(key=new_key(CHANNEL, SENDER), description=description, resumes=False)


async def _choose_existing_session(catalog: Catalog, search_text: str) -> ChatStart | None:
    matches = await asyncio.to_thread(find_sessions, catalog, search_text)
    if len(matches) == 1:
        return _start_from_entry(matches[0])
    key = await Picker(catalog, channel=CHANNEL).run(search_text)
    if key is None:
        return None
    return _start_from_entry((await asyncio.to_thread(find_sessions, catalog, key))[0])


def _start_from_entry(entry: Entry) -> ChatStart:
    details = plural(entry.visible, "message")
    if entry.updated is not None:
        age = format_age(entry.updated, datetime.now(UTC))
        details += ", just now" if age == "now" else f", {age}" if "-" in age else f", {age} ago"
    return ChatStart(key=entry.key, description=f"{_short_title(entry)} ({details})", resumes=True)


def _short_title(entry: Entry) -> str:
    return shorten(one_line(printable(entry.title)) or one_line(entry.key), _MAX_TITLE_LENGTH)
