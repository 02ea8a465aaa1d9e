-- SQLite does not see that a letter changed on the disk. Messages from before have none, and are
-- believed.
ALTER TABLE message ADD COLUMN crc INTEGER;
