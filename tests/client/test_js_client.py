from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser

from tests.client.contract import Target
from tests.client.contract_js import CONTRACT_JS, run_on
from tests.client.fake_gateway import DRAINING, SPENT, FakeGateway
from tests.support.missing import missing
from tests.support.waiting import eventually


@pytest.mark.parametrize("behaviour", CONTRACT_JS)
async def test_contract(behaviour: str, browser: Browser, any_target: Target) -> None:
    await run_on(browser, any_target, CONTRACT_JS[behaviour])


READ = "return await read(gateway.create(body()));"
WHOLE = " ".join(f"word{n}" for n in range(1, 41))


async def test_messages_of_a_newer_gateway_are_passed_over_and_counted(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.faults.novelties = True
    script = "return [await read(gateway.create(body())), gateway.messagesPassedOver];"
    assert await run_on(browser, target, script) == [WHOLE, 2]


async def test_duplicates_and_holes_never_reach_the_reader(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.token_delay_s = 0.03  # a hole must be answered before the next one is sent
    fake.faults.duplicate = True
    fake.faults.skip = {3, 17, 40}
    assert await run_on(browser, target, READ) == WHOLE
    assert [message["after"] for message in fake.sent_by_client("sub")] == ["1-2", "1-16", "1-39"]


async def test_a_resumed_stream_cut_before_any_frame_sends_its_cursor_again(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    script = """
        const stream = gateway.create(body());
        await read(stream);
        await network.cut();
        return await read(gateway.subscribe(stream.id, { after: "1-30" }));
    """
    fake.faults.cut_after_sub = 3
    assert await run_on(browser, target, script) == WHOLE[WHOLE.index(" word31") :]
    assert {message["after"] for message in fake.sent_by_client("sub")} == {"1-30"}
    assert len(fake.sent_by_client("sub")) == 4


async def test_a_create_cut_before_its_ok_generates_once(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.cut_before_ok = 2
    assert await run_on(browser, target, READ) == WHOLE
    assert len(fake.streams) == 1
    assert len({message["key"] for message in fake.sent_by_client("create")}) == 1


async def test_what_is_sent_is_what_the_caller_passed(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """Also where it is sent later or again, and the caller has changed its list of messages meanwhile."""
    fake.faults.cut_before_ok = fake.faults.drop_acks = 1
    fake.hold_at = 0
    script = """
        const asked = body("say:mine");
        const item = { role: "user", content: "shorter" };
        const stream = gateway.create(asked);
        asked.messages.push({ role: "assistant", content: "say:other" });
        await stream.ready;
        const steering = stream.input(item);
        while (gateway._requests.size === 0) await sleep(0);
        item.content = "longer";
        await steering;
        await stream.cancel();
    """
    await run_on(browser, target, script)
    assert [len(message["body"]["messages"]) for message in fake.sent_by_client("create")] == [1, 1]
    assert [message["item"]["content"] for message in fake.sent_by_client("input")] == ["shorter"] * 2


async def test_a_body_that_is_no_json_is_told(browser: Browser, fake: FakeGateway, target: Target) -> None:
    script = """
        const circle = {};
        circle.circle = circle;
        const refused = (call) => { try { call(); } catch (error) { return error.name; } };
        const texts = [];
        for (const each of [1, 2]) { // before the first connection, and on it
          equal([circle, undefined].map((bad) => refused(() => gateway.create(bad))), ["TypeError", "SyntaxError"]);
          texts.push(await read(gateway.create(body())));
        }
        return texts;
    """
    assert await run_on(browser, target, script) == [WHOLE, WHOLE]


async def test_a_cancel_before_the_ok_reaches_the_stream(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 0
    fake.faults.cut_before_ok = 1
    script = """
        const stream = gateway.create(body());
        while (!stream._asked) await sleep(5);
        await sleep(50);
        const { result } = await stream.cancel();
        await read(stream);
        return [result, stream.status];
    """
    assert await run_on(browser, target, script) == ["accepted", "cancelled"]
    assert [stream.status for stream in fake.streams.values()] == ["cancelled"]


async def test_a_stream_that_could_not_be_read_on_can_be_cancelled(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.hold_at = 3
    fake.faults.refuse_subs = [{"code": "too_many", "message": "full", "retriable": False}]
    script = """
        const stream = gateway.create(body());
        await first(stream, 3);
        await network.cut();
        const { message } = await fails(read(stream));
        const told = [message, stream.status, (await stream.cancel()).result];
        gateway.close();
        return [...told, (await fails(stream.cancel())).code];
    """
    assert await run_on(browser, target, script) == ["full", "failed", "accepted", "client_closed"]
    assert [stream.status for stream in fake.streams.values()] == ["cancelled"]


async def test_a_cancel_that_waits_for_the_id_outlives_the_reading(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.hold_at = 0
    fake.faults.cut_before_ok = 1
    script = """
        const stream = gateway.create(body());
        const reading = read(stream);
        while (!stream._asked) await sleep(5);
        const stopping = stream.cancel();
        stream.close();
        const outcome = [await reading, (await stopping).result];
        const { status } = await stream.done;
        assert(["detached", "cancelled"].includes(status), status); // as the answer and the end happen to come
        return outcome;
    """
    assert await run_on(browser, target, script) == ["", "accepted"]
    assert [stream.status for stream in fake.streams.values()] == ["cancelled"]


async def test_a_failure_is_told_to_one_who_has_every_frame(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    """As after a cut between the last frame and the end."""
    fake.hold_at = 3
    script = """
        const stream = gateway.create(body());
        await first(stream, 3);
        return stream.id;
    """
    id = str(await run_on(browser, target, script))
    fake.streams[id].end("failed", {"code": "engine_error", "message": "broken"})
    script = f"""
        const told = [];
        for (const after of ["1-3", "1-4"]) told.push((await fails(read(gateway.subscribe("{id}", {{ after }})))).code);
        return told;
    """
    assert await run_on(browser, target, script) == ["engine_error"] * 2


async def test_a_socket_lost_while_another_opens_is_seen(browser: Browser, fake: FakeGateway, target: Target) -> None:
    script = """
        const stream = gateway.create(body());
        await first(stream, 3);
        while (!gateway._next) await sleep(5);
        await sleep(50);
        gateway._link.over(1006, "cut");
        return [...states];
    """
    fake.hold_at = 3
    running = asyncio.create_task(run_on(browser, target, script))
    while not fake.streams or len(next(iter(fake.streams.values())).frames) < 3:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    await fake.hint_all(10)
    fake.faults.silent = True
    assert await running == ["connecting", "connected", "reconnecting"]


async def test_a_cancel_without_a_socket_goes_by_http(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 3
    fake.faults.drop_acks = 9  # a new socket carries the cancel too, and its answer could come first
    script = """
        const stream = gateway.create(body());
        await first(stream, 3);
        await network.cut();
        await sleep(0);
        gateway._link?.over(1006, "cut");
        const ack = await stream.cancel();
        await read(stream);
        return [ack.result, stream.status];
    """
    assert await run_on(browser, target, script) == ["accepted", "cancelled"]
    assert fake.http_cancels == 1


async def test_a_cancel_whose_ack_was_lost_is_sent_again(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    fake.faults.drop_acks = 1
    script = """
        const stream = gateway.create(body());
        await first(stream, 5);
        return (await stream.cancel()).at;
    """
    assert await run_on(browser, target, script) == "1-5"
    assert len(fake.sent_by_client("cancel")) == 2


async def test_an_input_arrives_once(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    fake.faults.drop_acks = 1
    script = "return (await gateway.input(await gateway.create(body()).ready, { text: 'shorter' })).result;"
    assert await run_on(browser, target, script) == "accepted"
    assert len(fake.inputs) == 1


async def test_an_input_with_an_id_of_its_own_is_added_once(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.hold_at = 5
    script = """
        const stream = gateway.create(body());
        const id = await stream.ready;
        const twice = [stream.input("shorter", { id: "mine" }), gateway.input(id, "shorter", { id: "mine" })];
        const results = (await Promise.all(twice)).map(({ result }) => result);
        return [...results, (await gateway.input(id, "shorter", { id: "mine" })).result];
    """
    assert await run_on(browser, target, script) == ["accepted", "accepted", "duplicate"]
    assert list(fake.inputs) == ["mine"]


async def test_nobody_has_to_await_a_cancel_or_an_input(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """An error that nobody handles ends a program on Node."""
    fake.faults.cut_before_ok = 1
    script = """
        const codes = [];
        const told = new Promise((resolve) =>
          addEventListener("unhandledrejection", (event) => {
            event.preventDefault();
            codes.push(event.reason.code);
            if (event.reason.code === "last") resolve();
          }),
        );
        const stream = gateway.create(body());
        stream.input("shorter");
        while (gateway.state !== "reconnecting") await sleep(5);
        gateway.close();
        stream.cancel();
        await fails(stream.input("shorter")).then(({ code }) => codes.push(code));
        Promise.reject({ code: "last" });
        await told;
        return codes;
    """
    assert await run_on(browser, target, script) == ["client_closed", "last"]


async def test_an_inputs_id_counts_in_its_stream_alone(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """Also where the caller names inputs as the client once named cancels."""
    fake.hold_at = 5
    script = """
        const ids = [await gateway.create(body()).ready, await gateway.create(body()).ready];
        const stopping = gateway.cancel(ids[0]);
        await Promise.all(ids.map((id) => gateway.input(id, { text: "shorter" }, { id: "k1" })));
        return [ids, (await stopping).result];
    """
    told: Any = await run_on(browser, target, script)
    ids, result = told
    assert result == "accepted"
    assert [message["stream"] for message in fake.sent_by_client("input")] == ids


async def test_a_hint_moves_every_stream_without_a_pause(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.token_delay_s = 0.03
    script = """
        const texts = await Promise.all([1, 2].map(() => read(gateway.create(body()))));
        return [texts, [...states]];
    """
    running = asyncio.create_task(run_on(browser, target, script))
    while len(fake.streams) < 2:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    before = set(fake.sockets)
    await fake.hint_all(50)
    assert await running == [[WHOLE, WHOLE], ["connecting", "connected"]]
    assert len(fake.sent_by_client("sub")) == 2
    assert not before & fake.sockets


async def test_a_stream_that_a_draining_gateway_refuses_moves_at_once(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    script = """
        const began = Date.now();
        return [await read(gateway.create(body())), [...states], Date.now() - began];
    """
    fake.faults.refuse_create = [DRAINING]
    told: Any = await run_on(browser, target, script)
    text, states, took_ms = told
    assert (text, states) == (WHOLE, ["connecting", "connected"])
    assert took_ms < DRAINING["retry_after_s"] * 1000
    assert len(fake.sent_by_client("create")) == 2


async def test_where_every_gateway_asks_to_reconnect_connections_are_spread(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.hold_at, fake.faults.drains = 3, True
    script = """
        const spread = new sg.StreamGateway({ ...options, random: () => 1 });
        try {
          return await read(spread.create(body()));
        } finally {
          spread.close();
        }
    """
    running = asyncio.create_task(run_on(browser, target, script))
    await eventually(lambda: fake.greeted >= 2)
    began = time.monotonic()
    await eventually(lambda: fake.greeted >= 4)
    assert time.monotonic() - began > 1
    fake.release()
    assert await running == WHOLE


async def test_a_slow_reader_holds_a_bounded_queue(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.token_delay_s = 0
    script = """
        const small = new sg.StreamGateway({ ...options, queueItems: 8 });
        const stream = small.create(body("x", 200));
        while (stream._queue.length < 8) await sleep(5);
        await sleep(100);
        const held = stream._queue.length;
        const text = await read(stream);
        small.close();
        return [held, text.match(/word/g).length];
    """
    assert await run_on(browser, target, script) == [8, 200]


async def test_a_full_queue_still_takes_the_result_of_an_input(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.hold_at = 3
    script = """
        const small = new sg.StreamGateway({ ...options, queueItems: 4 });
        const stream = small.create(body());
        while (stream._queue.length < 3) await sleep(5);
        await stream.input("say:the other answer", { id: "mine" });
        while (stream._queue.length < 4) await sleep(5);
        const told = [];
        for await (const item of stream) if (item.type === "input") { told.push(item.id); break; }
        small.close();
        return told;
    """
    running = asyncio.create_task(run_on(browser, target, script))
    await eventually(lambda: fake.streams and next(iter(fake.streams.values())).steers == [] and fake.inputs)
    fake.release()
    assert await running == ["mine"]


async def test_a_silent_socket_is_dead(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.ping_ms = 100
    running = asyncio.create_task(run_on(browser, target, READ))
    while not fake.streams:
        await asyncio.sleep(0.01)
    fake.faults.silent = True
    await asyncio.sleep(0.5)
    fake.faults.silent, fake.faults.ping_ms = False, 15_000
    fake.cut_all()  # those that opened in the silence would wait for their `hi` for ten seconds
    assert await running == WHOLE


async def test_a_head_that_nothing_follows_is_asked_for(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.skip = {5}
    fake.hold_at = 5
    script = """
        const quick = new sg.StreamGateway({ ...options, lagMs: 100 });
        const stream = quick.create(body());
        await first(stream, 5);
        quick.close();
        return stream.cursor;
    """
    running = asyncio.create_task(run_on(browser, target, script))
    while not fake.streams or len(next(iter(fake.streams.values())).frames) < 5:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await fake.ping_all()
    assert await running == "1-5"
    assert fake.sent_by_client("pong")


async def test_a_gap_and_a_reset_are_told(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 5
    script = """
        const stream = gateway.create(body());
        const items = [];
        for await (const item of stream) {
          items.push([item.type, item.cursor]);
          if (items.length === 8) return items.slice(5);
        }
    """
    running = asyncio.create_task(run_on(browser, target, script))
    while not fake.streams or len(next(iter(fake.streams.values())).frames) < 5:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await fake.say_all({"t": "gap", "from": 6, "to": 9})
    await asyncio.sleep(0.1)
    await fake.say_all({"t": "reset", "epoch": "2.bb", "to": 3})
    await fake.say_all({"t": "d", "s": 4, "f": []})
    assert await running == [["gap", "1-9"], ["reset", "2-3"], ["data", "2-4"]]


async def test_a_reset_goes_back_to_what_the_log_still_has(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """Joined frames are read again from the epoch that made them; a reset may lie below the cursor begun at."""
    fake.hold_at = 5
    script = """
        const taken = [];
        const say = (stream, message) => gateway._link.receive(JSON.stringify({ ch: stream._ch, ...message }));
        const take = ({ value }) => taken.push([value.type, value.cursor]);
        const begun = gateway.create(body());
        await first(begun, 5);
        say(begun, { t: "d", a: 5, s: 9, f: [] });
        take(await begun.next());
        say(begun, { t: "reset", epoch: "2.bb", to: 7 });
        take(await begun.next());
        begun.close();
        const stream = gateway.subscribe(begun.id, { after: "1-5" });
        while (stream.status !== "live") await sleep(5);
        say(stream, { t: "reset", epoch: "2.bb", to: 3 });
        say(stream, { t: "d", s: 4, f: [] });
        take(await stream.next());
        take(await stream.next());
        return taken;
    """
    expected = [["data", "1-9"], ["reset", "1-5"], ["reset", "2-3"], ["data", "2-4"]]
    assert await run_on(browser, target, script) == expected
    assert [message["after"] for message in fake.sent_by_client("sub")] == ["1-5"] * 2


@pytest.mark.parametrize("code", [1011, 1012, 1013, 4408, 4429])
async def test_close_codes_that_mean_come_back(code: int, browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.close_new_with = [code]
    script = """
        const quick = new sg.StreamGateway({ ...options, random: () => 0.01 });
        const text = await read(quick.create(body()));
        quick.close();
        return text;
    """
    assert await run_on(browser, target, script) == WHOLE


async def test_a_message_too_large_in_a_while_costs_no_other_stream(browser: Browser, target: Target) -> None:
    script = """
        const quick = new sg.StreamGateway({ ...options, random: () => 0.01 });
        for (let closes = 0; closes < 5; closes += 1) {
          assert(quick.state !== "closed", `closed after ${closes}`);
          quick.connect();
          while (!quick._link) await sleep(5);
          quick._link.readyAt -= 60_000;
          quick._link.over(1009, "too large");
        }
        const text = await read(quick.create(body()));
        quick.close();
        return text;
    """
    assert await run_on(browser, target, script) == WHOLE


async def test_messages_that_close_every_socket_are_told(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.close_new_with = [1008] * 3
    script = """
        const quick = new sg.StreamGateway({ ...options, random: () => 0.01 });
        const error = await fails(read(quick.create(body())));
        return [error.code, error.retriable, error.closeCode];
    """
    assert await run_on(browser, target, script) == ["refused", False, 1008]


async def test_states_tell_why_the_client_reconnects(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.close_new_with = [1011]
    script = """
        const told = [];
        const onState = (state, { error }) => told.push([state, error?.code, error?.retriable]);
        const tokens = [() => { throw new TypeError("no network"); }, () => target.key, () => target.key];
        const getToken = async () => tokens.shift()();
        const quick = new sg.StreamGateway({ url: options.url, random: () => 0.01, onState, getToken });
        await read(quick.create(body()));
        quick.close();
        return told;
    """
    assert await run_on(browser, target, script) == [
        ["connecting", None, None],
        ["reconnecting", "token_unavailable", True],
        ["reconnecting", "connection_lost", True],
        ["connected", None, None],
        ["closed", "client_closed", False],
    ]


async def test_forbidden_is_not_retried(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.faults.close_new_with = [4403]
    script = "return (await fails(read(gateway.create(body())))).code;"
    assert await run_on(browser, target, script) == "forbidden"


async def test_a_refused_token_is_replaced(browser: Browser, fake: FakeGateway, target: Target) -> None:
    script = """
        const asked = [];
        const getToken = async ({ refresh }) => { asked.push(refresh); return refresh ? target.key : "cap_expired"; };
        const other = new sg.StreamGateway({ ...options, token: undefined, getToken });
        const text = await read(other.create(body()));
        other.close();
        return [text, asked];
    """
    assert await run_on(browser, target, script) == [WHOLE, [False, True]]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("Date.now = () => clock() + 3_600_000;", id="a sleep"),
        pytest.param(
            "Date.now = () => clock() - 3_600_000; await sleep(100); Date.now = () => clock() - 3_540_000;",
            id="a clock that went back",
        ),
    ],
)
async def test_a_socket_that_is_silent_by_the_clock_is_replaced(
    browser: Browser, fake: FakeGateway, target: Target, steps: str
) -> None:
    """While a machine sleeps its clock goes on and its timers stand still."""
    fake.hold_at = 3
    script = """
        const [wait, clock] = [globalThis.setTimeout, Date.now];
        globalThis.setTimeout = (work, ms) => wait(work, ms === 5_000 ? 20 : ms);
        const other = new sg.StreamGateway(options);
        const stream = other.create(body());
        await first(stream, 3);
        STEPS
        const until = clock() + 10_000;
        while (stream.attachments < 2 && clock() < until) await sleep(20);
        other.close();
        return stream.attachments;
    """
    assert await run_on(browser, target, script.replace("STEPS", steps)) == 2


async def test_a_token_that_never_comes_is_asked_for_again(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """After a laptop's sleep a request for a token may hang on a dead connection."""
    script = """
        const wait = globalThis.setTimeout;
        globalThis.setTimeout = (work, ms) => wait(work, ms === 60_000 ? 20 : ms);
        let asked = 0;
        const getToken = () => (++asked === 1 ? new Promise(() => {}) : target.key);
        const other = new sg.StreamGateway({ ...options, token: undefined, getToken });
        const text = await read(other.create(body()));
        other.close();
        return [text, asked];
    """
    assert await run_on(browser, target, script) == [WHOLE, 2]


async def test_it_gives_up_with_an_error_of_its_own(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """A lost network takes the tokens' issuer away too."""
    script = """
        const told = [];
        for (const more of [{ token: target.key }, { getToken: () => fetch("http://127.0.0.1:9/token") }]) {
          const lost = new sg.StreamGateway({ url: "http://127.0.0.1:9", giveUpMs: 50, random: () => 0.1, ...more });
          const error = await fails(read(lost.create(body())));
          told.push([error instanceof sg.GatewayError, error.code, error.retriable]);
        }
        return told;
    """
    assert await run_on(browser, target, script) == [[True, "connection_lost", True]] * 2


async def test_refusals_are_waited_out_or_told(browser: Browser, fake: FakeGateway, target: Target) -> None:
    busy = {"code": "no_replica", "message": "busy", "retriable": True, "retry_after_s": 0.05}
    wrong = {"code": "invalid_request", "message": "no", "retriable": False}
    fake.faults.refuse_create = [busy, wrong]
    script = "return (await fails(read(gateway.create(body())))).code;"
    assert await run_on(browser, target, script) == "invalid_request"
    assert [message.get("retry") for message in fake.sent_by_client("create")] == [None, 1]


async def test_a_refusal_with_a_long_wait_is_told(browser: Browser, fake: FakeGateway, target: Target) -> None:
    """A budget of a month may reset in weeks, for which a browser's timer ends at once."""
    fake.faults.refuse_create = [SPENT] * 9
    fake.faults.refuse_requests = [SPENT]
    script = """
        const told = [await fails(read(gateway.create(body()))), await fails(gateway.input("resp_any", "More"))];
        return told.map(({ code, retriable, retryAfterS }) => [code, retriable, retryAfterS]);
    """
    told = ["budget_exceeded", True, SPENT["retry_after_s"]]
    assert await run_on(browser, target, script) == [told, told]
    assert len(fake.sent_by_client("create")) == 1


async def test_closing_ends_every_stream(browser: Browser, fake: FakeGateway, target: Target) -> None:
    fake.hold_at = 3
    script = """
        const stream = gateway.create(body());
        await first(stream, 3);
        const failing = fails(stream.next());
        gateway.close();
        return (await failing).code;
    """
    assert await run_on(browser, target, script) == "client_closed"


async def test_the_place_in_the_queue_is_told_where_it_is_asked_for(
    browser: Browser, fake: FakeGateway, target: Target
) -> None:
    fake.faults.places = [{"position": 2, "of": 3}, {"position": 1, "of": 3, "warming_s": 40}]
    script = """
        const told = [];
        const stream = gateway.create(body(), { onPlace: (place) => told.push(place) });
        await read(stream);
        equal(told, [{ position: 2, of: 3, warmingS: null }, { position: 1, of: 3, warmingS: 40 }, null]);
        await read(gateway.create(body("Another.")));
    """
    await run_on(browser, target, script)
    assert [message.get("queued") for message in fake.sent_by_client("create")] == [True, None]


@pytest.mark.parametrize("seed", range(4))
async def test_any_mix_of_faults_delivers_each_frame_once(
    seed: int, browser: Browser, fake: FakeGateway, target: Target
) -> None:
    chance = random.Random(seed)
    fake.token_delay_s = 0.002
    fake.faults.duplicate = chance.random() < 0.5
    fake.faults.skip = set(chance.sample(range(1, 80), 4))
    fake.faults.cut_before_ok = chance.randrange(3)
    fake.faults.cut_after_sub = chance.randrange(3)
    fake.faults.cut_after_frames = [chance.randrange(1, 30) for _ in range(6)]
    fake.faults.close_new_with = [chance.choice([1011, 4408]) for _ in range(chance.randrange(3))]
    script = """
        const quick = new sg.StreamGateway({ ...options, random: () => Math.random() / 10, queueItems: 16 });
        const one = async (number) => {
          const seqs = [];
          const stream = quick.create(body(`Story ${number}`, 80));
          for await (const { seq } of stream) {
            seqs.push(seq);
            if (Math.random() < 0.05) await sleep(20);
          }
          equal(seqs, Array.from({ length: 80 }, (_, at) => at + 1));
          equal(stream.status, "completed");
        };
        await Promise.all([1, 2, 3].map(one));
        quick.close();
    """

    async def hints() -> None:
        while True:
            await asyncio.sleep(chance.random() / 5)
            await fake.hint_all(5)

    hinting = asyncio.create_task(hints())
    await run_on(browser, target, script)
    hinting.cancel()
    assert len(fake.streams) == 3


NODE_SCRIPT = """
const { StreamGateway } = await import(process.argv[1]);
const [url, token, model] = process.argv.slice(2);
const gateway = new StreamGateway({ url, token, webSocket: WebSocket });
for await (const text of gateway.create({ model, messages: [{ role: "user", content: "Hi" }] }).text()) {
  process.stdout.write(text);
}
gateway.close();
"""


async def test_it_runs_on_node(fake: FakeGateway, target: Target) -> None:
    node = shutil.which("node")
    if node is None:
        missing("needs node on PATH")
    client = Path(__file__).parents[2] / "stream_gw" / "static" / "client.js"
    flags = ["--experimental-websocket", "--experimental-default-type=module", "--no-warnings"]
    command = [node, *flags, "--input-type=module", "-e", NODE_SCRIPT, client.as_uri(), target.url, target.key]
    process = await asyncio.create_subprocess_exec(
        *command, target.model, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    if b"bad option" in err:
        missing("this node has no WebSocket of its own to pass in")
    assert out.decode() == WHOLE, err.decode()
