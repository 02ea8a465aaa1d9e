-- If schema/0002 has not run, there are no leases.
CREATE TEMP VIEW lease AS
SELECT
    0 AS epoch, '' AS namespace, '' AS key, '' AS holder, '' AS since, 0.0 AS expires, '' AS process
WHERE 0;
