"""Parse times in a question: `yesterday`, `last week`, `in May`, `three days ago`, 2026-03. Pure.

The supported languages are English and German. Days start and end in the time zone of `now`, weeks
start on Monday. A month or weekday without a year or date means the latest one that has started.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern


def _numbers_by_name(names: str, *, first: int) -> dict[str, int]:
    """Return the number of each name. Commas separate numbers; a number may have several names."""
    return {
        name: number
        for number, group in enumerate(names.split(","), first)
        for name in group.split()
    }


_MONTHS: Final = _numbers_by_name(
    "january jan januar, february feb februar, march mar märz maerz, april apr, may mai, "
    "june jun juni, july jul juli, august aug, september sept sep, october oct oktober, "
    "november nov, december dec dezember",
    first=1,
)
_WEEKDAYS: Final = _numbers_by_name(
    "monday montag, tuesday dienstag, wednesday mittwoch, thursday donnerstag, friday freitag, "
    "saturday samstag, sunday sonntag",
    first=0,
)
_NUMBERS: Final = _numbers_by_name(
    "a an one ein einem einen einer, two zwei couple, three drei few, four vier, five fünf, "
    "six sechs, seven sieben, eight acht, nine neun, ten zehn",
    first=1,
)
_UNIT_BY_START: Final = {"day": "day", "tag": "day", "wee": "week", "woc": "week", "mon": "month"}

_MONTH_RE: Final = "(?P<month>" + "|".join(sorted(_MONTHS, key=len, reverse=True)) + r")\b\.?"
_WEEKDAY_RE: Final = "(?P<weekday>" + "|".join(_WEEKDAYS) + ")"
_COUNT_RE: Final = r"(?P<many>\d{1,3}|" + "|".join(_NUMBERS) + ")"
_UNIT_RE: Final = r"(?P<unit>days?|weeks?|months?|years?|tage?n?|wochen?|monate?n?|jahre?n?)"
_LAST_RE: Final = r"(?:last|previous|past|letzte[nrsm]?|vorige[nrsm]?)"
_THIS_RE: Final = r"(?:this|current|diese[nrsm]?)"


class Period(Struct, frozen=True):
    """A time range: `since` is included, `until` is not."""

    since: datetime
    until: datetime

    def contains(self, moment: datetime) -> bool:
        """Whether a time is in the range."""
        return self.since <= moment < self.until


def find_period(text: str, *, now: datetime) -> tuple[Period | None, str]:
    """Return the period that a text names, and the text without the words for the period.

    Of several periods, the one whose pattern comes first in `_RULES` counts. Words such as
    "yesterday" are relative to `now`. Without a period, return None and the text.
    """
    for pattern, read_period in _RULES:
        for match in pattern.finditer(text):
            try:
                period = read_period(match, now)
            except (ValueError, OverflowError, KeyError):
                # An impossible date such as 2026-13-45, or a name with a dotless i, which a pattern
                # that ignores case matches, too.
                continue
            return period, f"{text[: match.start()]} {text[match.end() :]}"
    return None, text


# --- meaning of each form --------------------------------------------------------------------


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def _day_period(start: datetime, count: int = 1) -> Period:
    return Period(_midnight(start), _midnight(start) + timedelta(days=count))


def _month_period(year: int, month: int, now: datetime) -> Period:
    year, month = year + (month - 1) // 12, (month - 1) % 12 + 1
    first_day = _midnight(now).replace(year=year, month=month, day=1)
    next_month = first_day.replace(year=year + month // 12, month=month % 12 + 1)
    return Period(first_day, next_month)


def _year_period(year: int, now: datetime) -> Period:
    first_day = _midnight(now).replace(year=year, month=1, day=1)
    return Period(first_day, first_day.replace(year=year + 1))


def _monday_of_week(now: datetime) -> datetime:
    return _midnight(now) - timedelta(days=now.weekday())


def _iso_date_period(match: re.Match[str], now: datetime) -> Period:
    year, month, day = int(match["year"]), int(match["month"]), int(match["day"] or 1)
    # This call raises ValueError for an impossible date.
    first_day = _midnight(now).replace(year=year, month=month, day=day)
    return _day_period(first_day) if match["day"] else _month_period(year, month, now)


def _time_ago_period(match: re.Match[str], now: datetime) -> Period:
    """Return the period of a text such as "two days ago"; for weeks, seven days around that day."""
    count, unit = _parse_count(match["many"]), _parse_unit(match["unit"])
    if unit == "week":
        return _day_period(now - timedelta(days=7 * count + 3), 7)
    return _unit_period(unit, count, now)


def _unit_period(unit: str, count: int, now: datetime) -> Period:
    """Return the day, week, month or year that is `count` units before the current one."""
    match unit:
        case "day":
            return _day_period(now - timedelta(days=count))
        case "week":
            return _day_period(_monday_of_week(now) - timedelta(days=7 * count), 7)
        case "month":
            return _month_period(now.year, now.month - count, now)
    return _year_period(now.year - count, now)


def _past_period(match: re.Match[str], now: datetime) -> Period:
    days = {"day": 1, "week": 7, "month": 31, "year": 366}[_parse_unit(match["unit"])]
    until = _midnight(now) + timedelta(days=1)
    return Period(until - timedelta(days=days * _parse_count(match["many"]) + 1), until)


def _weekday_period(match: re.Match[str], now: datetime) -> Period:
    days_back = (now.weekday() - _WEEKDAYS[match["weekday"].casefold()]) % 7
    return _day_period(now - timedelta(days=days_back))


def _named_date_period(match: re.Match[str], now: datetime) -> Period:
    """Return a month, or a day of a month, in the given year or the latest one that has started."""
    month = _MONTHS[match["month"].casefold()]
    groups = match.groupdict()
    year, day = groups.get("year"), groups.get("day")
    if day is None:
        return _month_period(int(year) if year else now.year - (month > now.month), month, now)
    if year:
        return _day_period(_midnight(now).replace(year=int(year), month=month, day=int(day)))
    return _day_period(_latest_day(month, int(day), now))


def _latest_day(month: int, day: int, now: datetime) -> datetime:
    # There can be eight years between two leap days.
    for year in range(now.year, now.year - 9, -1):
        with suppress(ValueError):
            date = _midnight(now).replace(year=year, month=month, day=day)
            if date <= now:
                return date
    raise ValueError(f"no month {month} has a day {day}")


def _parse_count(text: str) -> int:
    return int(text) if text.isdigit() else _NUMBERS[text.casefold()]


def _parse_unit(text: str) -> str:
    return _UNIT_BY_START.get(text[:3].lower(), "year")


def _make_units_ago_rule(count: int, unit: str = "") -> Callable[[re.Match[str], datetime], Period]:
    """Return a rule for the period `count` units ago. Without `unit`, the text names the unit."""
    return lambda match, now: _unit_period(unit or _parse_unit(match["unit"]), count, now)


_YEAR_RE: Final = r"(?P<year>(?:19|20)\d\d)"
_DAY_RE: Final = r"(?P<day>[0-3]?\d)(?:st|nd|rd|th|\.)?"

_RULES: Final = [
    (lazy_pattern(rf"\b(?:{pattern})(?!\w)", re.IGNORECASE), read_period)
    for pattern, read_period in (
        (rf"(?:on |am |in |im )?{_YEAR_RE}-(?P<month>\d\d)(?:-(?P<day>\d\d))?", _iso_date_period),
        (r"(?:the )?day before yesterday|vorgestern", _make_units_ago_rule(2, "day")),
        (r"yesterday|last night|gestern", _make_units_ago_rule(1, "day")),
        (r"today|tonight|this (?:morning|afternoon|evening)|heute", _make_units_ago_rule(0, "day")),
        (rf"(?:about )?(?:a )?{_COUNT_RE}(?: of)? {_UNIT_RE} (?:ago|before)", _time_ago_period),
        (rf"vor {_COUNT_RE} {_UNIT_RE}", _time_ago_period),
        (
            rf"(?:in |over |during )?(?:the |den |die )?{_LAST_RE} {_COUNT_RE} {_UNIT_RE}",
            _past_period,
        ),
        (
            rf"{_LAST_RE} (?:weekend|wochenende)|am wochenende",
            lambda _, now: _day_period(_monday_of_week(now) - timedelta(days=2), 2),
        ),
        (rf"(?:in (?:der |dem )?|im )?{_LAST_RE} {_UNIT_RE}", _make_units_ago_rule(1)),
        (rf"(?:in (?:der |dem )?)?{_THIS_RE} {_UNIT_RE}", _make_units_ago_rule(0)),
        # On a Monday, "last Monday" is a week ago.
        (
            rf"{_LAST_RE} {_WEEKDAY_RE}",
            lambda match, now: _weekday_period(match, now - timedelta(days=1)),
        ),
        (rf"(?:on |am ){_WEEKDAY_RE}", _weekday_period),
        (
            rf"(?:on |am )?(?:the )?{_DAY_RE} (?:of )?{_MONTH_RE}(?:,? {_YEAR_RE})?",
            _named_date_period,
        ),
        (rf"(?:on )?{_MONTH_RE} {_DAY_RE}(?:,? {_YEAR_RE})?", _named_date_period),
        (
            rf"(?:in |im |since |seit |during |{_LAST_RE} |{_THIS_RE} )?{_MONTH_RE},? {_YEAR_RE}",
            _named_date_period,
        ),
        (rf"(?:in|im|since|seit|during|{_LAST_RE}|{_THIS_RE}) {_MONTH_RE}", _named_date_period),
        (
            rf"(?:in|im jahr|since|seit|during) {_YEAR_RE}",
            lambda match, now: _year_period(int(match["year"]), now),
        ),
    )
]
"""Time patterns, tried in this order. A bare month does not match: `may` is mostly a verb."""
