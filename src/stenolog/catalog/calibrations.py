"""Token calibrations of models, stored in the catalog. Without them only accuracy is lost."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from stenolog.catalog.catalog_database import (
    CatalogDamaged,
    CatalogUnusable,
    Database,
    Row,
    replace_surrogates,
)
from stenolog.catalog.sqlite_connections import is_calibration
from stenolog.errors import DamagedStore, StoreUnavailable
from stenolog.tokens import Calibration

_FAILURES = (CatalogDamaged, CatalogUnusable, DamagedStore, StoreUnavailable)


class Calibrations:
    """The calibration of each model, stored in the catalog if possible, else in this process."""

    def __init__(self, database: Callable[[], Database]) -> None:
        self._database = database
        self._own: dict[str, Calibration] = {}
        """Calibrations that could not be stored."""

    def get(self, model: str) -> Calibration:
        """Return the calibration of a model, or the default if none is known."""
        name = replace_surrogates(model)
        with suppress(*_FAILURES):
            return self._read(name) or self._own.get(name, Calibration())
        return self._own.get(name, Calibration())

    def add_report(self, model: str, *, estimated: int, reported: int) -> Calibration:
        """Return the calibration after one more report, and store it if possible."""
        name = replace_surrogates(model)
        for made_anew in (False, True):
            try:
                return self._write(name, estimated, reported)
            except CatalogDamaged:
                with suppress(*_FAILURES):
                    # The tables are missing if nothing was listed yet.
                    if not made_anew:
                        self._database().rebuild()
                        continue
                break
            except _FAILURES:
                break
        known = self._own.get(name, Calibration())
        self._own[name] = known.after(estimated=estimated, reported=reported)
        return self._own[name]

    def _read(self, name: str) -> Calibration | None:
        database = self._database()
        with database.read() as transaction:
            rows = list(transaction.execute(database.sql["calibration"], (name,)))
        return _calibration(rows)

    def _write(self, name: str, estimated: int, reported: int) -> Calibration:
        database = self._database()
        sql = database.sql
        with database.write() as transaction:
            rows = list(transaction.execute(sql["calibration"], (name,)))
            known = _calibration(rows) or self._own.get(name)
            now = (known or Calibration()).after(estimated=estimated, reported=reported)
            transaction.execute(sql["calibrate"], (name, now.ratio, now.weight))
        return now


def _calibration(rows: Sequence[Row]) -> Calibration | None:
    """Return the stored calibration, or None if there is none or it is invalid."""
    for ratio, weight in rows:
        if is_calibration(ratio, weight):
            return Calibration(ratio=ratio, weight=weight)
    return None
