-- In a SQLite store: what is purged must leave no trace in the index either, at the same moment. Each
-- purge puts a row into `purge`, and nothing else does. All of the index goes then, and is made anew
-- when it is next asked for: of single words an index cannot be rid for sure. And `made` changes, so
-- that what somebody read before is not put in afterwards.

-- name: purged
CREATE TRIGGER catalog_purged AFTER INSERT ON purge
BEGIN
    DELETE FROM catalog_session;
    DELETE FROM catalog_tag;
    DELETE FROM catalog_message;
    DELETE FROM catalog_said;
    DELETE FROM catalog_block;
    INSERT INTO catalog_words (catalog_words) VALUES ('delete-all');
    UPDATE catalog_about SET made = random();
END;
