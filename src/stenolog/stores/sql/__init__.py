"""The SQL engine: everything that SQLite and PostgreSQL do in the same way."""
