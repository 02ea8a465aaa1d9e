-- If schema/0005 has not run, the processes of lease holders are unknown. If schema/0002 has not run
-- either, its view exists already.
CREATE TEMP VIEW IF NOT EXISTS lease AS
SELECT epoch, namespace, key, holder, since, expires, '' AS process FROM main.lease;
