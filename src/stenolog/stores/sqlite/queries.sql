-- The statements on sessions. The code runs them by name.

-- --- one session -------------------------------------------------------------------------------

-- name: find_session, lock_session
SELECT session.id, session.uid, session.created, session.updated, session.last_seq,
       session.bytes, session.fork_of, state.body, NULL
FROM session LEFT JOIN state ON state.session = session.id
WHERE session.namespace = ?1 AND session.key = ?2 AND session.deleted IS NULL;

-- name: find_current
SELECT uid, last_seq, NULL
FROM session
WHERE namespace = ?1 AND key = ?2 AND deleted IS NULL;

-- name: add_session
INSERT INTO session (namespace, key, uid, created, updated, last_seq, bytes, version, fork_of)
VALUES (?1, ?2, ?3, ?4, ?4, ?5, ?6, 1, ?7)
RETURNING id;
INSERT INTO state (session, body) SELECT id, ?8 FROM session WHERE uid = ?3;

-- name: save_session
UPDATE session
SET updated = ?2, last_seq = ?3, bytes = ?4, version = version + 1
WHERE id = ?1;
INSERT INTO state (session, body) VALUES (?1, ?5)
ON CONFLICT (session) DO UPDATE SET body = excluded.body;

-- Without an upper bound, keys are compared with an empty blob, which is greater than every text.
-- name: list_keys
SELECT CAST(key AS BLOB)
FROM session
WHERE namespace = ?1 AND deleted IS NULL AND key >= ?2 AND key > ?3 AND key < ifnull(?4, x'')
ORDER BY key
LIMIT ?5;

-- `updated` is part of the stamp because the file may be replaced by an older copy of itself. The
-- catalog is a separate file and must notice the replacement.
-- name: stamps
SELECT CAST(key AS BLOB),
       CAST(uid || ':' || version || ':' || updated AS BLOB)  -- guard: sqlite-stamp-has-time
FROM session
WHERE namespace = ?1 AND deleted IS NULL;

-- One index lookup per namespace, because a namespace may have many sessions.
-- name: namespaces
WITH RECURSIVE step (namespace) AS (
    VALUES ('')
    UNION ALL
    SELECT (
        SELECT min(found) FROM (
            SELECT min(namespace) AS found FROM session
            WHERE deleted IS NULL AND namespace > step.namespace
            UNION ALL
            SELECT min(namespace) FROM session
            WHERE deleted IS NOT NULL AND namespace > step.namespace
        )
    )
    FROM step WHERE step.namespace IS NOT NULL
)
SELECT namespace FROM step WHERE namespace > '';

-- --- appending ---------------------------------------------------------------------------------

-- name: take_seqs
UPDATE session
SET updated = ?3, last_seq = last_seq + ?4, bytes = bytes + ?5, version = version + 1
WHERE namespace = ?1 AND key = ?2 AND deleted IS NULL
RETURNING id, last_seq;

-- name: add_message
INSERT INTO message (session, seq, at, body, crc) VALUES (?1, ?2, ?3, ?4, ?5);

-- name: find_token
SELECT session.id, token.first, token.count
FROM session JOIN token ON token.session = session.id
WHERE session.namespace = ?1 AND session.key = ?2 AND session.deleted IS NULL AND token.token = ?3;

-- name: add_token
INSERT INTO token (session, token, first, count) VALUES (?1, ?2, ?3, ?4);

-- name: bodies
SELECT body FROM message WHERE session = ?1 AND seq BETWEEN ?2 AND ?3 ORDER BY seq;

-- --- reading -----------------------------------------------------------------------------------

-- name: messages
SELECT seq, at, body, crc FROM message WHERE session = ?1 AND seq BETWEEN ?2 AND ?3 ORDER BY seq;

-- The same for messages whose time may be damaged: the driver cannot return invalid UTF-8 as text.
-- name: raw_messages
SELECT seq, CAST(at AS BLOB), body, crc
FROM message
WHERE session = ?1 AND seq BETWEEN ?2 AND ?3
ORDER BY seq;

