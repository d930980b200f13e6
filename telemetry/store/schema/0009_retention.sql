-- Days that a row is kept, by its tenant's plan: 0 as the platform is set, -1 not at all (the roll-ups have it). Rows of
-- one part then expire at different times, so a part no longer waits for its last row.

ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS retention_days Int64 CODEC(T64, ZSTD(1));

ALTER TABLE attempts
    ADD COLUMN IF NOT EXISTS retention_days Int64 CODEC(T64, ZSTD(1));

ALTER TABLE requests MODIFY SETTING ttl_only_drop_parts = 0;

ALTER TABLE attempts MODIFY SETTING ttl_only_drop_parts = 0;
