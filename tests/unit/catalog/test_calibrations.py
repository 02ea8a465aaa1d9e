"""What models report of our estimates: kept in the index, and missed by nobody."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import stenolog
from stenolog.catalog import Catalog, open_catalog
from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.catalog_file import NAME, CatalogFileStore
from stenolog.tokens import Calibration

ONCE = Calibration().after(estimated=100, reported=130)


def test_a_model_nobody_reported_of_has_the_default(catalog: Catalog) -> None:
    assert catalog.calibration("m") == Calibration()


def test_reports_add_up_for_each_model_by_itself(catalog: Catalog) -> None:
    assert catalog.calibrate("m", estimated=100, reported=130) == ONCE
    twice = catalog.calibrate("m", estimated=100, reported=110)
    assert twice == ONCE.after(estimated=100, reported=110)
    assert catalog.calibration("m") == twice
    assert catalog.calibration("other") == Calibration()
    assert catalog.calibrate("lone \ud800", estimated=10, reported=12).weight > 0
    assert catalog.calibration("lone \ud800").weight > 0


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_it_is_there_the_next_time_and_for_others(tmp_path: Path, engine: str) -> None:
    where = str(tmp_path / "w") if engine == "jsonl" else f"sqlite:{tmp_path}/s.db"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        catalog.calibrate("m", estimated=100, reported=130)
        with open_catalog(store) as other:
            assert other.calibration("m") == ONCE
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        assert catalog.calibration("m") == ONCE


def _path(store: Store) -> Path:
    path = store.catalog_file() if isinstance(store, CatalogFileStore) else None
    assert path is not None
    return path


def _harm_file(store: Store, *statements: str) -> None:
    with sqlite3.connect(_path(store)) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def _old_file(store: Store) -> None:
    _harm_file(store, "UPDATE catalog_about SET version = 'old'")


def _touched_file(store: Store) -> None:
    _harm_file(
        store,
        "DELETE FROM catalog_session",
        "INSERT INTO catalog_calibration VALUES ('forged', 1e9, 'x')",
    )


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
@pytest.mark.parametrize("harm", [_old_file, _touched_file])
def test_it_outlives_an_index_that_is_made_anew(
    tmp_path: Path, engine: str, harm: Callable[[Store], None]
) -> None:
    where = str(tmp_path / "w") if engine == "jsonl" else f"sqlite:{tmp_path}/s.db"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        store.add_message("a", "user", "hello")
        catalog.refresh()
        catalog.calibrate("m", estimated=100, reported=130)
        harm(store)
        assert catalog.search("hello").count == 1
        assert catalog.calibration("m") == ONCE
        assert catalog.calibration("forged") == Calibration()


def test_an_index_that_is_gone_or_broken_costs_accuracy_only(tmp_path: Path) -> None:
    with stenolog.open_store(tmp_path / "w") as store, open_catalog(store) as catalog:
        assert isinstance(store, stenolog.JSONLStore)
        catalog.calibrate("m", estimated=100, reported=130)
        (store.folder / NAME).write_bytes(b"nonsense" * 1_000)
        assert catalog.calibration("m") == Calibration()
        assert catalog.calibrate("m", estimated=100, reported=130) == ONCE
        assert catalog.calibration("m") == ONCE
        (store.folder / NAME).unlink()
        assert catalog.calibration("m") == Calibration()
        assert catalog.calibrate("m", estimated=100, reported=130) == ONCE


def test_where_nothing_can_be_written_it_holds_for_this_process(tmp_path: Path) -> None:
    with stenolog.open_store(tmp_path / "w") as store:
        store.add_message("a", "user", "hello")
    with (
        stenolog.open_store(tmp_path / "w", read_only=True) as store,
        open_catalog(store) as catalog,
    ):
        assert catalog.calibrate("m", estimated=100, reported=130) == ONCE
        assert catalog.calibration("m") == ONCE
        assert catalog.problems == ()


def test_what_makes_no_sense_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    where = f"sqlite:{tmp_path}/s.db"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        catalog.refresh()
        database = catalog._active.database
        for model, ratio in (("zero", 0.0), ("huge", 1e300), ("text", "x")):
            with database.write() as transaction:
                transaction.execute(database.sql["calibrate"], (model, ratio, 3.0))
            assert catalog.calibration(model) == Calibration()
            assert catalog.calibrate(model, estimated=100, reported=130) == ONCE


def test_a_closed_catalog_says_so(store: Store) -> None:
    catalog = open_catalog(store)
    catalog.close()
    with pytest.raises(UsageError, match="closed"):
        catalog.calibration("m")
    with pytest.raises(UsageError, match="closed"):
        catalog.calibrate("m", estimated=1, reported=1)
