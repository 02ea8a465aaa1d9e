"""The catalog inside a PostgreSQL store. Imported only if there is such a store."""

from stenolog.catalog.postgres.catalog_tables import SchemaDatabase

__all__ = ["SchemaDatabase"]
