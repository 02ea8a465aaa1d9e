-- The turn of a process that was killed is free at once, and not when its time is over. Of leases
-- from before nothing is known, and they are waited for.
ALTER TABLE lease ADD COLUMN process TEXT NOT NULL DEFAULT '';
