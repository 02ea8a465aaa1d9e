"""New keys for imported sessions: pairs of old and new key, and patterns with a `*`."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from stenolog.codec import check_key
from stenolog.errors import UsageError

WILDCARD = "*"


class KeyPair(Struct, frozen=True):
    """An old and a new key.

    In the new key, `*` stands for the text that `*` matches in the old key.
    """

    old: str
    new: str

    def apply(self, key: str) -> str | None:
        """Return the new key of a session; None if the old key of the pair does not match."""
        if WILDCARD not in self.old:
            return self.new if key == self.old else None
        prefix, _, suffix = self.old.partition(WILDCARD)
        if len(key) < len(prefix) + len(suffix):
            return None
        if not key.startswith(prefix) or not key.endswith(suffix):
            return None
        return self.new.replace(WILDCARD, key[len(prefix) : len(key) - len(suffix)])

    def __str__(self) -> str:
        """Return the pair in the notation of `parse_pair`."""
        return f"{self.old}={self.new}"


class KeyMap(Struct, frozen=True):
    """A list of pairs of old and new key.

    A matching pair without `*` wins over pairs with `*`. Of several pairs with `*`, the first wins.
    """

    pairs: tuple[KeyPair, ...] = ()

    def __call__(self, key: str) -> str:
        """Return the new key, or the old key if no pair matches."""
        exact_keys = (pair.new for pair in self.pairs if pair.old == key)
        pattern_keys = (new for pair in self.pairs if (new := pair.apply(key)) is not None)
        return next(exact_keys, None) or next(pattern_keys, key)

    def unmatched(self, keys: Sequence[str]) -> list[KeyPair]:
        """Return the pairs that match none of these keys."""
        return [pair for pair in self.pairs if all(pair.apply(key) is None for key in keys)]

    def duplicates(self, keys: Sequence[str]) -> list[str]:
        """Return the new keys that several different old keys would get."""
        key_counts = Counter(self(key) for key in set(keys))
        changed_keys = {self(key) for key in keys if self(key) != key}
        return sorted(key for key, count in key_counts.items() if count > 1 and key in changed_keys)


def parse_pair(text: str) -> KeyPair:
    """Return the pair in a text: `OLD=NEW`, or `OLD`, a tab and `NEW`. Raises UsageError."""
    separator = "\t" if "\t" in text else "="
    old, has_separator, new = text.partition(separator)
    if not has_separator or not old or not new:
        raise UsageError(
            f"{text!r} must have the form OLD=NEW: the key in the source and the key here"
        )
    if old.count(WILDCARD) > 1 or new.count(WILDCARD) > old.count(WILDCARD):
        raise UsageError(f"{text!r} may have one * in OLD, and one in NEW only if OLD has one")
    if old.count(WILDCARD) and not new.count(WILDCARD):
        raise UsageError(
            f"{text!r}: NEW needs a * too, otherwise all sessions would get the same key"
        )
    check_key(new)
    return KeyPair(old, new)


def parse_pairs(text: str) -> tuple[KeyPair, ...]:
    """Return the pairs of a file, one per line. Raises UsageError.

    Empty lines and lines that start with # are skipped.
    """
    pairs = []
    for line_number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            try:
                pairs.append(parse_pair(line.strip("\r\n ")))
            except UsageError as error:
                raise UsageError(f"line {line_number}: {error}") from error
    return tuple(pairs)
