"""Tests `InUseCounter`: close during calls of other threads."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from stenolog import JSONLStore
from stenolog.errors import StoreClosed
from stenolog.stores import locks
from stenolog.stores.jsonl import store as store_module
from stenolog.stores.locks import InUseCounter
from support.interrupts import Striking


def test_nothing_is_released_during_a_call() -> None:
    released: list[str] = []
    users = InUseCounter(lambda: released.append("released"))
    with users.entry:
        users.end()
        assert released == []
        with pytest.raises(StoreClosed), users.entry:
            pass
        assert released == []
    assert released
    with pytest.raises(StoreClosed), users.entry:
        pass


def test_end_releases_again_if_the_release_was_interrupted() -> None:
    released: list[str] = []

    def release() -> None:
        released.append("released")
        if len(released) == 1:
            raise KeyboardInterrupt

    users = InUseCounter(release)
    with pytest.raises(KeyboardInterrupt):
        users.end()
    users.end()
    assert len(released) == 2


def _use(store: JSONLStore) -> None:
    store.add_message("a", "user", "second")
    store.get_history("a")
    with store.lease("a", ttl=60):
        store.list_sessions()


def _descriptors() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(str(descriptor.readlink()))
    return sorted(path for path in found if "interrupted" in path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("struck", ["a call", "close"])
def test_p8_close_closes_every_file_after_ctrl_c_at_any_step(fast_path: Path, struck: str) -> None:
    number, where = 1, "first"
    while where:
        store = JSONLStore(fast_path / "interrupted")
        store.add_message("a", "user", "first")
        lease = store.lease("a", ttl=60) if struck == "close" else None
        strike = Striking(number, (locks, store_module))
        strike.armed.set()
        interrupt: KeyboardInterrupt | None = None
        try:
            with strike.watching():
                store.close() if lease else _use(store)
        except KeyboardInterrupt as error:
            interrupt = error  # its traceback refers to the frames of the call
        where = strike.where
        # Python ignores an exception in the callback of a weak reference.
        assert (interrupt is not None) == bool(where) or where.startswith("_on_last_exit,")
        store.close()
        assert _descriptors() == [], where
        number += 1
    assert number > 10


def test_p8_close_ends_concurrent_calls_with_a_typed_error(
    tmp_path: Path,
) -> None:
    for number in range(40):
        store = JSONLStore(tmp_path / str(number % 4))
        wrong: list[BaseException] = []
        begun = threading.Barrier(5)

        def use(store: JSONLStore, wrong: list[BaseException], begun: threading.Barrier) -> None:
            begun.wait()
            try:
                while True:
                    store.add_message("a", "user", "x")
                    store.get_history("a", last=1)
            except StoreClosed:
                pass
            except BaseException as error:  # noqa: BLE001  handed to the test
                wrong.append(error)

        threads = [threading.Thread(target=use, args=(store, wrong, begun)) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        store.close()
        for thread in threads:
            thread.join()
        assert wrong == []
