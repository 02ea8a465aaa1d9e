"""The catalog inside a PostgreSQL store. Imported only for a PostgreSQL store."""

from stenolog.catalog.postgres.catalog_tables import SchemaDatabase

__all__ = ["SchemaDatabase"]
