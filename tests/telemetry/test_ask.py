"""Questions to the real engine about an hour in which what was wrong is known."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from stream_fabric.errors import BadRequest, NotFound, Unauthenticated
from stream_fabric.events import AttemptTrace, RequestTrace
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.cli.main import main
from telemetry.ask import reconcile as reconcile_module
from telemetry.ask import views
from telemetry.ask.compare import Cohort, diff
from telemetry.ask.http import HttpAsk
from telemetry.ask.queries import HOUR_US, SAVED, Value
from telemetry.ask.reconcile import PAGE, Report, reconcile
from telemetry.ask.text import why_text
from telemetry.ask.views import answer_path, usage
from telemetry.ask.why.explain import Answer, why
from telemetry.store.errors import StoreUnavailable
from tests.support.web import served
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.fleet import DIED, SLOWED, START_US, Fleet, fleet

END_US = START_US + HOUR_US
WINDOW = {"from_us": START_US, "until_us": END_US}
NOW_US = END_US


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with Asked() as running:
        yield running


@pytest.fixture
def ask(asked: Asked) -> HttpAsk:
    return HttpAsk(asked.url, TOKEN)


@pytest.fixture(scope="module")
def hour() -> Fleet:
    return fleet()


# --- why -------------------------------------------------------------------------------------------------------

NAMED = {
    "slow client": "slow client",
    "full queue": "full queue",
    "cold prefix": "cold prefix",
    "killed replica": "killed replica",
    "overloaded engine": "overloaded engine",
    "long answer": "long answer",
    "resume gap": "resume gap",
    "admission slow": "admission slow",
    "handed over": "handed over",
    "repaired reply": "repaired reply",
    "reply does not fit": "repaired reply",
    "steered": "steered",
    "failed": "failed",
    "gateway died": "resume gap",
    "refused ids": "refused",
}


@pytest.mark.parametrize("kind", NAMED)
async def test_why_names_every_planted_cause(ask: HttpAsk, hour: Fleet, kind: str) -> None:
    streams = hour.planted[kind]
    assert streams
    found = Counter([(await why(ask, stream)).cause for stream in streams])
    assert found == {NAMED[kind]: len(streams)}


async def test_why_finds_nothing_in_what_is_ordinary(ask: HttpAsk, hour: Fleet) -> None:
    slowed = {row.stream for row in hour.of(RequestTrace) if row.replica == SLOWED}
    plain = [stream for stream in hour.planted["plain"] if stream not in slowed][:40]
    answers = [await why(ask, stream) for stream in plain]
    found = Counter(answer.cause for answer in answers)
    assert set(found) <= {"", "long answer"}
    assert found[""] >= 35, "of ordinary answers a few are long"
    assert {answer.likely for answer in answers if not answer.cause} == {"Nothing is unusual."}


async def test_the_time_adds_up(ask: HttpAsk, hour: Fleet) -> None:
    """Over the readers in line, to the whole of the client's time; and what nobody accounts for is shown."""
    for kind, streams in hour.planted.items():
        if kind in ("refused", "refused ids"):
            continue
        story = (await why(ask, streams[0])).story
        segments = story.segments()
        assert sum(segment.us for segment in segments) == story.wall_us, kind
        if story.created is not None:
            told = sum(segment.us for segment in segments if segment.name == "residual_us")
            assert told == story.spent("residual_us")
            assert abs(told) < 0.02 * story.wall_us


async def test_a_reader_who_came_back_is_in_line_and_one_who_attached_is_beside(ask: HttpAsk, hour: Fleet) -> None:
    story = (await why(ask, hour.planted["resume gap"][0])).story
    assert [reader.role for reader in story.line] == ["created", "resumed"]
    assert not story.beside
    names = [segment.name for segment in story.segments()]
    assert names.index("resume_gap_us") > names.index("decode_us")
    story = (await why(ask, hour.planted["attached"][0])).story
    assert [reader.role for reader in story.line] == ["created"]
    assert [reader.role for reader in story.beside] == ["attached"]


