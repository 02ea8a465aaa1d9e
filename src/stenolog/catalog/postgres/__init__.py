"""The index inside a PostgreSQL store. Imported where there is one, and nowhere before."""

from stenolog.catalog.postgres.tables import SchemaDatabase

__all__ = ["SchemaDatabase"]
