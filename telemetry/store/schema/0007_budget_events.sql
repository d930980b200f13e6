-- Whose budget an event is about.

ALTER TABLE fleet ADD COLUMN IF NOT EXISTS tenant LowCardinality(String) AFTER asked_by;
