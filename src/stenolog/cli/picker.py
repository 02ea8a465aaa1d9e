"""Interactive list from which the user chooses a session. Typing filters the list.

This module compares the typed text with titles, keys and first prompts of the catalog's entries.
The catalog searches the messages.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct

from stenolog.agent.commands import new_key
from stenolog.catalog import Catalog, Entry, Hit
from stenolog.cli.agents import CHANNEL, SENDER, OpenAgent
from stenolog.cli.output import (
    format_age,
    inline_output,
    is_interactive,
    one_line,
    plural,
    printable,
)
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
"""Number of entries that are read from the catalog at once."""
_MAX_HITS: Final = 100
"""Maximum number of hits in messages."""


class Choices:
    """The sessions that match a query, and the selected session."""

    def __init__(self, *, channel: str | None = None) -> None:
        """Start without sessions. Until `toggle_channel`, only sessions of `channel` match."""
        self.channel = channel
        self.all_channels = channel is None
        self.is_loaded = False
        """Whether all sessions of the catalog were added."""
        self.query = ""
        self.matches: list[Entry] = []
        self.selected_row = 0
        self.hits: dict[str, Hit] = {}
        """Hits of the current query in messages, by key."""
        self._entries: dict[str, Entry] = {}
        self._searched_texts: dict[str, str] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Add sessions, in the order of the catalog."""
        for entry in entries:
            if entry.problem is None and entry.count and entry.key not in self._entries:
                self._entries[entry.key] = entry
                self._searched_texts[entry.key] = (
                    f"{entry.title}\n{entry.key}\n{entry.prompt}".casefold()
                )
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
        """Move the selection down by this number of rows."""
        self.selected_row = max(0, min(self.selected_row + rows, len(self.matches) - 1))

    @property
    def selection(self) -> Entry | None:
        """The selected session."""
        return self.matches[self.selected_row] if self.matches else None

    @property
    def other_matches(self) -> int:
        """Number of matches in other channels that are hidden from the list."""
        return (
            0 if self.all_channels else sum(map(self._matches, self._entries)) - len(self.matches)
        )

    def _update_matches(self) -> None:
        old_key = self.selection.key if self.selected_row and self.selection is not None else None
        matching = [
            entry
            for key, entry in self._entries.items()
            if (self.all_channels or entry.channel == self.channel) and self._matches(key)
        ]
        # A match in the title ranks above a match in a message.
        self.matches = [entry for entry in matching if self.name_matches(entry.key)]
        self.matches += [
            self._entries[key]
            for key in self.hits
            if key in self._entries
            and not self.name_matches(key)
            and (self.all_channels or self._entries[key].channel == self.channel)
        ]
        indexes = [index for index, entry in enumerate(self.matches) if entry.key == old_key]
        self.selected_row = (
            indexes[0] if indexes else min(self.selected_row, max(0, len(self.matches) - 1))
        )

    def _matches(self, key: str) -> bool:
        return key in self.hits or self.name_matches(key)

    def name_matches(self, key: str) -> bool:
        """Return whether the title, key or first prompt contain all words of the query."""
        searched_text = self._searched_texts[key]
        return all(word in searched_text for word in self.query.casefold().split())


def prefix_query(query: str) -> str:
    """Return the query for the catalog; the last word is a prefix, as it may be incomplete."""
    return f"{query}*" if query[-1:].isalnum() else query


def search_messages(catalog: Catalog, query: str) -> Sequence[Hit]:
    """Return hits of the query in messages, best first."""
    return catalog.search(prefix_query(query), limit=_MAX_HITS).hits if query.strip() else ()


def _catalog_pages(
    catalog: Catalog, *, size: int, channel: str | None = None
) -> Iterator[Sequence[Entry]]:
    """Yield the entries of the catalog in pages, last changed first."""
    page = catalog.list(channel=channel, limit=size)
    yield page.entries
    while page.after is not None:
        page = catalog.list(channel=channel, limit=size, after=page.after)
        yield page.entries


def load_sessions(catalog: Catalog, choices: Choices) -> None:
    """Add all sessions of the catalog to `choices`."""
    for entries in _catalog_pages(catalog, size=PAGE_SIZE):
        choices.add(entries)
    choices.is_loaded = True


