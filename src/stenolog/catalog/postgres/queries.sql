-- The statements of ../queries.sql for PostgreSQL, and those that only PostgreSQL needs. Texts are
-- sent and returned as bytes.

-- name: serialize
-- Only one process at a time creates the tables.
SELECT pg_advisory_xact_lock(hashtextextended(convert_from($1, 'UTF8'), 0));

-- name: has_tables
SELECT count(to_regclass(convert_from($1, 'UTF8')));

-- name: has_trigger
SELECT count(*) FROM pg_trigger
WHERE tgrelid = to_regclass(convert_from($1, 'UTF8')) AND tgname = 'catalog_purged';

-- name: drop_tables
DROP TABLE IF EXISTS {schema}.catalog_about, {schema}.catalog_session, {schema}.catalog_tag,
    {schema}.catalog_message, {schema}.catalog_said, {schema}.catalog_block, {schema}.catalog_words;

-- name: hold_all
LOCK TABLE {schema}.catalog_about IN ACCESS EXCLUSIVE MODE;

-- name: hold
-- This lock precedes the first query, which takes the snapshot: a process that empties the tables
-- has either finished or waits.
LOCK TABLE {schema}.catalog_about IN ACCESS SHARE MODE;

-- name: look
-- Sequential scans are off, because the planner underestimates the cost of a scan of all texts.
SELECT version, set_config('enable_seqscan', 'off', true) FROM {schema}.catalog_about;

-- name: turn
-- Only one process writes at a time. A concurrent purge waits, and then sees the new rows.
SELECT version FROM {schema}.catalog_about FOR UPDATE;

-- name: version
SELECT version FROM {schema}.catalog_about;

-- name: about
SELECT made, writes FROM {schema}.catalog_about;

-- name: count_write
UPDATE {schema}.catalog_about SET writes = writes + 1;

-- name: stamps
SELECT key, stamp FROM {schema}.catalog_session;

-- name: keys_newest_first
SELECT key FROM {schema}.catalog_session ORDER BY updated DESC, key;

-- name: current_stamps
SELECT key, CASE WHEN unpriced = 0 OR priced >= $1 THEN stamp END
FROM {schema}.catalog_session;

-- name: row
SELECT version, listed, uid, generation, archived, indexed, count, tokens, sight,
       prompt, CASE WHEN unpriced = 0 OR priced >= $1 THEN stamp END, owner, mixed,
       (SELECT at FROM {schema}.catalog_message AS m WHERE m.session = s.id AND m.seq = s.indexed),
       (unpriced > 0 AND priced < $1)::int4
FROM {schema}.catalog_session AS s WHERE key = $2;

-- name: row_version
SELECT id, version, owner FROM {schema}.catalog_session WHERE key = $1;

-- name: add_row
INSERT INTO {schema}.catalog_session (key, owner, version, listed, uid, generation, archived, indexed,
                                      count, visible, tokens, sight, state, title, prompt, created,
                                      updated, lost, damaged)
VALUES ($1, '', 0, 0, '', 0, 0, 0, 0, 0, 0, '[]', '', '', '', 0, 0, 0, 0);

-- name: own_row
UPDATE {schema}.catalog_session SET owner = $1, mixed = $2 WHERE id = $3;

-- name: prompts
SELECT role, text FROM {schema}.catalog_message JOIN {schema}.catalog_said USING (id)
WHERE session = $1 AND role = 'user' ORDER BY seq;

-- name: begin_row
UPDATE {schema}.catalog_session
SET version = version + 1, stamp = NULL, listed = 0, uid = $1, generation = $2, archived = $3,
    indexed = 0, tokens = 0, sight = '[]', prompt = '', problem = NULL, model = '',
    last_message = 0, answers = 0, unpriced = 0, priced = $4, input_tokens = 0, output_tokens = 0,
    cost = 0, failed = 0
WHERE id = $5;

-- name: shrink_row
UPDATE {schema}.catalog_session SET version = version + 1, count = count - $1 WHERE id = $2;

-- name: advance_row
UPDATE {schema}.catalog_session
SET version = version + 1, stamp = NULL, indexed = $1, count = count + $2
WHERE id = $3;

