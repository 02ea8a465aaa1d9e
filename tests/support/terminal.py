"""A terminal in memory, with its screen and the lines that have scrolled away.

It supports what inline programs write: text, line ends, cursor moves, erasing, and synchronized
updates. Colours and modes are ignored. An alternate screen is an error, because our programs use
none.
"""

import re

_SEQUENCE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")


class Terminal:
    """Lines of a fixed width; the last `rows` are on the screen."""

    def __init__(self, *, rows: int = 30, columns: int = 80) -> None:
        self._rows = rows
        self._columns = columns
        self._lines: list[list[str]] = [[]]
        self._top = 0
        self._y = 0
        self._x = 0
        self._rest = ""
        self._held: list[list[str]] | None = None

    def feed(self, text: str) -> None:
        """Process output; a sequence may be split anywhere."""
        text, at = self._rest + text, 0
        self._rest = ""
        while at < len(text):
            if text[at] != "\x1b":
                self._put(text[at])
                at += 1
                continue
            found = _SEQUENCE.match(text, at)
            if found is None:
                self._rest = text[at:]
                return
            self._obey(found[1] or "", found[2] or "")
            at = found.end()

    @property
    def screen(self) -> str:
        """Return the visible text."""
        return self._text(self._seen[self._top :])

    @property
    def all(self) -> str:
        """Return the visible text and everything that scrolled away."""
        return self._text(self._seen)

    @property
    def _seen(self) -> list[list[str]]:
        return self._lines if self._held is None else self._held

    @staticmethod
    def _text(lines: list[list[str]]) -> str:
        return "\n".join("".join(line).rstrip() for line in lines).rstrip()

    def _put(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self._x = 0
        elif character == "\b":
            self._x = max(0, self._x - 1)
        elif character >= " ":
            if self._x == self._columns:
                self._x = 0
                self._down()
            line = self._lines[self._y]
            line += " " * (self._x + 1 - len(line))
            line[self._x] = character
            self._x += 1

    def _down(self) -> None:
        self._y += 1
        if self._y == len(self._lines):
            self._lines.append([])
        self._top = max(self._top, self._y - self._rows + 1)

    def _obey(self, parameters: str, what: str) -> None:
        assert "1049" not in parameters, "the whole screen was taken"
        if parameters == "?2026":
            self._held = [line[:] for line in self._lines] if what == "h" else None
        number = int(parameters) if parameters.isdigit() else 0
        match what:
            case "A":
                self._y = max(self._top, self._y - max(1, number))
            case "B":
                for _ in range(max(1, number)):
                    self._down()
            case "C":
                self._x = min(self._columns - 1, self._x + max(1, number))
            case "D":
                self._x = max(0, min(self._x, self._columns - 1) - max(1, number))
            case "J" if number == 0:
                del self._lines[self._y][self._x :]
                del self._lines[self._y + 1 :]
            case "J" if number == 2:
                for line in self._lines[self._top :]:
                    line.clear()
            case "K":
                del self._lines[self._y][self._x :]
            case "H":
                self._y, self._x = self._top, 0
