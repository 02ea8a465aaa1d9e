-- The catalog has moved to a file beside the database (docs/decisions/0017). Its old tables, one set
-- for each namespace, are dropped, and the trigger last: if this is interrupted, a purge by an earlier
-- version fails, instead of leaving text behind. The names of the tables are known to the database
-- only, so this only returns the statements; schema.py runs them first, because one may fail.
SELECT format('DROP %s "%w"', type, name)
FROM sqlite_schema
WHERE type = 'trigger' AND name GLOB 'catalog_*_purged'
   OR type = 'table' AND (
      name GLOB 'catalog_*_words' OR name GLOB 'catalog_*_block' OR name GLOB 'catalog_*_said'
      OR name GLOB 'catalog_*_message' OR name GLOB 'catalog_*_tag'
      OR name GLOB 'catalog_*_session' OR name GLOB 'catalog_*_about'
      OR name GLOB 'catalog_*_calibration'
   )
ORDER BY type;
