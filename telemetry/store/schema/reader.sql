-- A role that may read the telemetry tables and nothing else: no other table, no table function that leaves ClickHouse,
-- no setting of the server. Analysts' SQL should run as a user with this role alone (STREAM_GW_CLICKHOUSE_READER):
-- it is then bounded by ClickHouse itself, also where the check of stream-gw telemetry has a fault.
--
-- Run it once, in the database of the telemetry, as a user that may manage access:
--
--     clickhouse-client --database stream_gw --queries-file reader.sql
--     clickhouse-client --query "CREATE USER analyst IDENTIFIED BY '...' DEFAULT ROLE stream_gw_reader"
--
-- The two statements of a user who exists already: GRANT stream_gw_reader TO name; SET DEFAULT ROLE ALL TO name.

CREATE ROLE IF NOT EXISTS stream_gw_reader;

GRANT SELECT ON requests TO stream_gw_reader;
GRANT SELECT ON attempts TO stream_gw_reader;
GRANT SELECT ON fleet TO stream_gw_reader;
GRANT SELECT ON requests_minute TO stream_gw_reader;
GRANT SELECT ON attempts_minute TO stream_gw_reader;
GRANT SELECT ON usage_hour TO stream_gw_reader;
GRANT SELECT ON bills TO stream_gw_reader;
GRANT SELECT ON cost_hour TO stream_gw_reader;
GRANT SELECT ON ingest_progress TO stream_gw_reader;
GRANT SELECT ON lengths_hour TO stream_gw_reader;
GRANT SELECT ON speeds_hour TO stream_gw_reader;
GRANT SELECT ON replicas_latest TO stream_gw_reader;
GRANT SELECT ON ingest_state TO stream_gw_reader;

-- The schema's version, which a process checks before it reads
GRANT SELECT ON migrations TO stream_gw_reader;
