-- Named statements, read by catalog_database.py.

-- name: version
SELECT version FROM catalog_about;

-- name: about
SELECT made, writes FROM catalog_about;

-- The step is random: two copies of a file that are written separately do not get the same number.
-- name: count_write
UPDATE catalog_about SET writes = writes + 1 + (random() & 1048575);

-- name: stamps
SELECT key, stamp FROM catalog_session;

-- name: keys_newest_first
SELECT key FROM catalog_session ORDER BY updated DESC, key;

-- name: current_stamps
-- A row is outdated if the price list is newer, and some of its answers had no price.
SELECT key, CASE WHEN unpriced = 0 OR priced >= ? THEN stamp END FROM catalog_session;

-- name: row
SELECT version, listed, uid, generation, archived, indexed, count, tokens, sight,
       prompt, CASE WHEN unpriced = 0 OR priced >= ?1 THEN stamp END, owner, mixed,
       (SELECT at FROM catalog_message WHERE session = catalog_session.id AND seq = indexed),
       unpriced > 0 AND priced < ?1
FROM catalog_session WHERE key = ?2;

-- name: row_version
SELECT id, version, owner FROM catalog_session WHERE key = ?;

-- name: add_row
INSERT INTO catalog_session (key, owner, version, listed, uid, generation, archived, indexed, count,
                             visible, tokens, sight, state, title, prompt, created, updated, lost,
                             damaged)
VALUES (?, '', 0, 0, '', 0, 0, 0, 0, 0, 0, '[]', '', '', '', 0, 0, 0, 0);

-- name: own_row
UPDATE catalog_session SET owner = ?, mixed = ? WHERE id = ?;

-- name: prompts
SELECT role, text FROM catalog_message JOIN catalog_said USING (id)
WHERE session = ? AND role = 'user' ORDER BY seq;

-- name: begin_row
UPDATE catalog_session
SET version = version + 1, stamp = NULL, listed = 0, uid = ?, generation = ?, archived = ?,
    indexed = 0, tokens = 0, sight = '[]', prompt = '', problem = NULL, model = '',
    last_message = 0, answers = 0, unpriced = 0, priced = ?, input_tokens = 0, output_tokens = 0,
    cost = 0, failed = 0
WHERE id = ?;

-- name: shrink_row
UPDATE catalog_session SET version = version + 1, count = count - ? WHERE id = ?;

-- name: advance_row
UPDATE catalog_session
SET version = version + 1, stamp = NULL, indexed = ?, count = count + ?
WHERE id = ?;

-- name: settle_row
UPDATE catalog_session
SET version = version + 1, stamp = ?, listed = ?, uid = ?, generation = ?, archived = ?,
    indexed = ?, count = count + ?, visible = ?, tokens = ?, sight = ?, withdrawn = ?, state = ?,
    title = ?, prompt = ?, created = ?, updated = ?, agent = ?, channel = ?, lost = ?, damaged = ?,
    problem = ?, program = ?, project = ?, forked_from = ?, forked_at = ?,
    last_message = max(last_message, ?)
WHERE id = ?;

-- name: add_usage
-- The limit prevents an overflow: any program can write token counts.
UPDATE catalog_session
SET model = coalesce(?, model), last_message = max(last_message, ?), answers = answers + ?,
    unpriced = unpriced + ?, input_tokens = min(input_tokens + ?, 4000000000000000000),
    output_tokens = min(output_tokens + ?, 4000000000000000000),
    cost = min(cost + ?, 9000000000000000), failed = failed + ?, priced = min(priced, ?)
WHERE id = ?;

-- name: remove_row
DELETE FROM catalog_session WHERE id = ?;

-- name: remove_tags
DELETE FROM catalog_tag WHERE session = ?;

-- name: add_tag
INSERT OR IGNORE INTO catalog_tag (tag, session) VALUES (?, ?);

-- name: last_id
SELECT coalesce(max(id), 0) FROM catalog_message;

-- name: add_message
INSERT INTO catalog_message (id, session, seq, role, at, tokens, speech)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: add_said
INSERT INTO catalog_said (id, text) VALUES (?, ?);

