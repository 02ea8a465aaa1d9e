"""The catalog inside a PostgreSQL store. Imported only if such a store is used."""

from stenolog.catalog.postgres.catalog_tables import SchemaDatabase

__all__ = ["SchemaDatabase"]
