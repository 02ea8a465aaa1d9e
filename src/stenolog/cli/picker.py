"""The resume picker: a list that filters as you type, below what the terminal shows already."""

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from stenolog.catalog import Catalog, Entry
from stenolog.cli.choices import MANY, Choices, hits_for
from stenolog.cli.terminal import inline_output
from stenolog.cli.text import age, one_line, printable
from stenolog.errors import StenologError

if TYPE_CHECKING:
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import Layout
    from prompt_toolkit.output import Output

_FIRST: Final = 50
_MOST_ROWS: Final = 15
_AROUND: Final = 5
"""How many lines stand around the list."""
_PAUSE: Final = 0.08
"""So long after the last key the content is searched."""
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
    """The key of the session that a person chose; None where they chose none.

    `text`: what is typed already. `channel`: whose sessions come first. `source` and `output`: the
    terminal, where it is not this process's own.
    """
    picker = Picker(catalog, channel=channel)
    return await picker.run(text, source=source, output=output)


class Picker:
    """Draws the choices, and fills them from the catalog while they are on the screen."""

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
        """Show it until somebody has chosen, or given up."""
        page = await asyncio.to_thread(self._catalog.list, limit=_FIRST)
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
            # A look into the index is short, and must not outlive the catalog.
            self._done = True
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what it shows -----------------------------------------------------------------------

    def head(self) -> "StyleAndTextTuples":
        """Of which sessions this is the list."""
        choices = self.choices
        whose = "all channels" if choices.all_channels else f"channel {choices.channel}"
        count = f"{len(choices.matches):,}{'' if choices.loaded else '+'}"
        return [("class:head", "Resume a session"), ("class:dim", f"  {whose} · {count}")]

    def rows(self, width: int, height: int) -> "StyleAndTextTuples":
        """The part of the list around the chosen one, a line each."""
        choices = self.choices
        if not choices.matches:
            return [("class:dim", self._nothing())]
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
        """More of the chosen one: where the words stand in it, or how it began; and its key."""
        entry = self.choices.chosen
        if entry is None:
            return []
        hit = self.choices.hits.get(entry.key)
        said = f"[{hit.seq}] {hit.role}: {hit.snippet}" if hit is not None else entry.prompt
        key = _fitted(f"  {one_line(entry.key)} · ≈{entry.tokens:,} tokens", width - 1)
        return [
            ("class:dim", f"{_fitted('  ' + one_line(printable(said)), width - 1)}\n{key}"),
        ]

    def legend(self) -> "StyleAndTextTuples":
        """Which keys do what."""
        if self.problem:
            return [("class:interrupted", self.problem)]
        keys = "type to filter · ↑ ↓ choose · Enter resume · Esc cancel"
        if self.choices.channel is not None:
            other = "this channel" if self.choices.all_channels else "all channels"
            keys = f"{keys} · Tab {other}"
        return [("class:dim", keys)]

    def _row(
        self, entry: Entry, now: datetime, width: int, *, chosen: bool
    ) -> "StyleAndTextTuples":
        style = "class:chosen" if chosen else ""
        when = age(entry.updated, now) if entry.updated is not None else "-"
        mark = {"running": "●", "interrupted": "◐"}.get(entry.state, " ")
        title = one_line(printable(entry.title)) or one_line(entry.key)
        if entry.key in self.choices.hits and not self.choices.named(entry.key):
            title = f"{title}  …{one_line(printable(self.choices.hits[entry.key].snippet))}"
        start = f"{'>' if chosen else ' '} {when:>10} {entry.visible:>6,} "
        rest = _fitted(f" {title}", width - len(start) - 1)
        state = f"class:{entry.state}" if entry.state != "idle" else ""
        return [(style, start), (f"{style} {state}", mark), (style, rest)]

    def _nothing(self) -> str:
        choices = self.choices
        if not choices.loaded:
            return "  …"
        if choices.elsewhere:
            return f"  Nothing matches here; {choices.elsewhere:,} in other channels: Tab."
        return "  No session matches." if choices.query else "  There are no sessions yet."

    # --- filling it --------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, app: "Application[Any]", after: str | None) -> None:
        while after is not None and not self._done:
            try:
                page = await asyncio.to_thread(self._catalog.list, limit=MANY, after=after)
            except StenologError as error:
                self.problem = f"The list is not complete: {error}"
                break
            self.choices.add(page.entries)
            after = page.after
            self._filled(app)
        self.choices.loaded = True
        app.invalidate()

    async def _search(self, app: "Application[Any]", query: str, *, at_once: bool = False) -> None:
        if not at_once:
            await asyncio.sleep(_PAUSE)
        if query != self.choices.query or self._done:
            return
        try:
            hits = await asyncio.to_thread(hits_for, self._catalog, query)
        except StenologError as error:
            self.problem = f"The content cannot be searched: {error}"
        else:
            self.choices.found(query, hits)
        self._filled(app)

    def _filled(self, app: "Application[Any]") -> None:
        """Show what has come; or take it, where Enter was pressed before it was there."""
        chosen = self.choices.chosen
        if self._entered and chosen is not None and not app.is_done:
            app.exit(result=chosen.key)
        app.invalidate()

    # --- the application ---------------------------------------------------------------------

    def _application(
        self, text: str, source: "Input | None", output: "Output | None"
    ) -> "Application[str | None]":
        # Slow to import, and only for who picks.
        from prompt_toolkit.application import Application
        from prompt_toolkit.buffer import Buffer
        from prompt_toolkit.document import Document
        from prompt_toolkit.layout import Layout
        from prompt_toolkit.styles import Style

        def typed(buffer: Buffer) -> None:
            self._entered = False
            self.choices.ask(buffer.text.strip())
            self._begin(self._search(app, self.choices.query))

        buffer = Buffer(document=Document(text), multiline=False)
        self.choices.ask(text.strip())
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
        # Esc is a key of its own here, and need not wait long for what may follow it.
        app.ttimeoutlen = 0.05
        return app

    def _layout(self, buffer: Any) -> "Layout":
        from prompt_toolkit.application import get_app
        from prompt_toolkit.layout import BufferControl, FormattedTextControl, HSplit, Layout
        from prompt_toolkit.layout import Window as Shown

        def width() -> int:
            return get_app().output.get_size().columns

        def height() -> int:
            return max(1, min(_MOST_ROWS, get_app().output.get_size().rows - _AROUND))

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
            (("pageup",), -_MOST_ROWS),
            (("pagedown",), _MOST_ROWS),
        ):
            for name in names:
                keys.add(name)(lambda _press, by=by: self.choices.move(by))

        keys.add("tab")(lambda _press: self.choices.switch())

        @keys.add("enter")
        def _(press: Press) -> None:
            # Who types faster than the index answers need not press it again.
            self._entered = True
            self._filled(press.app)

        @keys.add("escape", eager=True)
        @keys.add("c-c")
        @keys.add("c-d")
        @keys.add("<sigint>")
        def _(press: Press) -> None:
            press.app.exit(result=None)

        return keys


def _fitted(text: str, width: int) -> str:
    """The text in exactly this width of the terminal, shortened where it is too long."""
    from prompt_toolkit.utils import get_cwidth

    if get_cwidth(text) > width:
        kept = ""
        for character in text:
            if get_cwidth(kept + character) > max(0, width - 1):
                break
            kept += character
        text = f"{kept}…" if width > 0 else ""
    return text + " " * (width - get_cwidth(text))
