#!/usr/bin/env bash
# Eight readers at once for ten seconds; one answer in ten is cut and resumed. docs/bench.md has all flags.
set -euo pipefail
stream-gw bench "${BASE_URL:-http://127.0.0.1:8080}" --key "${API_KEY:-sk-dev}" --model "${MODEL:-sim-small}" \
    --concurrency "${USERS:-8}" --duration "${DURATION:-10s}" --cut 0.1 "$@"
