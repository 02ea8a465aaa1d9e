-- The statements on sessions. The code runs them by name. {schema} is the name of the schema.

-- --- one session -------------------------------------------------------------------------------

-- name: find_session
SELECT id, uid, created, updated, last_seq, bytes, fork_of, state,
       format
FROM {schema}.session
WHERE namespace = $1 AND key = $2 AND deleted IS NULL;

-- The same, with a lock: no other transaction can change the session until this one ends.
-- name: lock_session
SELECT id, uid, created, updated, last_seq, bytes, fork_of, state,
       format
FROM {schema}.session
WHERE namespace = $1 AND key = $2 AND deleted IS NULL
FOR NO KEY UPDATE;

-- name: find_current
SELECT uid, last_seq, format
FROM {schema}.session
WHERE namespace = $1 AND key = $2 AND deleted IS NULL;

-- name: format
SELECT version FROM {schema}.about;

-- name: add_session
INSERT INTO {schema}.session
    (namespace, key, uid, created, updated, last_seq, bytes, version, fork_of, format, state)
SELECT $1, $2, $3, $4, $4, $5, $6, 1, $7, version, $8 FROM {schema}.about WHERE version = $9
ON CONFLICT (namespace, key) WHERE deleted IS NULL DO NOTHING
RETURNING id;

-- name: save_session
UPDATE {schema}.session
SET updated = $2, last_seq = $3, bytes = $4, state = $5, version = version + 1
WHERE id = $1;

-- name: list_keys
SELECT key
FROM {schema}.session
WHERE namespace = $1 AND deleted IS NULL AND key >= $2 AND key > $3
  AND ($4::bytea IS NULL OR key < $4)
ORDER BY key
LIMIT $5;

-- name: stamps
SELECT key, uid || ':' || version
FROM {schema}.session
WHERE namespace = $1 AND deleted IS NULL;

-- One index lookup per namespace, because a namespace may have many sessions.
-- name: namespaces
WITH RECURSIVE step (namespace) AS (
    SELECT least(
        (SELECT min(namespace) FROM {schema}.session WHERE deleted IS NULL),
        (SELECT min(namespace) FROM {schema}.session WHERE deleted IS NOT NULL)
    )
    UNION ALL
    SELECT least(
        (SELECT min(namespace) FROM {schema}.session
         WHERE deleted IS NULL AND namespace > step.namespace),
        (SELECT min(namespace) FROM {schema}.session
         WHERE deleted IS NOT NULL AND namespace > step.namespace)
    )
    FROM step WHERE step.namespace IS NOT NULL
)
SELECT namespace FROM step WHERE namespace IS NOT NULL;

-- --- appending ---------------------------------------------------------------------------------

-- The fast append, in one round trip. The lock of the session's row makes the seq unique. Returns
-- no row if the session does not exist, or if the tables have another version.
-- name: append_one
WITH taken AS (
    UPDATE {schema}.session
    SET updated = $3, last_seq = last_seq + 1, bytes = bytes + $5, version = version + 1
    WHERE namespace = $1 AND key = $2 AND deleted IS NULL
      AND format = $6  -- guard: postgres-newer-tables-refused
    RETURNING id, last_seq
)
INSERT INTO {schema}.message (session, seq, at, body)
SELECT id, last_seq, $3, $4 FROM taken
RETURNING seq;

-- Append a batch. $8 is its idempotency key and $9 the epoch of the caller's lease. Both may be NULL.
-- If two callers use the same idempotency key at the same time, the second one violates the primary
-- key of `token` and retries. The row of the lease is locked, so that no other holder takes over
-- before the commit. Every transaction locks a session before its lease, as a purge does. The
-- opposite order could deadlock.
-- name: append
WITH locked AS MATERIALIZED (
    SELECT id FROM {schema}.session
    WHERE namespace = $1 AND key = $2 AND deleted IS NULL AND $9::int8 IS NOT NULL
    FOR NO KEY UPDATE
), known AS (
    SELECT token.session, token.first, token.count
    FROM {schema}.token JOIN {schema}.session ON session.id = token.session
    WHERE session.namespace = $1 AND session.key = $2 AND session.deleted IS NULL
      AND token.token = $8::bytea
), fence AS MATERIALIZED (
    SELECT epoch FROM {schema}.lease
    WHERE epoch = $9::int8 AND (SELECT count(*) FROM locked) >= 0
    FOR SHARE
), taken AS (
    UPDATE {schema}.session
    SET updated = $3, last_seq = last_seq + cardinality($4::text[]), bytes = bytes + $6,
        version = version + 1
    WHERE namespace = $1 AND key = $2 AND deleted IS NULL
      AND format = $7
      AND NOT EXISTS (SELECT FROM known)
      AND ($9::int8 IS NULL OR EXISTS (SELECT FROM fence))  -- guard: postgres-lease-fence
    RETURNING id, last_seq, last_seq - cardinality($4::text[]) AS before
), marked AS (
    INSERT INTO {schema}.token (session, token, first, count)
    SELECT id, $8::bytea, before + 1, cardinality($4::text[]) FROM taken
    WHERE $8::bytea IS NOT NULL  -- guard: postgres-token-after-lost-answer
), stored AS (
    INSERT INTO {schema}.message (session, seq, at, body)
    SELECT taken.id, taken.before + said.number, said.at, said.body
    FROM taken, unnest($5::text[], $4::text[]) WITH ORDINALITY AS said (at, body, number)
)
SELECT (SELECT before + 1 FROM taken), (SELECT session FROM known), (SELECT first FROM known),
       (SELECT count FROM known), (SELECT count(*) FROM fence);