def find_sessions(catalog: Catalog, text: str) -> Sequence[Entry]:
    """Return the session with this key, else all sessions that match the text.

    Messages are searched only if no title, key or first prompt matches.
    """
    choices = Choices()
    load_sessions(catalog, choices)
    choices.set_query(text)
    for entry in choices.matches:
        if entry.key == text:
            return [entry]
    if not choices.matches:
        choices.add_hits(text, search_messages(catalog, text))
    return choices.matches


def newest_session(catalog: Catalog, *, channel: str) -> Entry | None:
    """Return the last changed readable session of a channel, or None."""
    for entries in _catalog_pages(catalog, size=20, channel=channel):
        for entry in entries:
            if entry.problem is None and entry.count:
                return entry
    return None


# --- picker ---------------------------------------------------------------------------------------


_FIRST_PAGE_SIZE: Final = 50
_MAX_ROWS: Final = 15
_OTHER_ROWS: Final = 5
"""Number of rows of the terminal that are not used for the list."""
_SEARCH_DELAY_SECONDS: Final = 0.08
"""Seconds without a key press before messages are searched."""
_STYLE: Final = {
    "chosen": "reverse",
    "dim": "ansibrightblack",
    "hit": "bold",
    "running": "ansigreen",
    "interrupted": "ansiyellow",
    "head": "bold",
}


