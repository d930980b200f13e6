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
TOP = "3"

QUESTIONS: Sequence[tuple[str, str, dict[str, str]]] = (
    ("On what do requests spend their time?", "where_time_goes", {}),
    ("Which requests spent the most time in one phase?", "slow", {"phase": "engine_queue"}),
    ("What was the time to first token, minute by minute?", "ttft_by_minute", {"model": "phi-4"}),
    ("What went wrong, how often, and for whom?", "errors", {}),
    ("Who uses the platform most, and what is it like for them?", "tenants", {}),
    ("Is one replica slower than the others of its pool?", "replicas", {"pool": "phi"}),
    ("How far apart do tokens come?", "token_gaps", {}),
    ("Which replicas lost streams or handed them over?", "faults", {}),
    ("What did streams that outlived their replica notice?", "recoveries", {}),
    ("Why were requests placed where they were, and did it pay?", "placements", {"model": "llama-70b"}),
    ("Where do gateways expect the wrong cached prefixes?", "believed", {}),
    ("How much of their prompts do tenants find cached?", "cached", {}),
    ("Which sessions wander between replicas?", "sessions", {"model": "llama-70b"}),
    ("Whose connections take tokens too slowly?", "stalls", {}),
    ("How often do readers come back, and after how long?", "resumes", {}),
    ("When did requests wait for a replica?", "queues", {"pool": "llama"}),
    ("Which requests were refused, and with which answer?", "refusals", {}),
    ("How much was computed that no reader received?", "wasted", {}),
    ("How many replies do not fit their JSON schema, and what do repairs cost?", "structured", {}),
    ("How often do clients steer a running answer, and how soon does the next one begin?", "steered", {}),
    ("How many requests are served in another region, and what does it cost?", "regions", {}),
    ("Do the phases add up?", "residuals", {}),
    ("What happened to the fleet?", "fleet", {"pool": "llama"}),
    ("What is billed?", "usage_by_hour", {}),
)

_HEAD = """# Asking the traces

Every request leaves one row for each of its readers (from the gateway), one for each attempt (from the agent), and the
fleet's events of that time. `stream-gw telemetry` writes them to ClickHouse, and this page shows how to query them. The
output is from an invented hour with known faults (`tests/telemetry/fleet.py`). A test asks the engine the same
questions and checks the answers. Made by `python -m tests.telemetry.cookbook`.

- **On the command line** set the source first: `STREAM_GW_TELEMETRY_URL=http://host:port` of `stream-gw telemetry` with
  its `STREAM_GW_TELEMETRY_TOKEN`, or `STREAM_GW_CLICKHOUSE` for a ClickHouse server. Each command takes `--json`.
- **Over HTTP** any gateway answers, with a key of scope `admin` and the same parameters: `GET /v1/admin/traces`, and
  below it `/slow`, `/diff?a=…&b=…`, `/pool?pool=…`, `/usage`, `/queries`, `/queries/<name>?…`, `/<id>` and `/<id>/why`.
  `format=text` returns the texts of this page. `format=object` returns the JSON as `data`, and a `note` that says where
  `/pool` was cut off.
- **In a browser** the page `/ops` of a gateway lists the requests of a range and explains each of them
  ([runbook](runbook.md#the-operations-page)).

A time is an age (`15m`, `2h`, `3d`), `now`, or `2026-11-20T10:00:00Z`. Successful requests may be sampled
(`STREAM_GW_TRACE_ONE_IN`); each row then counts for as many requests as it represents. Errors, cancellations and
billing events are never sampled.

## Why was this request slow?

By the id of the stream, request, trace or completion:

"""

_CAUSES = """
Rules name the likely cause (`telemetry/ask/why/causes.py`). Each computes how much of the client's time its cause
explains; the cause that explains most is named. One above the p95 of similar requests comes before all that are common
among them. A second cause is named if it explains at least half as much.

The causes are: refused, killed replica, handed over, failed, slow client, resume gap, yielded, full queue, repaired
reply, schema check, answer moderation, steered, token stall, overloaded engine, cold prefix, slow prefill, long answer,
admission slow, gateway slow, fabric slow, unaccounted. If no rule applies, *nothing is unusual*.

Similar requests are the finished ones of the same model, prompt size and hour. With fewer than 30 they are those of a
day, then of any prompt size, then of a week.

The time line is the client's: all readers in order, the time between them, and time that belongs to no phase. It adds
up to the wall time exactly. Missing events (a dead gateway, a success that was not sampled) are marked with `!`.

An agent with `STREAM_GW_TRACE_TOKENS_ONE_IN=100` records the times of the first 4096 tokens for one attempt in a
hundred (the same streams on each agent). `show` and `why` then print the longest gaps between tokens.

### A steered answer

A client that sends inputs to a running answer cuts it. For each input, `why` prints how long it waited for its replica,
and the time from there to the first token of the next answer. That second part of all inputs is the phase `steering`:
abort, prefill of the longer prompt and first step. `prefill` and `decode` are without it.

%s
## What changed?

Two cohorts, each given by `since`, `until`, `model`, `pool`, `replica`, `tenant`, `region`, `tier`:

"""

