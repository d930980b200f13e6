"""Writes ``docs/traces.md`` from the made-up hour: ``python -m tests.telemetry.cookbook > docs/traces.md``."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence

from telemetry.ask.http import HttpAsk
from telemetry.ask.queries import HOUR_US, SAVED
from telemetry.ask.views import VIEWS
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.fleet import START_US, Fleet, fleet

WINDOW = {"since": "2026-11-20T10:00:00Z", "until": "2026-11-20T11:00:00Z"}
NOW_US = START_US + HOUR_US
TOP = "6"

QUESTIONS: Sequence[tuple[str, str, dict[str, str]]] = (
    ("On what do requests spend their time?", "where_time_goes", {}),
    ("Which requests spent most in one phase?", "slow", {"phase": "engine_queue"}),
    ("How did the time to the first token go, minute by minute?", "ttft_by_minute", {"model": "phi-4"}),
    ("What went wrong, how often, and for whom?", "errors", {}),
    ("Who uses the platform most, and what is it like for them?", "tenants", {}),
    ("Is one replica slower than the others of its pool?", "replicas", {"pool": "phi"}),
    ("How far apart do tokens come?", "token_gaps", {}),
    ("Which replicas lost streams or gave them away?", "faults", {}),
    ("What did streams that outlived their replica notice?", "recoveries", {}),
    ("Why did requests go where they went, and was it worth it?", "placements", {"model": "llama-70b"}),
    ("Where is the gateways' belief of what is cached wrong?", "believed", {}),
    ("How much of their prompts do tenants find cached?", "cached", {}),
    ("Which sessions wander between replicas?", "sessions", {"model": "llama-70b"}),
    ("Whose connections take tokens too slowly?", "stalls", {}),
    ("How often do readers come back, and after how long?", "resumes", {}),
    ("When did requests wait for a replica?", "queues", {"pool": "llama"}),
    ("Who was turned away, and with which answer?", "refusals", {}),
    ("How much was computed that nobody was shown?", "wasted", {}),
    ("How many requests are served far away, and what does it cost?", "regions", {}),
    ("Do the phases add up?", "residuals", {}),
    ("What happened to the fleet?", "fleet", {"pool": "llama"}),
    ("What is billed?", "usage_by_hour", {}),
)

_HEAD = """# Asking the traces

Every request leaves a row for each of its readers (told by the gateway) and for each try at it (told by the agent),
beside what happened to the fleet meanwhile; `stream-gw telemetry` brings them to ClickHouse. This page is how to ask.
Its output is of a made-up hour in which what is wrong was planted (`tests/telemetry/fleet.py`): a test asks the engine
the same, compares, and checks that the answers are right. Made by `python -m tests.telemetry.cookbook`.

Say whom to ask: `STREAM_GW_TELEMETRY_URL=http://host:port` of `stream-gw telemetry` and its
`STREAM_GW_TELEMETRY_TOKEN`; or `STREAM_GW_CLICKHOUSE` for a ClickHouse server itself. Each command takes `--json`.
Operators far from both ask any gateway, with a key of scope `admin`: `GET /v1/admin/traces`, and below it `/slow`,
`/diff?a=…&b=…`, `/pool?pool=…`, `/usage`, `/queries`, `/queries/<name>?…`, `/<id>` and `/<id>/why`, with the same
parameters; `format=text` gives the texts of this page. In a browser, a gateway's `/ops` lists requests and shows the
same of each.

A moment is `15m`, `2h`, `3d` (ago), `now`, or `2026-11-20T10:00:00Z`. Where success is sampled
(`STREAM_GW_TRACE_ONE_IN`) each row counts for as many as it stands for; errors, cancels and bills are never sampled.

## Why was this request slow?

By the id of the stream, of the request, of the trace, or of the completion that the client has:

"""

_CAUSES = """
The likely cause is found by rules (`telemetry/ask/causes.py`), not guessed: each says how much of the client's time it
would explain; what is above the p95 of its cohort goes before what everybody waits for; of what is left the costliest.
A second cause is told too where it cost half as much. The rules know: refused, killed replica, handed over, failed,
slow client, resume gap, full queue, token stall, overloaded engine, cold prefix, long answer, admission slow, gateway
slow, fabric slow, unaccounted; else *nothing stands out*. The cohort are finished requests of the same model, size of
prompt and hour; where fewer than 30 are, of a day, then of any size, then of a week.

The time line is the client's: all readers in line, what lay between them, and what nobody accounts for. It adds up to
the wall time exactly. What was not told (a gateway that died, a success out of the sample) is said with `!`.

