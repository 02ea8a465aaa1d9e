"""What was said before, for who comes back to a session: the last turns, short and dimmed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from stenolog.cli.chat_words import PROMPT
from stenolog.cli.markdown import Block, painted
from stenolog.cli.text import printable
from stenolog.context.shapes import words_of
from stenolog.records import Message

if TYPE_CHECKING:
    from rich.console import Console

LAST: Final = 40
"""How many messages are looked at."""
_SHOWN: Final = 4
_LINES: Final = 6


def said_by_user(text: str) -> str:
    """What a user said, as it stands in a chat."""
    return PROMPT + printable(text).replace("\n", "\n" + " " * len(PROMPT))


def past_lines(
    history: Sequence[Message], console: "Console", *, markdown: bool = True
) -> list[str]:
    """The last words of user and agent, dimmed; tools are left out."""
    from rich.text import Text

    told: list[tuple[str, bool]] = []
    for message in history:
        body = message.to_dict()
        words = printable(words_of(body)).strip()
        if words and body.get("role") in ("user", "assistant"):
            of_user = body["role"] == "user"
            told.append((said_by_user(words) if of_user else words, markdown and not of_user))
    lines: list[str] = []
    for words, laid_out in told[-_SHOWN:]:
        if laid_out:
            shown = painted(Block(source=words, gap=0), console, style="dim")
        else:
            with console.capture() as captured:
                console.print(Text(words, style="dim"), highlight=False)
            shown = captured.get().removesuffix("\n").split("\n")
        if len(shown) > _LINES:
            more = f"… {len(shown) - _LINES + 1} more lines"
            with console.capture() as captured:
                console.print(Text(more, style="dim italic"), highlight=False)
            shown = [*shown[: _LINES - 1], captured.get().removesuffix("\n")]
        lines += [*shown, ""]
    return lines