-- --- changes -----------------------------------------------------------------------------------

-- name: add_change
INSERT INTO change (session, number, at, body) VALUES (?1, ?2, ?3, ?4);

-- name: find_change
SELECT body FROM change WHERE session = ?1 AND number = ?2;

-- name: changes
SELECT number, body FROM change WHERE session = ?1 ORDER BY number;

-- --- fork, trash, purge ------------------------------------------------------------------------

-- name: copy_messages
INSERT INTO message (session, seq, at, body, crc)
SELECT ?1, seq, at, body, crc FROM message
WHERE session = ?2 AND seq BETWEEN ?3 AND ?4 ORDER BY seq;

-- name: delete_session
UPDATE session SET deleted = ?2, version = version + 1 WHERE id = ?1;

-- name: deletion_times
SELECT CAST(deleted AS BLOB)
FROM session
WHERE namespace = ?1 AND key = ?2 AND deleted IS NOT NULL;

-- name: find_deleted
SELECT id, CAST(uid AS BLOB)
FROM session
WHERE namespace = ?1 AND key = ?2 AND deleted IS NOT NULL
ORDER BY deleted DESC, id DESC;

-- name: list_deleted
SELECT CAST(session.key AS BLOB), CAST(session.uid AS BLOB), CAST(session.deleted AS BLOB),
       session.last_seq, state.body, session.id
FROM session LEFT JOIN state ON state.session = session.id
WHERE session.namespace = ?1 AND session.deleted IS NOT NULL
ORDER BY session.deleted DESC, session.id DESC;

-- name: restore_session
UPDATE session SET key = ?2, deleted = NULL, version = version + 1 WHERE id = ?1;

-- name: forks
SELECT CAST(key AS BLOB) FROM session WHERE namespace = ?1 AND fork_of = ?2 ORDER BY key, id;

-- name: sessions_of_key
SELECT id, CAST(uid AS BLOB) FROM session
WHERE namespace = ?1 AND key = ?2 AND deleted IS NULL
UNION ALL
SELECT id, CAST(uid AS BLOB) FROM session
WHERE namespace = ?1 AND key = ?2 AND deleted IS NOT NULL;

-- name: extent
SELECT count(*), ifnull(min(seq), 0), ifnull(max(seq), 0), ifnull(sum(length(body)), 0)
FROM message
WHERE session = ?1 AND seq BETWEEN ?2 AND ?3;

-- name: remove_session
DELETE FROM session WHERE id = ?1;

-- name: remove_messages
DELETE FROM message WHERE session = ?1 AND seq <= ?2;

-- name: remove_tokens
DELETE FROM token WHERE session = ?1 AND first <= ?2;

-- name: remove_changes
DELETE FROM change WHERE session = ?1;

-- name: begin_purge
INSERT INTO purge (begun) VALUES (?1);

-- name: purge_begun
SELECT begun FROM purge LIMIT 1;

-- name: last_purge
SELECT max(id) FROM purge;

-- name: end_purge
DELETE FROM purge WHERE id <= ?1;

-- --- leases ------------------------------------------------------------------------------------

-- name: find_lease
SELECT CAST(holder AS BLOB), CAST(since AS BLOB),
       epoch, CAST(since AS BLOB), expires, CAST(process AS BLOB)
FROM lease
WHERE namespace = ?1 AND key = ?2;

-- name: leases
SELECT key, epoch, CAST(since AS BLOB), expires, CAST(process AS BLOB) FROM lease
WHERE namespace = ?1 AND expires > 0;

-- name: add_lease
INSERT INTO lease (namespace, key, holder, since, expires, process)
VALUES (?1, ?2, ?3, ?4, ?5, ?6)
RETURNING epoch;

-- name: end_leases
UPDATE lease SET expires = 0 WHERE epoch = ?1;

