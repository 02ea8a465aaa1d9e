"""Rows about recall: a question to 100,000 messages, of one user or of a thousand users.

Users also have notes on the same engine. A single user has 5,000 daily entries and 200 facts; each
of many users has fifty of both. All questions differ. Half of them contain a rare word, the others
only common words. A turn is noted before each question, and each recall first checks for changes.
"""

import random
from collections.abc import Iterator
from time import perf_counter

import stenolog
from measure import Context, Measurement, percentiles, time_calls
from messages import sample
from stenolog.catalog import open_catalog
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.recall import recall
from stenolog.memory.scopes import Scope

MESSAGES = 100_000
USERS = 1_000
DAILY = 5_000
FACTS = 200
_NOTES_EACH = 50
_BATCH = 1_000
_VISIBLE = 50
_PLANTED_EVERY = 25
_COMMON = ("the build failed", "which port opened", "second test waits", "client socket read")


def _rare(rng: random.Random) -> str:
    """Return one of 4,096 words that occur in no other text."""
    return "".join(rng.choice(("ba", "du", "ki", "lo", "mu", "no", "ri", "ta")) for _ in "four")


def _batch(count: int, start: int, rng: random.Random) -> list[dict[str, object]]:
    messages = sample(997)
    batch = [dict(messages[(start + index) % len(messages)]) for index in range(count)]
    for index in range(0, count, _PLANTED_EVERY):
        text = f"the ferry {_rare(rng)} leaves with captain {_rare(rng)}, {_rare(rng)}"
        batch[index] = {"role": "user", "content": text}
    return batch


def _questions(rng: random.Random) -> Iterator[str]:
    while True:
        yield f"When does {_rare(rng)} leave, and who is the captain of {_rare(rng)}?"
        words = " ".join(rng.sample(_COMMON, 2))
        yield f"What was it about {words} number {rng.randrange(100_000)}?"


def _daily_entry(number: int, rng: random.Random) -> Draft:
    text = f"The user asked about the build number {number} and the ferry {_rare(rng)}. It went."
    return Draft(kind="daily", text=text, session="bench:me", seqs=(2 * number + 1, 2 * number + 2))


def _fact(number: int, rng: random.Random) -> Draft:
    about = f"ferry {number}"
    return Draft(kind="core", text=f"Likes the ferry {_rare(rng)}, number {number}", about=about)


def _measure(
    context: Context, store: stenolog.Store, users: list[str], *, session: str | None, address: str
) -> Measurement:
    rng = random.Random(2)
    questions = _questions(rng)
    active_users = users[:50]
    daily, facts = (DAILY, FACTS) if len(active_users) == 1 else (_NOTES_EACH, _NOTES_EACH)
    with (
        stenolog.open_store(address, namespace="notes") as notes_store,
        open_catalog(store) as catalog,
    ):
        notes = Notes(notes_store)
        for user in active_users:
            scope = Scope(who=user)
            notes.add(scope, [_daily_entry(number, rng) for number in range(context.times(daily))])
            notes.add(scope, [_fact(number, rng) for number in range(facts)])

        def ask() -> None:
            scope = Scope(who=rng.choice(active_users))
            recall(
                next(questions), scope=scope, notes=notes, catalog=catalog, exclude_session=session
            )

        def timed_turn() -> float:
            notes.add(Scope(who=rng.choice(active_users)), [_daily_entry(0, rng)])
            started = perf_counter()
            ask()
            return perf_counter() - started

        started = perf_counter()
        catalog.refresh()
        refreshed = perf_counter() - started
        started = perf_counter()
        for user in active_users:
            recall("ferry", scope=Scope(who=user), notes=notes, catalog=catalog)
        first = (perf_counter() - started) / len(active_users)
        ours = percentiles([timed_turn() for _ in range(context.times(100))])
        raw = percentiles(time_calls(context.times(100), store.admin.stamps))
    others = {"first_refresh_s": refreshed, "first_recall_ms": first * 1000}
    return Measurement(measured=ours["p50_us"] / 1000, ours=ours, raw=raw, others=others)


def one_session(context: Context) -> Measurement:
    """Measure recall from one session with all messages, 50 of them visible, in ms."""
    address = str(context.folder / "recall-one")
    with stenolog.open_store(address, namespace="talk") as store:
        rng = random.Random(1)
        for start in range(0, context.times(MESSAGES), _BATCH):
            store.add_messages("bench:me", _batch(_BATCH, start, rng))
        last = store.info("bench:me").last_seq
        store.checkpoint("bench:me", summary="It was long.", upto=last - _VISIBLE)
        return _measure(context, store, ["bench:me"], session="bench:me", address=address)


def many_users(context: Context) -> Measurement:
    """Measure recall with a hundred messages for each of many users, in ms."""
    address = str(context.folder / "recall-many")
    with stenolog.open_store(address, namespace="talk") as store:
        rng = random.Random(1)
        users = [f"bench:{number:04d}" for number in range(context.times(USERS))]
        for number, user in enumerate(users):
            store.add_messages(user, _batch(MESSAGES // USERS, number * 7, rng))
        return _measure(context, store, users, session=None, address=address)
