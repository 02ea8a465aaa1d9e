"""Check that the user said what a model claims, to keep inventions out of memory. Pure.

A quote counts if its words occur in sequence in one message of the user, regardless of case,
spacing and punctuation. If a sentence of the user ends between two words, a sentence of the quote
must end there, too: "Fish? No. Meat!" does not say "no meat". A model could still attach any claim
to a true quote. The fact must therefore share a significant word with the quote: a name, a number,
or a form of the same word. The user must also have said the values in the fact, such as the words
after "is" and "to".

A model that was misled by a web page or a tool result can attach anything to a true quote: an
account number, an address to write to, a person to trust. Names, numbers and addresses make a false
note harmful, so the user must have said each of them. Names are recognized by their capital
letters. Of names in lower case or in scripts without capital letters, `unsupported_values` finds
some, and the others are not checked.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from stenolog.catalog.tokenizer import normalize
from stenolog.lazy_loading import lazy_pattern


def _word_set(words: str) -> frozenset[str]:
    """Return the words of a text, which are separated by spaces."""
    return frozenset(words.split())


# --- quotes, and the words of a fact --------------------------------------------------------------


MIN_WORD_LETTERS: Final = 3
"""Minimum letters of a one-word quote ("no" occurs everywhere). Shorter words have no forms."""

_SAME_START_LETTERS: Final = 4
"""Number of first letters that two forms of a word share; a shorter form must be a prefix."""

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

# Negations and past tenses are not in this list, because "not" and "was" change the meaning.
_FUNCTION_WORDS: Final = _word_set(
    "a about also am an and any are as at be but by for from has have he her hers him his i if im "
    "in into is it its ive just me mine my of on or our ours please really she so some than that "
    "the their them then there these they this to too us user users very we which who with you "
    "your yours"
)

_STOP_WORDS: Final = _FUNCTION_WORDS | _word_set(
    "all been being can come comes could did do does get gets give gives go goes going got had how "
    "id ill know knows let lets like likes make makes need needs no not now over put puts say says "
    "see sees should take takes tell tells thing things think thinks today tomorrow try use uses "
    "want wants was were what when will would yes 我 你 他 她 它 们 的 是 了 在 有 不 也 很 都 和 "
    "就 这 那 一 个"
)
"""Words that occur in almost any sentence."""

_INTRODUCING_WORDS: Final = _word_set(
    "am are at be called for from is named pay pays send sends sent through to trust trusted "
    "trusts use used uses via was were with"
)
"""Words that introduce a value, as in "the bank is X", "trust X", "send it to X"."""
_FORMS_OF_BE: Final = _word_set("are is was were")
_PLAIN_WORDS: Final = _word_set(
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
"""Words that name no person or place. A fact may use these words even if the user did not."""
_MAX_ENDING_LETTERS: Final = 3
"""Maximum number of last letters in which two forms of a long word may differ."""
_MAX_STEM_LETTERS: Final = 40
_SINGLE_HIRAGANA: Final = lazy_pattern("[\u3040-\u309f]$")
"""Pattern of a single hiragana character, which is an ending or a particle."""


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
    parts = [terms for part in _ELLIPSIS.split(quote) if (terms := _split_words_and_stops(part))]
    if not parts or any(len(part) == 1 and len(part[0]) < MIN_WORD_LETTERS for part in parts):
        return False
    # The user may have written the dots of the quote, so look for the whole quote first.
    said_texts, whole_quote = list(texts), _split_words_and_stops(quote)
    if any(_contains_in_order(_split_words_and_stops(text), [whole_quote]) for text in said_texts):
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

    "The bank is evilbank" and "send it to mallory" do harm without a capital letter, too. Only
    English words before a value are recognized.
    """
    values = _find_introduced_values(fact)
    if not values:
        return []
    said_words = {word for text in texts for word in _significant_words(text)}
    stems = {_stem(word) for word in values}
    lengths = {len(stem) for stem in stems}
    said_stems = {
        stem for word in said_words for length in lengths if (stem := word[:length]) in stems
    }
    return [word for word in values if word not in said_words and _stem(word) not in said_stems]


def _find_introduced_values(fact: str) -> list[str]:
    fact_words = words(fact)
    introducing_indexes = (i for i, word in enumerate(fact_words) if word in _INTRODUCING_WORDS)
    start = next(introducing_indexes, len(fact_words))
    if fact_words[1:2] and fact_words[1] in _FORMS_OF_BE:
        start = 0  # "evilbank is the user's bank"
    values = _significant_words(fact) - _PLAIN_WORDS - _INTRODUCING_WORDS
    # Numbers are compared in `unsupported_details`, where "two" equals 2.
    return [word for word in fact_words[start:] if word in values and not word.isdecimal()]


def _stem(word: str) -> str:
    """Return the common prefix of the forms of a word."""
    return word[: min(max(_SAME_START_LETTERS, len(word) - _MAX_ENDING_LETTERS), _MAX_STEM_LETTERS)]


def _significant_words(text: str) -> set[str]:
    return {
        word for word in words(text) if word not in _STOP_WORDS and not _SINGLE_HIRAGANA.match(word)
    }


