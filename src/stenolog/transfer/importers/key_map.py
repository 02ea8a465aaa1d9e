"""New keys for imported sessions: pairs of old and new key, and patterns with a `*`."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from stenolog.codec import check_key
from stenolog.errors import UsageError

WILDCARD = "*"


class KeyPair(Struct, frozen=True):
    """An old and a new key; in both, `*` matches the same text."""

    old: str
    new: str

    def apply(self, key: str) -> str | None:
        """Return the new key; None if the pair does not match."""
        if WILDCARD not in self.old:
            return self.new if key == self.old else None
        before, _, after = self.old.partition(WILDCARD)
        if len(key) < len(before) + len(after):
            return None
        if not key.startswith(before) or not key.endswith(after):
            return None
        return self.new.replace(WILDCARD, key[len(before) : len(key) - len(after)])

    def __str__(self) -> str:
        """Return the pair in the notation of `parse_pair`."""
        return f"{self.old}={self.new}"


class KeyMap(Struct, frozen=True):
    """A list of pairs: a pair that names the key precedes patterns; the first pattern wins."""

    pairs: tuple[KeyPair, ...] = ()

    def __call__(self, key: str) -> str:
        """Return the new key; the same key if no pair matches."""
        exact = (pair.new for pair in self.pairs if pair.old == key)
        found = (new for pair in self.pairs if (new := pair.apply(key)) is not None)
        return next(exact, None) or next(found, key)

    def unmatched(self, keys: Sequence[str]) -> list[KeyPair]:
        """Return the pairs that match none of these keys."""
        return [pair for pair in self.pairs if not any(_matches(pair, key) for key in keys)]

    def duplicates(self, keys: Sequence[str]) -> list[str]:
        """Return the new keys that several different old keys would get."""
        counted = Counter(self(key) for key in set(keys))
        moved = {self(key) for key in keys if self(key) != key}
        return sorted(key for key, count in counted.items() if count > 1 and key in moved)


def parse_pair(text: str) -> KeyPair:
    """Return the pair in `OLD=NEW`, or with a tab in between. Raises UsageError."""
    separator = "\t" if "\t" in text else "="
    old, found, new = text.partition(separator)
    if not found or not old or not new:
        raise UsageError(
            f"{text!r} must have the form OLD=NEW: the key in the source and the key here"
        )
    if old.count(WILDCARD) > 1 or new.count(WILDCARD) > old.count(WILDCARD):
        raise UsageError(f"{text!r} may have one *, and NEW only if OLD has one")
    if old.count(WILDCARD) and not new.count(WILDCARD):
        raise UsageError(
            f"{text!r}: NEW needs a * too, otherwise all sessions would get the same key"
        )
    check_key(new)
    return KeyPair(old, new)


def parse_pairs(lines: str) -> tuple[KeyPair, ...]:
    """Return the pairs of a file, one per line, without empty lines and lines that start with #.

    Raises UsageError.
    """
    found = []
    for number, line in enumerate(lines.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            try:
                found.append(parse_pair(line.strip("\r\n ")))
            except UsageError as error:
                raise UsageError(f"line {number}: {error}") from error
    return tuple(found)


def _matches(pair: KeyPair, key: str) -> bool:
    return pair.old == key or pair.apply(key) is not None
