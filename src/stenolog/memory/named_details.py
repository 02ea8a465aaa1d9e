"""Find names, numbers and addresses in a text that no other text contains. Pure.

A model that was misled by a web page or a tool result can attach anything to a true quote: an
account number, an address to write to, a person to trust. Names, numbers and addresses make a false
note harmful, so the user must have said each of them.

Names are recognized by their capital letters. In scripts without capital letters, and for names in
lower case, this module finds nothing. `quotes.unsupported_values` finds some of these names.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from stenolog.catalog.tokenizer import normalize
from stenolog.lazy_loading import lazy_pattern

# Each pattern is tried only at the start of a run of its characters.
# Scanning a very long word from each of its characters would take minutes.
_ADDRESS_PATTERN: Final = lazy_pattern(
    r"""(?<![\w+.-])[+.-]*+\w[\w+.-]*+://\S++                           # https://example.org/pay
    | (?<![\w+.-])[\w+.-]++@[\w-]++(?:\.[\w-]++)*+                    # ann@example.org
    | (?<!\w)@\w++                                                    # @ann
    | (?<![\w.-])(?=[\w.-]*?[\w-]\.[a-z]{2})[\w.-]++(?:[:/?\#]\S*+)?  # example.org/pay
    | (?<!\w)[a-z]:\\\S++                                             # C:\Users
    | (?<![\w/])~?/[\w.~-]++(?:/[\w.~-]*+)*+                          # /etc/passwd
    """,
    re.IGNORECASE | re.VERBOSE,
)
_THOUSANDS_SEPARATOR: Final = lazy_pattern(r"(?<=\d)[ ,.'’\u00a0\u202f](?=\d{3}(?!\d))")
"""Thousands separator, as in 1,200."""
_WORD: Final = lazy_pattern(r"\w+")
_DIGIT: Final = lazy_pattern(r"\d")
_NUMBER_WITH_UNIT: Final = lazy_pattern(r"(\d+)[^\W\d]{1,3}")
"""Number with a unit, such as 5pm, 42km or 3rd; only the number counts."""
_LETTER_WORD: Final = lazy_pattern(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_SENTENCE_END: Final = lazy_pattern(r"[.?!…。\n]")
_LEADING_PUNCTUATION: Final = "+.-"
_TRAILING_PUNCTUATION: Final = ".,;:!?)]}>'\"’”"

_NUMERAL_LIST: Final = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMERALS: Final = {word: str(number) for number, word in enumerate(_NUMERAL_LIST.split())}

_NOT_NAME_LIST: Final = (
    "a an and the i im ive id ill he she it its they we you his her their our my your this that "
    "these those there user users assistant nutzer nutzers nutzerin benutzer benutzers "
    "anwender usuario usuaria utente utilisateur utilisatrice gebruiker användaren"
)
_NOT_NAMES: Final = frozenset(_NOT_NAME_LIST.split())

_VERB_LIST: Final = (
    "is was are were has had have will would can could does did must should may and or"
)
_VERBS: Final = frozenset(_VERB_LIST.split())
"""Words that follow a subject; a capitalized word before one of these words is a name."""


def unsupported_details(text: str, user_texts: Iterable[str]) -> list[str]:
    """Return the names, numbers and addresses of a text that no text in `user_texts` contains."""
    rest, *said_texts = (normalize("NFKC", part) for part in (text, *user_texts))
    missing_details = []
    for match in _ADDRESS_PATTERN.finditer(rest):
        address = match[0].lstrip(_LEADING_PUNCTUATION).rstrip(_TRAILING_PUNCTUATION)
        if not any(_contains_address(address, said_text) for said_text in said_texts):
            missing_details.append(address)
    # The parts of an address were checked with the address.
    rest = _ADDRESS_PATTERN.sub(lambda match: "," * (match.end() - match.start()), rest)
    known_numbers = {number for said_text in said_texts for number in _find_numbers(said_text)}
    missing_details += [number for number in _find_numbers(rest) if number not in known_numbers]
    known_words = {word for said_text in said_texts for word in _find_words(said_text)}
    missing_details += [name for name in _find_names(rest) if not _is_known_name(name, known_words)]
    return list(dict.fromkeys(missing_details))


def _contains_address(address: str, text: str) -> bool:
    """Whether a text contains the address, not only as a part of a longer address."""
    pattern = rf"(?<![\w.@/-]){re.escape(address)}(?![\w@/-]|\.\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _find_numbers(text: str) -> Iterator[str]:
    without_separators = _THOUSANDS_SEPARATOR.sub("", text.casefold())
    for word in filter(_DIGIT.search, _WORD.findall(without_separators)):
        unit_match = _NUMBER_WITH_UNIT.fullmatch(word)
        yield unit_match[1] if unit_match else word
    for word in _LETTER_WORD.findall(without_separators):
        if word in _NUMERALS:
            yield _NUMERALS[word]


def _find_names(text: str) -> Iterator[str]:
    """Yield the words that look like names because of their capital letters.

    The first word of a sentence always has a capital letter. The first word is a name if a verb or
    a comma follows: "Ann is a friend", but not "Likes tea".
    """
    for sentence in _SENTENCE_END.split(text):
        word_matches = list(_LETTER_WORD.finditer(sentence))
        for index, match in enumerate(word_matches):
            word = match[0]
            if word.casefold() in _NOT_NAMES or not any(map(str.isupper, word)):
                continue
            if index or word[1:] != word[1:].lower():
                yield word
                continue
            rest_of_sentence = sentence[match.end() :].lstrip()
            after = word_matches[1][0].casefold() if len(word_matches) > 1 else ""
            if after in _VERBS or rest_of_sentence[:1] in (",", ":") or word.endswith(("'s", "’s")):
                yield word


def _find_words(text: str) -> Iterator[str]:
    for word in _LETTER_WORD.findall(text):
        folded = word.casefold()
        yield folded
        # Split "Ann's" and "Ann-Marie".
        yield from re.split(r"['’-]", folded)


def _is_known_name(name: str, known_names: set[str]) -> bool:
    """Whether the user said a name, in this form or with another ending."""
    folded = name.casefold()
    name_without_s = folded.removesuffix("'s").removesuffix("’s")
    if folded in known_names or name_without_s in known_names:
        return True
    # Accept another ending, as in Berlin and Berliner. Short words must match exactly.
    return any(
        len(word) > 3
        and len(name_without_s) > 3
        and abs(len(word) - len(name_without_s)) <= 2
        and (word.startswith(name_without_s) or name_without_s.startswith(word))
        for word in known_names
    )
