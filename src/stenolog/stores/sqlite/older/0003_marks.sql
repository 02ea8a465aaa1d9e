-- If schema/0003 has not run and there are sessions, some may have aliases.
CREATE TEMP VIEW mark AS
SELECT DISTINCT namespace, 'aliases' AS name, 1 AS number FROM main.session;
