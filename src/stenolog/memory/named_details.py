"""Find names, numbers and addresses in a text that no other text contains. Pure.

A model that was misled by a web page or a tool result can attach anything to a true quote: an
account number, an address to write to, a person to trust. Names, numbers and addresses make such a
note harmful, so the user must have said each of them.

Names are recognized by their capital letters. In scripts without capital letters, and for names in
lower case, this module finds nothing. `quotes.unsupported_values` finds some of these names.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Final

# Each pattern is tried only at the start of a run of its characters. Otherwise a text of one long
# word would be scanned from each character and take minutes.
_ADDRESS: Final = re.compile(
    r"""(?<![\w+.-])[+.-]*+\w[\w+.-]*+://\S++                           # https://example.org/pay
    | (?<![\w+.-])[\w+.-]++@[\w-]++(?:\.[\w-]++)*+                    # ann@example.org
    | (?<!\w)@\w++                                                    # @ann
    | (?<![\w.-])(?=[\w.-]*?[\w-]\.[a-z]{2})[\w.-]++(?:[:/?\#]\S*+)?  # example.org/pay
    | (?<!\w)[a-z]:\\\S++                                             # C:\Users
    | (?<![\w/])~?/[\w.~-]++(?:/[\w.~-]*+)*+                          # /etc/passwd
    """,
    re.IGNORECASE | re.VERBOSE,
)
_GROUPED: Final = re.compile(r"(?<=\d)[ ,.'’\u00a0\u202f](?=\d{3}(?!\d))")
"""Thousands separator, as in 1,200."""
_WORD: Final = re.compile(r"\w+")
_DIGIT: Final = re.compile(r"\d")
_WITH_UNIT: Final = re.compile(r"(\d+)[^\W\d]{1,3}")
"""Number with a unit, such as 5pm, 42km or 3rd; only the number counts."""
_CAPITALISED: Final = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_END: Final = re.compile(r"[.?!…。\n]")
_LEADING: Final = "+.-"
_TRAILING: Final = ".,;:!?)]}>'\"’”"

_NUMERAL_WORDS: Final = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMERALS: Final = {word: str(number) for number, word in enumerate(_NUMERAL_WORDS.split())}

_NOT_A_NAME: Final = (
    "a an and the i im ive id ill he she it its they we you his her their our my your this that "
    "these those there user users assistant nutzer nutzers nutzerin benutzer benutzers "
    "anwender usuario usuaria utente utilisateur utilisatrice gebruiker användaren"
)
_NO_NAMES: Final = frozenset(_NOT_A_NAME.split())

_FOLLOWING: Final = (
    "is was are were has had have will would can could does did must should may and or"
)
_VERBS: Final = frozenset(_FOLLOWING.split())
"""Words that follow a subject; a capitalized word before such a word is a name."""


def unsupported_details(text: str, said: Iterable[str]) -> list[str]:
    """Return the names, numbers and addresses of a text that no text in `said` contains."""
    said_texts = [_plain(text) for text in said]
    rest = _plain(text)
    missing = []
    for address in _addresses(rest):
        if not any(_contains_address(address, said_text) for said_text in said_texts):
            missing.append(address)
    # The parts of an address were checked with the address.
    rest = _ADDRESS.sub(lambda match: "," * (match.end() - match.start()), rest)
    known_numbers = {number for said_text in said_texts for number in _numbers(said_text)}
    missing += [number for number in _numbers(rest) if number not in known_numbers]
    known_words = {word for said_text in said_texts for word in _words(said_text)}
    missing += [name for name in _names(rest) if not _is_known(name, known_words)]
    return list(dict.fromkeys(missing))


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _addresses(text: str) -> Iterator[str]:
    for match in _ADDRESS.finditer(text):
        yield match[0].lstrip(_LEADING).rstrip(_TRAILING)


def _contains_address(address: str, text: str) -> bool:
    """Whether a text contains the address, not only as a part of a longer address."""
    pattern = rf"(?<![\w.@/-]){re.escape(address)}(?![\w@/-]|\.\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _numbers(text: str) -> Iterator[str]:
    plain = _GROUPED.sub("", text.casefold())
    for word in filter(_DIGIT.search, _WORD.findall(plain)):
        with_unit = _WITH_UNIT.fullmatch(word)
        yield with_unit[1] if with_unit else word
    for word in _CAPITALISED.findall(plain):
        if word in _NUMERALS:
            yield _NUMERALS[word]


def _names(text: str) -> Iterator[str]:
    """Yield the words that are names by their capital letters.

    The first word of a sentence always has a capital letter. This word is a name if a verb or a
    comma follows: "Ann is a friend", but not "Likes tea".
    """
    for sentence in _END.split(text):
        capitalised = list(_CAPITALISED.finditer(sentence))
        for index, match in enumerate(capitalised):
            word = match[0]
            if word.casefold() in _NO_NAMES or word.islower() or not _is_cased(word):
                continue
            if index or word[1:] != word[1:].lower():
                yield word
                continue
            rest_of_sentence = sentence[match.end() :].lstrip()
            after = capitalised[1][0].casefold() if len(capitalised) > 1 else ""
            if after in _VERBS or rest_of_sentence[:1] in (",", ":") or word.endswith(("'s", "’s")):
                yield word


def _is_cased(word: str) -> bool:
    return any(letter.isupper() for letter in word)


def _words(text: str) -> Iterator[str]:
    for word in _CAPITALISED.findall(text):
        folded = word.casefold()
        yield folded
        # "Ann's", "Ann-Marie"
        yield from re.split(r"['’-]", folded)


def _is_known(name: str, known: set[str]) -> bool:
    """Whether a name was said, in this form or with another ending."""
    folded = name.casefold()
    whole = folded.removesuffix("'s").removesuffix("’s")
    if folded in known or whole in known:
        return True
    # Berlin, Berliner. Short words must match exactly.
    return any(
        len(word) > 3
        and len(whole) > 3
        and abs(len(word) - len(whole)) <= 2
        and (word.startswith(whole) or whole.startswith(word))
        for word in known
    )
