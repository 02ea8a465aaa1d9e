"""Tests of promise P7: many threads write, read, archive and follow one session."""

# ruff: noqa: D102 - tests have names instead of docstrings

from functools import partial
from itertools import islice
from threading import Semaphore, Thread

import pytest

from stenolog.errors import SessionDeleted, StaleCheckpoint
from stenolog.stores.base import Store
from stenolog.testing.contract.open_store_base import (
    ContractPart,
    append,
    assert_session,
    hidden_seqs,
    repeat_in_threads,
    run_at_once,
    user_message,
    user_messages,
    visible_texts,
)

THREAD_COUNT = 64
MESSAGES_PER_THREAD = 40
HANG_SECONDS = 20
"""Maximum seconds that a test waits for a follower."""


class Writers(ContractPart):
    """Tests with many concurrent callers."""

    def test_p7_messages_of_64_threads_are_stored_in_order(self, store: Store) -> None:
        def write(writer_index: int) -> list[int]:
            return [
                store.add_message("a", "user", [writer_index, number])
                for number in range(MESSAGES_PER_THREAD)
            ]

        seqs_by_writer = run_at_once(*(partial(write, index) for index in range(THREAD_COUNT)))
        contents_by_seq = {message.seq: message.content for message in store.get_history("a")}
        assert sorted(contents_by_seq) == list(range(1, THREAD_COUNT * MESSAGES_PER_THREAD + 1))
        for writer_index, writer_seqs in enumerate(seqs_by_writer):
            assert writer_seqs == sorted(writer_seqs)
            assert [contents_by_seq[seq] for seq in writer_seqs] == [
                [writer_index, number] for number in range(MESSAGES_PER_THREAD)
            ]

    def test_p7_readers_see_complete_batches_in_order_during_writes_and_compaction(
        self, store: Store
    ) -> None:
        writer_count = 8

        def write(writer_index: int) -> None:
            for number in range(20):
                store.add_messages(
                    "a", [user_message(f"{writer_index}.{number}.{part}") for part in "abc"]
                )

        def check_batches() -> None:
            seqs = [message.seq for message in store.get_history("a", full=True)]
            assert seqs == list(range(1, len(seqs) + 1))
            assert len(seqs) % 3 == 0

        def summarize_and_compact() -> None:
            last_seq = len(store.get_history("a", full=True))
            store.checkpoint("a", summary=f"up to {last_seq}", upto=last_seq)
            store.compact("a")

        with repeat_in_threads(check_batches, check_batches, summarize_and_compact):
            run_at_once(*(partial(write, index) for index in range(writer_count)))

        texts = [message.content for message in store.get_history("a", full=True)]
        assert len(texts) == writer_count * 20 * 3
        for writer_index in range(writer_count):
            assert [text for text in texts if text.startswith(f"{writer_index}.")] == [
                f"{writer_index}.{number}.{part}" for number in range(20) for part in "abc"
            ]

    def test_p5_checkpoints_during_writes_hide_only_messages_up_to_their_seq(
        self, store: Store
    ) -> None:
        floor = 0

        def write(writer_index: int) -> None:
            for number in range(25):
                store.add_message("a", "user", f"{writer_index}.{number}")

        def summarize() -> None:
            nonlocal floor
            visible_messages = store.get_history("a")
            if len(visible_messages) > 3:
                upto = visible_messages[-3].seq
                store.checkpoint("a", summary=f"to {upto}", upto=upto, expect_floor=floor)
                floor = upto
                assert store.get_history("a")[:2] == visible_messages[-2:]

        with repeat_in_threads(summarize):
            run_at_once(*(partial(write, index) for index in range(4)))

        assert hidden_seqs(store, "a") == list(range(1, floor + 1))
        assert store.info("a").count == 100
        assert store.get_summary("a") == (f"to {floor}" if floor else "")

    def test_p7_one_of_several_checkpoints_on_the_same_floor_succeeds(self, store: Store) -> None:
        store.add_messages("a", [user_message(str(number)) for number in range(10)])

        def try_checkpoint(upto: int) -> bool:
            try:
                store.checkpoint("a", summary=f"to {upto}", upto=upto, expect_floor=0)
            except StaleCheckpoint:
                return False
            return True

        successes = run_at_once(*(partial(try_checkpoint, upto) for upto in range(1, 9)))
        assert successes.count(True) == 1
        floor = successes.index(True) + 1
        assert_session(store, "a", floor=floor, summary=f"to {floor}")

    def test_p12_message_with_one_idempotency_key_from_many_threads_is_stored_once(
        self, store: Store
    ) -> None:
        store.add_message("a", "user", "before")
        add_message = partial(store.add_message, "a", "user", "x", once="t")
        assert run_at_once(*[add_message] * 16) == [2] * 16
        assert visible_texts(store, "a") == ["before", "x"]

    def test_p6_threads_on_different_sessions_do_not_affect_each_other(self, store: Store) -> None:
        def write_session(number: int) -> None:
            key = f"user:{number}"
            for text in "abc":
                store.add_message(key, "user", f"{text}{number}")
            store.set_summary(key, f"about {number}")

        run_at_once(*(partial(write_session, number) for number in range(64)))
        for number in range(64):
            assert visible_texts(store, f"user:{number}") == [f"{text}{number}" for text in "abc"]
            assert store.get_summary(f"user:{number}") == f"about {number}"
        assert len(store.list_sessions(prefix="user:")) == 64