-- name: settle_row
UPDATE {schema}.catalog_session
SET version = version + 1, stamp = $1, listed = $2, uid = $3, generation = $4, archived = $5,
    indexed = $6, count = count + $7, visible = $8, tokens = $9, sight = $10, withdrawn = $11,
    state = $12, title = $13, prompt = $14, created = $15, updated = $16, agent = $17,
    channel = $18, lost = $19, damaged = $20, problem = $21, program = $22, project = $23,
    forked_from = $24, forked_at = $25, last_message = greatest(last_message, $26)
WHERE id = $27;

-- name: add_usage
UPDATE {schema}.catalog_session
SET model = coalesce($1::bytea, model), last_message = greatest(last_message, $2),
    answers = answers + $3, unpriced = unpriced + $4,
    input_tokens = least(input_tokens + $5, 4000000000000000000),
    output_tokens = least(output_tokens + $6, 4000000000000000000),
    cost = least(cost + $7, 9000000000000000), failed = failed + $8, priced = least(priced, $9)
WHERE id = $10;

-- name: remove_row
DELETE FROM {schema}.catalog_session WHERE id = $1;

-- name: remove_tags
DELETE FROM {schema}.catalog_tag WHERE session = $1;

-- name: add_tag
INSERT INTO {schema}.catalog_tag (tag, session) VALUES ($1, $2);

-- name: last_id
SELECT coalesce(max(id), 0) FROM {schema}.catalog_message;

-- name: add_message
INSERT INTO {schema}.catalog_message (id, session, seq, role, at, tokens, speech)
VALUES ($1, $2, $3, $4, $5, $6, $7);

-- name: add_said
INSERT INTO {schema}.catalog_said (id, text) VALUES ($1, $2);

-- name: add_words
INSERT INTO {schema}.catalog_words (id, words, lines)
VALUES ($1, convert_from($2, 'UTF8')::tsvector, convert_from($3, 'UTF8'));

-- name: add_block
INSERT INTO {schema}.catalog_block AS known (block, oldest, newest) VALUES ($1, $2, $3)
ON CONFLICT (block) DO UPDATE
SET oldest = least(known.oldest, excluded.oldest), newest = greatest(known.newest, excluded.newest);

-- name: some_messages
SELECT id, role, text FROM {schema}.catalog_message JOIN {schema}.catalog_said USING (id)
WHERE session = $1 ORDER BY seq DESC LIMIT $2;

-- name: remove_message
DELETE FROM {schema}.catalog_message WHERE id = $1;

-- name: remove_said
DELETE FROM {schema}.catalog_said WHERE id = $1;

-- name: remove_words
DELETE FROM {schema}.catalog_words WHERE id = $1;

-- name: tokens_in
SELECT coalesce(sum(tokens), 0)::int8 FROM {schema}.catalog_message
WHERE session = $1 AND seq BETWEEN $2 AND $3;

-- name: session_filter
listed = 1
  AND ($1::bytea IS NULL OR key >= $1 AND key < $2::bytea)
  AND ($3::bytea IS NULL OR id IN (
      SELECT session FROM {schema}.catalog_tag WHERE sha256(tag) = sha256($3) AND tag = $3
  ))
  AND ($4::bytea IS NULL OR channel = $4)
  AND ($5::bytea IS NULL OR agent = $5)
  AND ($6::bytea IS NULL OR (
      upper(encode(key, 'hex')) IN (
          SELECT jsonb_array_elements_text(convert_from($6, 'UTF8')::jsonb)
      )
  ) = ($7::int8 = 1))
  AND ($8::bytea IS NULL OR state = $8)
  AND ($9::bytea IS NULL OR program = $9)
  AND ($10::bytea IS NULL OR project = $10)
  AND ($11::bytea IS NULL OR model = $11)
  AND ($12::int8 IS NULL OR (failed > 0) = ($12 = 1))
  AND ($13::int8 IS NULL OR last_message >= $13)
  AND ($14::int8 IS NULL OR last_message < $14);

-- name: entry_columns
-- The columns of an entry, with these names in index.py.
id, key, uid, title, state, visible, count, tokens, created, updated, agent, channel, prompt,
lost, damaged, problem, owner, mixed, program, project, model, forked_from, forked_at,
last_message, answers, unpriced, input_tokens, output_tokens, cost, failed;

-- name: list
SELECT {entry_columns}
FROM {schema}.catalog_session
WHERE {session_filter}
  AND ($15::int8 IS NULL OR {column} < $15 OR {column} = $15 AND key > $16::bytea)
ORDER BY {column} DESC, key
LIMIT $17;

