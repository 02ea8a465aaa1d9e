"""Input line at the bottom of a chat, which stays there while answers scroll above it.

From top to bottom, the terminal shows finished lines, streamed text, waiting messages and the input
line. The alternate screen is never used, so the terminal keeps the conversation.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prompt_toolkit.application import Application
from prompt_toolkit.application.current import set_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import ANSI, AnyFormattedText, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.layout import (
    AnyContainer,
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

from stenolog.cli.chat_screen import PROMPT
from stenolog.cli.output import one_line, printable
from stenolog.stores.disk import create_private_folder

if TYPE_CHECKING:
    from stenolog.cli.chat import TerminalChat

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
# A terminal paints all text between these two sequences in one step, or ignores the sequences.
_BEGIN_UPDATE: Final = "\x1b[?2026h"
_END_UPDATE: Final = "\x1b[?2026l"
_FRAME_SECONDS: Final = 0.08
"""Seconds between two repaints."""
_DOUBLE_PRESS_SECONDS: Final = 2.0
"""Seconds within which a second Ctrl-C leaves the chat."""
_COMPLETION_MENU_ROWS: Final = 8
_MAX_INPUT_ROWS: Final = 10
_LEAVE_HINT: Final = "Press Ctrl-C again to leave, or Ctrl-D. /help lists the commands."


class InputLine:
    """Input line that reads messages and shows the turn in progress."""

    def __init__(self, chat: "TerminalChat", *, history: History, completer: Completer) -> None:
        self._chat = chat
        self._finished_lines: list[str] = []
        self._live_lines: Sequence[str] = ()
        self._needs_repaint = asyncio.Event()
        self._hint = ""
        self._interrupted_at = 0.0
        self._buffer = Buffer(
            multiline=True,
            history=history,
            completer=completer,
            complete_while_typing=Condition(lambda: self._buffer.text.startswith("/")),
        )
        self._buffer.on_text_changed += self._clear_hint
        self._app: Application[str | None] = Application(
            layout=self._make_layout(),
            key_bindings=self._make_key_bindings(),
            style=Style.from_dict(_STYLE),
            erase_when_done=True,
        )
        # Terminals send Alt-Enter as Esc directly followed by Enter, so a short timeout is enough.
        self._app.ttimeoutlen = 0.05

    async def run(self) -> str | None:
        """Read input until the user enters /resume; return the text to search sessions for.

        Return None if the user leaves the chat.
        """
        paint_task = asyncio.get_running_loop().create_task(self._paint())
        paint_task.add_done_callback(self._on_paint_task_ended)
        try:
            return await self._app.run_async(handle_sigint=True)
        finally:
            paint_task.cancel()
            await asyncio.gather(paint_task, return_exceptions=True)
            self.flush()

    def _on_paint_task_ended(self, paint_task: "asyncio.Task[None]") -> None:
        """If painting failed, exit with the error instead of freezing the screen."""
        error = None if paint_task.cancelled() else paint_task.exception()
        if error is not None and self._app.is_running and not self._app.is_done:
            self._app.exit(exception=error)

    def end(self, search_text: str | None = None) -> None:
        """End `run`, which then returns `search_text`."""
        self._app.exit(result=search_text)

    def show(self, lines: Iterable[str]) -> None:
        """Print finished lines above the input line at the next repaint."""
        self._finished_lines += lines
        self._needs_repaint.set()

    def request_repaint(self) -> None:
        """Request a repaint."""
        self._needs_repaint.set()

    async def _paint(self) -> None:
        while True:
            max_wait = _FRAME_SECONDS if self._chat.is_busy else None
            with suppress(TimeoutError):
                async with asyncio.timeout(max_wait):
                    await self._needs_repaint.wait()
            self._needs_repaint.clear()
            self._update_live_lines()
            self.flush()
            self._app.invalidate()
            await asyncio.sleep(_FRAME_SECONDS)

    def flush(self) -> None:
        """Print finished lines, and paint the input line again below them."""
        if not self._finished_lines:
            return
        text = "".join(f"{line}\r\n" for line in self._finished_lines)
        self._finished_lines = []
        output, renderer = self._app.output, self._app.renderer
        if not self._app.is_running or self._app.is_done:
            output.write_raw(text)
            output.flush()
            return
        # The terminal erases and writes in one step. Otherwise the input line would flicker.
        output.write_raw(_BEGIN_UPDATE)
        renderer.erase()
        output.write_raw(text)
        with set_app(self._app):
            renderer.render(self._app, self._app.layout)
        output.write_raw(_END_UPDATE)
        output.flush()

    # --- layout ------------------------------------------------------------------------------

    def _make_layout(self) -> Layout:
        search = SearchToolbar()
        input_window = Window(
            BufferControl(self._buffer, search_buffer_control=search.control, preview_search=True),
            height=self._input_height,
            get_line_prefix=self._prompt_text,
            wrap_lines=True,
            dont_extend_height=True,
        )
        menu = CompletionsMenu(max_height=_COMPLETION_MENU_ROWS - 1, scroll_offset=1)
        windows: list[AnyContainer] = [
            _conditional_window(self._live_text, lambda: bool(self._live_lines)),
            _conditional_window(self._waiting_text, lambda: bool(self._chat.waiting_messages())),
            FloatContainer(input_window, [Float(menu, xcursor=True, ycursor=True)]),
            search,
            Window(FormattedTextControl(self._toolbar_text), height=1),
        ]
        return Layout(HSplit(windows), focused_element=input_window)

    def _input_height(self) -> Dimension:
        if self._buffer.complete_state is not None:
            return Dimension(min=_COMPLETION_MENU_ROWS)
        return Dimension(min=1, max=_MAX_INPUT_ROWS)

    @staticmethod
    def _prompt_text(line: int, wrapped: int) -> StyleAndTextTuples:
        return [("class:prompt", PROMPT if line == wrapped == 0 else " " * len(PROMPT))]

    def _update_live_lines(self) -> None:
        """Lay out the text that still changes. This is slow, so it is done once per repaint."""
        input_rows = min(_MAX_INPUT_ROWS, self._buffer.document.line_count)
        other_rows = input_rows + len(self._chat.waiting_messages()) + 4
        free_rows = self._app.output.get_size().rows - other_rows
        self._live_lines = self._chat.live_lines(max(1, free_rows))

    def _live_text(self) -> AnyFormattedText:
        return ANSI("\n".join([*self._live_lines, ""]))

    def _waiting_text(self) -> StyleAndTextTuples:
        width = self._app.output.get_size().columns - 12
        texts = (one_line(printable(text))[:width] for text in self._chat.waiting_messages())
        return [("class:dim", "\n".join(f"… waiting: {text}" for text in texts))]

    def _toolbar_text(self) -> StyleAndTextTuples:
        if self._hint:
            return [("class:full", self._hint)]
        style = "class:full" if self._chat.status.is_nearly_full else "class:toolbar"
        key_hint = "Ctrl-C to stop" if self._chat.is_busy else "/help"
        return [(style, f"{self._chat.status.text()} · {key_hint}")]

    def _clear_hint(self, _: Buffer) -> None:
        self._hint = ""

    # --- keys --------------------------------------------------------------------------------

    def _make_key_bindings(self) -> KeyBindings:
        keys = KeyBindings()
        has_input_focus = has_focus(self._buffer)

        keys.add("enter", filter=has_input_focus)(self._on_enter)
        keys.add("c-c")(self._on_ctrl_c)
        keys.add("<sigint>")(self._on_ctrl_c)
        for names in (("escape", "enter"), ("c-j",)):
            keys.add(*names, filter=has_input_focus)(lambda _: self._buffer.insert_text("\n"))

        is_empty = Condition(lambda: not self._buffer.text)
        keys.add("c-d", filter=has_input_focus & is_empty)(lambda _: self.end())
        keys.add("c-z")(lambda press: press.app.suspend_to_background())
        return keys

    def _on_enter(self, _: KeyPressEvent) -> None:
        buffer = self._buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion:
            buffer.complete_state = None
            return
        text_before = buffer.document.current_line_before_cursor
        if text_before.endswith("\\") and not buffer.document.current_line_after_cursor:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
            return
        text = buffer.text
        if not text.strip():
            return
        buffer.append_to_history()
        buffer.reset()
        self._chat.send(text.strip("\n"))

    def _on_ctrl_c(self, _: KeyPressEvent) -> None:
        if self._chat.is_busy:
            self._chat.stop()
        elif self._buffer.text:
            # The arrow-up key brings the text back.
            self._buffer.append_to_history()
            self._buffer.reset()
        elif time.monotonic() - self._interrupted_at < _DOUBLE_PRESS_SECONDS:
            self.end()
        else:
            self._interrupted_at = time.monotonic()
            self._hint = _LEAVE_HINT


def _conditional_window(
    get_text: Callable[[], AnyFormattedText], is_visible: Callable[[], bool]
) -> ConditionalContainer:
    return ConditionalContainer(
        Window(FormattedTextControl(get_text), dont_extend_height=True), Condition(is_visible)
    )


# --- input history --------------------------------------------------------------------------------


def history_file() -> Path:
    """Return the path of the input history in the user's state folder, outside any workspace."""
    from platformdirs import user_state_path

    return user_state_path("stenolog", appauthor=False) / "chat-history"


class InputHistory(FileHistory):
    """Input history in a private file. Disk errors are ignored, so that the chat still works."""

    def load_history_strings(self) -> Iterable[str]:
        """Return the texts that the user entered, newest first."""
        try:
            self._create_file()
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append a text that the user entered."""
        with suppress(OSError):
            self._create_file()
            super().store_string(string)

    def _create_file(self) -> None:
        """Create the file if it is missing. Raises OSError, also if it is a symbolic link."""
        file = Path(os.fsdecode(self.filename))
        create_private_folder(file.parent)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
