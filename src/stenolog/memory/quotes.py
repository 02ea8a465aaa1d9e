"""Checks that the user said a quote, to keep inventions of a model out of memory. Pure.

A quote counts if its words occur in sequence in one message of the user, regardless of case,
spacing and punctuation. If a sentence of the user ends between two words, a sentence of the quote
must end there, too: "Fish? No. Meat!" does not say "no meat". A model could still attach any claim
to a true quote. The fact must therefore share a significant word with the quote: a name, a number,
or a form of the same word. The user must also have said the values in the fact, such as the words
after "is" and "to".
"""

from collections.abc import Iterable, Sequence
from typing import Final

from stenolog.catalog.tokenizer import normalize
from stenolog.lazy_loading import lazy_pattern

MIN_WORD_LETTERS: Final = 3
"""Minimum number of letters of a quote of one word: "no" and "ok" occur everywhere."""

_SAME_START_LETTERS: Final = 4
"""Number of first letters that two forms of a word share; a shorter form must match fully."""

# In scripts without spaces, each character counts as a word.
_WORD: Final = lazy_pattern(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|"
    "[^\\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
_APOSTROPHE: Final = lazy_pattern(
    "(?<=\\w)['\N{RIGHT SINGLE QUOTATION MARK}\N{MODIFIER LETTER APOSTROPHE}](?=\\w)"
)
_SENTENCE_END: Final = lazy_pattern(
    r"[.?!\n…\N{FULLWIDTH QUESTION MARK}\N{FULLWIDTH EXCLAMATION MARK}。؟।]"
)
_ELLIPSIS: Final = lazy_pattern(r"\.{3,}|\N{HORIZONTAL ELLIPSIS}|\[\.\.\.\]")

# Function words exclude negations and past tenses, because "not" and "was" change the meaning.
_FUNCTION_WORD_LIST: Final = (
    "a about also am an and any are as at be but by for from has have he her hers him his i if im "
    "in into is it its ive just me mine my of on or our ours please really she so some than that "
    "the their them then there these they this to too us user users very we which who with you "
    "your yours"
)
_FUNCTION_WORDS: Final = frozenset(_FUNCTION_WORD_LIST.split())

_COMMON_WORD_LIST: Final = (
    "all been being can come comes could did do does get gets give gives go goes going got had how "
    "id ill know knows let lets like likes make makes need needs no not now over put puts say says "
    "see sees should take takes tell tells thing things think thinks today tomorrow try use uses "
    "want wants was were what when will would yes 我 你 他 她 它 们 的 是 了 在 有 不 也 很 都 和 "
    "就 这 那 一 个"
)
_STOP_WORDS: Final = _FUNCTION_WORDS | frozenset(_COMMON_WORD_LIST.split())
"""Words that occur in almost any sentence."""

_INTRODUCING_WORD_LIST: Final = (
    "am are at be called for from is named pay pays send sends sent through to trust trusted "
    "trusts use used uses via was were with"
)
_INTRODUCING_WORDS: Final = frozenset(_INTRODUCING_WORD_LIST.split())
"""Words that introduce a value, as in "the bank is X", "trust X", "send it to X"."""
_FORMS_OF_BE: Final = frozenset(["are", "is", "was", "were"])
_PLAIN_WORD_LIST: Final = (
    "able afraid age aged ago allergic always answer answered answers asked based become becoming "
    "born bought buy buying change changing day days drink drinking drinks each eat eating eats "
    "engaged enjoy enjoying enjoys every expect expected expects find finding fond having help "
    "helped helping home hour hours interested job join keep keeping keeps kept last learn "
    "learning learns leave leaving live lived lives living located look looking love loves made "
    "making married meet meeting minutes month months more most move moved moving never new next "
    "often old older only own owned owning owns part plan planned planning plans play played "
    "playing plays prefer preferred prefers read reading remember remembered reminded run running "
    "same scheduled see seeing since speak speaking speaks spend spending start started starting "
    "stay staying still stop stopped stopping studied studies study studying supposed time times "
    "told travel travelling try trying using usually visit visited visiting visits wanting week "
    "weeks work worked working works year years young younger"
)
_PLAIN_WORDS: Final = frozenset(_PLAIN_WORD_LIST.split())
"""Words that name no person or place. A fact may use these words even if the user did not."""
_MAX_ENDING_LETTERS: Final = 3
"""Maximum number of last letters in which two forms of a long word may differ."""
_MAX_STEM_LETTERS: Final = 40
_HIRAGANA: Final = lazy_pattern("[\u3040-\u309f]$")
"""A single hiragana character is an ending or a particle."""


def words(text: str) -> list[str]:
    """Return the normalized words of a text."""
    plain = normalize("NFKC", text).casefold()
    return _WORD.findall(_APOSTROPHE.sub("", plain))


def content_words(text: str) -> tuple[str, ...]:
    """Return the words that are not function words, in order, without a plural s."""
    return tuple(_without_plural_s(word) for word in words(text) if word not in _FUNCTION_WORDS)


def is_quoted(quote: str, texts: Iterable[str]) -> bool:
    """Whether one of these texts contains the quote, word for word.

    If the quote omits words ("…"), its parts must occur in one sentence, in order.
    """
    parts = [terms for part in _ELLIPSIS.split(quote) if (terms := _words_with_ends(part))]
    if not parts or any(len(part) == 1 and len(part[0]) < MIN_WORD_LETTERS for part in parts):
        return False
    # The user may have written the dots of the quote.
    said_texts, whole_quote = list(texts), _words_with_ends(quote)
    if any(_contains_in_order(_words_with_ends(text), [whole_quote]) for text in said_texts):
        return True
    sentences = (words(sentence) for text in said_texts for sentence in _SENTENCE_END.split(text))
    return len(parts) > 1 and any(_contains_in_order(sentence, parts) for sentence in sentences)


def is_related(fact: str, quote: str) -> bool:
    """Whether a fact can follow from a quote, because both share a significant word.

    A shared word is no proof. The check rejects facts that have nothing to do with the quote. The
    check also rejects true facts in completely different words or in another language.
    """
    forms = _WordForms(_significant_words(quote))
    return any(forms.has_form_of(word) for word in _significant_words(fact))


def shares_enough_words(fact: str, texts: Iterable[str]) -> bool:
    """Whether the user said at least a quarter of the significant words of a fact.

    Without this rule, "my bank" would support any sentence that has the word bank in it.
    """
    forms = _WordForms(word for text in texts for word in _significant_words(text))
    fact_words = _significant_words(fact)
    return sum(map(forms.has_form_of, fact_words)) * 4 >= len(fact_words)


def unsupported_values(fact: str, texts: Iterable[str]) -> list[str]:
    """Return the significant words after "is", "called" or "to" that the user did not say.

    "The bank is evilbank" and "send it to mallory" do harm without a capital letter, too. The
    function recognizes only English words before a value.
    """
    values = _introduced_values(fact)
    if not values:
        return []
    said = {word for text in texts for word in _significant_words(text)}
    stems = {_stem(word) for word in values}
    lengths = {len(stem) for stem in stems}
    said_stems = {stem for word in said for length in lengths if (stem := word[:length]) in stems}
    return [word for word in values if word not in said and _stem(word) not in said_stems]


def _introduced_values(fact: str) -> list[str]:
    fact_words = words(fact)
    introducing_indexes = (at for at, word in enumerate(fact_words) if word in _INTRODUCING_WORDS)
    start = next(introducing_indexes, len(fact_words))
    if fact_words[1:2] and fact_words[1] in _FORMS_OF_BE:
        start = 0  # "evilbank is the user's bank"
    values = _significant_words(fact) - _PLAIN_WORDS - _INTRODUCING_WORDS
    # Numbers are compared in `named_details.py`, where "two" equals 2.
    return [word for word in fact_words[start:] if word in values and not word.isdecimal()]


def _stem(word: str) -> str:
    """Return the common start of the forms of a word."""
    return word[: min(max(_SAME_START_LETTERS, len(word) - _MAX_ENDING_LETTERS), _MAX_STEM_LETTERS)]


def _significant_words(text: str) -> set[str]:
    return {word for word in words(text) if word not in _STOP_WORDS and not _HIRAGANA.match(word)}


def _words_with_ends(text: str) -> list[str]:
    """Return the words, with a full stop between sentences."""
    words_and_ends: list[str] = []
    for sentence in _SENTENCE_END.split(text):
        if sentence_words := words(sentence):
            words_and_ends += [".", *sentence_words] if words_and_ends else sentence_words
    return words_and_ends


def _contains_in_order(text_words: Sequence[str], parts: Sequence[Sequence[str]]) -> bool:
    # Add spaces around the texts, so that "art" is not found in "cart".
    text = f" {' '.join(text_words)} "
    position = 0
    for part in parts:
        part_text = f" {' '.join(part)} "
        start = text.find(part_text, position)
        if start < 0:
            return False
        position = start + len(part_text) - 1
    return True


class _WordForms:
    """A set of words that finds other forms of a word, such as pay and pays, allergic and allergy.

    Each search takes constant time, because a user or a model may send very many words.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = set(words)
        self._beginnings = {
            word[:length]
            for word in self._words
            for length in range(MIN_WORD_LETTERS, _SAME_START_LETTERS + 1)
            if len(word) >= length
        }

    def has_form_of(self, word: str) -> bool:
        """Whether a known word starts like `word`, up to the length of the shorter word."""
        if word in self._words:
            return True
        if len(word) < MIN_WORD_LETTERS:
            return False
        return word[:_SAME_START_LETTERS] in self._beginnings or any(
            word[:length] in self._words for length in range(MIN_WORD_LETTERS, _SAME_START_LETTERS)
        )


def _without_plural_s(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
