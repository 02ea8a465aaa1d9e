"""Tests of the thread pools of an event loop."""

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest

from stenolog.agent.threads import ThreadPool, Threads
from stenolog.errors import StoreClosed


def test_results_and_errors_reach_their_callers() -> None:
    def fail() -> None:
        raise LookupError("not there")

    def stop() -> None:
        raise StopIteration

    async def main() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test", 4)
        futures = [pool.submit(partial(int.__mul__, 2, number)) for number in range(100)]
        assert await asyncio.gather(*futures) == list(range(0, 200, 2))
        with pytest.raises(LookupError, match="not there"):
            await pool.submit(fail)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await pool.submit(stop)
        pool.finish_calls()

    asyncio.run(main())


def test_calls_run_at_the_same_time_in_at_most_the_given_number_of_threads() -> None:
    async def main() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test", 3)
        together = threading.Barrier(3)
        names: set[str] = set()

        def meet() -> None:
            names.add(threading.current_thread().name)
            together.wait(30)

        await asyncio.gather(*(pool.submit(meet) for _ in range(9)))
        assert names == {"test_0", "test_1", "test_2"}
        pool.finish_calls()

    asyncio.run(main())


def test_one_call_after_the_other_needs_one_thread() -> None:
    async def main() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test", 8)
        names = {await pool.submit(lambda: threading.current_thread().name) for _ in range(20)}
        assert names == {"test_0"}
        pool.finish_calls()

    asyncio.run(main())


def test_call_without_a_new_thread_waits_for_another_thread_or_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        threads, ran = Threads(), list[str]()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="start new thread"):
                await threads.run(ran.append, "rejected")
        await threads.run(ran.append, "accepted")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            await asyncio.gather(*(threads.run(ran.append, "waited") for _ in range(3)))
        threads.close()
        assert ran == ["accepted", *["waited"] * 3]

    asyncio.run(main())


def test_cancelled_caller_waits_until_its_call_has_ended() -> None:
    async def main() -> None:
        threads, begun, go_on, ended = Threads(), threading.Event(), threading.Event(), []

        def write() -> None:
            begun.set()
            assert go_on.wait(30)
            ended.append(True)

        writing = asyncio.create_task(threads.run(write))
        await asyncio.to_thread(begun.wait, 30)
        writing.cancel()
        await asyncio.sleep(0)
        assert not writing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert ended == [True]
        threads.close()

    asyncio.run(main())


def test_close_waits_for_calls_in_progress_and_cancels_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        threads, begun, go_on = Threads(), threading.Barrier(5), threading.Event()

        def hold() -> str:
            begun.wait(30)
            assert go_on.wait(30)
            return "done"

        held = [threads.run_lease(hold) for _ in range(4)]
        waiting = threads.run_lease(hold)
        await asyncio.to_thread(begun.wait, 30)
        finish = ThreadPool.finish_calls

        def let_go_and_finish(pool: ThreadPool) -> None:
            go_on.set()
            finish(pool)

        monkeypatch.setattr(ThreadPool, "finish_calls", let_go_and_finish)
        threads.close()
        assert await asyncio.gather(*held) == ["done"] * 4
        assert waiting.cancelled()
        with pytest.raises(StoreClosed):
            await threads.run(int)

    asyncio.run(main())


def test_program_that_closes_nothing_ends_after_its_calls() -> None:
    program = """if True:
        import asyncio, threading
        from stenolog.agent.threads import Threads

        def store():
            begun.set()
            threading.main_thread().join()
            print("stored")

        async def main():
            kept.append(Threads())
            kept[0].run_lease(store)
            begun.wait(30)

        begun, kept = threading.Event(), []
        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.PIPE
    )
    assert ended.stdout == b"stored\n"