An agent with `STREAM_GW_TRACE_TOKENS_ONE_IN=100` tells of one try in a hundred when each of its first 4096 tokens came
(the same streams on each agent); `show` and `why` then say between which tokens it took longest.

## What changed?

Two cohorts, each told by `since`, `until`, `model`, `pool`, `replica`, `tenant`, `region`, `tier`:

"""

_POOL = """
## What happened to a pool?

Between two moments, from what the fleet told of it (leases and their states, who asked for a drain, breakers, requests
refused for want of room, replicas that died), and each minute in which its requests noticed something:

"""

_FLEET_EVENTS = """
| event | told by | when | figures |
| --- | --- | --- | --- |
| `lease` | the agent | its pool hears of its first lease, of another state, that it has left (gone) | its load |
| `drain` | health; of an operator's the agent | somebody wants a replica to leave | what health rests on |
| `breaker` | the agent | it opens, lets one request try (half_open), closes | failures in a row |
| `shed` | a gateway | each 10 s in which it refused requests; `state`: gateway, rate, pool, queue | how many |
| `dead` | who reaps | a lease ended unrenewed | its streams |

`asked_by` is operator, health, controller (which plans), SIGTERM or standby; empty: it came about. A process tells of
120 such events a minute at most; the next one says how many it did not (`untold`). Before its first lease nothing is
told of a replica, and a state that lasts for less than a renewal (a second) may be passed over.

## Your own SQL

```
stream-gw traces sql "SELECT model, count() FROM requests WHERE ended = 'failed' GROUP BY model"
```

One SELECT over `requests`, `attempts`, `fleet`, `requests_minute`, `attempts_minute`, `usage_hour`, `lengths_hour`,
`speeds_hour` and `replicas_latest`; `telemetry/schema/` says what they hold. At most 10,000 rows (`--rows`) and 30
seconds. Only listed functions may be called, nothing can be written, and no file, address, setting or system table can
be reached; a server is best asked as a user of its own who may read these tables only.

## Does the bill agree?

```
stream-gw usage --tenant acme --since 24h
stream-gw usage reconcile --since 24h
```

`reconcile` compares three accounts of the same tokens: settled in Redis (in the step that ends a stream), streamed by
gateways (readers who together saw a stream from its first frame to its last), made and billed by engines. It lists
every stream and every hour that disagrees with the likely reason, and ends with 0 when all agree, 3 when not, 1 when it
could not look. A bill told in the first ten seconds of an hour may be of a stream that ended before; that is no
disagreement. `--no-redis` leaves the first account out.

## Twenty questions

Each is a saved query of `telemetry/ask/saved.sql`; `stream-gw traces queries` lists them all.
"""


async def page(ask: HttpAsk, hour: Fleet) -> str:
    stream = hour.planted["killed replica"][0]
    out = [_HEAD, _shown(f"stream-gw traces why {stream}", (await VIEWS["why"](ask, {"id": stream}, NOW_US)).text)]
    a = "since=2026-11-20T10:00:00Z,until=2026-11-20T10:30:00Z,pool=phi"
    b = "since=2026-11-20T10:30:00Z,until=2026-11-20T11:00:00Z,pool=phi"
    out += [
        _CAUSES,
        _shown(f"stream-gw traces diff {a} {b}", (await VIEWS["diff"](ask, {"a": a, "b": b}, NOW_US)).text),
    ]
    flags = "--since 2026-11-20T10:15:00Z --until 2026-11-20T10:25:00Z"
    given = {"pool": "llama", "since": "2026-11-20T10:15:00Z", "until": "2026-11-20T10:25:00Z"}
    out += [_POOL, _shown(f"stream-gw traces pool llama {flags}", (await VIEWS["pool"](ask, given, NOW_US)).text)]
    out.append(_FLEET_EVENTS)
    for number, (question, name, more) in enumerate(QUESTIONS, 1):
        given = {**WINDOW, **more, **({"top": TOP} if "top" in SAVED[name].parameters else {})}
        flags = " ".join(f"{key}={shlex.quote(value)}" for key, value in given.items())
        text = (await VIEWS["query"](ask, {"name": name, **given}, NOW_US)).text
        out.append(f"\n### {number}. {question}\n\n{SAVED[name].about[0].upper()}{SAVED[name].about[1:]}.\n\n")
        out.append(_shown(f"stream-gw traces query {name} {flags}", text))
    return "".join(out)


def _shown(command: str, text: str) -> str:
    return f"```\n$ {command}\n{text}\n```\n"


if __name__ == "__main__":
    with Asked() as running:
        print(asyncio.run(page(HttpAsk(running.url, TOKEN), fleet())), end="")
