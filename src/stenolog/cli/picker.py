"""Interactive list from which the user chooses a session. Typing filters the list.

This module compares the typed text with titles, keys and first prompts of the catalog's entries.
The catalog searches the messages.
"""

import asyncio
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from prompt_toolkit.buffer import Buffer
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.shortcuts import PromptSession
from prompt_toolkit.styles import Style
from rich.text import Text

from stenolog.catalog import Catalog, Entry, Hit
from stenolog.cli.agents import CHANNEL
from stenolog.cli.output import format_age, one_line, plural, printable
from stenolog.errors import StenologError

# --- choices --------------------------------------------------------------------------------------


_ALL: Final = 1 << 62
"""A limit larger than any number of sessions."""
_MAX_HITS: Final = 100
"""Maximum number of hits in messages."""


class Choices:
    """The sessions that match a query, and the selected session."""

    def __init__(self, *, channel: str | None = None) -> None:
        """Start empty. Only sessions of `channel` match; None: of all channels."""
        self.channel = channel
        self.query = ""
        self.matches: list[Entry] = []
        self.selected_row = 0
        self.hits: dict[str, Hit] = {}
        """Hits of the current query in messages, of sessions whose title does not match, by key."""
        self._entries: dict[str, tuple[Entry, str]] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the readable sessions that have messages, in the order of the catalog."""
        for entry in entries:
            if entry.problem is None and entry.count:
                searched_text = f"{entry.title}\n{entry.key}\n{entry.prompt}".casefold()
                self._entries.setdefault(entry.key, (entry, searched_text))
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

    def set_channel(self, channel: str | None) -> None:
        """Let only sessions of this channel match, or with None all sessions."""
        self.channel, self.selected_row = channel, 0
        self._update_matches()

    def move(self, rows: int) -> None:
        """Move the selection down by this number of rows, or up if the number is negative."""
        self.selected_row = max(0, min(self.selected_row + rows, len(self.matches) - 1))

    @property
    def selection(self) -> Entry | None:
        """The selected session, or None if no session matches."""
        return self.matches[self.selected_row] if self.matches else None

    def _update_matches(self) -> None:
        old_key = self.selection.key if self.selected_row and self.selection is not None else None
        words = self.query.casefold().split()
        titled = {
            entry.key: entry
            for entry, text in self._entries.values()
            if all(word in text for word in words)
        }
        # A match in the title ranks above a match in a message.
        self.hits = {key: hit for key, hit in self.hits.items() if key not in titled}
        matches = list(titled.values())
        matches += [self._entries[key][0] for key in self.hits if key in self._entries]
        self.matches = [entry for entry in matches if self.channel in (None, entry.channel)]
        shown_keys = [entry.key for entry in self.matches]
        self.selected_row = shown_keys.index(old_key) if old_key in shown_keys else 0


def search_messages(catalog: Catalog, query: str) -> Sequence[Hit]:
    """Return hits of the query in messages, best first. Its last word may be incomplete."""
    prefix_query = f"{query}*" if query[-1:].isalnum() else query
    return catalog.search(prefix_query, limit=_MAX_HITS).hits if query else ()


def find_sessions(catalog: Catalog, search_text: str) -> Sequence[Entry]:
    """Return the session with this key, else all sessions that match the text.

    Messages are searched only if no title, key or first prompt matches.
    """
    choices = Choices()
    choices.set_query(search_text)
    choices.add(catalog.list(limit=_ALL).entries)
    for entry in choices.matches:
        if entry.key == search_text:
            return [entry]
    if not choices.matches:
        choices.add_hits(search_text, search_messages(catalog, search_text))
    return choices.matches


# --- picker ---------------------------------------------------------------------------------------


_FIRST_PAGE_SIZE: Final = 50
"""Number of sessions that are read before the list is shown."""
_MAX_ROWS: Final = 15
_OTHER_ROWS: Final = 6
"""Number of rows of the terminal that are not used for the list."""
_STYLE: Final = {
    "chosen": "reverse",
    "dim": "ansibrightblack",
    "running": "ansigreen",
    "interrupted": "ansiyellow",
    "head": "bold",
}


async def choose_session(catalog: Catalog, search_text: str) -> Entry | None:
    """Return the only session that matches the text, or let the user choose one, or none."""
    if search_text:
        matches = await asyncio.to_thread(find_sessions, catalog, search_text)
        if len(matches) == 1:
            return matches[0]
    return await Picker(catalog, channel=CHANNEL).run(search_text)


class Picker:
    """Interactive list of sessions, filled from the catalog while the list is shown."""

    def __init__(self, catalog: Catalog, *, channel: str | None = None) -> None:
        """Create the list. It has only sessions of `channel` until the user shows all sessions."""
        self._catalog = catalog
        self._channel = channel
        self._choices = Choices(channel=channel)
        self._is_loading = True
        """Whether only the first sessions are loaded."""
        self._problem = ""
        self._enter_pressed = False
        self._is_done = False
        self._query_changed = asyncio.Event()
        # The list is the prompt above the line in which the query is typed.
        self._session: PromptSession[Entry | None] = PromptSession(
            self._list_text,
            key_bindings=self._make_key_bindings(),
            style=Style.from_dict(_STYLE),
            erase_when_done=True,
        )
        self._session.default_buffer.on_text_changed += self._on_query_changed
        self._app = self._session.app
        # Escape sequences start with Esc, so a long timeout would delay the Esc key.
        self._app.ttimeoutlen = 0.05

    async def run(self, query: str = "") -> Entry | None:
        """Return the session that the user chooses, or None. `query` is the initial query."""
        page = await asyncio.to_thread(self._catalog.list, limit=_FIRST_PAGE_SIZE)
        self._choices.add(page.entries)
        self._choices.set_query(query.strip())
        work = asyncio.gather(self._load_sessions(), self._search_messages())
        try:
            return await self._session.prompt_async(default=query)
        finally:
            # Wait for running reads: they must not outlive the catalog.
            self._is_done = True
            self._query_changed.set()
            await work

    async def _load_sessions(self) -> None:
        try:
            page = await asyncio.to_thread(self._catalog.list, limit=_ALL)
            self._choices.add(page.entries)
        except StenologError as error:
            self._problem = f"The list is incomplete: {error}"
        self._is_loading = False
        self._choose_or_repaint()

    async def _search_messages(self) -> None:
        while not self._is_done:
            self._query_changed.clear()
            query = self._choices.query
            try:
                hits = await asyncio.to_thread(search_messages, self._catalog, query)
                self._choices.add_hits(query, hits)
            except StenologError as error:
                self._problem = f"Messages cannot be searched: {error}"
            self._choose_or_repaint()
            await self._query_changed.wait()

    # --- keys --------------------------------------------------------------------------------

    def _on_query_changed(self, buffer: Buffer) -> None:
        self._enter_pressed = False
        self._choices.set_query(buffer.text.strip())
        self._query_changed.set()

    def _choose_or_repaint(self) -> None:
        """Choose the selected session if Enter was pressed and there is one; repaint the list."""
        entry = self._choices.selection
        is_open = self._app.is_running and not self._app.is_done
        if self._enter_pressed and entry is not None and is_open:
            self._app.exit(result=entry)
        self._app.invalidate()

    def _make_key_bindings(self) -> KeyBindings:
        keys = KeyBindings()
        for name, rows in (
            *(("up", -1), ("c-p", -1), ("pageup", -_MAX_ROWS)),
            *(("down", 1), ("c-n", 1), ("pagedown", _MAX_ROWS)),
        ):
            keys.add(name)(lambda _press, rows=rows: self._choices.move(rows))

        @keys.add("tab")
        def toggle_channel(_press: KeyPressEvent) -> None:
            self._choices.set_channel(None if self._choices.channel else self._channel)

        @keys.add("enter")
        def choose_selection(_press: KeyPressEvent) -> None:
            # If Enter is pressed before a match is found, the first match is chosen later.
            self._enter_pressed = True
            self._choose_or_repaint()

        @keys.add("escape", eager=True)
        @keys.add("c-c")
        @keys.add("c-d")
        @keys.add("<sigint>")
        def cancel_choice(_press: KeyPressEvent) -> None:
            self._app.exit(result=None)

        return keys

    # --- content -----------------------------------------------------------------------------

    def _list_text(self) -> StyleAndTextTuples:
        """Return the list around the selection, details of the selection, and the prompt."""
        choices = self._choices
        size = self._app.output.get_size()
        height = max(1, min(_MAX_ROWS, size.rows - _OTHER_ROWS))
        top = max(0, min(choices.selected_row - height // 2, len(choices.matches) - height))
        rows = choices.matches[top : top + height]
        channel = choices.channel
        sessions = plural(len(choices.matches), "session") + (" …" if self._is_loading else "")
        title = f"  {f'channel {channel}' if channel else 'all channels'} · {sessions}\n"
        keys = "type to filter · ↑↓ select · Enter resume · Esc cancel"
        if self._channel is not None:
            keys += f" · Tab {'all channels' if channel else 'this channel'}"
        text: StyleAndTextTuples = [("class:head", "Resume a session"), ("class:dim", title)]
        for entry in rows:
            text += self._row(entry, size.columns - 1)
        text.append(("", "\n" * (height - len(rows))))
        text += [("class:dim", _fit(line, size.columns - 1)) for line in self._details()]
        text.append(("class:interrupted" if self._problem else "class:dim", self._problem or keys))
        return [*text, ("", "\n> ")]

    def _row(self, entry: Entry, width: int) -> StyleAndTextTuples:
        is_selected = entry is self._choices.selection
        age = format_age(entry.updated, datetime.now(UTC)) if entry.updated is not None else "-"
        row_start = f"{'>' if is_selected else ' '} {age:>10} {entry.visible:>6,} "
        state_mark = {"running": "●", "interrupted": "◐"}.get(entry.state, " ")
        title = printable(entry.title) or entry.key
        if (hit := self._choices.hits.get(entry.key)) is not None:
            title += f"  …{hit.snippet}"
        style = "class:chosen" if is_selected else ""
        return [
            (style, row_start),
            (f"{style} class:{entry.state}", state_mark),
            (style, _fit(f" {title}", width - len(row_start) - 1)),
        ]

    def _details(self) -> tuple[str, str]:
        """Return the hit or the first prompt of the selection, and its key."""
        entry = self._choices.selection
        if entry is None:
            return ("" if self._is_loading else "  No matching sessions.", "")
        hit = self._choices.hits.get(entry.key)
        text = f"[{hit.seq}] {hit.role}: {hit.snippet}" if hit is not None else entry.prompt
        counts = f"{plural(entry.visible, 'message')} · ≈{entry.tokens:,} tokens"
        return f"  {' '.join(text.split())}", f"  {one_line(entry.key)} · {counts}"


def _fit(text: str, width: int) -> str:
    """Return the text as a line of exactly this width, without control characters."""
    line = Text(one_line(printable(text)))
    line.truncate(max(1, width), overflow="ellipsis", pad=True)
    return f"{line.plain}\n"
