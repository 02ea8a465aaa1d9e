-- Leases. A lease belongs to a key, because a turn may outlast a session that is deleted and created
-- again. An epoch is never used twice in the database: a holder has lost its lease exactly if the row
-- of its epoch is gone.
CREATE TABLE lease (
    epoch     INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT NOT NULL,
    key       TEXT NOT NULL,
    holder    TEXT NOT NULL,
    since     TEXT NOT NULL,
    expires   REAL NOT NULL,
    UNIQUE (namespace, key)
) STRICT;
