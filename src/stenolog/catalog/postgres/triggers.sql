-- A purge must remove all its data from the catalog in the same transaction. Sessions are deleted
-- only by a purge, and messages also by a copy that replaces a session. The tables are truncated,
-- because a full-text index keeps deleted words in its files. If another process reads the tables
-- for a long time, such as a dump, their rows are deleted instead.
--
-- The function runs as the role that created the catalog, regardless of the role that purges.
-- Missing tables do not prevent a purge. `about` is locked first, as everywhere, to avoid
-- deadlocks.
--
-- Because the function runs with the rights of its creator, the tables that it empties are fixed
-- here, no other role may create a trigger with it, and a trigger on another table is rejected.
-- {namespace} is in hexadecimal.

-- name: purged
CREATE OR REPLACE FUNCTION {schema}.catalog_purged() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    own   CONSTANT text := convert_from(decode('{namespace}', 'hex'), 'UTF8');
    about CONSTANT text := '{schema}.catalog_about';
    known text[];
    one   text;
    other text := format('UPDATE %s SET made = ((random() - 0.5) * 1.8e19)::int8', about);
BEGIN
    IF TG_RELID = to_regclass('{schema}.message') THEN
        -- A session that no longer exists may have been in this namespace.
        PERFORM FROM (SELECT DISTINCT session FROM gone) AS lost
        LEFT JOIN {schema}.session AS life ON life.id = lost.session
        WHERE life.namespace IS NULL OR life.namespace = own;
    ELSIF TG_RELID = to_regclass('{schema}.session') THEN
        -- The catalog has the title even of a session without messages.
        PERFORM FROM gone WHERE namespace = own;
    ELSE
        RAISE insufficient_privilege USING MESSAGE = 'not for a table outside of {schema}';
    END IF;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    known := ARRAY(
        SELECT name
        FROM unnest(ARRAY[
            about, '{schema}.catalog_session', '{schema}.catalog_tag', '{schema}.catalog_message',
            '{schema}.catalog_said', '{schema}.catalog_block', '{schema}.catalog_words'
        ]) WITH ORDINALITY AS every (name, number)
        WHERE to_regclass(name) IS NOT NULL
        ORDER BY number
    );
    IF NOT about = ANY (known) THEN
        -- Without `about` the catalog is unusable.
        FOREACH one IN ARRAY known LOOP
            EXECUTE format('DROP TABLE %s', one);
        END LOOP;
        RETURN NULL;
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', array_to_string(known, ', '));
        -- guard: catalog-purge-truncates
        EXECUTE format('TRUNCATE %s', array_to_string(known[2:], ', '));
        EXECUTE other;
    EXCEPTION WHEN lock_not_available THEN
        SET LOCAL lock_timeout = '30s';
        EXECUTE other;
        FOREACH one IN ARRAY known[2:] LOOP
            EXECUTE format('DELETE FROM %s', one);
        END LOOP;
    END;
    RETURN NULL;
END
$$;

-- name: not_for_others
REVOKE EXECUTE ON FUNCTION {schema}.catalog_purged() FROM PUBLIC;

-- name: on_message
CREATE OR REPLACE TRIGGER catalog_purged AFTER DELETE ON {schema}.message
REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.catalog_purged();

-- name: on_session
CREATE OR REPLACE TRIGGER catalog_purged AFTER DELETE ON {schema}.session
REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.catalog_purged();