class Picker:
    """Interactive list of choices, filled from the catalog while it is shown."""

    def __init__(self, catalog: Catalog, *, channel: str | None = None) -> None:
        """Create the list. Until the user switches, the list has only sessions of `channel`."""
        self._catalog = catalog
        self.choices = Choices(channel=channel)
        self.problem = ""
        self._top_row = 0
        self._is_done = False
        self._enter_pressed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, text: str = "", *, source: "Input | None" = None, output: "Output | None" = None
    ) -> str | None:
        """Return the key of the session that the user chooses, or None.

        `text` is the initial query. `source` and `output` replace the terminal of the
        process.
        """
        page = await asyncio.to_thread(self._catalog.list, limit=_FIRST_PAGE_SIZE)
        self.choices.add(page.entries)
        self.choices.is_loaded = page.after is None
        app = self._make_application(text, source, output)
        if page.after is not None:
            self._start_task(self._load_sessions(app, page.after))
        if text:
            self._start_task(self._search_messages(app, text, at_once=True))
        try:
            return await app.run_async()
        finally:
            # Searches are short and must not outlive the catalog.
            self._is_done = True
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- content -----------------------------------------------------------------------------

    def headline(self) -> "StyleAndTextTuples":
        """Return the headline: which sessions are listed, and their number."""
        choices = self.choices
        channel_text = "all channels" if choices.all_channels else f"channel {choices.channel}"
        count = f"{len(choices.matches):,}{'' if choices.is_loaded else '+'}"
        noun = "session" if count == "1" else "sessions"
        return [
            ("class:head", "Resume a session"),
            ("class:dim", f"  {channel_text} · {count} {noun}"),
        ]

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
        for position, entry in enumerate(
            choices.matches[self._top_row : self._top_row + height], self._top_row
        ):
            is_selected = position == choices.selected_row
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
        counts = f"{plural(entry.visible, 'message')} · ≈{entry.tokens:,} tokens"
        key_line = _fit_width(f"  {one_line(entry.key)} · {counts}", width - 1)
        return [
            (
                "class:dim",
                f"{_fit_width('  ' + ' '.join(printable(text).split()), width - 1)}\n{key_line}",
            )
        ]

    def help_line(self) -> "StyleAndTextTuples":
        """Return the help line, or the problem that occurred."""
        if self.problem:
            return [("class:interrupted", self.problem)]
        keys = "type to filter · ↑↓ select · Enter resume · Esc cancel"
        if self.choices.channel is not None:
            other_list = "this channel" if self.choices.all_channels else "all channels"
            keys = f"{keys} · Tab {other_list}"
        return [("class:dim", keys)]

    def _session_row(
        self, entry: Entry, now: datetime, width: int, *, is_selected: bool
    ) -> "StyleAndTextTuples":
        style = "class:chosen" if is_selected else ""
        age = format_age(entry.updated, now) if entry.updated is not None else "-"
        mark = {"running": "●", "interrupted": "◐"}.get(entry.state, " ")
        title = one_line(printable(entry.title)) or one_line(entry.key)
        if entry.key in self.choices.hits and not self.choices.name_matches(entry.key):
            title = f"{title}  …{one_line(printable(self.choices.hits[entry.key].snippet))}"
        start = f"{'>' if is_selected else ' '} {age:>10} {entry.visible:>6,} "
        title_text = _fit_width(f" {title}", width - len(start) - 1)
        state_style = f"class:{entry.state}" if entry.state != "idle" else ""
        return [(style, start), (f"{style} {state_style}", mark), (style, title_text)]

    def _empty_text(self) -> str:
        choices = self.choices
        if not choices.is_loaded:
            return "  …"
        if choices.other_matches:
            return f"  No match in this channel; Tab shows {choices.other_matches:,} in others."
        return "  No matching sessions." if choices.query else "  No sessions yet."

    # --- loading -----------------------------------------------------------------------------

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_sessions(self, app: "Application[Any]", after: str | None) -> None:
        while after is not None and not self._is_done:
            try:
                page = await asyncio.to_thread(self._catalog.list, limit=PAGE_SIZE, after=after)
            except StenologError as error:
                self.problem = f"The list is incomplete: {error}"
                break
            self.choices.add(page.entries)
            after = page.after
            self._refresh_list(app)
        self.choices.is_loaded = True
        app.invalidate()

    async def _search_messages(
        self, app: "Application[Any]", query: str, *, at_once: bool = False
    ) -> None:
        if not at_once:
            await asyncio.sleep(_SEARCH_DELAY_SECONDS)
        if query != self.choices.query or self._is_done:
            return
        try:
            hits = await asyncio.to_thread(search_messages, self._catalog, query)
        except StenologError as error:
            self.problem = f"Messages cannot be searched: {error}"
        else:
            self.choices.add_hits(query, hits)
        self._refresh_list(app)

    def _refresh_list(self, app: "Application[Any]") -> None:
        """Repaint. If Enter was pressed before a match was loaded, choose the match now."""
        entry = self.choices.selection
        if self._enter_pressed and entry is not None and not app.is_done:
            app.exit(result=entry.key)
        app.invalidate()

    # --- the application ---------------------------------------------------------------------

    def _make_application(
        self, text: str, source: "Input | None", output: "Output | None"
    ) -> "Application[str | None]":
        # These imports are slow and only needed for this list.
        from prompt_toolkit.application import Application
        from prompt_toolkit.buffer import Buffer
        from prompt_toolkit.document import Document
        from prompt_toolkit.layout import Layout
        from prompt_toolkit.styles import Style

        def on_text_changed(buffer: Buffer) -> None:
            self._enter_pressed = False
            self.choices.set_query(buffer.text.strip())
            self._start_task(self._search_messages(app, self.choices.query))

        buffer = Buffer(document=Document(text), multiline=False)
        self.choices.set_query(text.strip())
        buffer.on_text_changed += on_text_changed
        layout: Layout = self._make_layout(buffer)
        app: Application[str | None] = Application(
            layout=layout,
            key_bindings=self._key_bindings(),
            style=Style.from_dict(_STYLE),
            erase_when_done=True,
            input=source,
            output=output or inline_output(),
        )
        # The user can press Esc. Do not wait long for an escape sequence that starts with Esc.
        app.ttimeoutlen = 0.05
        return app

    def _make_layout(self, buffer: Any) -> "Layout":
        from prompt_toolkit.application import get_app
        from prompt_toolkit.layout import (
            BufferControl,
            FormattedTextControl,
            HSplit,
            Layout,
            Window,
        )

        def width() -> int:
            return get_app().output.get_size().columns

        def height() -> int:
            return max(1, min(_MAX_ROWS, get_app().output.get_size().rows - _OTHER_ROWS))

        line = Window(
            BufferControl(buffer), height=1, get_line_prefix=lambda _line, _wrap: [("", "> ")]
        )
        return Layout(
            HSplit(
                [
                    Window(FormattedTextControl(self.headline), height=1),
                    line,
                    Window(
                        FormattedTextControl(lambda: self.session_rows(width(), height())),
                        height=height,
                    ),
                    Window(FormattedTextControl(lambda: self.selection_detail(width())), height=2),
                    Window(FormattedTextControl(self.help_line), height=1),
                ]
            ),
            focused_element=line,
        )

    def _key_bindings(self) -> "KeyBindings":
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
            self._refresh_list(press.app)

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
        fitting = ""
        for character in text:
            if get_cwidth(fitting + character) > max(0, width - 1):
                break
            fitting += character
        text = f"{fitting}…" if width > 0 else ""
    return text + " " * (width - get_cwidth(text))


