"""Contract of the JavaScript client on any gateway, as scripts for a page of that gateway's origin.

A script gets `sg` (the module), `options` (url, token), `body(prompt, tokens)`, and `network` (cut, refuse, accept),
which is a proxy before the gateway. It returns when it holds and throws when not.
"""

from __future__ import annotations

from pathlib import Path

from playwright.async_api import Browser, Page

from tests.client.contract import Target
from tests.client.cutter import Cutter

_HARNESS = Path(__file__).with_name("harness.js").read_text()


async def run_script(page: Page, target: Target, script: str) -> object:
    facts = {"key": target.key, "model": target.model}
    return await page.evaluate(_HARNESS, {"target": facts, "script": script})


async def run_on(browser: Browser, target: Target, script: str) -> object:
    """Run one script in a new page whose network can be cut."""
    async with Cutter.before(target.url) as cutter:

        async def network(verb: str) -> None:
            cutter.refuses = verb == "refuse"
            if verb != "accept":
                cutter.cut()

        page = await browser.new_page()
        await page.expose_function("networkCall", network)
        await page.goto(f"{cutter.url}/healthz")
        try:
            return await run_script(page, target, script)
        finally:
            await page.close()


CONTRACT_JS = {
    "reads_a_whole_answer": """
        const stream = gateway.create(body());
        const text = await read(stream);
        assert(text, "no text");
        equal(stream.status, "completed");
        assert(stream.usage, "no usage");
        for (const mode of ["tokens", "coalesce", "snapshot"]) {
          equal(await read(gateway.subscribe(stream.id, { mode })), text);
        }
    """,
    "carries_many_streams_on_one_socket": """
        const streams = [1, 2, 3, 4].map((n) => gateway.create(body(`Tell me story ${n}.`)));
        const texts = await Promise.all(streams.map(read));
        equal(new Set(streams.map((stream) => stream.id)).size, 4);
        assert(texts.every(Boolean), "an empty answer");
        equal(states, ["connecting", "connected"]);
    """,
    "continues_after_cuts": """
        const stream = gateway.create(body());
        const seqs = [];
        let text = "";
        for await (const item of stream) {
          seqs.push(item.seq);
          text += sg.textOf(item.chunks);
          if ([2, 5, 9].includes(seqs.length)) await network.cut();
        }
        equal(seqs, [...new Set(seqs)].sort((a, b) => a - b));
        assert(states.includes("reconnecting"), "was never cut");
        equal(text, await read(gateway.subscribe(stream.id)));
    """,
    "continues_from_a_cursor": """
        const stream = gateway.create(body());
        await first(stream, 4);
        const { cursor } = stream;
        const rest = gateway.subscribe(stream.id, { after: cursor });
        for await (const item of rest) assert(item.seq > Number(cursor.split("-")[1]), "a frame came twice");
        await read(stream);
    """,
    "tells_the_end_to_one_who_has_it_all": """
        const stream = gateway.create(body());
        await read(stream);
        const again = gateway.subscribe(stream.id, { after: stream.cursor });
        equal([await read(again), again.status], ["", "completed"]);
        assert(again.usage, "no usage");
    """,
    "creates_once_for_one_key": """
        const key = crypto.randomUUID();
        const [one, two] = [gateway.create(body(), { key }), gateway.create(body(), { key })];
        equal(await read(one), await read(two));
        equal(one.id, two.id);
        equal((await fails(read(gateway.create(body("Another."), { key })))).code, "idempotency_mismatch");
    """,
    "cancels_a_resumed_stream": """
        const stream = gateway.create(body("Long.", 4000));
        await first(stream, 2);
        const other = new sg.StreamGateway(options);
        const resumed = other.subscribe(stream.id, { after: stream.cursor });
        await first(resumed, 1);
        const ack = await resumed.cancel();
        assert(["accepted", "pending"].includes(ack.result), JSON.stringify(ack));
        await read(resumed);
        await read(stream);
        equal([resumed.status, stream.status], ["cancelled", "cancelled"]);
        assert(["already", "terminal"].includes((await stream.cancel()).result), "cancelled twice");
        other.close();
    """,
    "cancels_while_disconnected": """
        const stream = gateway.create(body("Long.", 4000));
        await first(stream, 2);
        await network.refuse();
        await sleep(50);
        const stopping = stream.cancel();
        await sleep(300);
        await network.accept();
        assert(["accepted", "already", "terminal"].includes((await stopping).result), "not cancelled");
        await read(stream);
        equal(stream.status, "cancelled");
    """,
    "aborting_cancels": """
        const aborting = new AbortController();
        const stream = gateway.create(body("Long.", 4000), { signal: aborting.signal });
        await first(stream, 2);
        aborting.abort();
        equal((await fails(stream.next())).name, "AbortError");
        equal((await stream.done).status, "cancelled");
        const replay = gateway.subscribe(stream.id);
        await read(replay);
        equal(replay.status, "cancelled");
    """,
    "aborting_may_detach": """
        const aborting = new AbortController();
        const stream = gateway.create(body("Long.", 400), { signal: aborting.signal, abort: "detach" });
        await first(stream, 2);
        aborting.abort();
        equal((await fails(stream.next())).name, "AbortError");
        const replay = gateway.subscribe(stream.id);
        await first(replay, 1);
        equal((await replay.cancel()).result, "accepted");
    """,
    "a_slow_reader_gets_everything": """
        const small = new sg.StreamGateway({ ...options, queueItems: 4 });
        const stream = small.create(body());
        const seqs = [];
        for await (const item of stream) { seqs.push(item.seq); await sleep(10); }
        equal(seqs, [...new Set(seqs)].sort((a, b) => a - b));
        equal(stream.status, "completed");
        small.close();
    """,
    "tells_what_is_refused": """
        const nobody = new sg.StreamGateway({ ...options, token: "sk-nobody" });
        equal((await fails(read(nobody.create(body())))).code, "invalid_api_key");
        equal((await fails(read(gateway.subscribe("resp_" + "0".repeat(32))))).code, "not_found");
        nobody.close();
    """,
}
