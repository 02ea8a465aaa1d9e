"""The line at the bottom of a chat: it stays there while answers scroll past above it.

Finished lines are written above it; what is still changing, and what waits, stands between. It
never takes the whole screen, so that the terminal keeps what was said.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct
from prompt_toolkit.application import Application
from prompt_toolkit.application.current import set_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, ThreadedCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import ANSI, AnyFormattedText, StyleAndTextTuples
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.layout import (
    BufferControl,
    ConditionalContainer,
    Dimension,
    Float,
    FloatContainer,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.menus import CompletionsMenu
from prompt_toolkit.styles import Style
from prompt_toolkit.widgets import SearchToolbar

from stenolog.cli.chat_words import PROMPT
from stenolog.cli.text import inline_output, one_line, printable

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

_STYLE: Final = {
    "prompt": "bold ansicyan",
    "dim": "ansibrightblack",
    "toolbar": "ansibrightblack",
    "full": "ansiyellow",
    "completion-menu": "noinherit",
    "completion-menu.completion.current": "reverse",
    "completion-menu.meta.completion": "ansibrightblack",
    "completion-menu.meta.completion.current": "reverse",
}
# Terminals that know these paint what stands between them at once; others pass them over.
_HOLD: Final = "\x1b[?2026h"
_SHOW: Final = "\x1b[?2026l"
_FRAME: Final = 0.08
"""How often what changes is painted."""
_TWICE: Final = 2.0
"""Within so many seconds a second Ctrl-C leaves."""
_MENU: Final = 8
_MOST_LINES: Final = 10
_HINT: Final = "Ctrl-C again leaves; so does Ctrl-D. /help shows what there is."


class Leave(Struct, frozen=True):
    """The user wants to go."""


class Pick(Struct, frozen=True):
    """The user wants to choose a session."""

    text: str = ""


Wish = Leave | Pick


class Behind(Protocol):
    """What the line asks of the chat behind it."""

    def send(self, text: str) -> Wish | None:
        """Somebody entered this. A wish ends the line until it is run again."""
        ...

    def stop(self) -> None:
        """End the answer that is being written."""
        ...

    @property
    def busy(self) -> bool:
        """Whether an answer is being written."""
        ...

    def live(self, rows: int) -> Sequence[str]:
        """What is still changing, in at most so many lines."""
        ...

    def waiting(self) -> Sequence[str]:
        """What was entered and has not had its turn yet."""
        ...

    def status(self) -> str:
        """The status line."""
        ...

    @property
    def nearly_full(self) -> bool:
        """Whether the status line is to be looked at."""
        ...


class Line:
    """Reads what is typed, and shows what happens."""

    def __init__(
        self,
        behind: Behind,
        *,
        history: History | None = None,
        completer: Completer | None = None,
        source: "Input | None" = None,
        output: "Output | None" = None,
    ) -> None:
        self._behind = behind
        self._lines: list[str] = []
        self._live: Sequence[str] = ()
        self._changed = asyncio.Event()
        self._hint = ""
        self._interrupted = 0.0
        self._buffer = Buffer(
            multiline=True,
            history=history or InMemoryHistory(),
            completer=None if completer is None else ThreadedCompleter(completer),
            complete_while_typing=Condition(lambda: self._buffer.text.startswith("/")),
        )
        self._buffer.on_text_changed += lambda _: self._unhint()
        self._app: Application[Wish] = Application(
            layout=self._layout(),
            key_bindings=self._keys(),
            style=Style.from_dict(_STYLE),
            erase_when_done=True,
            input=source,
            output=output or inline_output(),
        )
        # Alt-Enter comes as Esc and Enter in one piece.
        self._app.ttimeoutlen = 0.05

    async def run(self) -> Wish:
        """Take input until the user wishes something else than to talk."""
        painting = asyncio.get_running_loop().create_task(self._paint())
        painting.add_done_callback(self._painted_last)
        try:
            return await self._app.run_async(handle_sigint=True)
        finally:
            painting.cancel()
            await asyncio.gather(painting, return_exceptions=True)
            self.flush()

    def _painted_last(self, painting: "asyncio.Task[None]") -> None:
        """End with the error that painting ended with: a line that shows nothing more is worse."""
        error = None if painting.cancelled() else painting.exception()
        if error is not None and self._app.is_running and not self._app.is_done:
            self._app.exit(exception=error)

    def show(self, lines: Iterable[str]) -> None:
        """Put finished lines above the line, soon."""
        self._lines += lines
        self._changed.set()

    def changed(self) -> None:
        """What is shown has changed: paint it soon."""
        self._changed.set()

    async def _paint(self) -> None:
        while True:
            pause = _FRAME if self._behind.busy else None
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            self._look()
            self.flush()
            self._app.invalidate()
            await asyncio.sleep(_FRAME)

    def flush(self) -> None:
        """Finished lines go out at once, where the line stood; it is painted below them."""
        if not self._lines:
            return
        text = "".join(f"{line}\r\n" for line in self._lines)
        self._lines = []
        output, renderer = self._app.output, self._app.renderer
        if not self._app.is_running or self._app.is_done:
            output.write_raw(text)
            output.flush()
            return
        # All in one step, or the line would be seen to vanish for a moment.
        output.write_raw(_HOLD)
        renderer.erase()
        output.write_raw(text)
        with set_app(self._app):
            renderer.render(self._app, self._app.layout)
        output.write_raw(_SHOW)
        output.flush()

    # --- what it shows -----------------------------------------------------------------------

    def _layout(self) -> Layout:
        search = SearchToolbar()
        entry = Window(
            BufferControl(self._buffer, search_buffer_control=search.control, preview_search=True),
            height=self._height,
            get_line_prefix=self._prefix,
            wrap_lines=True,
            dont_extend_height=True,
        )
        return Layout(
            HSplit(
                [
                    _shown(self._live_text, lambda: bool(self._live)),
                    _shown(self._waiting_text, lambda: bool(self._behind.waiting())),
                    FloatContainer(
                        entry,
                        [
                            Float(
                                CompletionsMenu(max_height=_MENU - 1, scroll_offset=1),
                                xcursor=True,
                                ycursor=True,
                            )
                        ],
                    ),
                    search,
                    Window(FormattedTextControl(self._toolbar), height=1),
                ]
            ),
            focused_element=entry,
        )

    def _height(self) -> Dimension:
        if self._buffer.complete_state is not None:
            return Dimension(min=_MENU)
        return Dimension(min=1, max=_MOST_LINES)

    @staticmethod
    def _prefix(line: int, wrapped: int) -> StyleAndTextTuples:
        return [("class:prompt", PROMPT if line == wrapped == 0 else " " * len(PROMPT))]

    def _look(self) -> None:
        """See what is changing: once for each picture, because laying it out takes a while."""
        typed = min(_MOST_LINES, self._buffer.document.line_count)
        room = self._app.output.get_size().rows - typed - len(self._behind.waiting()) - 4
        self._live = self._behind.live(max(1, room))

    def _live_text(self) -> AnyFormattedText:
        return ANSI("\n".join([*self._live, ""]))

    def _waiting_text(self) -> StyleAndTextTuples:
        width = self._app.output.get_size().columns - 12
        lines = [f"… waits: {one_line(printable(text))[:width]}" for text in self._behind.waiting()]
        return [("class:dim", "\n".join(lines))]

    def _toolbar(self) -> StyleAndTextTuples:
        if self._hint:
            return [("class:full", self._hint)]
        style = "class:full" if self._behind.nearly_full else "class:toolbar"
        what = "Ctrl-C stops" if self._behind.busy else "/help"
        return [(style, f"{self._behind.status()} · {what}")]

    def _unhint(self) -> None:
        self._hint = ""

    # --- keys --------------------------------------------------------------------------------

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(self._buffer)

        keys.add("enter", filter=typing)(self._enter)
        keys.add("c-c")(self._interrupt)
        keys.add("<sigint>")(self._interrupt)
        for names in (("escape", "enter"), ("c-j",)):
            keys.add(*names, filter=typing)(lambda _: self._buffer.insert_text("\n"))

        @keys.add("c-d", filter=typing & Condition(lambda: not self._buffer.text))
        def _(press: KeyPressEvent) -> None:
            press.app.exit(result=Leave())

        keys.add("c-z")(lambda press: press.app.suspend_to_background())
        return keys

    def _enter(self, press: KeyPressEvent) -> None:
        buffer = self._buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion:
            buffer.complete_state = None
            return
        before = buffer.document.current_line_before_cursor
        if before.endswith("\\") and not buffer.document.current_line_after_cursor:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
            return
        text = buffer.text
        if not text.strip():
            return
        buffer.append_to_history()
        buffer.reset()
        wish = self._behind.send(text.strip("\n"))
        if wish is not None:
            press.app.exit(result=wish)

    def _interrupt(self, press: KeyPressEvent) -> None:
        if self._behind.busy:
            self._behind.stop()
        elif self._buffer.text:
            # Not lost: the arrow up brings it back.
            self._buffer.append_to_history()
            self._buffer.reset()
        elif time.monotonic() - self._interrupted < _TWICE:
            press.app.exit(result=Leave())
        else:
            self._interrupted = time.monotonic()
            self._hint = _HINT


def _shown(text: Callable[[], AnyFormattedText], there: Callable[[], bool]) -> ConditionalContainer:
    return ConditionalContainer(
        Window(FormattedTextControl(text), dont_extend_height=True), Condition(there)
    )


class Commands(Completer):
    """Completes commands, and the sessions that /resume may mean."""

    def __init__(
        self,
        commands: Sequence[tuple[str, str, str]],
        sessions: Callable[[str], Iterable[tuple[str, str]]],
    ) -> None:
        """`commands`: name, arguments, help. `sessions`: key and title of those that match."""
        self._commands = commands
        self._sessions = sessions

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """What may stand at the cursor."""
        del complete_event
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text.partition(" ")
        if not space:
            for name, arguments, words in self._commands:
                if name.startswith(command):
                    shown = f"{name} {arguments}".rstrip()
                    yield Completion(name, -len(command), display=shown, display_meta=words)
        elif command == "/resume":
            for key, title in self._sessions(rest):
                yield Completion(
                    key, -len(rest), display=one_line(key), display_meta=one_line(title)
                )