-- name: add_messages
INSERT INTO {schema}.message (session, seq, at, body)
SELECT $1, said.seq, said.at, said.body
FROM unnest($2::int8[], $3::text[], $4::text[]) AS said (seq, at, body);

-- name: bodies
SELECT body FROM {schema}.message WHERE session = $1 AND seq BETWEEN $2 AND $3 ORDER BY seq;

-- --- reading -----------------------------------------------------------------------------------

-- name: messages
SELECT seq, at, body
FROM {schema}.message
WHERE session = $1 AND seq BETWEEN $2 AND $3
ORDER BY seq;

-- --- changes -----------------------------------------------------------------------------------

-- name: add_change
INSERT INTO {schema}.change (session, number, at, body) VALUES ($1, $2, $3, $4);

-- name: find_change
SELECT body FROM {schema}.change WHERE session = $1 AND number = $2;

-- name: changes
SELECT number, body FROM {schema}.change WHERE session = $1 ORDER BY number;

-- --- fork, trash, purge ------------------------------------------------------------------------

-- name: copy_messages
INSERT INTO {schema}.message (session, seq, at, body)
SELECT $1, seq, at, body FROM {schema}.message
WHERE session = $2 AND seq BETWEEN $3 AND $4;

-- name: delete_session
UPDATE {schema}.session SET deleted = $2, version = version + 1 WHERE id = $1;

-- name: deletion_times
SELECT deleted FROM {schema}.session WHERE namespace = $1 AND key = $2 AND deleted IS NOT NULL;

-- Locks in the order of the ids, as `sessions_of_key` does, to avoid deadlocks.
-- name: find_deleted
WITH locked AS MATERIALIZED (
    SELECT id, uid, deleted
    FROM {schema}.session
    WHERE namespace = $1 AND key = $2 AND deleted IS NOT NULL
    ORDER BY id
    FOR UPDATE
)
SELECT id, uid FROM locked ORDER BY deleted DESC, id DESC;

-- name: list_deleted
SELECT key, uid, deleted, last_seq, state, id
FROM {schema}.session
WHERE namespace = $1 AND deleted IS NOT NULL
ORDER BY deleted DESC, id DESC;

-- If two callers restore to the same key, the unique index lets only the first one succeed.
-- name: restore_session
UPDATE {schema}.session SET key = $2, deleted = NULL, version = version + 1 WHERE id = $1;

-- name: forks
SELECT key FROM {schema}.session WHERE namespace = $1 AND fork_of = $2 ORDER BY key, id;

-- name: sessions_of_key
SELECT id, uid FROM {schema}.session WHERE namespace = $1 AND key = $2 ORDER BY id FOR UPDATE;

-- name: extent
SELECT count(*), coalesce(min(seq), 0), coalesce(max(seq), 0),
       coalesce(sum(octet_length(body)), 0)::int8
FROM {schema}.message
WHERE session = $1 AND seq BETWEEN $2 AND $3;

-- name: remove_session
DELETE FROM {schema}.session WHERE id = $1;

-- name: remove_messages
DELETE FROM {schema}.message WHERE session = $1 AND seq <= $2;

-- name: remove_tokens
DELETE FROM {schema}.token WHERE session = $1 AND first <= $2;

-- name: remove_changes
DELETE FROM {schema}.change WHERE session = $1;

-- Deleted rows stay in the pages until these are vacuumed.
-- name: clean
VACUUM {schema}.session, {schema}.message, {schema}.token, {schema}.change;

-- --- leases ------------------------------------------------------------------------------------

