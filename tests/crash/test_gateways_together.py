"""Tests three gateways on one PostgreSQL when one is killed and one is stopped under load.

Each gateway accepts every request; the lease decides which one runs a turn. In the end every
message is in the log once and answered once, no session ever ran two turns at once, and streams are
complete from every gateway.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stenolog.context.turn_state import answer_to
from stenolog.stores.open_store import open_store
from stenolog.testing.model_server import ModelServer
from support.crash.reporting import Say
from support.gateway.clients import Listener, Talker, wait_for_listeners
from support.gateway.gateway_process import Process

SESSIONS = 5
WHO = ("a", "b", "c")
TAKEOVER = 2.0


class _Watching:
    """A model that counts the concurrent turns of each session."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()

    def __call__(self, request: Any) -> str:
        words = request["messages"][-1]["content"]
        session = words.split()[0]
        if not session.startswith("s"):
            return "They talked."  # a summary is not a turn
        with self._lock:
            self.asked[words] += 1
            self._running[session] += 1
            self.most[session] = max(self.most[session], self._running[session])
        time.sleep(self._pause)
        with self._lock:
            self._running[session] -= 1
        return f"You said: {words}"


@contextmanager
def _gateways(place: Path, count: int, *, sessions: str, model: str) -> Iterator[list[Process]]:
    config = f"takeover = {TAKEOVER}\n"
    made = [
        Process(place / f"gateway{number}", sessions=sessions, model=model, config=config)
        for number in range(count)
    ]
    try:
        starting = [threading.Thread(target=one.start) for one in made]
        for one in starting:
            one.start()
        for one in starting:
            one.join()
        yield made
    finally:
        for process in made:
            process.close()


def _run(place: Path, url: str, say: Say, *, seconds: float, seed: int) -> None:
    watching = _Watching(0.05)
    enough, silence = threading.Event(), threading.Event()
    with (
        ModelServer(watching) as model,
        _gateways(place, 3, sessions=url, model=model.url) as gateways,
    ):
        urls = [one.url for one in gateways]
        keys = [f"s{number}" for number in range(SESSIONS)]
        # Several clients per session, at different gateways: only the lease separates their turns.
        talkers = [
            Talker(urls, key, seed + at * len(WHO) + number, enough, who=who)
            for at, key in enumerate(keys)
            for number, who in enumerate(WHO)
        ]
        listeners = [Listener(urls, key, seed - at, silence) for at, key in enumerate(keys)]
        try:
            for thread in (*talkers, *listeners):
                thread.start()
            time.sleep(seconds)
            gateways[0].kill()
            time.sleep(seconds)
            assert gateways[1].stop() == 0
            time.sleep(seconds)
            enough.set()
            for talker in talkers:
                talker.join(60)
            wait_for_listeners(url, listeners)
        finally:
            enough.set()
            silence.set()
            for thread in (*talkers, *listeners):
                thread.join(60)
        assert gateways[2].stop() == 0
    assert [words for talker in talkers for words in talker.unclean] == []
    count = _check_log(url, talkers, listeners)
    assert max(watching.most.values()) == 1, "no session ever ran two turns at once"
    again = [words for words, times in watching.asked.items() if times > 1]
    failed = sum(talker.failed for talker in talkers)
    say(f"{count} messages, {failed} requests made again, {len(again)} turns taken over")


def _check_log(where: str, talkers: list[Talker], listeners: list[Listener]) -> int:
    count = 0
    with open_store(where, read_only=True) as store:
        for number, listener in enumerate(listeners):
            key = f"s{number}"
            own = [one for one in talkers if one.name.startswith(f"talker {key} ")]
            told = {words: found for one in own for words, found in one.answers.items()}
            history = store.get_history(key, full=True)
            count += len(history)
            said = [one for one in history if one.role == "user"]
            assert Counter(one.content for one in said) == Counter(list(told)), "each is there once"
            answers = [one for one in history if one.role == "assistant"]
            assert len(said) + len(answers) == len(history)
            given = []
            for message in said:
                answer = answer_to(history, message.seq)
                assert answer is not None
                assert told[message.content] <= {answer.content}
                given.append(answer.seq)
            # One answer may answer several concurrent messages, but each answers at least one.
            assert sorted(set(given)) == [one.seq for one in answers]
            assert listener.heard == [(one.seq, one.content) for one in history]
    return count


def test_three_gateways_share_one_database(tmp_path: Path, own_url: str, say: Say) -> None:
    _run(tmp_path, own_url, say, seconds=1.0, seed=11)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_gateways_share_one_database_in_a_long_run(
    tmp_path: Path, own_url: str, say: Say, seed: int
) -> None:
    _run(tmp_path, own_url, say, seconds=8.0, seed=seed)


def test_turn_of_a_killed_gateway_is_resumed_without_a_new_request(
    tmp_path: Path, own_url: str
) -> None:
    """The client is gone; another gateway stores the answer anyway."""
    asked, go_on = threading.Event(), threading.Event()

    def answer(request: Any) -> str:
        del request
        asked.set()
        go_on.wait(30)
        return "Here I am."

    with (
        ModelServer(answer) as model,
        _gateways(tmp_path, 2, sessions=own_url, model=model.url) as gateways,
    ):
        enough, silence = threading.Event(), threading.Event()
        listener = Listener([gateways[1].url], "s0", 1, silence)
        talker = Talker([gateways[0].url], "s0", 1, enough)
        try:
            listener.start()
            talker.start()
            assert asked.wait(30)
            gateways[0].kill()
            enough.set()
            go_on.set()
            deadline = time.monotonic() + 60
            while len(listener.heard) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            enough.set()
            go_on.set()
            silence.set()
            talker.give_up()
            talker.join()
            listener.join()
    assert [content for _, content in listener.heard] == ["s0 a says 1", "Here I am."]
