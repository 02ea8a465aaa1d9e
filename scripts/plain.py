"""Count phrases that a reader has to translate, in docstrings, comments, strings and pages.

    python scripts/plain.py [--list] [PATH ...]

The script fails if there are more such phrases per 1,000 words than `[tool.stenolog.plain]` in
pyproject.toml allows. `--list` prints each phrase with better words. A listed phrase may be fine:
the aim is that readers understand every sentence the first time.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("src", "docs", "README.md", "CONTRIBUTING.md")
SHORTEST = 4
"""Strings with fewer words are names and keys rather than sentences."""

PHRASES = {
    r"\b(?:whoever|nobody|somebody|everybody|anybody)\b": "the caller, the user, another process",
    r"(?:^|[.,;:(]|\b(?:for|to|by|of|from|with|than|and|or|then)) ?who (?:has|had|is|was|only|"
    r"reads?|writes?|waits?|asks?|looks?|takes?|calls?|holds?|wants?|gets?|may|must|can)\b": (
        "a reader, the client, a process that …"
    ),
    r"\bwhat (?:is|was|are|were|(?:has|had) been|came|comes|goes|went|lies|stands?|"
    r"waits|follows) \w+(?:,| \w)": "the messages that …, the record that …",
    r"\bwhat (?:becomes|became|there is) of\b": "the result of",
    r"\b(?:go|goes|going|gone|went) on (?:with|there|at|from)\b": "resume, continue",
    r"\b(?:in|out of) sight\b": "visible, hidden",
    r"\b(?-i:So) (?:many|much|often|long)\b": "number of, maximum, interval",
    r"\b(?:is|are|was|were) told\b": "gets, is notified",
    r"\btells? (?:of|that|whether|how|what|who)\b": "reports, shows, says",
    r"\b(?:stands?|stood) (?:in|beside|behind|before|under|above|for)\b": "is in, follows",
    r"\b(?:beside|behind) (?:it|them|the|each|an?|this|that)\b": "next to, after",
    r"\bin (?:the|its|their) place of\b": "instead of",
    r"\btak(?:en?|es|ing) in\b": "import",
    r"\b(?:put|puts|set|sets) aside\b": "move, keep as",
    r"\bin hand\b": "unsaved, pending",
    r"\bas (?:it is|it was|it stands|they are|they were)\b": "unchanged",
    r"\bof (?:its|their) own\b": "separate",
    r"\b(?:is|are|was|were) (?:no|not any) more\b": "no longer exists",
    r"\bis no (?:session|folder|file|key|message|store|log|note|record|name)\b": "is not a …",
    r"\bfor good\b": "permanently",
    r"\bwhere(?:ver)? (?:there is|it has) (?:one|none)\b": "if there is one, if there is none",
    r"\b(?:how it (?:is|stands)|where it stood)\b": "the state, the position",
    r"\bmend(?:s|ed|ing)?\b": "repair, fix",
    r"\bbeg[au]n\b": "started",
    r"\banew\b": "again",
    r"\bmeanwhile\b": "while …",
}
"""Regular expressions of phrases, and the words to use instead."""

_PATTERNS = [(re.compile(phrase, re.IGNORECASE), words) for phrase, words in PHRASES.items()]


class Place(NamedTuple):
    """A phrase, and its position: file and line."""

    path: Path
    line: int
    phrase: str
    instead: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the number of places and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every place")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in CHECKED])
    options = parser.parse_args(arguments)
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["stenolog"]["plain"]
    words, places = check(options.paths)
    rate = 1000 * len(places) / max(1, words)
    if options.list:
        for place in places:
            print(f"{place.path}:{place.line}: {place.phrase!r} → {place.instead}")
    print(f"{len(places)} phrases to translate in {words:,} words: {rate:.1f} per 1,000")
    if rate > limit["per_1000_words"]:
        print(f"the limit is {limit['per_1000_words']}; --list shows them", file=sys.stderr)
        return 1
    return 0


def check(paths: Sequence[Path]) -> tuple[int, list[Place]]:
    """Return the number of words in files and folders, and the places to look at."""
    words, places = 0, []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            for line, text in _read_prose(file):
                words += len(text.split())
                places += [
                    Place(file, line, match[0], instead)
                    for pattern, instead in _PATTERNS
                    for match in pattern.finditer(text)
                ]
    return words, places


def _read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a file with their line numbers."""
    match path.suffix:
        case ".py":
            yield from _read_source(path.read_text(encoding="utf-8"))
        case ".md" | ".html":
            yield from _read_page(path.read_text(encoding="utf-8"))


def _read_source(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.split()
            if len(words) >= SHORTEST:
                yield node.lineno, " ".join(words)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _read_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines outside of code blocks."""
    is_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


if __name__ == "__main__":
    sys.exit(main())