class _Follower:
    """A thread that follows a session until `count` messages were received.

    The thread is a daemon: a hanging thread fails the test, but does not block the test run.
    """

    def __init__(self, store: Store, key: str, count: int | None = None, *, after: int = 0) -> None:
        self._messages = store.follow(key, after=after)
        self._seqs: list[int] = []
        self._received = Semaphore(0)
        self._thread = Thread(target=self._receive, args=[count], daemon=True)
        self._thread.start()

    def _receive(self, count: int | None) -> None:
        for message in islice(self._messages, count):
            self._seqs.append(message.seq)
            self._received.release()

    def wait_for_messages(self, count: int) -> None:
        """Wait until the thread has received `count` messages."""
        for _ in range(count):
            assert self._received.acquire(timeout=HANG_SECONDS), "no message arrived"

    def wait_for_seqs(self) -> list[int]:
        """Wait for the end of the thread, and return the received seqs."""
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive(), "the follower is still waiting"
        return self._seqs


class Following(ContractPart):
    """Tests of `follow`."""

    def test_follow_starts_with_stored_messages_after_the_given_seq(self, store: Store) -> None:
        append(store, "a", "1", "2", "3")
        messages = [(m.seq, m.content) for m in store.follow("a", timeout=0)]
        assert messages == [(1, "1"), (2, "2"), (3, "3")]
        assert [m.seq for m in islice(store.follow("a", timeout=0), 2)] == [1, 2]
        assert [m.seq for m in store.follow("a", after=2, timeout=0)] == [3]
        assert list(store.follow("a", after=3, timeout=0)) == []

    def test_follow_includes_hidden_and_archived_messages(self, store: Store) -> None:
        append(store, "a", "1", "2", "3", "4", "5")
        store.truncate_history("a", 3)
        store.compact("a")
        store.hide("a", 4, 4)
        messages = [(m.seq, m.content) for m in store.follow("a", timeout=0)]
        assert messages == [(seq, str(seq)) for seq in range(1, 6)]
        assert [m.seq for m in store.follow("a", after=1, timeout=0)] == [2, 3, 4, 5]

    def test_follow_ends_after_the_timeout_without_new_messages(self, store: Store) -> None:
        append(store, "a", "1")
        assert [m.seq for m in store.follow("a", timeout=0.05)] == [1]
        assert list(store.follow("nobody", timeout=0.05)) == []

    def test_follow_returns_messages_appended_while_it_waits(self, store: Store) -> None:
        append(store, "a", "1")
        follower = _Follower(store, "a", 4, after=1)
        append(store, "a", "2")
        store.add_messages("a", user_messages("3", "4"))
        store.set_history("a", user_messages("5"))
        assert follower.wait_for_seqs() == [2, 3, 4, 5]

    def test_follow_waits_for_a_missing_session(self, store: Store) -> None:
        follower = _Follower(store, "later", 1)
        append(store, "other", "not this one")
        append(store, "later", "1")
        assert follower.wait_for_seqs() == [1]

    def test_follow_waits_for_the_first_message_of_an_empty_session(self, store: Store) -> None:
        store.set_summary("a", "nothing was said yet")
        follower = _Follower(store, "a", 1)
        append(store, "a", "1")
        assert follower.wait_for_seqs() == [1]

    def test_follow_with_a_uid_follows_only_that_session(self, store: Store) -> None:
        append(store, "a", "1", "2")
        uid = store.info("a").uid
        assert [m.seq for m in store.follow("a", after=1, uid=uid, timeout=0)] == [2]
        store.delete("a")
        with pytest.raises(SessionDeleted, match=r"was deleted$"):
            next(store.follow("a", after=1, uid=uid, timeout=0))
        append(store, "a", "new 1", "new 2", "new 3")
        with pytest.raises(SessionDeleted, match="another one has its key"):
            next(store.follow("a", after=2, uid=uid, timeout=0))
        assert [m.content for m in store.follow("a", timeout=0)] == ["new 1", "new 2", "new 3"]

    def test_several_followers_receive_all_messages(self, store: Store) -> None:
        followers = [_Follower(store, "a", 3) for _ in range(3)]
        append(store, "a", "1", "2", "3")
        assert [follower.wait_for_seqs() for follower in followers] == [[1, 2, 3]] * 3

    def test_p7_follow_returns_each_message_once_across_compaction(self, store: Store) -> None:
        follower = _Follower(store, "a", 100)
        for number in range(1, 101):
            store.add_message("a", "user", number)
            if number % 9 == 0:
                store.truncate_history("a", 2)
                store.compact("a")
            if number % 25 == 0:
                store.undo("a")
        assert follower.wait_for_seqs() == list(range(1, 101))

    def test_close_ends_every_follow(self, store: Store) -> None:
        append(store, "a", "1")
        followers = [_Follower(store, "a", after=1), _Follower(store, "nobody")]
        reader = _Follower(store, "a")
        reader.wait_for_messages(1)
        store.close()
        assert [follower.wait_for_seqs() for follower in followers] == [[], []]
        assert reader.wait_for_seqs() == [1]
