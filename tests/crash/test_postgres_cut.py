"""Tests connections to PostgreSQL that a proxy cuts during a call, before and after the commit.

Stored messages are stored exactly once, and error messages are true.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final

import pytest

import stenolog
from stenolog import MaybeStored, NotStored, StoreUnavailable
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.postgres import PostgresStore
from support.contract.crash_contract import KEY, SCRIPT
from support.contract.open_store_base import user_message, visible_texts
from support.crash.reporting import Say
from support.postgres_proxy import Exchange, Moment, Proxy, writes
from support.postgres_server import Server
from support.store_calls import all_contents, trash_content

MOMENTS: Final[tuple[Moment, ...]] = ("before", "during", "after")


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with Proxy(postgres.port) as standing:
        yield standing


@pytest.fixture
def store(own_url: str, postgres: Server, proxy: Proxy) -> Iterator[Store]:
    """Open the store through the proxy."""
    with stenolog.open_store(_proxy_url(own_url, postgres, proxy)) as opened:
        yield opened


@pytest.fixture
def beside(own_url: str) -> Iterator[Store]:
    """Open the same database directly."""
    with stenolog.open_store(own_url) as opened:
        yield opened


def _proxy_url(url: str, postgres: Server, proxy: Proxy) -> str:
    return url.replace(f":{postgres.port}/", f":{proxy.port}/")


def stores(exchange: Exchange) -> bool:
    """Return whether the exchange stores messages."""
    return "insert" in exchange.text.lower() and "message" in exchange.text.lower()


# --- one append ---------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("first", [True, False], ids=["a new session", "an old one"])
@pytest.mark.parametrize("size", [1, 3])
def test_p12_append_with_an_idempotency_key_is_stored_once_wherever_the_connection_is_cut(
    store: Store, beside: Store, proxy: Proxy, moment: Moment, first: bool, size: int
) -> None:
    before = [] if first else ["before"]
    if not first:
        store.add_message("a", "user", "before")
    batch = [user_message(f"x{n}") for n in range(size)]
    proxy.cut(moment, stores)
    # The idempotency key decides: the store retries by itself.
    seqs = store.add_messages("a", batch, once="t1")
    assert proxy.cuts() == 1
    assert seqs == list(range(len(before) + 1, len(before) + size + 1))
    assert store.add_messages("a", batch, once="t1") == seqs
    assert visible_texts(beside, "a") == [*before, *(f"x{n}" for n in range(size))]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("first", [True, False], ids=["a new session", "an old one"])
def test_p8_append_without_an_idempotency_key_raises_the_correct_error_if_cut(
    store: Store, beside: Store, proxy: Proxy, moment: Moment, first: bool
) -> None:
    before = [] if first else ["before"]
    if not first:
        store.add_message("a", "user", "before")
    proxy.cut(moment, stores)
    try:
        store.add_message("a", "user", "x")
    except NotStored:
        possible = [before]
    except MaybeStored:
        # The store must not retry on a guess.
        possible = [before, [*before, "x"]]
    else:
        possible = [[*before, "x"]]
    assert proxy.cuts() == 1
    there = visible_texts(beside, "a")
    assert there in possible
    assert store.add_message("a", "user", "next") == len(there) + 1


def test_p8_append_whose_response_is_lost_raises_maybe_stored(
    store: Store, beside: Store, proxy: Proxy
) -> None:
    store.add_message("a", "user", "before")
    proxy.cut("after", stores)
    with pytest.raises(MaybeStored):
        store.add_message("a", "user", "x")
    assert visible_texts(beside, "a") == ["before", "x"]


def test_p8_cut_append_raises_maybe_stored_if_the_server_is_then_unreachable(
    own_url: str, postgres: Server, proxy: Proxy, beside: Store
) -> None:
    def stores_last(exchange: Exchange) -> bool:
        """Cut this exchange, and refuse all connections after it."""
        if stores(exchange):
            proxy.refuse()
        return stores(exchange)

    with PostgresStore(_proxy_url(own_url, postgres, proxy), busy_timeout=0.5) as store:
        store.add_message("a", "user", "before")
        proxy.cut("after", stores_last)
        # Retried because of the idempotency key, and then there is no response at all.
        with pytest.raises(MaybeStored):
            store.add_message("a", "user", "x", once="t1")
        assert visible_texts(beside, "a") == ["before", "x"]
        proxy.refuse(False)
        assert store.add_message("a", "user", "x", once="t1") == 2
    assert visible_texts(beside, "a") == ["before", "x"]


@pytest.mark.slow
def test_p8_append_to_an_unreachable_server_raises_not_stored(
    own_url: str, postgres: Server, proxy: Proxy, beside: Store
) -> None:
    with PostgresStore(_proxy_url(own_url, postgres, proxy), busy_timeout=0.5) as store:
        store.add_message("a", "user", "1")
        proxy.refuse()
        proxy.cut_all()
        _until_cut(store)
        with pytest.raises(NotStored):
            store.add_message("a", "user", "2")
        with pytest.raises(NotStored):
            store.add_message("a", "user", "2", once="t2")
        with pytest.raises(StoreUnavailable):
            store.get_history("a")
        assert visible_texts(beside, "a") == ["1"]
        proxy.refuse(False)
        assert store.add_message("a", "user", "2", once="t2") == 2
    assert visible_texts(beside, "a") == ["1", "2"]


def _until_cut(store: Store) -> None:
    """Read once, so that the store notices that its connections are gone."""
    with pytest.raises(StoreUnavailable):
        store.get_history("a")


@pytest.mark.parametrize("moment", MOMENTS)
def test_p8_read_is_retried_after_its_connection_is_cut(
    store: Store, proxy: Proxy, moment: Moment
) -> None:
    store.add_message("a", "user", "1")
    looks: list[Callable[[], object]] = [
        lambda: visible_texts(store, "a"),
        lambda: store.info("a").count,
        store.list_sessions,
        lambda: [message.seq for message in store.follow("a", timeout=0)],
    ]
    for number, look in enumerate(looks, 1):
        expected = look()
        proxy.cut(moment, lambda _: True)
        assert look() == expected
        assert proxy.cuts() == number


# --- every call at every exchange ---------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_p2_p8_sampled_calls_are_complete_or_absent_wherever_the_connection_is_cut(
    own_url: str, postgres: Server, proxy: Proxy, moment: Moment, seed: int, say: Say
) -> None:
    chosen = random.Random(seed).sample(range(len(SCRIPT)), 6)
    _cut_everywhere(own_url, _proxy_url(own_url, postgres, proxy), proxy, moment, chosen, say)


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
def test_p2_p8_every_call_is_complete_or_absent_wherever_the_connection_is_cut(
    own_url: str, postgres: Server, proxy: Proxy, moment: Moment, say: Say
) -> None:
    every = list(range(len(SCRIPT)))
    _cut_everywhere(own_url, _proxy_url(own_url, postgres, proxy), proxy, moment, every, say)


def _cut_everywhere(
    url: str, through: str, proxy: Proxy, moment: Moment, chosen: Sequence[int], say: Say
) -> None:
    told: Counter[str] = Counter()
    for which in chosen:
        for number in count():
            # Each attempt has its own sessions.
            namespace = f"n{which}-{number}"
            with (
                stenolog.open_store(url, namespace=namespace) as beside,
                stenolog.open_store(through, namespace=namespace) as store,
            ):
                if not _cut_in(store, beside, proxy, (which, moment, number), told):
                    break
    say(f"{len(chosen)} calls, each exchange cut {moment}: {dict(told)}")
    assert told["cut"] > 2 * len(chosen)


def _cut_in(
    store: Store,
    beside: Store,
    proxy: Proxy,
    where: tuple[int, Moment, int],
    told: Counter[str],
) -> bool:
    """Make a call of the script and cut one of its exchanges; return whether there was one."""
    which, moment, number = where
    call, model, left = SCRIPT[which], InMemoryStore(), number

    def is_chosen(_: Exchange) -> bool:
        nonlocal left
        left -= 1
        return left == -1

    for earlier in SCRIPT[:which]:
        earlier.make(model, KEY)
        earlier.make(beside, KEY)
    before = _shown(beside)
    assert before == _shown(model)
    call.make(model, KEY)
    after, cuts = _shown(model), proxy.cuts()
    proxy.cut(moment, is_chosen)
    try:
        call.make(store, KEY)
    except NotStored:
        assert _shown(beside) == before, (call, where)
        told["not stored"] += 1
    except (MaybeStored, StoreUnavailable):
        assert _shown(beside) in (before, after), (call, where)
        told["unknown"] += 1
    else:
        assert _shown(beside) == after, (call, where)
        told["went on"] += 1
    proxy.forget_cuts()
    told["cut"] += proxy.cuts() - cuts
    return proxy.cuts() > cuts


def _shown(store: Store) -> tuple[Any, Any]:
    return all_contents(store), trash_content(store)


# --- many threads -------------------------------------------------------------------------------


def test_p7_p12_many_threads_on_an_unreliable_connection_store_everything_once(
    own_url: str, postgres: Server, proxy: Proxy, beside: Store, seed: int, say: Say
) -> None:
    _bad_line(_proxy_url(own_url, postgres, proxy), proxy, beside, seed, say, each=40)


@pytest.mark.full
def test_p7_p12_many_threads_on_an_unreliable_connection_in_a_long_run(
    own_url: str, postgres: Server, proxy: Proxy, beside: Store, seed: int, say: Say
) -> None:
    _bad_line(_proxy_url(own_url, postgres, proxy), proxy, beside, seed, say, each=800)


def _bad_line(where: str, proxy: Proxy, beside: Store, seed: int, say: Say, *, each: int) -> None:
    chance = random.Random(seed)
    mutex = threading.Lock()
    unlucky = 0.15

    def is_chosen(exchange: Exchange) -> bool:
        with mutex:
            return writes(exchange) and chance.random() < unlucky

    told: Counter[str] = Counter()
    acknowledged: dict[str, int] = {}
    unknown: set[str] = set()

    def write(store: Store, name: str, *, tokens: bool) -> None:
        for number in range(each):
            text = f"{name}.{number}"
            while True:
                try:
                    seq = store.add_message("a", "user", text, once=text if tokens else None)
                except NotStored:
                    told["not stored"] += 1
                except MaybeStored:
                    told["unknown"] += 1
                    if not tokens:
                        unknown.add(text)
                        break
                else:
                    acknowledged[text] = seq
                    break

    with stenolog.open_store(where) as store:
        store.add_message("a", "user", "first")
        for moment in MOMENTS:
            proxy.cut(moment, is_chosen, times=1_000_000)
        threads = [
            threading.Thread(target=write, args=(store, f"t{n}"), kwargs={"tokens": n % 2 == 0})
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        proxy.forget_cuts()
    found = [(str(message.content), message.seq) for message in beside.get_history("a")][1:]
    texts = Counter(text for text, _ in found)
    assert {text: times for text, times in texts.items() if times > 1} == {}
    assert acknowledged.items() <= dict(found).items()
    assert set(texts) <= acknowledged.keys() | unknown
    say(
        f"bad line: seed {seed}, {proxy.cuts()} cuts, {len(acknowledged)} acknowledged, "
        f"{len(unknown)} of unknown fate, of which {len(unknown & texts.keys())} are there; "
        f"{dict(told)}"
    )
    assert proxy.cuts() > each // 4


# --- leases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
def test_p7_lease_whose_response_was_lost_does_not_block(
    store: Store, beside: Store, proxy: Proxy, moment: Moment
) -> None:
    store.add_message("a", "user", "1")

    def takes_lease(exchange: Exchange) -> bool:
        return "insert into" in exchange.text.lower() and "lease" in exchange.text.lower()

    proxy.cut(moment, takes_lease)
    with store.lease("a", ttl=60, wait=1) as lease:
        assert proxy.cuts() == 1
        with pytest.raises(stenolog.StoreBusy):
            beside.lease("a", ttl=60, wait=0)
        assert lease.store.add_message("a", "user", "2") == 2
    beside.lease("a", ttl=60, wait=0).release()


@pytest.mark.parametrize("moment", MOMENTS)
def test_p7_p12_append_through_a_lease_is_stored_once_wherever_the_connection_is_cut(
    store: Store, beside: Store, proxy: Proxy, moment: Moment
) -> None:
    store.add_message("a", "user", "1")
    with store.lease("a", ttl=60) as lease:
        proxy.cut(moment, stores)
        assert lease.store.add_message("a", "user", "2", once="t2") == 2
        assert proxy.cuts() == 1
    assert visible_texts(beside, "a") == ["1", "2"]
