-- Whose turn it is in a session. By key and not by life: a turn outlasts a session that is deleted
-- and made anew. An epoch is never given out twice, in the whole database, so that a holder has
-- lost its lease exactly when the row of its epoch is gone.
CREATE TABLE lease (
    epoch     INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT NOT NULL,
    key       TEXT NOT NULL,
    holder    TEXT NOT NULL,
    since     TEXT NOT NULL,
    expires   REAL NOT NULL,
    UNIQUE (namespace, key)
) STRICT;
