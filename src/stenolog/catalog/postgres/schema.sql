-- The tables of a catalog in a PostgreSQL store; ../schema.sql describes them. Their names start
-- with catalog_ and a digest of the namespace. No other table refers to them, so they can be
-- dropped at any time. Texts are stored as UTF-8 bytes, because a text of PostgreSQL cannot contain
-- a NUL. This also sorts them by bytes, as the other engines do.

CREATE TABLE {schema}.catalog_about (
    version bytea NOT NULL,
    made    int8  NOT NULL,
    writes  int8  NOT NULL
);

CREATE TABLE {schema}.catalog_session (
    id         int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key        bytea NOT NULL,
    owner      bytea NOT NULL,
    mixed      int8  NOT NULL DEFAULT 0,
    stamp      bytea,
    version    int8  NOT NULL,
    listed     int8  NOT NULL,
    uid        bytea NOT NULL,
    generation int8  NOT NULL,
    archived   int8  NOT NULL,
    indexed    int8  NOT NULL,
    count      int8  NOT NULL,
    visible    int8  NOT NULL,
    tokens     int8  NOT NULL,
    sight      bytea NOT NULL,
    withdrawn  bytea NOT NULL DEFAULT '[]',
    state      bytea NOT NULL,
    title      bytea NOT NULL,
    prompt     bytea NOT NULL,
    created    int8  NOT NULL,
    updated    int8  NOT NULL,
    agent      bytea,
    channel    bytea,
    lost       int8  NOT NULL,
    damaged    int8  NOT NULL,
    program       bytea   NOT NULL DEFAULT '',
    project       bytea   NOT NULL DEFAULT '',
    model         bytea   NOT NULL DEFAULT '',
    forked_from   bytea,
    forked_at     int8    NOT NULL DEFAULT 0,
    last_message  int8    NOT NULL DEFAULT 0,
    answers       int8    NOT NULL DEFAULT 0,
    unpriced      int8    NOT NULL DEFAULT 0,
    priced        int8    NOT NULL DEFAULT 0,
    input_tokens  int8    NOT NULL DEFAULT 0,
    output_tokens int8    NOT NULL DEFAULT 0,
    cost          int8    NOT NULL DEFAULT 0,
    failed        int8    NOT NULL DEFAULT 0,
    problem       bytea
);

CREATE UNIQUE INDEX catalog_session_key ON {schema}.catalog_session (key);

CREATE INDEX catalog_session_newest ON {schema}.catalog_session (updated DESC, key);

CREATE INDEX catalog_session_last ON {schema}.catalog_session (last_message DESC, key);

-- This index and those below use digests: an index entry has at most about two thousand bytes.
CREATE INDEX catalog_session_owner ON {schema}.catalog_session (sha256(owner));

CREATE TABLE {schema}.catalog_tag (
    tag     bytea NOT NULL,
    session int8  NOT NULL
);

CREATE INDEX catalog_tag_tag ON {schema}.catalog_tag (sha256(tag));

CREATE INDEX catalog_tag_session ON {schema}.catalog_tag (session);

CREATE TABLE {schema}.catalog_message (
    id      int8 PRIMARY KEY,
    session int8  NOT NULL,
    seq     int8  NOT NULL,
    role    bytea NOT NULL,
    at      int8  NOT NULL,
    tokens  int8  NOT NULL,
    speech  int8  NOT NULL,
    UNIQUE (session, seq)
);

CREATE TABLE {schema}.catalog_said (
    id   int8 PRIMARY KEY,
    text bytea NOT NULL
);

CREATE TABLE {schema}.catalog_block (
    block  int8 PRIMARY KEY,
    oldest int8 NOT NULL,
    newest int8 NOT NULL
);

-- `words`: the tokens of tokenizer.py, the marks and the block, with their numbers of occurrences
-- up to a maximum. It cannot store the positions in a long message (they end at 16,383, and at 255
-- for each word). So `lines` has the tokens in order, separated by spaces: consecutive words are
-- searched there, among the messages that have all of them.
CREATE TABLE {schema}.catalog_words (
    id    int8 PRIMARY KEY,
    words tsvector NOT NULL,
    lines text COLLATE "C" NOT NULL
);

CREATE INDEX catalog_words_words ON {schema}.catalog_words USING gin (words);

CREATE TABLE IF NOT EXISTS {schema}.catalog_calibration (
    model  bytea PRIMARY KEY,
    ratio  float8 NOT NULL,
    weight float8 NOT NULL
);

INSERT INTO {schema}.catalog_about (version, made, writes)
VALUES ($1, ((random() - 0.5) * 1.8e19)::int8, 0);
