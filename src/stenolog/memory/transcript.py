"""What consolidation reads of a session: its finished turns, as they are shown to a model. Pure.

A turn is cut where nothing that comes later can move the cut: before a user's message that has no
open tool call before it, and behind an answer that calls no tool. A turn that goes on after such an
answer is two of these. In return, whoever reads the session later, or from another cut on, finds
the same cuts, so that a turn is named by the seq of its last message, for good. (The turns of
`context.turns` are right for a window, but an answer that comes late can move their beginnings.)

A turn contains what the user and the assistant said. It leaves out system messages, reasoning,
recalled memory, and tool calls with their results: a web page or a file must not be able to dictate
notes. Media become a word in brackets, long texts are cut in the middle, and secrets are removed
before anything else is done with a text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.context.shapes import calls_of, results_of, role_of, speaks
from stenolog.memory.blocks import strip_blocks
from stenolog.memory.redaction import redact_ends
from stenolog.records import Message, SessionInfo
from stenolog.stores import spans
from stenolog.stores.withdrawn import withdrawn
from stenolog.tokens import estimate

_LOOKED_AT: Final = 100_000
"""Characters at each end of a text that are looked at."""

_SHOWN: Final = {"user": 4_000, "assistant": 2_000}
"""Maximum number of characters shown of a message, by role."""

Count = Callable[[str], int]
"""Tokens of a text."""

_GIST: Final = 160
_TEXTS: Final = ("text", "input_text", "output_text")
_MEDIA: Final = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "video": "video",
    "video_url": "video",
}


class Line(Struct, frozen=True):
    """What one of them said, without blocks and secrets."""

    role: str
    text: str


class Turn(Struct, frozen=True, kw_only=True):
    """A finished turn, as it is shown to a model."""

    last: int
    """The seq it ends at: its name."""
    seqs: tuple[int, ...]
    """The messages in it that are not taken back."""
    at: datetime
    """When its first message was stored."""
    lines: tuple[Line, ...]
    redacted: int
    """How many secrets were taken out."""

    @property
    def spoken(self) -> list[str]:
        """What the user said, message by message: what a quote must stand in."""
        # guard: fact-from-user-only
        return [line.text for line in self.lines if line.role == "user"]


# --- where turns end -------------------------------------------------------------------------


def finished(messages: Iterable[Message]) -> list[list[Message]]:
    """The messages of each finished turn; the first of them begins where a turn does."""
    turns: list[list[Message]] = []
    turn: list[Message] = []
    waiting: set[str | None] = set()
    for message in messages:
        fields = message.to_dict()
        calls = {call.id for call in calls_of(fields)}
        if turn and speaks(fields) and not waiting:
            turns.append(turn)
            turn = []
        turn.append(message)
        waiting = (waiting | calls) - {result.id for result in results_of(fields)}
        if role_of(fields) == "assistant" and not calls:
            # A call that was never answered is given up here, else one lost result would keep all
            # that comes later from being consolidated.
            turns.append(turn)
            turn, waiting = [], set()
    return turns


def is_taken_back(message: Message, info: SessionInfo) -> bool:
    """Whether somebody took the message out of the conversation, rather than out of the context.

    Hidden at or below the floor, with a summary in its place, it was compacted and still counts.
    Hidden in any other way (popped, hidden, replaced, cleared, truncated) it does not, nor where
    that was done before the compaction.
    """
    if not message.hidden:
        return False
    compacted = message.seq <= info.floor and bool(info.summary)
    return not compacted or spans.contains(withdrawn(info.meta), message.seq)


def as_turn(messages: Sequence[Message], info: SessionInfo) -> Turn | None:
    """The turn that these messages are; None where nothing of it is left to tell.

    That is so where all that the user said in it was taken back, too.
    """
    lines: list[Line] = []
    seqs: list[int] = []
    redacted = 0
    asked = left = False
    for message in messages:
        fields = message.to_dict()
        asked = asked or speaks(fields)
        if is_taken_back(message, info):
            continue
        left = left or speaks(fields)
        seqs.append(message.seq)
        for line in _said(fields):
            # Half a block, or half a secret, would not be known as one: all this before any cut.
            clean = redact_ends(strip_blocks(_sound(line.text)), most=_LOOKED_AT)
            redacted += clean.count
            if clean.text.strip():
                lines.append(Line(line.role, clean.text.strip()))  # guard: notes-redacted
    if not lines or (asked and not left):
        return None
    first, last = messages[0], messages[-1]
    return Turn(last=last.seq, seqs=tuple(seqs), at=first.at, lines=tuple(lines), redacted=redacted)


# --- how it is shown -------------------------------------------------------------------------


def gist(turn: Turn) -> str:
    """Describe a turn without a model: the first words of the user and of the last answer."""
    asked = next((line.text for line in turn.lines if line.role == "user"), "")
    answers = [line.text for line in turn.lines if line.role == "assistant"]
    told = [f"The user: {_first_words(asked)}"] if asked else []
    told += [f"The assistant: {_first_words(answers[-1])}"] if answers else []
    return " ".join(told) or _first_words(turn.lines[0].text)


def shown(turn: Turn, *, number: int, budget: int, count: Count = estimate) -> str:
    """The turn as text of about so many tokens at the most."""
    heading = f"## Turn {number}, {turn.at:%Y-%m-%d %H:%M} UTC"
    lines = [Line(line.role, _middle_out(line.text, _SHOWN[line.role])) for line in turn.lines]
    text = _joined(heading, lines)
    most = max(_SHOWN.values())
    while count(text) > budget and most > 40:
        most //= 2
        keep = max(budget // 20, 2)
        lines = lines if len(lines) <= keep else [*lines[: keep // 2], *lines[-(keep // 2) :]]
        lines = [Line(line.role, _middle_out(line.text, most)) for line in lines]
        text = _joined(heading, lines)
    return text


def batches(
    turns: Sequence[Turn], *, budget: int, most: int, count: Count = estimate
) -> Iterator[list[Turn]]:
    """The turns in runs that fit a budget of tokens; a turn too long for it stands alone."""
    batch: list[Turn] = []
    spent = 0
    for turn in turns:
        size = count(shown(turn, number=1, budget=budget, count=count))
        if batch and (spent + size > budget or len(batch) >= most):
            yield batch
            batch, spent = [], 0
        batch.append(turn)
        spent += size
    if batch:
        yield batch


def _joined(heading: str, lines: Sequence[Line]) -> str:
    # Set in, so that no text can pass for a heading or for another speaker.
    said = (f"{line.role}:\n    " + "\n    ".join(line.text.splitlines()) for line in lines)
    return "\n".join([heading, *said])


# --- what a message says ---------------------------------------------------------------------


def _said(fields: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the text of a message with its role; tool calls and results are left out."""
    role = role_of(fields)
    if role in ("user", "assistant"):  # guard: notes-not-of-tool-output
        yield Line(role, "\n".join(_own_words(fields.get("content"))))


def _own_words(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            kind, text = part.get("type"), part.get("text")
            if isinstance(kind, str) and kind in _MEDIA:
                yield f"[{_MEDIA[kind]}]"
            elif isinstance(text, str) and kind in _TEXTS:
                yield text


def _sound(text: str) -> str:
    """The text without halves of characters: two that come together would be refused by a store."""
    return text.encode("utf-8", "replace").decode()


def _middle_out(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    head = most * 3 // 4
    return f"{text[:head]} […] {text[len(text) - (most - head) :]}"


def _first_words(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _GIST:
        return line
    head, space, _ = line[:_GIST].rpartition(" ")
    return (head if space and len(head) > _GIST // 2 else line[:_GIST]) + "…"