-- name: totals
SELECT count(*), coalesce(sum(cost), 0)::float8, count(*) FILTER (WHERE answers > unpriced),
       count(*) FILTER (WHERE failed > 0)
FROM {schema}.catalog_session WHERE {session_filter};

-- name: facet
SELECT {column}, count(*), coalesce(sum(cost), 0)::float8,
       count(*) FILTER (WHERE answers > unpriced)
FROM {schema}.catalog_session WHERE {session_filter}
GROUP BY {column} ORDER BY count(*) DESC, {column} LIMIT $15;

-- name: tag_facet
SELECT tag, count(*), coalesce(sum(cost), 0)::float8,
       count(*) FILTER (WHERE answers > unpriced)
FROM {schema}.catalog_tag JOIN {schema}.catalog_session ON id = session
WHERE {session_filter}
GROUP BY tag ORDER BY count(*) DESC, tag LIMIT $15;

-- name: projects
SELECT project, count(*), coalesce(sum(cost), 0)::float8,
       count(*) FILTER (WHERE answers > unpriced)
FROM {schema}.catalog_session WHERE {session_filter}
GROUP BY project ORDER BY max(last_message) DESC, project LIMIT $15 OFFSET $16;

-- name: of_projects
SELECT {entry_columns}
FROM (
    SELECT *, row_number() OVER (PARTITION BY project ORDER BY last_message DESC, key) AS place
    FROM {schema}.catalog_session
    WHERE {session_filter} AND upper(encode(project, 'hex')) IN (
        SELECT jsonb_array_elements_text(convert_from($15, 'UTF8')::jsonb)
    )
) AS newest
WHERE place <= $16 ORDER BY last_message DESC, key;

-- name: entry
SELECT {entry_columns}
FROM {schema}.catalog_session WHERE listed = 1 AND key = $1;

-- name: tags
SELECT session, tag FROM {schema}.catalog_tag
WHERE session = ANY (ARRAY(SELECT jsonb_array_elements_text(convert_from($1, 'UTF8')::jsonb)::int8))
ORDER BY tag;

-- name: unreadable
SELECT key, problem FROM {schema}.catalog_session
WHERE listed = 1 AND problem IS NOT NULL ORDER BY key;

-- name: unlisted
SELECT id FROM {schema}.catalog_session WHERE listed = 0;

-- name: sessions_of
SELECT id FROM {schema}.catalog_session WHERE {session_filter};

-- name: blocks
SELECT block, oldest, newest FROM {schema}.catalog_block ORDER BY newest DESC;

-- name: matches
-- The rows are unordered: if the limit is exceeded, the caller searches by blocks. $2 has the
-- conditions that the tsquery cannot express, as JSON: for each term whether it is excluded, and
-- its forms. A form matches if `lines` contains all its pieces of text. A message is left out if it
-- has an excluded term, or lacks a required one.
SELECT id, at, session FROM (
    SELECT id FROM {schema}.catalog_words
    WHERE words @@ convert_from($1, 'UTF8')::tsquery
      AND ($2::bytea IS NULL OR NOT EXISTS (
          SELECT FROM jsonb_array_elements(convert_from($2, 'UTF8')::jsonb) AS asked (term)
          WHERE (term ->> 0)::boolean = (
              SELECT bool_or((
                  SELECT bool_and(strpos(lines, piece) > 0)
                  FROM jsonb_array_elements_text(form) AS pieces (piece)
              )) FROM jsonb_array_elements(term -> 1) AS forms (form)
          )
      ))
    LIMIT $3
) AS found JOIN {schema}.catalog_message USING (id);

-- name: matches_in
-- The same in some blocks. Each message has the mark of its block, so the index finds only these.
SELECT id, at, session FROM (
    SELECT id FROM {schema}.catalog_words
    WHERE words @@ (convert_from($1, 'UTF8')::tsquery && (
          SELECT string_agg(format('%L', '=b' || block), ' | ')::tsquery
          FROM jsonb_array_elements_text(convert_from($6, 'UTF8')::jsonb) AS asked (block)
      ))
      AND +id / $5 BETWEEN $3 / $5 AND $4 / $5
      AND ($2::bytea IS NULL OR NOT EXISTS (
          SELECT FROM jsonb_array_elements(convert_from($2, 'UTF8')::jsonb) AS asked (term)
          WHERE (term ->> 0)::boolean = (
              SELECT bool_or((
                  SELECT bool_and(strpos(lines, piece) > 0)
                  FROM jsonb_array_elements_text(form) AS pieces (piece)
              )) FROM jsonb_array_elements(term -> 1) AS forms (form)
          )
      ))
) AS found JOIN {schema}.catalog_message USING (id);

