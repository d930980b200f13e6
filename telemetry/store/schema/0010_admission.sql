-- Regions that a request was bound to, separated by commas; and the model that it named if a smaller one answered.

ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS regions LowCardinality(String),
    ADD COLUMN IF NOT EXISTS asked_model LowCardinality(String);
