"""Which session is meant: what matches as somebody types, by title, key, first prompt and content.

It works on the entries of the catalog, never on what was said; the index searches in that.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from stenolog.catalog import Catalog, Entry, Hit

MANY: Final = 1_000
"""How many entries are taken from the catalog at once."""
_HITS: Final = 100


class Choices:
    """The sessions to choose from, those that match first, and the one that is chosen."""

    def __init__(self, *, channel: str | None = None) -> None:
        """`channel`: whose sessions are shown until `all_channels` is asked for."""
        self.channel = channel
        self.all_channels = channel is None
        self.loaded = False
        """Whether every session is here."""
        self.query = ""
        self.matches: list[Entry] = []
        self.selected = 0
        self.hits: dict[str, Hit] = {}
        """Where the words stand in what was said, by key, for the query as it is."""
        self._entries: dict[str, Entry] = {}
        self._words: dict[str, str] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """More sessions, in the order of the catalog."""
        for entry in entries:
            if entry.problem is None and entry.count and entry.key not in self._entries:
                self._entries[entry.key] = entry
                self._words[entry.key] = f"{entry.title}\n{entry.key}\n{entry.prompt}".casefold()
        self._match()

    def ask(self, query: str) -> None:
        """Another query; what an earlier one found in the content is forgotten."""
        if query != self.query:
            self.query, self.hits, self.selected = query, {}, 0
            self._match()

    def found(self, query: str, hits: Iterable[Hit]) -> None:
        """What the index found in the content for this query, the best first."""
        if query == self.query:
            for hit in hits:
                self.hits.setdefault(hit.key, hit)
            self._match()

    def switch(self) -> None:
        """Between the sessions of the channel and those of all."""
        if self.channel is not None:
            self.all_channels = not self.all_channels
            self.selected = 0
            self._match()

    def move(self, by: int) -> None:
        """Choose another one, so many further down."""
        self.selected = max(0, min(self.selected + by, len(self.matches) - 1))

    @property
    def chosen(self) -> Entry | None:
        """The session that Enter would take."""
        return self.matches[self.selected] if self.matches else None

    @property
    def elsewhere(self) -> int:
        """How many match in other channels, which are not shown."""
        return 0 if self.all_channels else sum(map(self._fits, self._entries)) - len(self.matches)

    def _match(self) -> None:
        kept = self.chosen.key if self.selected and self.chosen is not None else None
        shown = [
            entry
            for key, entry in self._entries.items()
            if (self.all_channels or entry.channel == self.channel) and self._fits(key)
        ]
        # What a person called it counts for more than what was said somewhere in it.
        self.matches = [entry for entry in shown if self.named(entry.key)]
        self.matches += [
            self._entries[key]
            for key in self.hits
            if key in self._entries
            and not self.named(key)
            and (self.all_channels or self._entries[key].channel == self.channel)
        ]
        places = [at for at, entry in enumerate(self.matches) if entry.key == kept]
        self.selected = places[0] if places else min(self.selected, max(0, len(self.matches) - 1))

    def _fits(self, key: str) -> bool:
        return key in self.hits or self.named(key)

    def named(self, key: str) -> bool:
        """Whether title, key or first prompt have the words of the query."""
        words = self._words[key]
        return all(word in words for word in self.query.casefold().split())


def search_words(query: str) -> str:
    """The query for the index: the word that is being typed may go on."""
    return f"{query}*" if query[-1:].isalnum() else query


def hits_for(catalog: Catalog, query: str) -> Sequence[Hit]:
    """Where the words stand in what was said, the best first."""
    return catalog.search(search_words(query), limit=_HITS).hits if query.strip() else ()


def load(catalog: Catalog, choices: Choices) -> None:
    """Every session of the catalog."""
    after: str | None = None
    while True:
        page = catalog.list(limit=MANY, after=after)
        choices.add(page.entries)
        after = page.after
        if after is None:
            choices.loaded = True
            return


def matching(catalog: Catalog, text: str) -> Sequence[Entry]:
    """The sessions that a text may mean: the one of this key, else all that it matches.

    Where neither title nor key nor first prompt has the words, those in which they were said.
    """
    choices = Choices()
    load(catalog, choices)
    choices.ask(text)
    for entry in choices.matches:
        if entry.key == text:
            return [entry]
    if not choices.matches:
        choices.found(text, hits_for(catalog, text))
    return choices.matches


def newest(catalog: Catalog, *, channel: str) -> Entry | None:
    """The session of a channel that changed last; None where it has none that can be read."""
    after: str | None = None
    while True:
        page = catalog.list(channel=channel, limit=20, after=after)
        for entry in page.entries:
            if entry.problem is None and entry.count:
                return entry
        after = page.after
        if after is None:
            return None
