-- Inputs of clients to running streams: what became of each, and the time that their next answers took.

ALTER TABLE requests
    ADD COLUMN IF NOT EXISTS steer_us Int64 CODEC(T64, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS inputs Int64 CODEC(T64, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS inputs_refused Int64 CODEC(T64, ZSTD(1));

ALTER TABLE attempts
    ADD COLUMN IF NOT EXISTS steer_us Int64 CODEC(T64, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS inputs_json String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS inputs Array(Tuple(at_us Int64, result String, reason String, waited_us Int64, answered_us Int64))
        ALIAS JSONExtract(inputs_json, 'Array(Tuple(at_us Int64, result String, reason String, waited_us Int64, answered_us Int64))');
