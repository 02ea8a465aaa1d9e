"""Tests the mark that informs all processes of new aliases, on each engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from stenolog.errors import ReadOnly, StoreClosed
from stenolog.sessions.aliases import NO_ALIASES, alias_mark, change_alias_mark, prepare_alias_mark
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

WHERE: Final = {"jsonl": "{}", "sqlite": "sqlite:{}/steno.db"}

Opened = Callable[..., Store]


@pytest.fixture(params=WHERE)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    where = WHERE[request.param].format(tmp_path)

    def open_it(**options: object) -> Store:
        return open_store(where, **options)  # type: ignore[arg-type]

    return open_it


def test_p7_changed_marker_differs_for_all_processes(opened: Opened) -> None:
    with opened() as store, opened() as beside, opened(namespace="other") as elsewhere:
        assert alias_mark(beside) == NO_ALIASES
        prepare_alias_mark(store)
        seen = [alias_mark(beside)]
        prepare_alias_mark(beside)
        assert alias_mark(store) == seen[0] != NO_ALIASES
        for changing in (store, beside, store):
            change_alias_mark(changing)
            seen.append(alias_mark(beside))
        assert len(set(seen)) == len(seen)
        assert alias_mark(elsewhere) == NO_ALIASES
    with opened(read_only=True) as look:
        assert alias_mark(look) == seen[-1]
        with pytest.raises(ReadOnly):
            change_alias_mark(look)


def test_mark_of_an_in_memory_store_changes() -> None:
    store = InMemoryStore()
    prepare_alias_mark(store)
    first = alias_mark(store)
    change_alias_mark(store)
    assert alias_mark(store) not in (first, NO_ALIASES)
    store.close()
    with pytest.raises(StoreClosed):
        alias_mark(store)


def test_p11_mark_file_is_private(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        prepare_alias_mark(store)
    assert (tmp_path / "sessions" / ".aliases").stat().st_mode & 0o777 == 0o600