-- Returns the epoch of a new lease if the lease is free, or the epoch that an earlier attempt of
-- the same call received. The epoch is assigned under the lock of the row, so that a later holder
-- has a higher epoch. The statement waits for a concurrent purge, so that no lease of a purged
-- session remains.
-- name: take_lease
INSERT INTO {schema}.lease AS held (namespace, key, holder, taker, since, expires)
SELECT $1, $2, $3, $4, clock_timestamp(), clock_timestamp() + make_interval(secs => $5::float8)
WHERE EXISTS (
    SELECT FROM {schema}.session WHERE namespace = $1 AND key = $2 AND deleted IS NULL
    FOR KEY SHARE  -- guard: postgres-lease-waits-for-purge
)
ON CONFLICT (namespace, key) DO UPDATE
SET epoch = nextval('{schema}.lease_epoch_seq'), holder = $3, taker = $4, since = excluded.since,
    expires = clock_timestamp() + make_interval(secs => $5::float8)
WHERE held.expires <= clock_timestamp() OR held.taker = $4  -- guard: postgres-one-lease-holder
RETURNING epoch;

-- name: find_lease
SELECT holder, to_char(since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'),
       expires > clock_timestamp()
FROM {schema}.lease
WHERE namespace = $1 AND key = $2;

-- name: find_epoch
SELECT epoch FROM {schema}.lease WHERE epoch = $1;

-- name: check_lease
SELECT epoch FROM {schema}.lease WHERE epoch = $1 FOR SHARE;

-- name: leases
SELECT key, expires > clock_timestamp() FROM {schema}.lease WHERE namespace = $1;

-- name: lease_in_force
SELECT expires > clock_timestamp() FROM {schema}.lease WHERE epoch = $1;

-- name: renew_lease
UPDATE {schema}.lease
SET since = clock_timestamp(), expires = clock_timestamp() + make_interval(secs => $2::float8)
WHERE epoch = $1 AND expires > '-infinity'
RETURNING epoch;

-- name: end_leases
UPDATE {schema}.lease SET expires = '-infinity' WHERE epoch = ANY ($1::int8[]);

-- name: end_lease_of
DELETE FROM {schema}.lease WHERE namespace = $1 AND key = $2;

-- --- marks -------------------------------------------------------------------------------------

-- name: find_mark
SELECT number FROM {schema}.mark WHERE namespace = $1 AND name = $2;

-- name: change_mark
INSERT INTO {schema}.mark AS known (namespace, name, number) VALUES ($1, $2, 1)
ON CONFLICT (namespace, name) DO UPDATE SET number = known.number + 1;

-- --- the server --------------------------------------------------------------------------------

-- name: about_server
SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
       current_setting('fsync');

-- --- snapshots ---------------------------------------------------------------------------------

-- name: list_snapshots
SELECT key, uid, deleted
FROM {schema}.session
WHERE namespace = $1
ORDER BY deleted IS NULL, key, id;

-- name: find_uid
SELECT id, key, created, updated, last_seq, bytes, fork_of, state, format, namespace, deleted
FROM {schema}.session
WHERE namespace = $1 AND uid = $2;

-- name: tokens
SELECT token, first, count FROM {schema}.token WHERE session = $1 ORDER BY first, token;

-- name: missing_tokens
SELECT token.token, token.first, token.count
FROM {schema}.token LEFT JOIN {schema}.message
  ON message.session = token.session AND message.seq = token.first
WHERE token.session = $1 AND message.seq IS NULL
ORDER BY token.first, token.token;

-- name: add_snapshot
INSERT INTO {schema}.session
    (namespace, key, uid, created, updated, last_seq, bytes, version, deleted, fork_of, format, state)
SELECT $1, $2, $3, $4, $5, $6, 0, 1, $7, $8, version, '' FROM {schema}.about WHERE version = $9
RETURNING id;

-- name: set_state
UPDATE {schema}.session SET bytes = $2, state = $3 WHERE id = $1;

-- name: copy_in
COPY {schema}.message (session, seq, at, body) FROM STDIN;

-- name: put_token
INSERT INTO {schema}.token (session, token, first, count) VALUES ($1, $2, $3, $4)
ON CONFLICT (session, token) DO UPDATE SET first = excluded.first, count = excluded.count;

-- --- for the doctor ----------------------------------------------------------------------------

-- name: every_session
SELECT id, last_seq, state, key, uid, namespace, fork_of, created, updated, deleted
FROM {schema}.session
ORDER BY id;

-- name: seqs
SELECT seq FROM {schema}.message WHERE session = $1;

-- name: stray_rows
SELECT 'message', count(*) FROM {schema}.message
WHERE NOT EXISTS (SELECT FROM {schema}.session WHERE session.id = message.session)
UNION ALL
SELECT 'token', count(*) FROM {schema}.token
WHERE NOT EXISTS (SELECT FROM {schema}.session WHERE session.id = token.session)
UNION ALL
SELECT 'change', count(*) FROM {schema}.change
WHERE NOT EXISTS (SELECT FROM {schema}.session WHERE session.id = change.session);
