"""Numbers and times as people say them. Pure."""

from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

_STEPS: Final = ((60, "s"), (60, "min"), (24, "h"), (7, "d"))
_NO_LOSS: Final = "The log is damaged, but no message is lost as far as was read"


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, in one unit; the date where it is longer than a week."""
    if moment is None:
        return ""
    left = ((now or datetime.now(UTC)) - moment).total_seconds()
    if left < 10:
        return "now"
    for size, unit in _STEPS:
        if left < size:
            return f"{int(left)} {unit}"
        left /= size
    return f"{moment:%Y-%m-%d}"


def moment_of(at: datetime) -> str:
    """The time to the second, for who wants to know exactly."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def clock(at: datetime, now: datetime | None = None) -> str:
    """The time of day, with the date where that is not today."""
    told = at.astimezone(UTC)
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    return f"{told:%H:%M}" if told.date() == today else f"{told:%Y-%m-%d %H:%M}"


def short(number: int) -> str:
    """A number in at most four characters or so: 950, 1.2k, 34k, 5.6M."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            shown = number / size
            return f"{shown:.1f}{unit}" if shown < 10 else f"{shown:.0f}{unit}"
    return str(number)


def seconds(number: float) -> str:
    """How long something took."""
    if round(number, 3) < 1:
        return f"{number * 1000:.0f} ms"
    if round(number, 1) < 60:
        return f"{number:.1f} s"
    minutes, left = divmod(round(number), 60)
    return f"{minutes} min {left} s"


def dollars(amount: float) -> str:
    """What something cost; of a small amount as much as can be told from nothing."""
    if 0 < amount < 0.000_1:
        return "<$0.0001"
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def plural(number: int, noun: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_sight(visible: int, count: int) -> str:
    """How many messages there are, and of how many the model sees, where that is another number."""
    shown = plural(count, "message")
    return shown if visible == count else f"{visible:,} of {shown}"


def damage(lost: int, lines: int, workspace: str) -> str:
    """What is told of a session that is not whole; nothing where it is."""
    if not lost and not lines:
        return ""
    cost = "is damaged and" if lost == 1 else "are damaged and"
    what = f"{plural(lost, 'message')} {cost} cannot be read" if lost else _NO_LOSS
    return f"{what}; `steno doctor {workspace}` says more."


def unreadable(first: int, last: int) -> str:
    """What stands in the place of messages that are damaged."""
    if first == last:
        return f"message {first} cannot be read"
    return f"messages {first} to {last} cannot be read"


def segment(key: str) -> str:
    """A key as one segment of a path."""
    return quote(key, safe="")
