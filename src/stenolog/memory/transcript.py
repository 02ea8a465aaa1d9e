"""Split a session into finished turns, and format the turns for the model. Pure.

Turns are split only where no later message can move the boundary: before a user message if no tool
call is open, and after an answer without tool calls. If a turn continues after an answer without
tool calls, it counts as two turns. In return, every reader finds the same boundaries at any time,
and the seq of the last message identifies a turn permanently. (The turns of `context.turn_state`
fit a context window, but a late answer can move their start.)

A turn contains the texts of the user and the assistant. System messages, reasoning, recalled
memory, and tool calls with their results are left out, because a web page or a file must not be
able to dictate notes. Media become a word in brackets. Secrets are redacted before long texts are
cut in the middle.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.memory.recall import strip_blocks
from stenolog.messages import (
    FilePart,
    ImagePart,
    TextPart,
    UnknownPart,
    calls_of,
    has_text,
    read_content,
    results_of,
    role_of,
)
from stenolog.records import Message, SessionInfo
from stenolog.redaction.redact import redact_ends
from stenolog.stores import spans
from stenolog.stores.withdrawn_messages import withdrawn_seqs
from stenolog.tokens import estimate

_MAX_END_CHARACTERS: Final = 100_000
"""Maximum number of characters that are kept at each end of a long text."""

_MAX_CHARS: Final = {"user": 4_000, "assistant": 2_000}
"""Maximum number of characters that are shown per message, by role."""

CountTokens = Callable[[str], int]
"""Function that counts the tokens of a text."""

_MAX_GIST_LENGTH: Final = 160
"""Maximum number of characters of a text in `describe_turn`."""
_MAX_TYPE_LENGTH: Final = 40
"""Maximum number of characters of the type of an unknown content part; longer types are hidden."""


class Line(Struct, frozen=True):
    """A message of the user or the assistant, without memory blocks and secrets."""

    role: str
    text: str


class Turn(Struct, frozen=True, kw_only=True):
    """A finished turn, as shown to a model."""

    last_seq: int
    """Last seq of the turn, which identifies the turn."""
    seqs: tuple[int, ...]
    """Seqs of the turn's messages that were not withdrawn."""
    at: datetime
    """Time at which the first message of the turn was stored."""
    lines: tuple[Line, ...]
    redacted: int
    """Number of redacted secrets."""

    @property
    def user_texts(self) -> list[str]:
        """Messages of the user. A quote must occur in one of these messages."""
        # guard: fact-from-user-only
        return [line.text for line in self.lines if line.role == "user"]


# --- boundaries of turns ---------------------------------------------------------------------


def finished_turns(messages: Iterable[Message]) -> list[list[Message]]:
    """Return the messages of each finished turn. `messages` must start at a turn boundary."""
    turns: list[list[Message]] = []
    turn: list[Message] = []
    open_call_ids: set[str | None] = set()
    for message in messages:
        fields = message.to_dict()
        call_ids = {call.id for call in calls_of(fields)}
        if turn and has_text(fields) and not open_call_ids:
            turns.append(turn)
            turn = []
        turn.append(message)
        open_call_ids = (open_call_ids | call_ids) - {result.id for result in results_of(fields)}
        if role_of(fields) == "assistant" and not call_ids:
            # Ignore unanswered calls: one lost result must not block all later messages.
            turns.append(turn)
            turn, open_call_ids = [], set()
    return turns


def is_withdrawn(message: Message, info: SessionInfo) -> bool:
    """Whether a message was withdrawn from the conversation, not only from the context.

    A message that only a summary replaced was not withdrawn. A message that was hidden in any other
    way (popped, hidden, replaced, cleared, truncated) was withdrawn, even if it was summarized
    later.
    """
    if not message.hidden:
        return False
    is_summarized = message.seq <= info.floor and bool(info.summary)
    return not is_summarized or spans.contains(withdrawn_seqs(info.meta), message.seq)


