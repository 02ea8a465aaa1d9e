-- The tables of a database. A change of the tables changes their fingerprint in the header.

-- One row per session, including deleted ones. It is small, because every append rewrites it; long
-- values are in `state`. Keys are compared by their bytes. `version` grows with every change.
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

-- At most one live session has a key; any number of deleted sessions may have it.
CREATE UNIQUE INDEX session_live ON session (namespace, key) WHERE deleted IS NULL;
CREATE INDEX session_deleted ON session (namespace, key) WHERE deleted IS NOT NULL;
CREATE INDEX session_fork ON session (namespace, fork_of) WHERE fork_of IS NOT NULL;

-- Floor, hidden ranges, summary, meta and undo steps, as JSON.
CREATE TABLE state (
    session INTEGER PRIMARY KEY REFERENCES session (id) ON DELETE CASCADE,
    body    BLOB NOT NULL
) STRICT;

-- The caller's message, byte for byte. The table has a rowid, because without one a message of 1,500
-- bytes takes three times its size. The rowid has a name, because VACUUM would change unnamed ones.
-- SQLite does not notice a byte that changed on the disk: `crc` is the checksum of seq and body
-- (transactions.py).
CREATE TABLE message (
    id      INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    seq     INTEGER NOT NULL,
    at      TEXT    NOT NULL,
    body    BLOB    NOT NULL,
    crc     INTEGER NOT NULL,
    UNIQUE (session, seq)
) STRICT;

-- Idempotency keys. They are bytes, because a text of SQLite cannot contain a lone surrogate.
CREATE TABLE token (
    session INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    token   BLOB    NOT NULL,
    first   INTEGER NOT NULL,
    count   INTEGER NOT NULL,
    PRIMARY KEY (session, token)
) STRICT, WITHOUT ROWID;

-- Every change of visibility, summary or meta, as JSON: earlier summaries, and the values that undo
-- needs and that are too long for `state`.
CREATE TABLE change (
    session INTEGER NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    number  INTEGER NOT NULL,
    at      TEXT    NOT NULL,
    body    BLOB    NOT NULL,
    PRIMARY KEY (session, number)
) STRICT;

-- A row exists from the start of a purge until the purged bytes are erased from the file.
CREATE TABLE purge (
    id    INTEGER PRIMARY KEY,
    begun TEXT NOT NULL
) STRICT;

-- Leases. A lease belongs to a key, because a turn may outlast a session that is deleted and created
-- again. An epoch is never used twice in the database: a holder has lost its lease exactly if the row
-- of its epoch is gone. `process` identifies the holder's process, so that other processes notice its
-- end (lease_holders.py); empty if it is unknown.
CREATE TABLE lease (
    epoch     INTEGER PRIMARY KEY AUTOINCREMENT,
    namespace TEXT NOT NULL,
    key       TEXT NOT NULL,
    holder    TEXT NOT NULL,
    since     TEXT NOT NULL,
    expires   REAL NOT NULL,
    process   TEXT NOT NULL,
    UNIQUE (namespace, key)
) STRICT;

-- Change markers. A cache of session data compares their numbers to notice that it is outdated.
CREATE TABLE mark (
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    number    INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)
) STRICT, WITHOUT ROWID;
