-- Whoever keeps something beside the sessions sees by a number that it is out of date, without a
-- look at all of them.
CREATE TABLE mark (
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    number    INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)
) STRICT, WITHOUT ROWID;

-- Whether a session has aliases was told by a table that was made only when it was needed. Where
-- there are sessions, somebody may have: they are looked at once more.
INSERT INTO mark (namespace, name, number) SELECT DISTINCT namespace, 'aliases', 1 FROM session;
DROP TABLE IF EXISTS alias_mark;
