-- Change markers. A cache of session data compares their numbers to notice that it is outdated.
CREATE TABLE mark (
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    number    INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)
) STRICT, WITHOUT ROWID;

-- Earlier versions created a table when the first alias was stored. If there are sessions, some may
-- have aliases, so the marker makes readers look for aliases again.
INSERT INTO mark (namespace, name, number) SELECT DISTINCT namespace, 'aliases', 1 FROM session;
DROP TABLE IF EXISTS alias_mark;
