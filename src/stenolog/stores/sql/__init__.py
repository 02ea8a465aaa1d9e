"""Code shared by the two SQL engines, SQLite and PostgreSQL."""
