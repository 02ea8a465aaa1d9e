"""Split texts and queries into tokens, and stem the tokens. Pure.

A *word* is a text between spaces. Signs such as `-` split a word into *names*. A name is split into
*parts* of letters, digits, combining marks and pictographs. `getUserName`, `get_user_name` and
`get-user-name` become get, user, name; `HTTPServer2` becomes http, server, 2. Scripts without
spaces (Chinese, Japanese, Korean, Thai …) are split into overlapping pairs of characters. Case,
width and the accents of Latin and Greek letters are ignored; other accents are not, because they
make another letter.

Each message has two lines of tokens. The first line has the parts in order, so that a compound word
(`a.b/c-d`, 東京都) is found as a run of parts. The second line has extra tokens: names with
their parts joined, so that `getusername` finds `getUserName`, and each single character of a script
without spaces.

Tokens consist of letters, digits, combining marks and pictographs only. Tokens that the catalog
adds, for example for the session of a message, start with `=`, which no token of a text contains.
The catalog stores tokens and stems: if a change of this module gives any text other tokens or
stems, increase `catalog_database.VERSION`.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Final, Literal, TypeVar

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern

T = TypeVar("T")

MAX_TOKEN_LENGTH: Final = 64
"""Maximum number of characters of a token; longer tokens are truncated."""

_MAX_PARTS: Final = 12
"""A name with more parts is regarded as encoded data and not split."""
_MAX_DIGIT_RUNS: Final = 4
"""Text between underscores with more runs of digits and of non-digits is not split at digits."""

_MAX_NAME_LENGTH: Final = 256
"""Maximum number of characters of a name; the rest is ignored."""

_CACHE_SIZE: Final = 100_000
_MAX_CACHED_LENGTH: Final = 32

# These scripts have no spaces: Han, kana, bopomofo, hangul, Yi, Thai, Lao, Tibetan, Myanmar, Khmer.
_UNSPACED_RANGES: Final = (
    "\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029"
    "\u3031-\u3035\u3038-\u303c\u3041-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U0001b000-\U0001b2ff\U00020000-\U0003ffff"
)
_CYRILLIC_IO: Final = "\u0435\u0308"  # Cyrillic io, which most writers replace by ie
_LATIN_OR_GREEK: Final = lazy_pattern("[A-Za-z\u00c0-\u024f\u0370-\u03ff\u1e00-\u1fff]")
_DIGIT_RUNS: Final = lazy_pattern(r"\d+|\D+")
_UNSPACED_CHARACTER: Final = lazy_pattern(f"[{_UNSPACED_RANGES}]")
_LONG_MARKS: Final = lazy_pattern("[\\W\uff9e\uff9f]{32,}+")
"""At least 32 characters that may be combining marks, including U+FF9E and U+FF9F."""


class Word(Struct, frozen=True):
    """The tokens of a word or of a name."""

    parts: tuple[str, ...]
    """Tokens of the word, in order."""
    joined_tokens: tuple[str, ...]
    """Tokens of the word after lowering case and removing `_`; empty if equal to `parts`."""
    chars: tuple[str, ...]
    """The single characters of scripts without spaces."""
    line: str
    """`parts`, separated by spaces."""
    joined_line: str
    """`joined_tokens`, separated by spaces."""
    has_more_tokens: bool
    """Whether the word has tokens besides its parts."""


class TokenLines(Struct, frozen=True):
    """The two lines of tokens that the index stores for a text. Spaces separate the tokens."""

    parts: str
    extra_tokens: str


class _CharacterReplacements(dict[int, str]):
    """Cache of replacements: a space for white space, a tab for a sign, else the same character."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        result = char if char == "_" or _is_word_char(char) else " " if char.isspace() else "\t"
        self[code] = result
        return result


class _UnspacedCharacters(dict[str, bool]):
    """Cache of whether a character is a pictograph or belongs to a script without spaces."""

    def __missing__(self, char: str) -> bool:
        is_unspaced = bool(_UNSPACED_CHARACTER.match(char)) or unicodedata.category(char) == "So"
        self[char] = is_unspaced
        return is_unspaced


class BoundedCache(dict[str, T]):
    """Cache of the results of a function for short texts. A full cache is cleared."""

    def __init__(self, compute: Callable[[str], T]) -> None:
        self._compute = compute

    def __missing__(self, text: str) -> T:
        result = self._compute(text)
        if len(text) <= _MAX_CACHED_LENGTH:
            if len(self) >= _CACHE_SIZE:
                self.clear()
            self[text] = result
        return result


_replacements: Final = _CharacterReplacements()
_unspaced_cache: Final = _UnspacedCharacters()