async def test_a_killed_replica_is_named_with_who_went_on(ask: HttpAsk, hour: Fleet) -> None:
    found = await why(ask, hour.planted["killed replica"][0])
    assert DIED in found.likely
    assert "its lease expired" in found.likely
    assert found.story.bill is not None
    assert found.story.bill["replica"] in found.likely
    text = why_text(found)
    assert "the replica died" in text
    assert "recovery" in text


def _lines(found: Answer) -> str:
    return why_text(found)


async def test_what_is_missing_is_said(ask: HttpAsk, hour: Fleet) -> None:
    text = _lines(await why(ask, hour.planted["gateway died"][0]))
    assert "no event of the request that created the stream" in text
    assert "not recorded" in text
    text = _lines(await why(ask, hour.planted["sampled out"][0]))
    assert "no event of a reader" in text
    assert "attempts" in text
    text = _lines(await why(ask, hour.planted["unbilled"][0]))
    assert "no event of an attempt" in text
    with pytest.raises(NotFound, match="there are no events of resp_nobody"):
        await why(ask, "resp_nobody")


@pytest.mark.parametrize("kind", ["cancelled", "left"])
async def test_who_ended_it_is_told(ask: HttpAsk, hour: Fleet, kind: str) -> None:
    story = (await why(ask, hour.planted[kind][0])).story
    assert story.outcome == kind
    if kind == "cancelled":
        assert f"cancelled at {story.fact('cancel_point')}" in why_text(Answer(story, []))


async def test_every_id_of_a_request_finds_it(ask: HttpAsk, hour: Fleet) -> None:
    stream = hour.planted["slow client"][0]
    asked = hour.asked[stream]
    for id in (stream, asked.request_id, asked.trace_id, asked.id, f"chatcmpl-{stream[5:]}", stream[5:]):
        assert (await why(ask, id)).story.stream == stream, id


