-- The schema of a new database: what all numbered files together make of an empty one. A test
-- compares the two.

-- One row for each life of a session. It is small, because every append rewrites it; what is long
-- stands in `state`. Keys are compared by their bytes. `version` grows with every change.
CREATE TABLE session (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT    NOT NULL,
    key       TEXT    NOT NULL,
    uid       TEXT    NOT NULL UNIQUE,
    created   TEXT    NOT NULL,
    updated   TEXT    NOT NULL,
    last_seq  INTEGER NOT NULL,
    bytes     INTEGER NOT NULL,
    version   INTEGER NOT NULL,
    deleted   TEXT,
    fork_of   TEXT
) STRICT;

-- A key lives at most once; of the deleted there may be many.
CREATE UNIQUE INDEX session_live ON session (namespace, key) WHERE deleted IS NULL;
CREATE INDEX session_deleted ON session (namespace, key) WHERE deleted IS NOT NULL;
CREATE INDEX session_fork ON session (namespace, fork_of) WHERE fork_of IS NOT NULL;

-- Floor, hidden ranges, summary, meta and undo steps, as JSON.
CREATE TABLE state (
    session INTEGER PRIMARY KEY REFERENCES session (id) ON DELETE CASCADE,
    body    BLOB NOT NULL
) STRICT;

-- The caller's object, byte for byte. With a rowid, because without one a message of 1,500 bytes
-- takes three times its size; and with a name for it, or VACUUM would give out new ones. `crc` is
-- that of seq and body (damage.py); NULL where the message is older than this column.
CREATE TABLE message (
    id      INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    seq     INTEGER NOT NULL,
    at      TEXT    NOT NULL,
    body    BLOB    NOT NULL,
    crc     INTEGER,
    UNIQUE (session, seq)
) STRICT;

-- A token may hold a lone surrogate, which no text of SQLite's can: hence bytes.
CREATE TABLE token (
    session INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    token   BLOB    NOT NULL,
    first   INTEGER NOT NULL,
    count   INTEGER NOT NULL,
    PRIMARY KEY (session, token)
) STRICT, WITHOUT ROWID;

-- Every operation on what is in sight, as JSON: the summaries before, and what undo needs where it
-- is too long for `state`.
CREATE TABLE change (
    session INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    number  INTEGER NOT NULL,
    at      TEXT    NOT NULL,
    body    BLOB    NOT NULL,
    PRIMARY KEY (session, number)
) STRICT;

-- A row stands here from the moment that something is purged until its bytes are gone.
CREATE TABLE purge (
    id    INTEGER PRIMARY KEY,
    begun TEXT NOT NULL
) STRICT;

-- Whose turn it is in a session. By key and not by life: a turn outlasts a session that is deleted
-- and made anew. An epoch is never given out twice, in the whole database, so that a holder has
-- lost its lease exactly when the row of its epoch is gone. `process` says by which others see that
-- the holder itself is gone (processes.py); empty where nothing can be said.
CREATE TABLE lease (
    epoch     INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT NOT NULL,
    key       TEXT NOT NULL,
    holder    TEXT NOT NULL,
    since     TEXT NOT NULL,
    expires   REAL NOT NULL,
    process   TEXT NOT NULL DEFAULT '',
    UNIQUE (namespace, key)
) STRICT;

-- Whoever keeps something beside the sessions sees by a number that it is out of date, without a
-- look at all of them.
CREATE TABLE mark (
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    number    INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)
) STRICT, WITHOUT ROWID;