def token_lines(text: str) -> TokenLines:
    """Return the tokens of a text for the index."""
    spaced_text = text.translate(_replacements)
    names = spaced_text.split()
    words = [_word_cache[name] for name in names]
    parts = " ".join([word.line for word in words if word.line])
    extra_tokens: dict[str, None] = {}
    names_with_extras = {
        name for name, word in zip(names, words, strict=True) if word.has_more_tokens
    }
    if names_with_extras:
        for run in spaced_text.split(" "):
            run_names = run.split() if run else ()
            if not names_with_extras.isdisjoint(run_names):
                run_words = [_word_cache[name] for name in run_names]
                if any(word.joined_line for word in run_words):
                    joined_lines = [word.joined_line or word.line for word in run_words]
                    extra_tokens[" ".join(filter(None, joined_lines))] = None
                for word in run_words:
                    extra_tokens.update(dict.fromkeys(word.chars))
    return TokenLines(parts, " ".join(extra_tokens))


def split_words(text: str) -> list[Word]:
    """Return the words of a text or a query."""
    runs = [run.split() for run in text.translate(_replacements).split(" ")]
    return [_join_names([_word_cache[name] for name in run]) for run in runs if run]


def split_names(text: str) -> list[str]:
    """Split a text at spaces and signs, without splitting the names into tokens."""
    return text.translate(_replacements).split()


def word_positions(text: str) -> Iterator[tuple[int, int, Word]]:
    """Yield start, end and tokens of each name in a text.

    Runs of characters of a script without spaces are yielded separately.
    """
    for match in re.finditer("[^ \t]+", text.translate(_replacements)):
        start = match.start()
        for _, run in _split_by_script(match[0]):
            yield start, start + len(run), _word_cache[run]
            start += len(run)


def _tokenize_name(text: str) -> Word:
    """Split a name into its tokens (see the module docstring)."""
    if text.isascii() and text.isalpha() and text.islower():
        return _make_word([text[:MAX_TOKEN_LENGTH]], [], [])
    parts: list[str] = []
    joined_tokens: list[str] = []
    chars: list[str] = []
    # Normalization can introduce separators: ½ becomes 1/2.
    plain = text if text.isascii() else normalize("NFKC", text)
    for name in plain.translate(_replacements).split():
        for is_unspaced, run in _split_by_script(name):
            if is_unspaced:
                pairs = [run[index : index + 2] for index in range(len(run) - 1)] or [run]
                parts += pairs
                joined_tokens += pairs
                chars += run
            else:
                parts += _split_name(run)
                joined_tokens += _split_name(_fold_case(run).replace("_", ""))
    return _make_word(parts, joined_tokens if joined_tokens != parts else [], chars)


_word_cache: Final = BoundedCache(_tokenize_name)


def _join_names(names: Sequence[Word]) -> Word:
    """Join the names of a word such as `a.b/c-d`, which has signs between its names."""
    if len(names) == 1:
        return names[0]
    parts = [part for name in names for part in name.parts]
    joined_tokens = [part for name in names for part in name.joined_tokens or name.parts]
    chars = [char for name in names for char in name.chars]
    return _make_word(parts, joined_tokens if joined_tokens != parts else [], chars)


def _split_by_script(name: str) -> Iterable[tuple[bool, str]]:
    """Split a name where a script without spaces starts or ends; return (is_unspaced, run)."""
    if name.isascii():
        return [(False, name)]
    runs = groupby(name, _unspaced_cache.__getitem__)
    return [(is_unspaced, "".join(run)) for is_unspaced, run in runs]


def _make_word(parts: list[str], joined_tokens: list[str], chars: list[str]) -> Word:
    return Word(
        parts=tuple(parts),
        joined_tokens=tuple(joined_tokens),
        chars=tuple(dict.fromkeys(chars)),
        line=" ".join(parts),
        joined_line=" ".join(joined_tokens),
        has_more_tokens=bool(joined_tokens or chars),
    )


def _split_name(name: str) -> list[str]:
    """Split a name at underscores, changes of case and digits, and fold the case of the parts."""
    name = name[:_MAX_NAME_LENGTH]
    runs_of_name: list[str] = []
    for word in name.split("_"):
        runs = [word] if word.isalpha() else _DIGIT_RUNS.findall(word)
        runs_of_name += [word] if len(runs) > _MAX_DIGIT_RUNS else runs
    parts = [part for run in runs_of_name for part in _split_case(run)]
    if len(parts) > _MAX_PARTS:
        parts = [name.replace("_", "")]
    return [folded[:MAX_TOKEN_LENGTH] for part in parts if (folded := _fold_case(part))]