async def test_the_cohort_is_of_the_same_size_and_hour_and_leaves_the_request_out(ask: HttpAsk, hour: Fleet) -> None:
    stream = hour.planted["long answer"][0]
    asked = hour.asked[stream]
    usual = (await why(ask, stream)).story.cohort
    low, high = next((a, b) for a, b in ((128, 512), (512, 2048)) if a <= asked.prompt_tokens < b)
    members = [
        row
        for row in hour.of(RequestTrace)
        if row.model == asked.model and row.role == "created" and row.ended == "completed" and row.stream != stream
        and low <= row.prompt_tokens < high and START_US <= row.at_us < END_US
    ]  # fmt: skip
    assert usual.members == len(members) >= 30
    assert f"prompts of {low} to {high - 1} tokens, the same hour" in usual.what
    tokens = sorted(row.output_tokens for row in members)
    assert usual.p50("output_tokens") == pytest.approx(tokens[len(tokens) // 2], rel=0.02)


# --- diff, slow, list ------------------------------------------------------------------------------------------

HALVES = (
    Cohort(START_US, START_US + HOUR_US // 2, {"pool": "phi"}),
    Cohort(START_US + HOUR_US // 2, END_US, {"pool": "phi"}),
)


async def test_diff_finds_a_planted_regression(ask: HttpAsk) -> None:
    found = await diff(ask, *HALVES)
    change = found.changes("ttft", "p99")[0]
    assert (change.phase, change.replica) == ("engine_queue_us", SLOWED)
    assert change.us == pytest.approx(380_000, rel=0.1)
    says = found.sentence("ttft", "p99")
    assert says.startswith("p99 TTFT rose 3")
    assert f"engine queue on replica {SLOWED}" in says
    back = await diff(ask, *reversed(HALVES))
    assert back.sentence("ttft", "p99").startswith("p99 TTFT fell 3")


async def test_two_halves_of_the_same_are_the_same(ask: HttpAsk) -> None:
    found = await diff(ask, HALVES[0], HALVES[0])
    assert "is the same" in found.sentence("ttft", "p99")
    nobody = Cohort(START_US, END_US, {"pool": "nobody"})
    assert "no requests" in (await diff(ask, HALVES[0], nobody)).sentence("wall", "p95")


async def test_slow_is_sorted_by_its_phase(ask: HttpAsk, hour: Fleet) -> None:
    given = {"since": "2026-11-20T10:00:00Z", "until": "2026-11-20T11:00:00Z", "phase": "client_stall", "top": "12"}
    rows = (await answer_path(ask, "slow", given, NOW_US)).value
    ended = {row.stream for row in hour.of(RequestTrace) if row.phases.client_stall_us and row.at_us < END_US}
    assert {row["stream"] for row in rows if row["phase_us"]} == ended
    assert [row["phase_us"] for row in rows] == sorted((row["phase_us"] for row in rows), reverse=True)
    with pytest.raises(BadRequest, match="there is no phase"):
        await answer_path(ask, "slow", {"phase": "wall_us; DROP TABLE requests"}, NOW_US)


async def test_a_value_is_never_read_as_sql(ask: HttpAsk) -> None:
    hostile = "x' OR 1=1 -- \\"
    given = {"since": "2026-11-20T10:00:00Z", "until": "2026-11-20T11:00:00Z", "model": hostile}
    assert (await answer_path(ask, "", given, NOW_US)).value == []
    with pytest.raises(NotFound):
        await why(ask, hostile)


async def test_every_saved_query_runs(ask: HttpAsk) -> None:
    given: dict[str, Any] = {
        **WINDOW, "id": "x", "stream": "x", "session": "x", "least_us": 0, "most_us": 1 << 40, "last": "z", "top": 5,
        "pool": "llama",
    }  # fmt: skip
    for name, query in SAVED.items():
        values = {key: given[key] for key in query.parameters if key in given and key not in query.defaults}
        await ask.query(name, values)
        assert "$" not in query.sql
        assert query.about


async def test_the_pulse_is_of_minutes_and_then_of_pools(ask: HttpAsk, hour: Fleet) -> None:
    rows = await ask.query("pulse", {"from_us": START_US, "until_us": START_US + 15 * 60_000_000})
    mine = [
        row
        for row in hour.of(RequestTrace)
        if START_US <= row.at_us < START_US + 15 * 60_000_000 and row.role in ("created", "refused")
    ]
    minutes = [row for row in rows if row["minute_us"]]
    assert rows[: len(minutes)] == minutes
    counted = Counter(row.at_us - row.at_us % 60_000_000 for row in mine)
    assert {row["minute_us"]: row["requests"] for row in minutes} == counted
    assert [row["minute_us"] for row in minutes] == sorted(counted)
    assert {row["pool"] for row in minutes} == {""}
    pools = rows[len(minutes) :]
    assert {row["pool"]: row["requests"] for row in pools} == Counter(row.pool for row in mine)
    for pool in pools:
        of_it = [row for row in mine if row.pool == pool["pool"]]
        assert pool["failed"] == sum(row.ended == "failed" for row in of_it)
        assert pool["refused"] == sum(row.ended == "refused" for row in of_it)
        first = sorted(row.ttft_us / 1000 for row in of_it if row.ttft_us)
        if first:
            assert pool["ttft_p50_ms"] == pytest.approx(first[len(first) // 2], rel=0.1)
            assert pool["ttft_p50_ms"] <= pool["ttft_p95_ms"] <= pool["ttft_p99_ms"] <= first[-1] * 1.01
    assert sum(row["failed"] for row in pools) == sum(row["failed"] for row in minutes)


async def test_a_query_says_what_it_needs(ask: HttpAsk) -> None:
    with pytest.raises(BadRequest, match="needs from_us"):
        await ask.query("slow", {"until_us": 1})
    with pytest.raises(BadRequest, match="has no colour"):
        await ask.query("slow", {**WINDOW, "colour": "red"})
    with pytest.raises(BadRequest, match="top of query slow is Int64"):
        await ask.query("slow", {**WINDOW, "top": "5"})
    with pytest.raises(NotFound, match="there is no query 'nonsense'"):
        await ask.query("nonsense", {})


async def test_the_door_wants_its_token(asked: Asked) -> None:
    stranger = HttpAsk(asked.url, "another")
    for asking in (stranger.query("recent", WINDOW), stranger.sql("SELECT 1", 1)):
        with pytest.raises(Unauthenticated, match=f"{asked.url} refuses the token; set STREAM_GW_TELEMETRY_TOKEN or "):
            await asking


async def test_a_url_that_leads_elsewhere_is_named() -> None:
    async def no_such_path(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such path '/query'"}}, status=404)

    async with served([web.post("/query", no_such_path)]) as gateway:
        with pytest.raises(NotFound, match=f"{gateway} answers 404: no such path '/query'; is it stream-gw telemetry"):
            await HttpAsk(gateway, "token").query("recent", WINDOW)
    for url in ("foo", "127.0.0.1:9464"):
        with pytest.raises(StoreUnavailable, match=f"'{url}' is no URL of stream-gw telemetry; write http://"):
            await HttpAsk(url, "token").query("recent", WINDOW)


async def test_a_bearer_that_is_not_ascii_is_refused_with_401(asked: Asked) -> None:
    url = urlsplit(asked.url)
    for bearer in (b"\xff\xfe", "tökën".encode(), b"\xed\xa0\x80"):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST /query HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n")
        writer.write(b"authorization: Bearer " + bearer + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 401 "), answer


# --- reconcile -------------------------------------------------------------------------------------------------


class Settled:
    """The fabric's account of the made-up hour."""

    def __init__(self, hour: Fleet) -> None:
        self._hour = hour

    async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
        found = {}
        for (who, when, model), (streams, prompt, cached, output) in self._hour.settled.items():
            if (who, when) == (tenant, hour):
                found[model] = (streams, Usage(prompt=prompt, cached=cached, output=output))
        return found

    async def settled(self, stream: StreamId) -> tuple[str, Usage] | None:
        return ("completed", Usage(output=self._hour.held[stream])) if stream in self._hour.held else None


async def _reconciled(ask: HttpAsk, hour: Fleet) -> Report:
    return await reconcile(ask, Settled(hour), START_US, END_US + HOUR_US)


async def test_reconcile_lists_every_stream_that_disagrees_and_no_other(ask: HttpAsk, hour: Fleet) -> None:
    report = await _reconciled(ask, hour)
    streams = {one.stream: one for one in report.disagreements if one.stream}
    planted = {kind: set(hour.planted[kind]) for kind in ("billed twice", "unbilled", "streamed less", "settled more")}
    assert set(streams) == set().union(*planted.values())
    for kind, says in (
        ("billed twice", "2 bills arrived"),
        ("unbilled", "no bill arrived"),
        ("streamed less", "fewer tokens"),
        ("settled more", "settled another count"),
    ):
        for stream in planted[kind]:
            assert says in streams[stream].why
    hours = [one for one in report.disagreements if not one.stream]
    assert {(one.tenant, one.model) for one in hours} == {
        (hour.asked[stream].tenant, hour.asked[stream].model)
        for kind in ("billed twice", "unbilled", "settled more")
        for stream in planted[kind]
    }
    assert not report.agrees


async def test_a_stream_that_runs_on_lacks_no_bill(ask: HttpAsk, hour: Fleet) -> None:
    """The gateway cut its reader off, for example because the key was revoked."""

    class Live(Settled):
        async def settled(self, stream: StreamId) -> tuple[str, Usage] | None:
            return ("live", Usage()) if stream in hour.planted["unbilled"] else await super().settled(stream)

    report = await reconcile(ask, Live(hour), START_US, END_US + HOUR_US)
    assert not {one.stream for one in report.disagreements} & set(hour.planted["unbilled"])
    assert {one.stream for one in report.disagreements} >= set(hour.planted["billed twice"])


async def test_reconcile_counts_what_it_compared(ask: HttpAsk, hour: Fleet) -> None:
    report = await _reconciled(ask, hour)
    billed = [row for row in hour.of(AttemptTrace) if row.billed]
    assert report.streams == len({row.stream for row in billed})
    assert report.billed_output == sum(row.output_tokens for row in billed)
    assert report.generated == sum(row.generated_tokens for row in hour.of(AttemptTrace)) - sum(
        row.generated_tokens for row in hour.of(AttemptTrace) if row.stream in hour.planted["unbilled"]
    )
    assert report.settled_output == sum(sums[3] for sums in hour.settled.values())
    # All but those of whom a reader was never told, or who did not see the end
    partly = sum(len(hour.planted[kind]) for kind in ("sampled out", "gateway died", "left"))
    assert report.whole == report.streams - partly


async def test_reconcile_of_a_tenant_that_has_no_fault_agrees(ask: HttpAsk, hour: Fleet) -> None:
    class Exact(Settled):
        async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
            rows = await ask.query(
                "usage_by_hour", {"from_us": hour * HOUR_US, "until_us": (hour + 1) * HOUR_US, "tenant": tenant}
            )
            return {
                row["model"]: (1, Usage(row["prompt_tokens"], row["cached_tokens"], 0, row["output_tokens"]))
                for row in rows
            }

        async def settled(self, stream: StreamId) -> tuple[str, Usage] | None:
            return None

    faulty = {hour.asked[s].tenant for k in ("billed twice", "unbilled", "streamed less") for s in hour.planted[k]}
    for tenant in sorted({"acme", "globex", "initech"}):
        report = await reconcile(ask, Exact(hour), START_US, END_US + HOUR_US, tenant)
        assert report.agrees == (tenant not in faulty), tenant


async def test_reconcile_looks_at_all_who_asked_and_at_every_page(ask: HttpAsk, hour: Fleet) -> None:
    found = await ask.query("tenant_names", WINDOW)
    assert [row["tenant"] for row in found] == sorted({row.tenant for row in hour.of(RequestTrace)})
    assert await ask.query("tenant_names", {**WINDOW, "after": found[-1]["tenant"]}) == []
    # Requested before the week, but billed within it
    later = {"from_us": END_US + 6 * 24 * HOUR_US, "until_us": END_US + 7 * 24 * HOUR_US}
    assert await ask.query("tenant_names", later) == found
    window = {**WINDOW, "tenant": ""}
    whole = [row["stream"] for row in await ask.query("unbilled", window)]
    assert len(whole) > 1
    assert [row["stream"] for row in await ask.query("unbilled", {**window, "after": whole[0]})] == whole[1:]


async def test_reconcile_finds_a_tenant_of_whom_no_bill_arrived() -> None:
    """Memory was full, and there was no spool: the readers' traces of some arrived, and nothing of the others."""
    streams = [StreamId(f"resp_{n:032x}") for n in range(PAGE + 2)]
    lost = Usage(prompt=10, output=20)

    class Nothing:
        async def query(self, name: str, parameters: Mapping[str, Value]) -> list[dict[str, Any]]:
            match name:
                case "tenant_names":
                    return [] if parameters["after"] else [{"tenant": "acme"}]
                case "unbilled":
                    left = [stream for stream in streams if stream > str(parameters["after"])]
                    rows = {"of_tenant": "acme", "of_model": "m", "streamed": 20}
                    return [{"stream": stream, **rows} for stream in left[: int(parameters["top"])]]
            return []

        async def sql(self, text: str, rows_max: int) -> Any:
            raise AssertionError

    class Ledger:
        async def usage(self, tenant: TenantId, hour: int) -> dict[str, tuple[int, Usage]]:
            count = PAGE + 7  # five of which nothing arrived
            at = hour == START_US // HOUR_US
            return {"m": (count, Usage(prompt=10 * count, output=20 * count))} if at else {}

        async def settled(self, stream: StreamId) -> tuple[str, Usage] | None:
            return ("completed", lost) if stream == streams[0] else None

    report = await reconcile(Nothing(), Ledger(), START_US, END_US)
    assert report.found == len(streams) + 1
    by_hour, *by_stream = report.disagreements
    assert (by_hour.stream, by_hour.tenant, by_hour.settled, by_hour.billed) == ("", "acme", 20 * (PAGE + 7), 0)
    assert [one.stream for one in by_stream] == streams[: len(by_stream)]
    assert [(one.settled, one.streamed) for one in by_stream[:2]] == [(20, 20), (None, 20)]
    assert report.settled_output == 20 * (PAGE + 7) and report.billed_output == 0


# --- the command line ------------------------------------------------------------------------------------------


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command in this process: its exit code, stdout and stderr."""
    monkeypatch.setenv("STREAM_GW_TELEMETRY_URL", asked.url)
    monkeypatch.setenv("STREAM_GW_TELEMETRY_TOKEN", TOKEN)

    def run(*flags: str) -> tuple[int, str, str]:
        code = main(flags)
        return (code, *capsys.readouterr())

    return run


def test_why_from_the_command_line(cli: Cli, hour: Fleet) -> None:
    stream = hour.planted["full queue"][0]
    code, out, _ = cli("traces", "why", stream)
    assert code == 0
    assert "likely cause: No replica of pool" in out
    assert max(map(len, out.splitlines())) <= 110
    code, out, _ = cli("traces", "why", stream, "--json")
    value = json.loads(out)
    assert (code, value["cause"]) == (0, "full queue")
    assert sum(segment["us"] for segment in value["segments"]) == value["wall_us"]
    code, _, err = cli("traces", "why", "resp_nobody")
    assert code == 1
    assert "there are no events of resp_nobody" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["traces", "show", "{stream}"], "client_stall_us"),
        (["traces", "list", "--since", "2026-11-20T10:00", "--until", "2026-11-20T11:00", "--top", "3"], "completed"),
        (["traces", "slow", "--since", "2026-11-20T10:00", "--until", "2026-11-20T11:00"], "phase ms"),
        (["traces", "pool", "llama", "--since", "2026-11-20T10:15", "--until", "2026-11-20T10:25"], "breaker open"),
        (["traces", "queries"], "spent_by_replica"),
        (["traces", "query", "faults", "since=2026-11-20T10:00", "until=2026-11-20T11:00"], DIED),
        (["traces", "sql", "SELECT count() AS many FROM requests WHERE ended = 'failed'"], "6"),
        (["usage", "--since", "2026-11-20T10:00", "--until", "2026-11-20T12:00", "--tenant", "acme"], "llama-70b"),
        (
            ["traces", "diff", "since=2026-11-20T10:00,until=2026-11-20T10:30,pool=phi",
             "since=2026-11-20T10:30,until=2026-11-20T11:00,pool=phi"],
            "p99 TTFT rose",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)  # fmt: skip
def test_each_verb_answers(cli: Cli, hour: Fleet, flags: list[str], says: str) -> None:
    given = [flag.replace("{stream}", hour.planted["slow client"][0]) for flag in flags]
    code, out, err = cli(*given)
    assert code == 0, err
    assert says in out
    code, out, err = cli(*given, "--json")
    assert code == 0, err
    assert json.loads(out)


def test_a_reconciliation_that_finds_something_ends_with_its_own_code(cli: Cli) -> None:
    flags = ["usage", "reconcile", "--since", "2026-11-20T10:00", "--until", "2026-11-20T11:59", "--no-redis"]
    code, out, err = cli(*flags)
    assert code == 3, err
    assert "6 disagree" in out
    code, out, _ = cli(*flags, "--json")
    assert code == 3
    assert json.loads(out)["found"] == 6


async def test_usage_of_a_part_of_an_hour_is_that_hours_whole_bill_on_any_number_of_pages(
    ask: HttpAsk, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (await usage(ask, {"since": "2026-11-20T10:00", "until": "2026-11-20T11:00"}, NOW_US)).value
    assert len(whole) > 5
    late = {"since": "2026-11-20T10:45", "until": "2026-11-20T11:00"}
    assert (await usage(ask, late, NOW_US)).value == whole
    monkeypatch.setattr(reconcile_module, "QUERY_ROWS_MAX", 2)
    assert (await usage(ask, late, NOW_US)).value == whole
    monkeypatch.setattr(views, "USAGE_ROWS_MAX", 5)
    with pytest.raises(BadRequest, match="more than 5 rows"):
        await usage(ask, late, NOW_US)


def test_events_of_a_pool_that_are_cut_off_are_told(cli: Cli) -> None:
    flags = ["traces", "pool", "llama", "--since", "2026-11-20T10:15", "--until", "2026-11-20T10:25"]
    _, whole, _ = cli(*flags)
    assert "only the first" not in whole
    code, out, _ = cli(*flags, "--top", "3")
    assert code == 0
    assert out.splitlines()[-1] == "only the first 3 events; continue with --since 2026-11-20T10:18:02.000Z"
    code, out, err = cli(*flags, "--top", "3", "--json")
    assert (code, len(json.loads(out))) == (0, 3)
    assert err.startswith("only the first 3 events")
    _, rest, _ = cli(*flags, "--since", "2026-11-20T10:18:02.000Z")
    assert rest.splitlines()[-1] == whole.splitlines()[-1]