def _split_words_and_stops(text: str) -> list[str]:
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


# --- names, numbers and addresses -----------------------------------------------------------------


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
_NUMBER_WORD: Final = lazy_pattern(r"\w+")
_DIGIT: Final = lazy_pattern(r"\d")
_NUMBER_WITH_UNIT: Final = lazy_pattern(r"(\d+)[^\W\d]{1,3}")
"""Number with a unit, such as 5pm, 42km or 3rd; only the number counts."""
_LETTER_WORD: Final = lazy_pattern(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_NAME_SENTENCE_END: Final = lazy_pattern(r"[.?!…。\n]")
_LEADING_PUNCTUATION: Final = "+.-"
_TRAILING_PUNCTUATION: Final = ".,;:!?)]}>'\"’”"

_NUMERAL_LIST: Final = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMERALS: Final = {word: str(number) for number, word in enumerate(_NUMERAL_LIST.split())}

_NOT_NAMES: Final = _word_set(
    "a an and the i im ive id ill he she it its they we you his her their our my your this that "
    "these those there user users assistant nutzer nutzers nutzerin benutzer benutzers "
    "anwender usuario usuaria utente utilisateur utilisatrice gebruiker användaren"
)

_WORDS_AFTER_NAME: Final = _word_set(
    "is was are were has had have will would can could does did must should may and or"
)
"""Words that often follow a name; a capitalized word before one of these words is a name."""


def unsupported_details(text: str, user_texts: Iterable[str]) -> list[str]:
    """Return the names, numbers and addresses of a text that no text in `user_texts` contains."""
    checked_text, *said_texts = (normalize("NFKC", part) for part in (text, *user_texts))
    missing_details = []
    for match in _ADDRESS_PATTERN.finditer(checked_text):
        address = match[0].lstrip(_LEADING_PUNCTUATION).rstrip(_TRAILING_PUNCTUATION)
        if not any(_contains_address(address, said_text) for said_text in said_texts):
            missing_details.append(address)
    # The parts of an address were checked with the address, so replace it by commas.
    checked_text = _ADDRESS_PATTERN.sub(lambda match: "," * len(match[0]), checked_text)
    known_numbers = {number for said_text in said_texts for number in _find_numbers(said_text)}
    missing_details += [
        number for number in _find_numbers(checked_text) if number not in known_numbers
    ]
    known_words = {word for said_text in said_texts for word in _find_words(said_text)}
    missing_details += [
        name for name in _find_names(checked_text) if not _is_known_name(name, known_words)
    ]
    return list(dict.fromkeys(missing_details))


def _contains_address(address: str, text: str) -> bool:
    """Whether a text contains the address, not only as a part of a longer address."""
    pattern = rf"(?<![\w.@/-]){re.escape(address)}(?![\w@/-]|\.\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _find_numbers(text: str) -> Iterator[str]:
    without_separators = _THOUSANDS_SEPARATOR.sub("", text.casefold())
    for word in filter(_DIGIT.search, _NUMBER_WORD.findall(without_separators)):
        unit_match = _NUMBER_WITH_UNIT.fullmatch(word)
        yield unit_match[1] if unit_match else word
    for word in _LETTER_WORD.findall(without_separators):
        if word in _NUMERALS:
            yield _NUMERALS[word]


def _find_names(text: str) -> Iterator[str]:
    """Yield the words that look like names because of their capital letters.

    The first word of a sentence always has a capital letter, so it counts as a name only if, for
    example, a verb or a comma follows: "Ann is a friend", but not "Likes tea".
    """
    for sentence in _NAME_SENTENCE_END.split(text):
        word_matches = list(_LETTER_WORD.finditer(sentence))
        for index, match in enumerate(word_matches):
            word = match[0]
            if word.casefold() in _NOT_NAMES or not any(map(str.isupper, word)):
                continue
            if index or word[1:] != word[1:].lower():
                yield word
                continue
            rest_of_sentence = sentence[match.end() :].lstrip()
            next_word = word_matches[1][0].casefold() if len(word_matches) > 1 else ""
            if (
                next_word in _WORDS_AFTER_NAME
                or rest_of_sentence[:1] in (",", ":")
                or word.endswith(("'s", "’s"))
            ):
                yield word


def _find_words(text: str) -> Iterator[str]:
    for word in _LETTER_WORD.findall(text):
        folded = word.casefold()
        yield folded
        # Split "Ann's" and "Ann-Marie".
        yield from re.split(r"['’-]", folded)


def _is_known_name(name: str, known_words: set[str]) -> bool:
    """Whether the user said a name, in this form or with another ending."""
    folded = name.casefold()
    name_without_s = folded.removesuffix("'s").removesuffix("’s")
    if folded in known_words or name_without_s in known_words:
        return True
    # Accept another ending, as in Berlin and Berliner. Short words must match exactly.
    return any(
        len(word) > 3
        and len(name_without_s) > 3
        and abs(len(word) - len(name_without_s)) <= 2
        and (word.startswith(name_without_s) or name_without_s.startswith(word))
        for word in known_words
    )