def _split_case(run: str) -> list[str]:
    """Split a name where capital letters start a word: `HTTPServer` in two, `URLs` not at all."""
    if run.islower() or run.isupper():
        return [run]
    starts = [0]
    for index in range(1, len(run)):
        if run[index].isupper():
            rest = run[index + 1 :]
            ends_capitals = run[index - 1].isupper() and rest[:1].islower() and rest != "s"
            if ends_capitals or not run[index - 1].isupper():
                starts.append(index)
    return [run[start:end] for start, end in zip(starts, [*starts[1:], len(run)], strict=True)]


def _fold_case(text: str) -> str:
    """Fold case, and remove the accents of Latin and Greek letters."""
    if text.isascii():
        return text.lower()
    folded = normalize("NFKD", normalize("NFKC", text.casefold()))
    kept_characters: list[str] = []
    base = ""
    for char in folded:
        if "\u0300" <= char <= "\u036f":
            if _LATIN_OR_GREEK.match(base) or base + char == _CYRILLIC_IO:
                continue
        else:
            base = char
        kept_characters.append(char)
    plain = normalize("NFKC", "".join(kept_characters))
    return "".join(plain.translate(_replacements).split())


def normalize(form: Literal["NFKC", "NFKD"], text: str) -> str:
    """Normalize a text in linear time, with the result of `unicodedata.normalize`.

    Python sorts the combining marks after a letter with an insertion sort. Sorting 100,000 marks
    takes half a minute and blocks all other threads. Long runs of marks are therefore sorted first.
    """
    sorted_text = _LONG_MARKS.sub(_sort_marks, text)  # guard: linear-normalization
    return unicodedata.normalize(form, sorted_text)


def _sort_marks(match: re.Match[str]) -> str:
    decomposed = "".join([unicodedata.normalize("NFKD", char) for char in match[0]])
    runs = groupby(decomposed, lambda char: unicodedata.combining(char) > 0)
    return "".join(["".join(sorted(run, key=unicodedata.combining)) for _, run in runs])


def _is_word_char(char: str) -> bool:
    """Return whether a character can be part of a token: a letter, digit, mark or pictograph."""
    if "\ufe00" <= char <= "\ufe0f":  # variation selectors
        return False
    category = unicodedata.category(char)
    return category[0] in "LNM" or category == "So"


# --- stems -----------------------------------------------------------------------------------
# With stems, `deploying` finds `deployed`. English suffixes and common irregular forms are handled.
# Tokens with other characters than ASCII letters stay unchanged. As in Porter's stemmer, a suffix
# is removed only if enough of the word is left. A stem need not be a word; it only has to be the
# same for all forms of a word.


_STOP_WORD_LIST: Final = """
    a about again all also although am an and any anybody anyone anything are aren as at be because
    been being both but by can cannot could couldn did didn do does doesn doing don done each
    either else ever every for from get gets getting got had hadn has hasn have haven having he
    hello her here hers herself hey hi him himself his how however i if in into is isn it its
    itself just let ll lot m maybe me mine more most much must my myself neither no nor not now of
    off oh ok okay on once only or other our ours ourselves out over own please quite rather re
    really s shall she should shouldn since so some somebody someone something somewhat still such
    sure t than thank thanks that the their theirs them themselves then there these they thing
    things this those though through to too under until up us ve very was wasn we well were weren
    what whatever when where whether which while who whom whose why will with within without won
    would wouldn yeah yes yet you your yours yourself
    aber alle als also am an auch auf aus bei bin bis bist da damit dann das dass dein deine dem
    den denn der des dich die dies diese dieser dieses dir doch du durch ein eine einem einen einer
    eines er es etwas euch euer fur hab habe haben hat hatte hier ich ihm ihn ihr ihre im in ist ja
    jede jeder jedes kann kein keine mal man mehr mein meine mich mir mit nach nein nicht noch nun
    nur ob oder ohne sein seine sich sie sind so und uns unser unter vom von vor war waren warum
    was weil wenn wer werden wie wieder wir wird wo wurde zu zum zur uber
"""

STOP_WORDS: Final = frozenset(_STOP_WORD_LIST.split())
"""Words without a stem, in the form of tokens: lower case, without accents."""


_MIN_STEMMED_LENGTH: Final = 4
"""Minimum length of words that are stemmed."""


