"""Sessions in a PostgreSQL database, for any number of machines."""

from stenolog.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
