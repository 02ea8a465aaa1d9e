"""Parses times in a question: `yesterday`, `last week`, `in May`, `three days ago`, 2026-03. Pure.

The supported languages are English and German. Days start and end in the time zone of `now`, weeks
start on Monday. A month or weekday without a year or date means the latest that has started.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

_MONTHS: Final = {
    name: number
    for number, names in enumerate(
        (
            "january jan januar",
            "february feb februar",
            "march mar märz maerz",
            "april apr",
            "may mai",
            "june jun juni",
            "july jul juli",
            "august aug",
            "september sept sep",
            "october oct oktober",
            "november nov",
            "december dec dezember",
        ),
        1,
    )
    for name in names.split()
}
_WEEKDAYS: Final = {
    name: number
    for number, names in enumerate(
        (
            "monday montag",
            "tuesday dienstag",
            "wednesday mittwoch",
            "thursday donnerstag",
            "friday freitag",
            "saturday samstag",
            "sunday sonntag",
        )
    )
    for name in names.split()
}
_NUMBERS: Final = {
    name: number
    for number, names in enumerate(
        (
            "a an one ein einem einen einer",
            "two zwei couple",
            "three drei few",
            "four vier",
            "five fünf",
            "six sechs",
            "seven sieben",
            "eight acht",
            "nine neun",
            "ten zehn",
        ),
        1,
    )
    for name in names.split()
}
_DOTS: Final = str.maketrans(
    {"\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}": "i", "\N{LATIN SMALL LETTER DOTLESS I}": "i"}
)
_UNITS: Final = {"day": "day", "tag": "day", "wee": "week", "woc": "week", "mon": "month"}

_MONTH: Final = "(?P<month>" + "|".join(sorted(_MONTHS, key=len, reverse=True)) + r")\b\.?"
_WEEKDAY: Final = "(?P<weekday>" + "|".join(_WEEKDAYS) + ")"
_MANY: Final = r"(?P<many>\d{1,3}|" + "|".join(_NUMBERS) + ")"
_UNIT: Final = r"(?P<unit>days?|weeks?|months?|years?|tage?n?|wochen?|monate?n?|jahre?n?)"
_LAST: Final = r"(?:last|previous|past|letzte[nrsm]?|vorige[nrsm]?)"
_THIS: Final = r"(?:this|current|diese[nrsm]?)"


class Period(Struct, frozen=True):
    """A time range: `since` is included, `until` is not."""

    since: datetime
    until: datetime

    def holds(self, at: datetime) -> bool:
        """Whether a time is in the range."""
        return self.since <= at < self.until


class TimeMention(Struct, frozen=True):
    """The period that a text names, and the text without the words for the period."""

    period: Period | None
    rest: str


def find_period(text: str, *, now: datetime) -> TimeMention:
    """Return the first period that a text names, relative to `now`, or None as the period."""
    for pattern, meaning in _RULES:
        for match in pattern.finditer(text):
            try:
                period = meaning(match, now)
            except (ValueError, OverflowError):
                continue  # an impossible date such as 2026-13-45
            return TimeMention(period, f"{text[: match.start()]} {text[match.end() :]}")
    return TimeMention(None, text)


# --- meaning of each form --------------------------------------------------------------------


def _midnight(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0)


def _days(start: datetime, count: int = 1) -> Period:
    return Period(_midnight(start), _midnight(start) + timedelta(days=count))


def _month(year: int, month: int, now: datetime) -> Period:
    year, month = year + (month - 1) // 12, (month - 1) % 12 + 1
    first = _midnight(now).replace(year=year, month=month, day=1)
    after = first.replace(year=year + month // 12, month=month % 12 + 1)
    return Period(first, after)


def _year(year: int, now: datetime) -> Period:
    first = _midnight(now).replace(year=year, month=1, day=1)
    return Period(first, first.replace(year=year + 1))


def _monday(now: datetime) -> datetime:
    return _midnight(now) - timedelta(days=now.weekday())


def _iso(match: re.Match[str], now: datetime) -> Period:
    year, month, day = match["year"], match["month"], match["day"]
    if day is None:
        return _month(int(year), _checked(int(month)), now)
    return _days(_midnight(now).replace(year=int(year), month=int(month), day=int(day)))


def _checked(month: int) -> int:
    if not 1 <= month <= 12:
        raise ValueError(month)
    return month


def _ago(match: re.Match[str], now: datetime) -> Period:
    """Return the exact day, or the week, month or year around the time."""
    many = _many(match["many"])
    match _unit(match["unit"]):
        case "day":
            return _days(now - timedelta(days=many))
        case "week":
            return _days(now - timedelta(days=7 * many + 3), 7)
        case "month":
            return _month(now.year, now.month - many, now)
    return _year(now.year - many, now)


def _past(match: re.Match[str], now: datetime) -> Period:
    days = {"day": 1, "week": 7, "month": 31, "year": 366}[_unit(match["unit"])]
    until = _midnight(now) + timedelta(days=1)
    return Period(until - timedelta(days=days * _many(match["many"]) + 1), until)


def _last(match: re.Match[str], now: datetime) -> Period:
    match _unit(match["unit"]):
        case "week":
            return _days(_monday(now) - timedelta(days=7), 7)
        case "month":
            return _month(now.year, now.month - 1, now)
        case "year":
            return _year(now.year - 1, now)
    return _days(now - timedelta(days=1))


def _this(match: re.Match[str], now: datetime) -> Period:
    match _unit(match["unit"]):
        case "week":
            return _days(_monday(now), 7)
        case "month":
            return _month(now.year, now.month, now)
        case "year":
            return _year(now.year, now)
    return _days(now)


def _weekday(match: re.Match[str], now: datetime) -> Period:
    days_back = (now.weekday() - _WEEKDAYS[_normalized_name(match["weekday"])]) % 7
    return _days(now - timedelta(days=days_back))


def _last_weekday(match: re.Match[str], now: datetime) -> Period:
    """Return the last such weekday before today: on a Monday, "last Monday" is a week ago."""
    return _weekday(match, now - timedelta(days=1))


def _weekend(_found: re.Match[str], now: datetime) -> Period:
    return _days(_monday(now) - timedelta(days=2), 2)


def _named(match: re.Match[str], now: datetime) -> Period:
    """Return a month, or a day of a month, in the given year or the latest that has started."""
    month = _MONTHS[_normalized_name(match["month"])]
    parts = match.groupdict()
    year, day = parts.get("year"), parts.get("day")
    if day is None:
        return _month(int(year) if year else now.year - (month > now.month), month, now)
    if year:
        return _days(_midnight(now).replace(year=int(year), month=month, day=int(day)))
    return _days(_last_such_day(month, int(day), now))


def _last_such_day(month: int, day: int, now: datetime) -> datetime:
    # There can be eight years between two leap days.
    for year in range(now.year, now.year - 9, -1):
        with suppress(ValueError):
            named = _midnight(now).replace(year=year, month=month, day=day)
            if named <= now:
                return named
    raise ValueError(f"no month {month} has a day {day}")


def _in_year(match: re.Match[str], now: datetime) -> Period:
    return _year(int(match["year"]), now)


def _many(text: str) -> int:
    return int(text) if text.isdigit() else _NUMBERS[_normalized_name(text)]


def _normalized_name(name: str) -> str:
    """Normalize a name for the tables: patterns that ignore case match a dotless i as an i."""
    return name.translate(_DOTS).casefold()


def _unit(text: str) -> str:
    return _UNITS.get(text[:3].lower(), "year")


def _back(days: int) -> Callable[[re.Match[str], datetime], Period]:
    return lambda _found, now: _days(now - timedelta(days=days))


_YEAR: Final = r"(?P<year>(?:19|20)\d\d)"
_DAY: Final = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th|\.)?"

_RULES: Final = [
    (re.compile(rf"\b(?:{pattern})(?!\w)", re.IGNORECASE), meaning)
    for pattern, meaning in (
        (rf"(?:on |am |in |im )?{_YEAR}-(?P<month>\d\d)(?:-(?P<day>\d\d))?", _iso),
        (r"(?:the )?day before yesterday|vorgestern", _back(2)),
        (r"yesterday|last night|gestern", _back(1)),
        (r"today|tonight|this (?:morning|afternoon|evening)|heute", _back(0)),
        (rf"(?:about )?(?:a )?{_MANY}(?: of)? {_UNIT} (?:ago|before)", _ago),
        (rf"vor {_MANY} {_UNIT}", _ago),
        (rf"(?:in |over |during )?(?:the |den |die )?{_LAST} {_MANY} {_UNIT}", _past),
        (rf"{_LAST} (?:weekend|wochenende)|am wochenende", _weekend),
        (rf"(?:in (?:der |dem )?|im )?{_LAST} {_UNIT}", _last),
        (rf"(?:in (?:der |dem )?)?{_THIS} {_UNIT}", _this),
        (rf"{_LAST} {_WEEKDAY}", _last_weekday),
        (rf"(?:on |am ){_WEEKDAY}", _weekday),
        (rf"(?:on |am )?(?:the )?{_DAY} (?:of )?{_MONTH}(?:,? {_YEAR})?", _named),
        (rf"(?:on )?{_MONTH} {_DAY}(?:,? {_YEAR})?", _named),
        (rf"(?:in |im |since |seit |during |{_LAST} |{_THIS} )?{_MONTH},? {_YEAR}", _named),
        (rf"(?:in|im|since|seit|during|{_LAST}|{_THIS}) {_MONTH}", _named),
        (rf"(?:in|im jahr|since|seit|during) {_YEAR}", _in_year),
    )
]
"""Time patterns; the first match counts. A bare month does not match: `may` is mostly a verb."""
