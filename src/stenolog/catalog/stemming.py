"""Stem words, so that `deploying` finds `deployed`. Pure.

Handles English suffixes and common irregular forms; words of other languages stay unchanged. The
rules are similar to Porter's: a suffix is removed only if enough of the word is left. A stem need
not be a word; it only has to be the same for all forms of a word. The catalog stores stems: if a
change gives any word another stem, change `catalog_database.VERSION`.
"""

import re
from collections.abc import Iterable
from itertools import chain
from typing import Final

from stenolog.catalog import tokenizer

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

_CACHE_SIZE: Final = 100_000
_MAX_CACHED_LENGTH: Final = 32

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
_AGENT_NOUN_ENDING: Final = re.compile("[aeiou][^aeiou]+er$")
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


class _Stems(dict[str, str]):
    """Cache of stems by token."""

    def __missing__(self, token: str) -> str:
        is_letter = len(token) < 2 and token.isascii()
        stem = "" if is_letter or token in STOP_WORDS else _stem(token)
        if len(self) >= _CACHE_SIZE:
            self.clear()
        self[token] = stem
        return stem


class _NameStems(dict[str, tuple[str, ...]]):
    """Cache of stems by name. A name, such as `getUserName`, may consist of several words."""

    def __missing__(self, name: str) -> tuple[str, ...]:
        stems = tuple(stem_tokens(tokenizer.name_tokens(name)))
        if len(self) >= _CACHE_SIZE:
            self.clear()
        if len(name) <= _MAX_CACHED_LENGTH:
            self[name] = stems
        return stems


_stems: Final = _Stems()
_name_stems: Final = _NameStems()


def stem(token: str) -> str:
    """Return the stem of a token; empty for a stop word and for a single letter."""
    return _stems[token]


def stems(text: str) -> list[str]:
    """Return the stems of a text in order, without stop words."""
    return [*chain.from_iterable(map(_name_stems.__getitem__, tokenizer.split_names(text)))]


def stem_tokens(tokens: Iterable[str]) -> list[str]:
    """Return the stems of these tokens in order, without stop words."""
    return [stem for stem in map(_stems.__getitem__, tokens) if stem]


def _stem(token: str) -> str:
    if not token.isascii() or not token.isalpha():
        return token
    if token in _BASE_OF_IRREGULAR:
        return _normalize_ending(_BASE_OF_IRREGULAR[token])
    if len(token) < _MIN_STEMMED_LENGTH:
        return _normalize_ending(token)
    word = _without_tense(_without_plural(token))
    for ending, replacement, min_length in _LONG_ENDINGS:
        if word.endswith(ending):
            if len(word) - len(ending) >= min_length:
                word = word[: -len(ending)] + replacement
            break
    return _normalize_ending(word)


def _without_plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-3] + ("y" if len(word) > 4 else "ie")
    if word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def _without_tense(word: str) -> str:
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
    """Remove `-er` of agent nouns, `-ate`, a mute e and a double l; replace y by i."""
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