-- name: find_epoch, check_lease
SELECT epoch FROM lease WHERE epoch = ?1;

-- name: end_lease_of
DELETE FROM lease WHERE namespace = ?1 AND key = ?2;

-- name: lease_in_force
SELECT epoch, CAST(since AS BLOB), expires, CAST(process AS BLOB) FROM lease WHERE epoch = ?1;

-- name: renew_lease
UPDATE lease SET since = ?2, expires = ?3, process = ?4 WHERE epoch = ?1 AND expires > 0 RETURNING epoch;

-- --- marks -------------------------------------------------------------------------------------

-- name: find_mark
SELECT number FROM mark WHERE namespace = ?1 AND name = ?2;

-- name: change_mark
INSERT INTO mark (namespace, name, number) VALUES (?1, ?2, 1)
ON CONFLICT (namespace, name) DO UPDATE SET number = number + 1;

-- --- for the doctor ----------------------------------------------------------------------------

-- name: every_session
SELECT session.id, session.last_seq, state.body,
       CAST(session.key AS BLOB), CAST(session.uid AS BLOB),
       CAST(session.namespace AS BLOB), CAST(session.fork_of AS BLOB),
       CAST(session.created AS BLOB), CAST(session.updated AS BLOB), CAST(session.deleted AS BLOB)
FROM session LEFT JOIN state ON state.session = session.id
ORDER BY session.id;

-- Only for a purge, which also rewrites the whole file.
-- name: stray_rows
SELECT (SELECT count(*) FROM message WHERE session NOT IN (SELECT id FROM session))
     + (SELECT count(*) FROM token WHERE session NOT IN (SELECT id FROM session))
     + (SELECT count(*) FROM change WHERE session NOT IN (SELECT id FROM session))
     + (SELECT count(*) FROM state WHERE session NOT IN (SELECT id FROM session));

-- Only numbers, also if the index is damaged. The bounds skip entries that it sorts wrongly.
-- name: seqs
SELECT seq FROM message
WHERE session = ?1 AND seq BETWEEN -9223372036854775807 AND 9223372036854775807
  AND typeof(seq) = 'integer';

-- --- snapshots ---------------------------------------------------------------------------------

-- name: list_snapshots
SELECT CAST(key AS BLOB), CAST(uid AS BLOB), CAST(deleted AS BLOB), 0 AS living, id
FROM session
WHERE namespace = ?1 AND deleted IS NOT NULL
UNION ALL
SELECT CAST(key AS BLOB), CAST(uid AS BLOB), NULL, 1, id
FROM session
WHERE namespace = ?1 AND deleted IS NULL
ORDER BY living, 1, id;

-- A uid is unique in the file, across all namespaces.
-- name: find_uid
SELECT session.id, session.key, session.created, session.updated, session.last_seq, session.bytes,
       session.fork_of, state.body, NULL, session.namespace, session.deleted
FROM session LEFT JOIN state ON state.session = session.id
WHERE session.uid = ?2;

-- name: tokens
SELECT token, first, count FROM token WHERE session = ?1 ORDER BY first, token;

-- name: missing_tokens
SELECT token.token, token.first, token.count
FROM token LEFT JOIN message ON message.session = token.session AND message.seq = token.first
WHERE token.session = ?1 AND message.id IS NULL
ORDER BY token.first, token.token;

-- name: add_snapshot
INSERT INTO session
       (namespace, key, uid, created, updated, last_seq, bytes, version, deleted, fork_of)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, 0, 1, ?7, ?8)
RETURNING id;

-- name: set_state
UPDATE session SET bytes = ?2 WHERE id = ?1;
INSERT INTO state (session, body) VALUES (?1, ?3)
ON CONFLICT (session) DO UPDATE SET body = excluded.body;

-- name: put_token
INSERT OR REPLACE INTO token (session, token, first, count) VALUES (?1, ?2, ?3, ?4);
