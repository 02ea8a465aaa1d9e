"""Token counts that models report: stored in the catalog, or in the process without one."""

from pathlib import Path

import pytest

import stenolog
from stenolog.catalog import Catalog, open_catalog
from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.catalog_file import CATALOG_NAME
from stenolog.tokens import Calibration

ONCE = Calibration().after(estimated=100, reported=130)


def test_model_without_reports_has_the_default(catalog: Catalog) -> None:
    assert catalog.calibration("m") == Calibration()


def test_reports_are_kept_per_model(catalog: Catalog) -> None:
    assert catalog.calibrate("m", estimated=100, reported=130) == ONCE
    twice = catalog.calibrate("m", estimated=100, reported=110)
    assert twice == ONCE.after(estimated=100, reported=110)
    assert catalog.calibration("m") == twice
    assert catalog.calibration("other") == Calibration()
    assert catalog.calibrate("lone \ud800", estimated=10, reported=12).weight > 0
    assert catalog.calibration("lone \ud800").weight > 0


@pytest.mark.parametrize("engine", ["jsonl", "sqlite"])
def test_calibration_is_stored_and_shared(tmp_path: Path, engine: str) -> None:
    where = str(tmp_path / "w") if engine == "jsonl" else f"sqlite:{tmp_path}/s.db"
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        catalog.calibrate("m", estimated=100, reported=130)
        with open_catalog(store) as other:
            assert other.calibration("m") == ONCE
    with stenolog.open_store(where) as store, open_catalog(store) as catalog:
        assert catalog.calibration("m") == ONCE


def test_report_that_hardly_changes_the_ratio_is_not_written(tmp_path: Path) -> None:
    with stenolog.open_store(str(tmp_path / "w")) as store, open_catalog(store) as catalog:
        for _ in range(20):
            catalog.calibrate("m", estimated=100, reported=130)
        written = _path(store).read_bytes()
        settled = catalog.calibrate("m", estimated=1000, reported=1310)
        assert _path(store).read_bytes() == written
        assert settled.ratio > 1.3
        assert catalog.calibration("m") == settled
        with open_catalog(store) as other:
            assert other.calibration("m").ratio == pytest.approx(1.3)


def test_small_reports_are_written_when_they_add_up(tmp_path: Path) -> None:
    with stenolog.open_store(str(tmp_path / "w")) as store, open_catalog(store) as catalog:
        for _ in range(20):
            catalog.calibrate("m", estimated=100, reported=130)
        for _ in range(20):
            now = catalog.calibrate("m", estimated=100, reported=135)
        with open_catalog(store) as other:
            assert other.calibration("m").ratio == pytest.approx(now.ratio, rel=0.011)
            assert other.calibration("m").ratio > 1.32


def _path(store: Store) -> Path:
    path = store.admin.place.catalog_file
    assert path is not None
    return path


def test_missing_or_damaged_catalog_only_costs_accuracy(tmp_path: Path) -> None:
    with stenolog.open_store(tmp_path / "w") as store, open_catalog(store) as catalog:
        assert isinstance(store, stenolog.JSONLStore)
        catalog.calibrate("m", estimated=100, reported=130)
        (store.folder / CATALOG_NAME).write_bytes(b"nonsense" * 1_000)
        with open_catalog(store) as other:
            assert other.calibration("m") == Calibration()
            assert other.calibrate("m", estimated=100, reported=130) == ONCE
        assert catalog.calibration("m") == ONCE
        (store.folder / CATALOG_NAME).unlink()
        assert catalog.calibration("m") == ONCE


def test_calibration_applies_to_this_process_if_it_cannot_be_stored(tmp_path: Path) -> None:
    with stenolog.open_store(tmp_path / "w") as store:
        store.add_message("a", "user", "hello")
    with (
        stenolog.open_store(tmp_path / "w", read_only=True) as store,
        open_catalog(store) as catalog,
    ):
        assert catalog.calibrate("m", estimated=100, reported=130) == ONCE
        assert catalog.calibration("m") == ONCE
        assert catalog.problems == ()


def test_closed_catalog_raises(store: Store) -> None:
    catalog = open_catalog(store)
    catalog.close()
    with pytest.raises(UsageError, match="closed"):
        catalog.calibration("m")
    with pytest.raises(UsageError, match="closed"):
        catalog.calibrate("m", estimated=1, reported=1)
