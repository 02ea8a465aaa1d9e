"""Input line at the bottom of a chat, which stays there while answers scroll above it.

Finished lines are written above it. Streamed text and waiting messages are shown between them and
the input line. It never uses the alternate screen, so the terminal keeps the conversation.
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

from stenolog.cli.chat_messages import PROMPT
from stenolog.cli.output import inline_output, one_line, printable

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
# Synchronized output: terminals that support these sequences paint the text between them at once,
# and others ignore them.
_HOLD: Final = "\x1b[?2026h"
_SHOW: Final = "\x1b[?2026l"
_FRAME: Final = 0.08
"""Seconds between two repaints."""
_TWICE: Final = 2.0
"""Seconds within which a second Ctrl-C leaves the chat."""
_MENU: Final = 8
_MOST_LINES: Final = 10
_HINT: Final = "Press Ctrl-C again to leave, or Ctrl-D. /help lists the commands."


class Leave(Struct, frozen=True):
    """The user's wish to leave the chat."""


class Pick(Struct, frozen=True):
    """The user's wish to choose another session."""

    text: str = ""


Wish = Leave | Pick


class Behind(Protocol):
    """The chat, as the input line uses it."""

    def send(self, text: str) -> Wish | None:
        """Handle an entered text. Returning a wish ends `Line.run`."""
        ...

    def stop(self) -> None:
        """Stop the current answer."""
        ...

    @property
    def busy(self) -> bool:
        """Whether an answer is being written."""
        ...

    def live(self, rows: int) -> Sequence[str]:
        """Return the text that is still changing, in at most `rows` lines."""
        ...

    def waiting(self) -> Sequence[str]:
        """Return the entered messages that are not being answered yet."""
        ...

    def status(self) -> str:
        """Return the status line."""
        ...

    @property
    def nearly_full(self) -> bool:
        """Whether the status line should be highlighted."""
        ...


class Line:
    """Input line that reads messages and shows the turn in progress."""

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
        # Terminals send Alt-Enter as Esc directly followed by Enter.
        self._app.ttimeoutlen = 0.05

    async def run(self) -> Wish:
        """Read input until the user wants to leave or to choose a session."""
        painting = asyncio.get_running_loop().create_task(self._paint())
        painting.add_done_callback(self._painted_last)
        try:
            return await self._app.run_async(handle_sigint=True)
        finally:
            painting.cancel()
            await asyncio.gather(painting, return_exceptions=True)
            self.flush()

    def _painted_last(self, painting: "asyncio.Task[None]") -> None:
        """If painting fails, end the application with that error instead of freezing."""
        error = None if painting.cancelled() else painting.exception()
        if error is not None and self._app.is_running and not self._app.is_done:
            self._app.exit(exception=error)

    def show(self, lines: Iterable[str]) -> None:
        """Print finished lines above the input line at the next repaint."""
        self._lines += lines
        self._changed.set()

    def changed(self) -> None:
        """Request a repaint."""
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
        """Print finished lines in place of the input line, and paint it again below them."""
        if not self._lines:
            return
        text = "".join(f"{line}\r\n" for line in self._lines)
        self._lines = []
        output, renderer = self._app.output, self._app.renderer
        if not self._app.is_running or self._app.is_done:
            output.write_raw(text)
            output.flush()
            return
        # In one step, otherwise the input line would flicker.
        output.write_raw(_HOLD)
        renderer.erase()
        output.write_raw(text)
        with set_app(self._app):
            renderer.render(self._app, self._app.layout)
        output.write_raw(_SHOW)
        output.flush()

    # --- layout ------------------------------------------------------------------------------

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
        """Update the changing text. Done once per repaint, because laying it out is slow."""
        typed = min(_MOST_LINES, self._buffer.document.line_count)
        room = self._app.output.get_size().rows - typed - len(self._behind.waiting()) - 4
        self._live = self._behind.live(max(1, room))

    def _live_text(self) -> AnyFormattedText:
        return ANSI("\n".join([*self._live, ""]))

    def _waiting_text(self) -> StyleAndTextTuples:
        width = self._app.output.get_size().columns - 12
        lines = [
            f"… waiting: {one_line(printable(text))[:width]}" for text in self._behind.waiting()
        ]
        return [("class:dim", "\n".join(lines))]

    def _toolbar(self) -> StyleAndTextTuples:
        if self._hint:
            return [("class:full", self._hint)]
        style = "class:full" if self._behind.nearly_full else "class:toolbar"
        what = "Ctrl-C to stop" if self._behind.busy else "/help"
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
            # The arrow-up key brings the text back.
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
    """Completer for commands, and for the sessions of /resume."""

    def __init__(
        self,
        commands: Sequence[tuple[str, str, str]],
        sessions: Callable[[str], Iterable[tuple[str, str]]],
    ) -> None:
        """Store the sources of completions.

        `commands` are tuples of name, arguments and help. `sessions` returns key and title of the
        sessions that match a text.
        """
        self._commands = commands
        self._sessions = sessions

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Yield the completions at the cursor."""
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
