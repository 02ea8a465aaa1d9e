-- With this column, the lease of a killed process is free at once, before it expires. The processes of
-- older leases are unknown, so these leases last until they expire.
ALTER TABLE lease ADD COLUMN process TEXT NOT NULL DEFAULT '';
