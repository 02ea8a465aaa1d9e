-- Where schema/0005 has not run: of no holder is known which process it is. Where 0002 has not run,
-- either, its view is there already.
CREATE TEMP VIEW IF NOT EXISTS lease AS
SELECT epoch, namespace, key, holder, since, expires, '' AS process FROM main.lease;
