"""Closing beside calls."""

import threading
from pathlib import Path

import pytest

from stenolog import JSONLStore, StoreClosed
from stenolog.stores.jsonl.uses import Uses


def test_nothing_is_released_while_somebody_is_inside() -> None:
    released: list[str] = []
    uses = Uses(lambda: released.append("released"))
    with uses:
        uses.end()
        assert released == []
        with pytest.raises(StoreClosed), uses:
            pass
        assert released == []
    assert released == ["released"]
    with pytest.raises(StoreClosed), uses:
        pass
    uses.end()
    assert released == ["released"], "once"


def test_p8_close_beside_calls_of_many_threads_ends_them_all_with_a_typed_error(
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
