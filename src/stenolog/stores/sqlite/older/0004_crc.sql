-- If schema/0004 has not run, no message has a checksum, and none is checked.
CREATE TEMP VIEW message AS SELECT id, session, seq, at, body, NULL AS crc FROM main.message;