-- name: add_words
INSERT INTO catalog_words (rowid, parts, more, marks) VALUES (?, ?, ?, ?);

-- name: add_block
INSERT INTO catalog_block (block, oldest, newest) VALUES (?, ?, ?)
ON CONFLICT (block) DO UPDATE
SET oldest = min(oldest, excluded.oldest), newest = max(newest, excluded.newest);

-- name: some_messages
SELECT id, role, text FROM catalog_message JOIN catalog_said USING (id)
WHERE session = ? ORDER BY seq DESC LIMIT ?;

-- name: remove_message
DELETE FROM catalog_message WHERE id = ?;

-- name: remove_said
DELETE FROM catalog_said WHERE id = ?;

-- name: remove_words
INSERT INTO catalog_words (catalog_words, rowid, parts, more, marks)
VALUES ('delete', ?, ?, ?, ?);

-- name: tokens_in
SELECT coalesce(sum(tokens), 0) FROM catalog_message
WHERE session = ? AND seq BETWEEN ? AND ?;

-- name: session_filter
-- This condition replaces {session_filter} in the statements below.
listed
  AND (?1 IS NULL OR key >= ?1 AND key < CAST(?2 AS TEXT))
  AND (?3 IS NULL OR id IN (SELECT session FROM catalog_tag WHERE tag = ?3))
  AND (?4 IS NULL OR channel = ?4)
  AND (?5 IS NULL OR agent = ?5)
  AND (?6 IS NULL OR (hex(key) IN (SELECT value FROM json_each(?6))) = ?7)
  AND (?8 IS NULL OR state = ?8)
  AND (?9 IS NULL OR program = ?9)
  AND (?10 IS NULL OR project = ?10)
  AND (?11 IS NULL OR model = ?11)
  AND (?12 IS NULL OR (failed > 0) = ?12)
  AND (?13 IS NULL OR last_message >= ?13)
  AND (?14 IS NULL OR last_message < ?14);

-- name: entry_columns
-- The columns of an entry, with these names in index.py.
id, key, uid, title, state, visible, count, tokens, created, updated, agent, channel, prompt,
lost, damaged, problem, owner, mixed, program, project, model, forked_from, forked_at,
last_message, answers, unpriced, input_tokens, output_tokens, cost, failed;

-- name: list
-- The caller replaces {column} by the column of the order.
SELECT {entry_columns}
FROM catalog_session
WHERE {session_filter}
  AND (?15 IS NULL OR {column} < ?15 OR {column} = ?15 AND key > ?16)
ORDER BY {column} DESC, key
LIMIT ?17;

-- name: totals
SELECT count(*), total(cost), coalesce(sum(answers > unpriced), 0), coalesce(sum(failed > 0), 0)
FROM catalog_session WHERE {session_filter};

-- name: facet
-- The caller replaces {column} by the column of the facet.
SELECT {column}, count(*), total(cost), coalesce(sum(answers > unpriced), 0)
FROM catalog_session WHERE {session_filter}
GROUP BY {column} ORDER BY count(*) DESC, {column} LIMIT ?15;

-- name: tag_facet
SELECT tag, count(*), total(cost), coalesce(sum(answers > unpriced), 0)
FROM catalog_tag JOIN catalog_session ON id = session WHERE {session_filter}
GROUP BY tag ORDER BY count(*) DESC, tag LIMIT ?15;

-- name: projects
SELECT project, count(*), total(cost), coalesce(sum(answers > unpriced), 0)
FROM catalog_session WHERE {session_filter}
GROUP BY project ORDER BY max(last_message) DESC, project LIMIT ?15 OFFSET ?16;

-- name: of_projects
-- The newest sessions of each of these projects.
SELECT {entry_columns}
FROM (
    SELECT *, row_number() OVER (PARTITION BY project ORDER BY last_message DESC, key) AS place
    FROM catalog_session
    WHERE {session_filter} AND hex(project) IN (SELECT value FROM json_each(?15))
)
WHERE place <= ?16 ORDER BY last_message DESC, key;