_IRREGULAR_FORMS: Final = """
    allergy allergic allergies, begin began begun, break broke broken, bring brought, build built,
    buy bought, catch caught, child children, choose chose chosen choice choices, come came, decide
    decision decisions, draw drew drawn, drink drank drunk, drive drove driven, eat ate eaten, fall
    fell fallen, feel felt, fight fought, find found, fly flew flown flight flights, foot feet,
    forget forgot forgotten, freeze froze frozen, give gave given, go went gone goes, grow grew
    grown, hear heard, hide hid hidden, hold held, keep kept, knife knives, know knew known, learn
    learnt, leave left, lend lent, lose lost, make made, man men, marry marriage marriages, mean
    meant, meet met, mouse mice, pay paid, person people persons, ride rode ridden, ring rang rung,
    run ran, say said, see saw seen, sell sold, send sent, shake shook shaken, show shown, sing sang
    sung song songs, sink sank sunk, sit sat, sleep slept, speak spoke spoken, spend spent, stand
    stood, steal stole stolen, swim swam swum, take took taken, teach taught, tear tore torn, tell
    told, think thought, throw threw thrown, tooth teeth, understand understood, wake woke woken,
    wear wore worn, wife wives, win won, woman women, write wrote written
"""
_BASE_OF_IRREGULAR: Final = {
    form: base for base, *forms in map(str.split, _IRREGULAR_FORMS.split(",")) for form in forms
}
"""The base of each irregular form."""

_VOWELS: Final = "aeiouy"
_AGENT_NOUN_ENDING: Final = lazy_pattern("[aeiou][^aeiou]+er$")
_LONG_ENDINGS: Final = (
    # Each row has an ending, its replacement, and the minimum length of the rest of the word.
    # The longest ending comes first, because only the first match is replaced.
    ("ization", "ize", 2),
    ("isation", "ize", 2),
    ("ational", "ate", 2),
    ("fulness", "", 2),
    ("ousness", "ous", 2),
    ("iveness", "ive", 2),
    ("ation", "ate", 2),
    ("ence", "", 4),
    ("ance", "", 4),
    ("ement", "", 5),
    ("ments", "", 4),
    ("ment", "", 4),
    ("ness", "", 3),
    ("ingly", "", 3),
    ("edly", "", 3),
    ("ably", "able", 3),
    ("ally", "al", 3),
    ("fully", "", 3),
    ("ist", "", 5),
    ("ful", "", 3),
    ("ly", "", 4),
)


def stem(token: str) -> str:
    """Return the stem of a token; empty for a stop word and for a single letter."""
    return _stem_cache[token]


def stems(text: str) -> list[str]:
    """Return the stems of a text in order, without stop words."""
    return [*chain.from_iterable(map(_name_stem_cache.__getitem__, split_names(text)))]


def stem_tokens(tokens: Iterable[str]) -> list[str]:
    """Return the stems of these tokens in order, without stop words."""
    return [stem for stem in map(_stem_cache.__getitem__, tokens) if stem]


def _stem(token: str) -> str:
    if (len(token) < 2 and token.isascii()) or token in STOP_WORDS:
        return ""
    if not token.isascii() or not token.isalpha():
        return token
    if token in _BASE_OF_IRREGULAR:
        return _normalize_ending(_BASE_OF_IRREGULAR[token])
    if len(token) < _MIN_STEMMED_LENGTH:
        return _normalize_ending(token)
    word = _remove_tense(_remove_plural(token))
    for ending, replacement, min_length in _LONG_ENDINGS:
        if word.endswith(ending):
            if len(word) - len(ending) >= min_length:
                word = word[: -len(ending)] + replacement
            break
    return _normalize_ending(word)


def _stems_of_name(name: str) -> tuple[str, ...]:
    """Return the stems of a name, such as `getUserName`, which may consist of several words."""
    return tuple(stem_tokens(_word_cache[name].parts))


_stem_cache: Final = BoundedCache(_stem)
_name_stem_cache: Final = BoundedCache(_stems_of_name)


def _remove_plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-3] + ("y" if len(word) > 4 else "ie")
    if word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def _remove_tense(word: str) -> str:
    """Remove `-ed` and `-ing` if a vowel is left."""
    if word.endswith("ied") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith("eed"):
        return word[:-1] if len(word) > 5 else word
    for ending in ("ing", "ed"):
        head = word.removesuffix(ending)
        if head != word and len(head) > 1 and any(vowel in head for vowel in _VOWELS):
            return _restore_base(head)
    return word


def _restore_base(head: str) -> str:
    """Restore the base form: `planning` gives plan, not plann; but `calling` gives call."""
    if len(head) > 3 and head[-1] == head[-2] and head[-1] not in "aeioulsz":
        return head[:-1]
    return f"{head}e" if head.endswith("at") else head


def _normalize_ending(word: str) -> str:
    """Remove `-er` of agent nouns, `-ate` and a silent e; replace ll by l, and y by i."""
    if len(word) > 6 and _AGENT_NOUN_ENDING.search(word):
        word = _restore_base(word[:-2])
    if len(word) > 7 and word.endswith("ate"):
        word = word[:-3]
    if word.endswith("e") and len(word) > 2:
        return word[:-1]
    if word.endswith("ll") and len(word) > 6:
        return word[:-1]
    if word.endswith("y") and len(word) > 3 and word[-2] not in "aeiou":
        return word[:-1] + "i"
    return word
