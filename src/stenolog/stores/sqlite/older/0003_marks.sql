-- Where schema/0003 has not run: where there are sessions, somebody may have given aliases.
CREATE TEMP VIEW mark AS
SELECT DISTINCT namespace, 'aliases' AS name, 1 AS number FROM main.session;
