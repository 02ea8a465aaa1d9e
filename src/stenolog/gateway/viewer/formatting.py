"""Format numbers, times and short phrases for the pages."""

import shlex
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from markupsafe import Markup

_AGE_UNITS: Final = ((60, "s"), (60, "min"), (24, "h"), (7, "d"))
_NO_LOSS_TEXT: Final = "The log is damaged, but all messages that were read are intact"


HIDDEN_REASON_TEXTS: Final = {
    "summarized": "replaced by a summary",
    "cleared": "cleared",
    "replaced": "replaced by an edit or retry",
    "truncated": "truncated",
    "hidden": "hidden from the model",
}
"""Texts for the reasons why messages are hidden."""
_INTERRUPTIONS: Final = {
    "stopped": "You stopped this answer.",
    "given up": "The agent gave up before it finished.",
    "too old to be answered": "Not answered: the message was more than a day old.",
}
"""Sentences for the reasons that agents store with an incomplete answer."""


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """Return the age in one unit (`5 min`), or the date if the age is more than a week."""
    if moment is None:
        return ""
    amount = ((now or datetime.now(UTC)) - moment).total_seconds()
    if amount < 10:
        return "now"
    for size, unit in _AGE_UNITS:
        if amount < size:
            return f"{int(amount)} {unit}"
        amount /= size
    return f"{moment:%Y-%m-%d}"


def utc_time(at: datetime) -> str:
    """Return the time in UTC with seconds."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def clock(at: datetime, now: datetime | None = None) -> str:
    """Return the time of day in UTC, with the date if it is not today."""
    utc = at.astimezone(UTC)
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    return f"{utc:%H:%M}" if utc.date() == today else f"{utc:%Y-%m-%d %H:%M}"


def short_number(number: int) -> str:
    """Return a number in about four characters: 950, 1.2k, 34k, 5.6M."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            amount = number / size
            return f"{amount:.1f}{unit}" if amount < 10 else f"{amount:.0f}{unit}"
    return str(number)


def seconds(number: float) -> str:
    """Return a duration: `250 ms`, `1.5 s`, `2 min 5 s`."""
    if round(number, 3) < 1:
        return f"{number * 1000:.0f} ms"
    if round(number, 1) < 60:
        return f"{number:.1f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes} min {rest} s"


def dollars(amount: float) -> str:
    """Return an amount in US dollars, with four decimals if it is less than one dollar."""
    if 0 < amount < 0.000_1:
        return "<$0.0001"
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: `1 message`, `2,000 messages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def message_count(visible: int, count: int) -> str:
    """Return the number of messages, and the number of visible messages if it differs."""
    total = plural(count, "message")
    return total if visible == count else f"{total} · model sees {visible:,}"


def interruption_text(reason: str) -> str:
    """Return a sentence for the stored reason of an interruption; empty without a reason."""
    return _INTERRUPTIONS.get(reason, f"Interrupted: {reason}.") if reason else ""


def damage_html(lost: int, lines: int, workspace: str) -> Markup:
    """Return a sentence about the damage of a session; empty if the session is intact."""
    if not lost and not lines:
        return Markup()
    verb = "is damaged and" if lost == 1 else "are damaged and"
    sentence = f"{plural(lost, 'message')} {verb} cannot be read" if lost else _NO_LOSS_TEXT
    command = f"steno doctor {shlex.quote(workspace)}"
    return Markup("{}. For details, run <code>{}</code>").format(sentence, command)


def unreadable_text(first: int, last: int) -> str:
    """Return the text that is shown in place of damaged messages."""
    if first == last:
        return f"Message {first} is damaged and cannot be read"
    return f"Messages {first} to {last} are damaged and cannot be read"


def path_segment(key: str) -> str:
    """Return a key as one segment of a URL path."""
    return quote(key, safe="")
