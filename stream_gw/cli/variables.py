"""Names of the environment variables that stream-gw reads, and a warning of those that nothing reads.

The names stand here as text: the settings of all roles take 0.1 to 0.2 s of CPU time to import, and every process looks
at its environment when it starts. A test compares them with the settings.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping

_log = logging.getLogger(__name__)

ENV = "STREAM_GW_"
_SETTINGS = """
ACCESS_LOG_ONE_IN CELLS CLICKHOUSE CLICKHOUSE_READER CORS_ORIGINS DATABASE_URL DEV_KEY DRAIN_DELAY_S DRAIN_S
DRAIN_SPREAD_S DRAIN_STUCK ENGINE EVENTS EVENTS_MEMORY_BYTES_MAX EVENTS_REDIS_BYTES_MAX EVENTS_SPOOL
EVENTS_SPOOL_BYTES_MAX EVENTS_TOPIC FLUSH_FLOOR_MS GATEWAY GPU_HOUR_MICRO HARDWARE HOST IMAGE_MODELS
ITL_OBJECTIVE_MS KAFKA_CA KAFKA_CERT KAFKA_KEY KAFKA_PASSWORD KAFKA_SASL KAFKA_SERVERS KAFKA_TLS KAFKA_USER
KEPT_GRACE_S KEYS_FILE KEY_PEPPER KEY_PEPPER_PREVIOUS KV_BYTES_PER_TOKEN KV_EVENTS LEASE_RENEW_S LEASE_TTL_S
LIMITS_FAIL_OPEN LOG_FORMAT LOG_LEVEL MEDIA_DOMAINS METRICS_HOST METRICS_PORT MODEL MODERATION_FAIL MODERATION_KEY
MODERATION_MODEL MODERATION_RULES_FILE MODERATION_TIMEOUT_S MODERATION_URL MODERATION_WINDOW_CHARS
OTLP_ENDPOINT OTLP_NAMES PARTITIONS PLAIN_GRACE_S POD_ACCOUNT POD_DELETION_COST POD_SELECTOR POOL POOLS_FILE
PORT QUEUE_MAX QUEUE_WAIT_S READY_WITHOUT_REDIS_S RECONCILE_HOUR REDIS_URL REGION REPLICA RESPONSE_BYTES_MAX
RESPONSE_DAYS RESPONSE_HELD_BYTES_MAX RESPONSE_STORED_BYTES_MAX REVISION ROOM_RATIO SCALER_CERT
SCALER_CLIENT_CA SCALER_HOST SCALER_KEY SCALER_PORT SERVE_WITHOUT_BILLS SIM STANDBY STUCK_RATIO
TELEMETRY_BLOCK_MB TELEMETRY_BLOCK_ROWS TELEMETRY_CONTENT_DAYS TELEMETRY_CREATE_TOPICS TELEMETRY_DLQ_TOPIC
TELEMETRY_DRAIN_S TELEMETRY_GROUP TELEMETRY_HOST TELEMETRY_LINGER_S TELEMETRY_PORT TELEMETRY_RAW_DAYS
TELEMETRY_ROLLUP_DAYS TELEMETRY_SESSION_S TELEMETRY_TOKEN TELEMETRY_URL TOKEN_SECRET TOKEN_SECRETS_ACCEPTED
TRACE_ONE_IN TRACE_TOKENS_ONE_IN UPSTREAM UPSTREAM_API_KEY UPSTREAM_SLOTS UPSTREAM_STEPS VLLM_FLAGS
VLLM_PYTHON VLLM_START_S
"""
_OTHERS = """
BUDGET ITL_OBJECTIVE_S STEPS TRACES
CHAOS_EVENTS CHAOS_REQUESTS CHAOS_SEED COMPILE FAILED_TESTS HYPOTHESIS KEY ONLY_TESTS QUICK SIM_PLANTED_SEEDS
SIM_SEED SIM_SEEDS URL
"""
SETTINGS = frozenset(_SETTINGS.split())
"""Settings of all roles, without the prefix. One environment may serve every role."""
_KNOWN = SETTINGS | frozenset(_OTHERS.split())
"""The settings, then the variables of vLLM's plugins and of ``simulate``, then those of builds and tests."""
_TESTS = "TEST_"
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")
"""Variables that Kubernetes sets for a Service named ``stream-gw-…``; one more, ``…_PORT``, has a URL."""


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with our prefix that nothing reads, each with the setting nearest to it, or empty."""
    found = {}
    for variable, value in sorted(environ.items()):
        name = variable.upper()  # the settings ignore case
        if not name.startswith(ENV):
            continue
        name = name.removeprefix(ENV)
        if name in _KNOWN or name.startswith(_TESTS):
            continue
        if _SERVICE_LINK.search(name) or (name.endswith("_PORT") and value.startswith(("tcp://", "udp://"))):
            continue
        close = difflib.get_close_matches(name, sorted(SETTINGS), n=1)
        found[variable] = ENV + close[0] if close else ""
    return found


def warn_of_unknown_variables() -> None:
    """Log each variable of this process's environment that nothing reads, because its value has no effect."""
    for variable, nearest in unknown_variables(os.environ).items():
        _log.warning("unknown environment variable ignored", extra={"variable": variable, "nearest_known": nearest})