-- name: entry
SELECT {entry_columns}
FROM catalog_session WHERE listed AND key = ?;

-- name: tags
SELECT session, tag FROM catalog_tag
WHERE session IN (SELECT value FROM json_each(?)) ORDER BY tag;

-- name: unreadable
SELECT key, problem FROM catalog_session WHERE listed AND problem IS NOT NULL ORDER BY key;

-- name: unlisted
SELECT id FROM catalog_session WHERE NOT listed;

-- name: sessions_of
SELECT id FROM catalog_session WHERE {session_filter};

-- name: blocks
SELECT block, oldest, newest FROM catalog_block ORDER BY newest DESC;

-- name: matches
SELECT id, at, session FROM catalog_words
JOIN catalog_message ON catalog_message.id = catalog_words.rowid
WHERE catalog_words MATCH ? ORDER BY catalog_words.rowid DESC LIMIT ?;

-- name: matches_in
SELECT id, at, session FROM catalog_words
JOIN catalog_message ON catalog_message.id = catalog_words.rowid
WHERE catalog_words MATCH ? AND catalog_words.rowid BETWEEN ? AND ?
  AND catalog_words.rowid / ? IN (SELECT value FROM json_each(?));

-- name: ranks
-- The plus prevents one lookup per id, because each lookup would count all messages with the word
-- again.
SELECT rowid, bm25(catalog_words, 1.0, 1.0, 0.0) FROM catalog_words
WHERE catalog_words MATCH ? AND rowid BETWEEN ? AND ?
  AND +rowid IN (SELECT value FROM json_each(?));

-- name: found_in
-- The session of each of these messages, and whether it is speech.
SELECT id, session, speech FROM catalog_message WHERE id IN (SELECT value FROM json_each(?));

-- name: entries
SELECT {entry_columns}
FROM catalog_session WHERE listed AND id IN (SELECT value FROM json_each(?));

-- name: hit
SELECT key, uid, title, sight, seq, role, at, text
FROM catalog_message
JOIN catalog_said USING (id)
JOIN catalog_session ON catalog_session.id = catalog_message.session
WHERE catalog_message.id = ? AND listed;

-- name: own
SELECT id, key, agent, listed, count, visible, sight, withdrawn FROM catalog_session
WHERE key = ?;

-- name: owned
-- The same for all sessions of an owner.
SELECT id, key, agent, listed, count, visible, sight, withdrawn, mixed FROM catalog_session
WHERE owner = ?;

-- name: seen
SELECT id FROM catalog_message WHERE session = ? AND seq BETWEEN ? AND ?;

-- name: newest_with
SELECT rowid FROM catalog_words WHERE catalog_words MATCH ? ORDER BY rowid DESC LIMIT ?;

-- name: newest_with_in
-- The same for a period. The ids of its messages are in the given range of ids.
SELECT id FROM catalog_words
JOIN catalog_message ON catalog_message.id = catalog_words.rowid
WHERE catalog_words MATCH ? AND catalog_words.rowid BETWEEN ? AND ? AND at >= ? AND at < ?
ORDER BY catalog_words.rowid DESC LIMIT ?;

-- name: where_said
SELECT id, session, seq FROM catalog_message
WHERE id IN (SELECT value FROM json_each(?)) AND role NOT IN ('system', 'developer');

-- name: said_at
-- Returns the messages at these positions (session and seq).
SELECT catalog_session.key, uid, seq, role, at, substr(text, 1, ?)
FROM json_each(?) AS place
CROSS JOIN catalog_message
ON session = json_extract(place.value, '$[0]') AND seq = json_extract(place.value, '$[1]')
JOIN catalog_said ON catalog_said.id = catalog_message.id
JOIN catalog_session ON catalog_session.id = session
WHERE role NOT IN ('system', 'developer');

-- name: calibration
SELECT ratio, weight FROM catalog_calibration WHERE model = ?;

-- name: calibrate
INSERT INTO catalog_calibration (model, ratio, weight) VALUES (?, ?, ?)
ON CONFLICT (model) DO UPDATE SET ratio = excluded.ratio, weight = excluded.weight;
