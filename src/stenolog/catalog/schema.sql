-- The tables of a catalog, in a file of their own. It can be deleted at any time.

-- One row. `version` is that of these tables and of the tokenizer, `made` a random number that no other
-- index has that ever stood here, `writes` grows with every change.
CREATE TABLE catalog_about (
    version TEXT    NOT NULL,
    made    INTEGER NOT NULL,
    writes  INTEGER NOT NULL
);

-- One row for each session, and for what was found in its place. Times are microseconds since 1970.
-- `stamp` is the store's mark from before the session was read, NULL where there is more to read;
-- `version` grows with every change, so that of two who read the same row one stores the next.
-- `sight` are the runs of visible seqs, as JSON, and `withdrawn` those of which a message was taken back
-- where it is out of sight. `listed` is 0 for what is no session (yet).
-- `owner` is the sender of the first user message, and `mixed` is 1 if another user message has none or
-- another one (owners.py).
CREATE TABLE catalog_session (
    id         INTEGER PRIMARY KEY,
    key        TEXT    NOT NULL UNIQUE,
    owner      TEXT    NOT NULL,
    mixed      INTEGER NOT NULL DEFAULT 0,
    stamp      TEXT,
    version    INTEGER NOT NULL,
    listed     INTEGER NOT NULL,
    uid        TEXT    NOT NULL,
    generation INTEGER NOT NULL,
    archived   INTEGER NOT NULL,
    indexed    INTEGER NOT NULL,
    count      INTEGER NOT NULL,
    visible    INTEGER NOT NULL,
    tokens     INTEGER NOT NULL,
    sight      TEXT    NOT NULL,
    withdrawn  TEXT    NOT NULL DEFAULT '[]',
    state      TEXT    NOT NULL,
    title      TEXT    NOT NULL,
    prompt     TEXT    NOT NULL,
    created    INTEGER NOT NULL,
    updated    INTEGER NOT NULL,
    agent      TEXT,
    channel    TEXT,
    lost       INTEGER NOT NULL,
    damaged    INTEGER NOT NULL,
    problem    TEXT
);

CREATE INDEX catalog_session_newest ON catalog_session (updated DESC, key);

CREATE INDEX catalog_session_owner ON catalog_session (owner);

-- All that a look for changes reads.
CREATE INDEX catalog_session_stamp ON catalog_session (key, stamp);

CREATE TABLE catalog_tag (
    tag     TEXT    NOT NULL,
    session INTEGER NOT NULL,
    PRIMARY KEY (tag, session)
) WITHOUT ROWID;

CREATE INDEX catalog_tag_session ON catalog_tag (session);

CREATE TABLE catalog_message (
    id      INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    role    TEXT    NOT NULL,
    at      INTEGER NOT NULL,
    tokens  INTEGER NOT NULL,
    UNIQUE (session, seq)
);

-- Apart from the message, so that looking through many of those reads no text.
CREATE TABLE catalog_said (
    id   INTEGER PRIMARY KEY,
    text TEXT NOT NULL
);

-- Ids of messages are given out as they are read, not by time. Of some thousand in a row this tells
-- how old they are, at the most: so the newest hits are found without looking at all of them.
CREATE TABLE catalog_block (
    block  INTEGER PRIMARY KEY,
    oldest INTEGER NOT NULL,
    newest INTEGER NOT NULL
);

-- The tokens of tokenizer.py, and in `marks` the session, the role, the owner, and the words in the
-- form of stemming.py. None of them has a character that would be split again; `=` stands in marks
-- only, and first, so that no word begins like one.
-- Words of which one or two letters are asked for have lists of their own: to merge those of all
-- words that begin so took ten times as long. Longer beginnings leave few enough.
CREATE VIRTUAL TABLE catalog_words USING fts5 (
    parts, more, marks, content = '', prefix = '1 2', tokenize = "ascii tokenchars '='"
);

-- What the reports of each model say of our estimates (tokens.py). It is not made from the store, so
-- it outlives the other tables wherever it can be read; lost, it costs accuracy only.
CREATE TABLE IF NOT EXISTS catalog_calibration (
    model  TEXT PRIMARY KEY,
    ratio  REAL NOT NULL,
    weight REAL NOT NULL
);

INSERT INTO catalog_about (version, made, writes) VALUES (?, random(), 0);
