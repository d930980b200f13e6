#!/usr/bin/env bash
# Streams an answer, reads it again from its middle, and cancels another one. Needs curl alone.
set -euo pipefail
base="${BASE_URL:-http://127.0.0.1:8080}"
key="Authorization: Bearer ${API_KEY:-sk-dev}"
model="${MODEL:-sim-small}"
headers="$(mktemp)"
trap 'rm -f "$headers"' EXIT

ask() { # max_tokens, flags of curl
    local tokens="$1"
    shift
    curl -sSN "$@" -D "$headers" "$base/v1/chat/completions" -H "$key" -H 'Content-Type: application/json' -d "{
        \"model\": \"$model\", \"stream\": true, \"max_tokens\": $tokens,
        \"messages\": [{\"role\": \"user\", \"content\": \"Tell me of rivers.\"}]}"
}
stream_id() { sed -n 's/^x-stream-id: \(resp_[0-9a-f]*\).*/\1/Ip' "$headers"; }

echo "# an answer, as server-sent events"
ask 20
id="$(stream_id)"

echo "# the same stream after its fifth frame, as any gateway gives it"
curl -sSN "$base/v1/streams/$id?after=1-5" -H "$key"

echo "# an answer whose reader leaves after half a second, and is then cancelled"
ask 5000 --max-time 0.5 >/dev/null 2>&1 || true
curl -sS -X POST "$base/v1/streams/$(stream_id)/cancel" -H "$key"
echo
