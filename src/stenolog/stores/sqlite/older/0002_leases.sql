-- Where schema/0002 has not run: nobody ever had a turn.
CREATE TEMP VIEW lease AS
SELECT
    0 AS epoch, '' AS namespace, '' AS key, '' AS holder, '' AS since, 0.0 AS expires, '' AS process
WHERE 0;
