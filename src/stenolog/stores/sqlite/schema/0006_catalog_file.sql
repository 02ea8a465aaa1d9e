-- The catalog has moved to a file next to the database (docs/decisions/0017). Its old tables, one set
-- per namespace, are dropped, and the trigger last: after an interruption, a purge by an earlier
-- version fails instead of leaving text behind. Only the database knows the names of the tables, so
-- this script returns the statements. database_file.py runs them before the migration, because one
-- may fail.
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
