-- Check of structured replies against their schema, replies that were made again, and the time that both took.

ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS check_us Int64 CODEC(T64, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS schema_check LowCardinality(String),
    ADD COLUMN IF NOT EXISTS repairs Int64 CODEC(T64, ZSTD(1));

ALTER TABLE attempts ADD COLUMN IF NOT EXISTS check_us Int64 CODEC(T64, ZSTD(1));