_POOL = """
## What happened to a pool?

The fleet events of a time window, and each minute in which requests were affected:

"""

_FLEET_EVENTS = """
| event | reported by | when | figures |
| --- | --- | --- | --- |
| `lease` | the agent | it has its first lease, changes its state, or leaves (gone) | its load |
| `drain` | the health check; the agent for an operator's drain | a replica is asked to leave | those of the check |
| `breaker` | the agent | it opens, allows a trial request (half_open), or closes | failures in a row |
| `shed` | a gateway | each 10 s in which it rejected requests; `state`: gateway, rate, pool, queue | how many |
| `dead` | the process that recovers it | a lease expired | its streams |
| `scale` | the leading controller | the wanted number of replicas changes | those of the decision |
| `promote` | the same | a warm replica is told to take requests | |
| `rollout` | the same | a pool begins to run several revisions, or runs one again | |
| `shed_begin`, `shift_begin`, `yield_begin`, `…_end` | the same | [overload](scaling.md#events-and-metrics) | |
| `budget_warning`, `budget_exceeded`, `velocity_trip` | a gateway, an agent | a budget is used to 80 %, or up | |

`asked_by` is operator, health, controller (the planner), SIGTERM or standby; empty: nobody requested it. A process
reports at most 120 fleet events a minute; the next one says how many were left out (`untold`). Nothing is reported of a
replica before its first lease. A state that lasts less than a second may be missing.

## Your own SQL

```
stream-gw traces sql "SELECT model, count() FROM requests WHERE ended = 'failed' GROUP BY model"
```

One SELECT over `requests`, `attempts`, `fleet`, `requests_minute`, `attempts_minute`, `usage_hour`, `bills`,
`cost_hour`, `lengths_hour`, `speeds_hour` and `replicas_latest`; `telemetry/store/schema/` says what they hold. At most
10,000 rows (`--rows`) and 30 seconds. Only listed functions may be called, nothing can be written, and no file,
address, setting or system table can be reached. Still, ask a server as a user who may read these tables alone
(`STREAM_GW_CLICKHOUSE_READER`).

## Does the bill agree?

```
stream-gw usage --tenant acme --since 24h
stream-gw usage show --from 2026-11-01 --tenant acme --group-by key
stream-gw usage show --from 7d --group-by tenant --bucket day
stream-gw usage show --from 2026-09-01 --to 2026-11-01 --group-by tenant,model --bucket month --csv
stream-gw usage reconcile --since 24h
```

Whole hours are counted: the start is rounded down, the end up. Without a verb, `usage` has all rows, by hour, tenant
and model. `show` sums up requests, tokens, price, GPU cost and margin in groups; tenants ask `GET /v1/usage`
([protocol.md](protocol.md)).

`reconcile` compares three accounts of the same tokens:

- settled in Redis, in the step that ends a stream (`--no-redis` leaves it out);
- streamed by gateways, to readers who together saw a stream from its first frame to its last;
- made and billed by engines.

It lists every stream and every hour that disagrees, with the likely reason. The exit code is 0 when all agree, 3 when
not, 1 when it could not look. A bill of the first ten seconds of an hour may be of a stream that ended before; that is
no disagreement.

## Saved questions

Each is a saved query of `telemetry/ask/saved.sql`; `stream-gw traces queries` lists them all.
"""


async def page(ask: HttpAsk, hour: Fleet) -> str:
    stream = hour.planted["killed replica"][0]
    out = [_HEAD, _shown(f"stream-gw traces why {stream}", (await VIEWS["why"](ask, {"id": stream}, NOW_US)).text)]
    a = "since=2026-11-20T10:00:00Z,until=2026-11-20T10:30:00Z,pool=phi"
    b = "since=2026-11-20T10:30:00Z,until=2026-11-20T11:00:00Z,pool=phi"
    out += [
        _CAUSES % await _inputs(ask, hour.planted["steered"][0]),
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


async def _inputs(ask: HttpAsk, stream: str) -> str:
    """The table of inputs in the explanation of a steered stream."""
    whole = (await VIEWS["why"](ask, {"id": stream}, NOW_US)).text
    _, head, rest = whole.partition("\ninputs (")
    return _shown(f"stream-gw traces why {stream} | sed -n '/^inputs (/,/^$/p'", head[1:] + rest.partition("\n\n")[0])


def _shown(command: str, text: str) -> str:
    return f"```\n$ {command}\n{text}\n```\n"


if __name__ == "__main__":
    with Asked() as running:
        print(asyncio.run(page(HttpAsk(running.url, TOKEN), fleet())), end="")
