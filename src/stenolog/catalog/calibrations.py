"""What models report of our estimates, kept in the index. Nothing fails for the lack of it."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from stenolog.catalog.connections import is_calibration
from stenolog.catalog.database import Broken, Database, Row, Unusable, clean
from stenolog.errors import DamagedStore, StoreUnavailable
from stenolog.tokens import Calibration

_FAILURES = (Broken, Unusable, DamagedStore, StoreUnavailable)


class Calibrations:
    """The calibration of each model, in the index where possible, else in this process."""

    def __init__(self, database: Callable[[], Database]) -> None:
        self._database = database
        self._own: dict[str, Calibration] = {}
        """Those that could not be kept."""

    def get(self, model: str) -> Calibration:
        """The calibration of a model; the default where none is known."""
        name = clean(model)
        with suppress(*_FAILURES):
            return self._read(name) or self._own.get(name, Calibration())
        return self._own.get(name, Calibration())

    def take_in(self, model: str, *, estimated: int, reported: int) -> Calibration:
        """The calibration with one more report, kept if possible."""
        name = clean(model)
        for made_anew in (False, True):
            try:
                return self._write(name, estimated, reported)
            except Broken:
                with suppress(*_FAILURES):
                    # It is missing where nobody listed anything yet.
                    if not made_anew:
                        self._database().renew()
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
    """The one that was kept; None where there is none, or it makes no sense."""
    for ratio, weight in rows:
        if is_calibration(ratio, weight):
            return Calibration(ratio=ratio, weight=weight)
    return None
