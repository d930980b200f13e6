-- What became of requests that came faster than their pool began them.

ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS shifted_to LowCardinality(String),
    ADD COLUMN IF NOT EXISTS backlog_ms Int64 CODEC(T64, ZSTD(1));