def make_turn(messages: Sequence[Message], info: SessionInfo) -> Turn | None:
    """Return these messages as a turn, or None if no content is left to note.

    Returns None, too, if all user messages of the turn were withdrawn.
    """
    lines: list[Line] = []
    seqs: list[int] = []
    redacted = 0
    user_message_count = kept_user_message_count = 0
    for message in messages:
        fields = message.to_dict()
        user_message_count += has_text(fields)
        if is_withdrawn(message, info):
            continue
        kept_user_message_count += has_text(fields)
        seqs.append(message.seq)
        role = role_of(fields)
        if role in ("user", "assistant"):  # guard: notes-not-of-tool-output
            content = "\n".join(_content_texts(fields.get("content")))
            # Replace lone surrogates: joined texts could form a pair, which stores reject.
            text = content.encode("utf-8", "replace").decode()
            # Remove blocks and secrets before texts are cut: half a secret is not recognized.
            redacted_text = redact_ends(strip_blocks(text), max_end_length=_MAX_END_CHARACTERS)
            redacted += redacted_text.count
            if redacted_text.text.strip():
                lines.append(Line(role, redacted_text.text.strip()))  # guard: notes-redacted
    if not lines or (user_message_count and not kept_user_message_count):
        return None
    first, last = messages[0], messages[-1]
    return Turn(
        last_seq=last.seq, seqs=tuple(seqs), at=first.at, lines=tuple(lines), redacted=redacted
    )


# --- formatting ------------------------------------------------------------------------------


def describe_turn(turn: Turn) -> str:
    """Describe a turn without a model: the first words of the user and of the last answer."""
    user_text = next((line.text for line in turn.lines if line.role == "user"), "")
    answers = [line.text for line in turn.lines if line.role == "assistant"]
    sentences = [f"The user: {_first_words(user_text)}"] if user_text else []
    sentences += [f"The assistant: {_first_words(answers[-1])}"] if answers else []
    return " ".join(sentences) or _first_words(turn.lines[0].text)


def format_turn(
    turn: Turn, *, turn_number: int, budget: int, count_tokens: CountTokens = estimate
) -> str:
    """Return the turn as text of at most about `budget` tokens."""
    heading = f"## Turn {turn_number}, {turn.at:%Y-%m-%d %H:%M} UTC"
    lines = [Line(line.role, _cut_middle(line.text, _MAX_CHARS[line.role])) for line in turn.lines]
    limit = max(_MAX_CHARS.values())
    while count_tokens(text := _format_lines(heading, lines)) > budget and limit > 40:
        limit //= 2
        line_limit = max(budget // 20, 2)
        if len(lines) > line_limit:
            lines = [*lines[: line_limit // 2], *lines[-(line_limit // 2) :]]
        lines = [Line(line.role, _cut_middle(line.text, limit)) for line in lines]
    return text


def next_batch(
    turns: Sequence[Turn], *, budget: int, limit: int, count_tokens: CountTokens = estimate
) -> list[Turn]:
    """Return the first turns that fit the token budget together, at least one turn."""
    batch_tokens = 0
    for index, turn in enumerate(turns[:limit]):
        text = format_turn(turn, turn_number=1, budget=budget, count_tokens=count_tokens)
        batch_tokens += count_tokens(text)
        if index and batch_tokens > budget:
            return list(turns[:index])
    return list(turns[:limit])


def _format_lines(heading: str, lines: Sequence[Line]) -> str:
    # Texts are indented, so that no text can look like a heading or another speaker.
    paragraphs = (f"{line.role}:\n    " + "\n    ".join(line.text.splitlines()) for line in lines)
    return "\n".join([heading, *paragraphs])


# --- content of messages ---------------------------------------------------------------------


def _content_texts(content: Any) -> Iterator[str]:
    """Yield the text parts of a message, and a word in brackets for each other part."""
    for part in read_content(content):
        match part:
            case TextPart():
                yield part.text
            case ImagePart():
                yield "[image]"
            case FilePart():
                yield f"[{part.kind}]"
            case UnknownPart():
                # The type is shown only if it is one word, so that no text can be hidden in it.
                is_word = part.type.isidentifier() and len(part.type) <= _MAX_TYPE_LENGTH
                yield f"[{part.type if is_word else 'part'}]"


def _cut_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head_length = limit * 3 // 4
    return f"{text[:head_length]} […] {text[len(text) - (limit - head_length) :]}"


def _first_words(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= _MAX_GIST_LENGTH:
        return line
    head, space, _ = line[:_MAX_GIST_LENGTH].rpartition(" ")
    return (head if space and len(head) > _MAX_GIST_LENGTH // 2 else line[:_MAX_GIST_LENGTH]) + "…"
