-- Who wanted what happened to the fleet.

ALTER TABLE fleet ADD COLUMN IF NOT EXISTS asked_by LowCardinality(String) AFTER figures;
