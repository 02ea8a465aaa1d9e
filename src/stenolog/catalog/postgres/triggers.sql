-- What is purged must leave no trace in the index either, at the same moment (../triggers.sql). Only a
-- purge deletes messages. The files of the index go with its rows, because an index of words never
-- forgets one; but where somebody reads the tables for long, as a dump does, the rows have to do.
--
-- Who made the index empties it, whoever purges; and tables that are gone keep nobody from purging.
-- `about` comes first here as everywhere: who would wait for another one waits there.

-- name: purged
CREATE OR REPLACE FUNCTION {schema}.catalog_purged() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog SET lock_timeout = '1s'
AS $$
DECLARE
    known text[] := ARRAY(
        SELECT format('%I.%I', TG_TABLE_SCHEMA, TG_ARGV[0] || name)
        FROM unnest(ARRAY['about', 'session', 'tag', 'message', 'said', 'block', 'words'])
            WITH ORDINALITY AS every (name, number)
        WHERE to_regclass(format('%I.%I', TG_TABLE_SCHEMA, TG_ARGV[0] || name)) IS NOT NULL
        ORDER BY number
    );
    about text := format('%I.%I', TG_TABLE_SCHEMA, TG_ARGV[0] || 'about');
    one   text;
    other text := format('UPDATE %s SET made = ((random() - 0.5) * 1.8e19)::int8', about);
BEGIN
    IF NOT about = ANY (known) THEN
        -- Not an index that anybody would go on with.
        FOREACH one IN ARRAY known LOOP
            EXECUTE format('DROP TABLE %s', one);
        END LOOP;
        RETURN NULL;
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', array_to_string(known, ', '));
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

-- name: on_purge
CREATE TRIGGER catalog_purged AFTER DELETE ON {schema}.message
FOR EACH STATEMENT EXECUTE FUNCTION {schema}.catalog_purged('catalog_');