# --- start of a chat ------------------------------------------------------------------------------


_MAX_LISTED_SESSIONS: Final = 10
"""Maximum number of sessions listed in the error if several match."""
_MAX_TITLE_LENGTH: Final = 60


class ChatStart(Struct, frozen=True, kw_only=True):
    """The session in which a chat starts."""

    key: str
    description: str
    """Description of the session in one line."""
    resumes: bool
    """Whether the session already has messages."""


async def find_start(
    opened: OpenAgent,
    *,
    key: str | None = None,
    continue_last: bool = False,
    text: str | None = None,
) -> ChatStart | None:
    """Find the session to start in; return None if the user chose no session.

    `continue_last` selects the last session of channel cli; `text` selects a session that matches
    this text. Raises StenologError, and ClickException if there is no terminal to ask in.
    """
    catalog = opened.agent.catalog
    if key is not None:
        return _start_with_key(opened, key)
    if text is not None:
        return await _choose_start(catalog, text)
    last_entry = await asyncio.to_thread(newest_session, catalog, channel=CHANNEL)
    if not continue_last:
        description = "New session."
        if last_entry is not None:
            hint = "`steno chat -c` continues the last one"
            if last_entry.state == "interrupted":
                hint = "The last one was interrupted; `steno chat -c` finishes the answer"
            description = f"New session. {hint}: {_short_title(last_entry)}"
    elif last_entry is not None:
        return _resume_start(last_entry)
    else:
        description = "There is no earlier session to continue. This is a new one."
    return ChatStart(key=new_key(CHANNEL, SENDER), description=description, resumes=False)


async def _choose_start(catalog: Catalog, text: str) -> ChatStart | None:
    matches = await asyncio.to_thread(find_sessions, catalog, text)
    if len(matches) == 1:
        return _resume_start(matches[0])
    if is_interactive():
        key = await Picker(catalog, channel=CHANNEL).run(text)
        if key is None:
            return None
        return _resume_start(next(iter(await asyncio.to_thread(find_sessions, catalog, key))))
    if not matches:
        raise click.ClickException(
            f"No session matches {one_line(text)!r}. `steno list` lists all sessions."
        )
    count = len(matches)
    question = f"{count:,} sessions match {one_line(text)!r}." if text else "Which session?"
    lines = [f"{question} Choose one by its key: steno chat KEY"]
    lines += [
        f"  {one_line(entry.key)}  {_short_title(entry)}"
        for entry in matches[:_MAX_LISTED_SESSIONS]
    ]
    lines += (
        [f"  … and {count - _MAX_LISTED_SESSIONS:,} more"] if count > _MAX_LISTED_SESSIONS else []
    )
    raise click.ClickException("\n".join(lines))


def _start_with_key(opened: OpenAgent, key: str) -> ChatStart:
    key = opened.agent.resolve_key(key)
    if opened.agent.sessions.get_history(key, last=1):
        return ChatStart(key=key, description="", resumes=True)
    return ChatStart(key=key, description="New session with this key.", resumes=False)


def _resume_start(entry: Entry) -> ChatStart:
    details = plural(entry.visible, "message")
    if entry.updated is not None:
        age = format_age(entry.updated, datetime.now(UTC))
        details += ", just now" if age == "now" else f", {age}" if "-" in age else f", {age} ago"
    return ChatStart(key=entry.key, description=f"{_short_title(entry)} ({details})", resumes=True)


def _short_title(entry: Entry) -> str:
    title = one_line(printable(entry.title)) or one_line(entry.key)
    return title if len(title) <= _MAX_TITLE_LENGTH else f"{title[: _MAX_TITLE_LENGTH - 1]}…"