-- name: ranks
-- Lower is better. With 1, ts_rank takes the length of the message into account.
SELECT id, -ts_rank(words, convert_from($1, 'UTF8')::tsquery, 1) FROM {schema}.catalog_words
WHERE +id BETWEEN $2 AND $3
  AND id = ANY (ARRAY(SELECT jsonb_array_elements_text(convert_from($4, 'UTF8')::jsonb)::int8));

-- name: found_in
SELECT id, session, speech FROM {schema}.catalog_message
WHERE id = ANY (ARRAY(SELECT jsonb_array_elements_text(convert_from($1, 'UTF8')::jsonb)::int8));

-- name: entries
SELECT {entry_columns}
FROM {schema}.catalog_session
WHERE listed = 1
  AND id = ANY (ARRAY(SELECT jsonb_array_elements_text(convert_from($1, 'UTF8')::jsonb)::int8));

-- name: hit
SELECT key, uid, title, sight, seq, role, at, text
FROM {schema}.catalog_message AS message
JOIN {schema}.catalog_said USING (id)
JOIN {schema}.catalog_session AS session ON session.id = message.session
WHERE message.id = $1 AND listed = 1;

-- name: own
SELECT id, key, agent, listed, count, visible, sight, withdrawn FROM {schema}.catalog_session
WHERE key = $1;

-- name: owned
SELECT id, key, agent, listed, count, visible, sight, withdrawn, mixed FROM {schema}.catalog_session
WHERE sha256(owner) = sha256($1) AND owner = $1;

-- name: seen
SELECT id FROM {schema}.catalog_message WHERE session = $1 AND seq BETWEEN $2 AND $3;

-- name: newest_with
-- Searches block by block, newest ids first, until the limit is reached.
SELECT id FROM (SELECT block FROM {schema}.catalog_block ORDER BY block DESC) AS blocks
CROSS JOIN LATERAL (
    SELECT id FROM {schema}.catalog_words
    WHERE words @@ (convert_from($1, 'UTF8')::tsquery && format('%L', '=b' || block)::tsquery)
    ORDER BY +id DESC
) AS found
LIMIT nullif($2, -1);

-- name: newest_with_in
-- The same for a period. The ids of its messages are in the given range of ids.
SELECT id FROM (
    SELECT block FROM {schema}.catalog_block WHERE newest >= $4 AND oldest < $5 ORDER BY block DESC
) AS blocks
CROSS JOIN LATERAL (
    SELECT id FROM {schema}.catalog_words JOIN {schema}.catalog_message USING (id)
    WHERE words @@ (convert_from($1, 'UTF8')::tsquery && format('%L', '=b' || block)::tsquery)
      AND +id BETWEEN $2 AND $3 AND at >= $4 AND at < $5
    ORDER BY +id DESC
) AS found
LIMIT nullif($6, -1);

-- name: where_said
SELECT id, session, seq FROM {schema}.catalog_message
WHERE id = ANY (ARRAY(SELECT jsonb_array_elements_text(convert_from($1, 'UTF8')::jsonb)::int8))
  AND role NOT IN ('system', 'developer');

-- name: said_at
-- A character takes at most four bytes. The caller removes a truncated last character.
SELECT session.key, uid, message.seq, role, at, substr(text, 1, (4 * $1)::int4)
FROM jsonb_array_elements(convert_from($2, 'UTF8')::jsonb) WITH ORDINALITY AS asked (place, number)
JOIN {schema}.catalog_message AS message
  ON message.session = (place ->> 0)::int8 AND message.seq = (place ->> 1)::int8
JOIN {schema}.catalog_said AS said ON said.id = message.id
JOIN {schema}.catalog_session AS session ON session.id = message.session
WHERE role NOT IN ('system', 'developer')
ORDER BY number;

-- name: calibration
SELECT ratio, weight FROM {schema}.catalog_calibration WHERE model = $1;

-- name: calibrate
INSERT INTO {schema}.catalog_calibration (model, ratio, weight) VALUES ($1, $2, $3)
ON CONFLICT (model) DO UPDATE SET ratio = excluded.ratio, weight = excluded.weight;
