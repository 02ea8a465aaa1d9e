"""Rows about recall: a question to 100,000 messages, of one user or of a thousand.

Each user also has notes, on the same engine: 5,000 daily entries and 200 facts where there is one
user, fifty of each where there are many. No two questions are the same; half of them have a rare
word, and the others only words that stand everywhere. Before each, a turn was noted, and each first
looks whether something has changed.
"""

import random
from collections.abc import Iterator
from time import perf_counter

import stenolog
from measure import Figure, Place, percentiles, timed
from messages import sample
from stenolog.catalog import open_catalog
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.recall import recall
from stenolog.memory.scopes import Scope

MESSAGES = 100_000
USERS = 1_000
DAILY = 5_000
FACTS = 200
_FEW = 50
_EACH = 1_000
_IN_SIGHT = 50
_PLANTED_EVERY = 25
_EVERYWHERE = ("the build failed", "which port opened", "second test waits", "client socket read")


def _rare(chance: random.Random) -> str:
    """One of 4,096 words that nobody else says."""
    return "".join(chance.choice(("ba", "du", "ki", "lo", "mu", "no", "ri", "ta")) for _ in "four")


def _batch(count: int, start: int, chance: random.Random) -> list[dict[str, object]]:
    messages = sample(997)
    batch = [dict(messages[(start + index) % len(messages)]) for index in range(count)]
    for index in range(0, count, _PLANTED_EVERY):
        text = f"the ferry {_rare(chance)} leaves with captain {_rare(chance)}, {_rare(chance)}"
        batch[index] = {"role": "user", "content": text}
    return batch


def _questions(chance: random.Random) -> Iterator[str]:
    while True:
        yield f"When does {_rare(chance)} leave, and who is the captain of {_rare(chance)}?"
        words = " ".join(chance.sample(_EVERYWHERE, 2))
        yield f"What was it about {words} number {chance.randrange(100_000)}?"


def _daily(number: int, chance: random.Random) -> Draft:
    text = f"The user asked about the build number {number} and the ferry {_rare(chance)}. It went."
    return Draft(kind="daily", text=text, session="bench:me", seqs=(2 * number + 1, 2 * number + 2))


def _fact(number: int, chance: random.Random) -> Draft:
    about = f"ferry {number}"
    return Draft(kind="core", text=f"Likes the ferry {_rare(chance)}, number {number}", about=about)


def _measured(
    place: Place, store: stenolog.Store, users: list[str], *, session: str | None, where: str
) -> Figure:
    chance = random.Random(2)
    questions = _questions(chance)
    asking = users[:50]
    daily, facts = (DAILY, FACTS) if len(asking) == 1 else (_FEW, _FEW)
    with (
        stenolog.open_store(where, namespace="notes") as opened,
        open_catalog(store) as catalog,
    ):
        notes = Notes(opened)
        for user in asking:
            scope = Scope(who=user)
            notes.add(scope, [_daily(number, chance) for number in range(place.times(daily))])
            notes.add(scope, [_fact(number, chance) for number in range(facts)])

        def ask() -> None:
            scope = Scope(who=chance.choice(asking))
            recall(
                next(questions), scope=scope, notes=notes, catalog=catalog, exclude_session=session
            )

        def turn() -> float:
            notes.add(Scope(who=chance.choice(asking)), [_daily(0, chance)])
            started = perf_counter()
            ask()
            return perf_counter() - started

        started = perf_counter()
        catalog.refresh()
        refreshed = perf_counter() - started
        started = perf_counter()
        for user in asking:
            recall("ferry", scope=Scope(who=user), notes=notes, catalog=catalog)
        first = (perf_counter() - started) / len(asking)
        ours = percentiles([turn() for _ in range(place.times(100))])
        raw = percentiles(timed(place.times(100), store.stamps))
    others = {"first_refresh_s": refreshed, "first_recall_ms": first * 1000}
    return Figure(measured=ours["p50_us"] / 1000, ours=ours, raw=raw, others=others)


def one_session(place: Place) -> Figure:
    """All messages in one session, of which the last 50 are in sight, in ms."""
    where = str(place.folder / "recall-one")
    with stenolog.open_store(where, namespace="talk") as store:
        chance = random.Random(1)
        for start in range(0, place.times(MESSAGES), _EACH):
            store.add_messages("bench:me", _batch(_EACH, start, chance))
        last = store.info("bench:me").last_seq
        store.checkpoint("bench:me", summary="It was long.", upto=last - _IN_SIGHT)
        return _measured(place, store, ["bench:me"], session="bench:me", where=where)


def many_users(place: Place) -> Figure:
    """A hundred messages of each user, in ms."""
    where = str(place.folder / "recall-many")
    with stenolog.open_store(where, namespace="talk") as store:
        chance = random.Random(1)
        users = [f"bench:{number:04d}" for number in range(place.times(USERS))]
        for number, user in enumerate(users):
            store.add_messages(user, _batch(MESSAGES // USERS, number * 7, chance))
        return _measured(place, store, users, session=None, where=where)
