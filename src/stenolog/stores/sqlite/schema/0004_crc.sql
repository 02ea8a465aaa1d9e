-- SQLite does not notice a byte that changed on the disk, so each message gets a checksum. Older
-- messages have none and are not checked.
ALTER TABLE message ADD COLUMN crc INTEGER;
