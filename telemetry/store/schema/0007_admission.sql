-- Regions that a request was bound to, separated by commas.
ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS regions LowCardinality(String);
