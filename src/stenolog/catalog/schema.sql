-- The tables of a catalog, in a separate file, which can be deleted at any time.

-- One row. `version`: version of these tables and of the tokenizer. `made`: a random number that
-- identifies this catalog. `writes` grows with every change.
CREATE TABLE catalog_about (
    version TEXT    NOT NULL,
    made    INTEGER NOT NULL,
    writes  INTEGER NOT NULL
);

-- One row per session, and per log that is not a session. Times are microseconds since 1970.
-- `stamp`: the store's stamp from before the session was read; NULL if there is more to read.
-- `version` grows with every change; if two processes read the same row, only one can write the
-- next version. `sight`: ranges of visible seqs, as JSON. `withdrawn`: ranges in which a hidden
-- message counts as withdrawn. `listed` is 0 for a row that is not a session (yet). `owner`: the
-- sender of the first user message. `mixed` is 1 if another user message has no sender or a
-- different one (message_metadata.py). `last_message`: time of the newest message. `answers`:
-- number of answers with token counts of the provider, which are summed in `input_tokens` and
-- `output_tokens`. `unpriced`: number of these answers without a known price. `cost` is in
-- nanodollars. `priced`: version of the price list. `failed`: number of failed tool calls.
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
    program       TEXT    NOT NULL DEFAULT '',
    project       TEXT    NOT NULL DEFAULT '',
    model         TEXT    NOT NULL DEFAULT '',
    forked_from   TEXT,
    forked_at     INTEGER NOT NULL DEFAULT 0,
    last_message  INTEGER NOT NULL DEFAULT 0,
    answers       INTEGER NOT NULL DEFAULT 0,
    unpriced      INTEGER NOT NULL DEFAULT 0,
    priced        INTEGER NOT NULL DEFAULT 0,
    input_tokens  INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cost          INTEGER NOT NULL DEFAULT 0,
    failed        INTEGER NOT NULL DEFAULT 0,
    problem       TEXT
);

CREATE INDEX catalog_session_newest ON catalog_session (updated DESC, key);

CREATE INDEX catalog_session_last ON catalog_session (last_message DESC, key);

CREATE INDEX catalog_session_owner ON catalog_session (owner);

-- This index has all columns that the search for changed sessions reads.
CREATE INDEX catalog_session_stamp ON catalog_session (key, stamp, unpriced, priced);

CREATE TABLE catalog_tag (
    tag     TEXT    NOT NULL,
    session INTEGER NOT NULL,
    PRIMARY KEY (tag, session)
) WITHOUT ROWID;

CREATE INDEX catalog_tag_session ON catalog_tag (session);

-- `speech` is 1 for words of a user or a model, and 0 for tool calls, their results and the rest.
CREATE TABLE catalog_message (
    id      INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    role    TEXT    NOT NULL,
    at      INTEGER NOT NULL,
    tokens  INTEGER NOT NULL,
    speech  INTEGER NOT NULL,
    UNIQUE (session, seq)
);

-- The texts have their own table, so that a scan of messages reads no text.
CREATE TABLE catalog_said (
    id   INTEGER PRIMARY KEY,
    text TEXT NOT NULL
);

-- Message ids follow the order of reading, not of time. Each row has the range of times of some
-- thousand consecutive ids, so that the newest hits are found without reading all matches.
CREATE TABLE catalog_block (
    block  INTEGER PRIMARY KEY,
    oldest INTEGER NOT NULL,
    newest INTEGER NOT NULL
);

-- The tokens of tokenizer.py. `marks` has the session, the role, the owner, and the stems of the
-- tokens. No token has a character at which FTS5 would split it. Only marks start with `=`, so
-- that no word starts like a mark. Prefixes of one and two letters have separate indexes: merging
-- the lists of all words with such a prefix took ten times as long. Longer prefixes match fewer
-- words.
CREATE VIRTUAL TABLE catalog_words USING fts5 (
    parts, more, marks, content = '', prefix = '1 2', tokenize = "ascii tokenchars '='"
);

-- Calibration of token estimates per model (tokens.py). It is not built from the store. Losing it
-- only costs accuracy.
CREATE TABLE catalog_calibration (
    model  TEXT PRIMARY KEY,
    ratio  REAL NOT NULL,
    weight REAL NOT NULL
);

INSERT INTO catalog_about (version, made, writes) VALUES (?, random(), 0);
