"""The operations page in a real browser, on a real platform with telemetry."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, expect

from stream_fabric.pool.plan import PoolPlan
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from tests.client.browser import PATIENCE_MS
from tests.e2e.ops_pages import answered, opened, tile, until_told, violations
from tests.gateway.processes import Process, need_redis
from tests.gateway.wire import Gate, chat
from tests.support.keys_file import operator_and_tenant
from tests.support.nginx import NginxServer
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

HOSTILE = "<img src=x onerror=document.title='owned'><b>&amp;"

WATERFALL = """(table) => ({
    rows: [...table.querySelectorAll("tbody tr.segment")].map((row) => {
        const bar = row.querySelector(".track i");
        return {
            us: Number(row.dataset.us), left: parseFloat(bar.style.left), width: parseFloat(bar.style.width),
        };
    }),
    sum: Number(table.querySelector("tfoot tr").dataset.us),
})"""
STORED = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"


@dataclass(frozen=True)
class Fleet:
    gates: list[Gate]
    """As the operator of ``up`` sees them."""
    hostile: Gate
    """Another gateway, as a tenant with a hostile name sees it."""
    operator: str
    """A key that may only operate, good at that gateway."""
    model: str
    """Served by that tenant's replica."""
    facts: dict[str, Any]

    def env(self, **more: str) -> dict[str, str]:
        return {"STREAM_GW_REDIS_URL": self.facts["redis_url"], "STREAM_GW_PARTITIONS": "4", **more}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    need_redis()
    folder: Path = tmp_path_factory.mktemp("ops")
    keys = folder / "keys.toml"
    operator, tenant = operator_and_tenant(keys, HOSTILE)
    flags = ["up", "--port", "0", "--gateways", "2", "--replicas", "2", "--telemetry", "--sim", "itl_ms=3,ttft_ms=20"]
    with Process(*flags, XDG_STATE_HOME=str(folder), STREAM_GW_TELEMETRY_LINGER_S="0.1") as up:
        facts = up.facts
        gates = [Gate(gateway["url"], gateway["pid"], facts["key"]) for gateway in facts["gateways"]]
        env = {"STREAM_GW_REDIS_URL": facts["redis_url"], "STREAM_GW_PARTITIONS": "4"}
        told = {"STREAM_GW_TELEMETRY_URL": facts["telemetry"]["url"]}
        told["STREAM_GW_TELEMETRY_TOKEN"] = facts["telemetry"]["token"]
        secret = secrets.token_hex(16)
        gateway = Process(
            "gateway", "--port", "0", "--keys-file", str(keys), STREAM_GW_TOKEN_SECRET=secret, **env, **told
        )
        model = HOSTILE
        agent = Process("agent", "--replica", HOSTILE, "--sim", f"model={model},itl_ms=3,ttft_ms=20", **env)
        with gateway, agent:
            yield Fleet(gates, Gate(gateway.facts["url"], gateway.pid, tenant), operator, model, facts)


async def test_the_page_shows_the_fleet_and_why_a_request_took_so_long(context: BrowserContext, fleet: Fleet) -> None:
    one, two = fleet.gates
    streams = [await answered(gate) for gate in (one, two, one)]
    for stream in streams:
        await until_told(one, stream)
    async with opened(context, f"{one.url}/ops#key={one.key}") as page:
        await expect(page.locator("#feed")).to_have_text("Live")
        assert one.key not in await page.evaluate(STORED), "the key is kept nowhere"
        pool = page.locator("article.pool", has=page.get_by_role("heading", name="sim-small"))
        await expect(pool.locator("tbody tr")).to_have_count(2)
        for agent in fleet.facts["agents"]:
            line = pool.get_by_role("row", name=agent["replica"])
            await expect(line.locator("td.state")).to_have_text("ready")
            await expect(line).to_contain_text("left")
        await expect(tile(page, "Replicas ready")).to_have_text("3 of 3")
        here = page.get_by_role("region", name="TTFT at this gateway, by pool")
        await expect(here.get_by_role("row", name="sim-small")).to_contain_text("ms")
        whole = page.get_by_role("region", name="TTFT of the whole fleet, by pool")
        await expect(whole.get_by_role("row", name="sim-small")).to_contain_text("ms")
        await expect(page.locator("#attention")).to_have_text("Nothing needs attention.")

        row = page.locator("#requests tbody tr", has=page.locator(f"[title*={streams[0]}]"))
        await expect(row).to_contain_text("completed")
        await row.locator("td").nth(2).click()
        detail = page.get_by_role("dialog")
        await expect(detail.get_by_role("heading", name=streams[0])).to_be_visible()
        await expect(detail).to_contain_text("Likely cause:")
        await expect(detail.get_by_role("region", name="Candidates of the placement")).to_contain_text("taken")
        await expect(detail.get_by_role("region", name="Attempts by replica")).to_contain_text("billed")
        shown = await detail.locator("table.waterfall").evaluate(WATERFALL)
        why = (await one.ask("GET", f"/v1/admin/traces/{streams[0]}/why")).json
        check_waterfall(shown, why["wall_us"])

        # A link to it opens it, in this tab without another key
        address = page.url
        assert address.endswith(f"#trace={streams[0]}")
        await page.reload()
        await expect(page.get_by_role("dialog")).to_contain_text("Where the time went")
        await page.get_by_role("button", name="Close").click()
        await expect(page).to_have_url(f"{one.url}/ops")

        await page.get_by_label("Id of a request").fill("resp_nobody")
        await page.get_by_role("button", name="Find").click()
        await expect(page.get_by_role("dialog")).to_contain_text("there are no events of resp_nobody")
        await page.keyboard.press("Escape")
        await page.get_by_label("Status").select_option("refused")
        await expect(page.locator("#requests-note")).to_contain_text("No requests")
        await expect(page).to_have_url(f"{one.url}/ops?status=refused")


async def test_the_page_shows_the_inputs_of_a_steered_answer(context: BrowserContext, fleet: Fleet) -> None:
    one, two = fleet.gates
    async with one.create(chat(200)) as exchange:
        stream = exchange.headers["x-stream-id"]
        for _ in range(8):
            await exchange.piece()
        reply = await two.ask("POST", f"/v1/streams/{stream}/input", {"id": "k1", "item": "Shorter."})
        assert reply.json == {"result": "accepted"}
        await exchange.rest()
    await until_told(one, stream)
    async with opened(context, f"{one.url}/ops#key={one.key}") as page:
        await expect(page.locator("#feed")).to_have_text("Live")
        await page.goto(f"{one.url}/ops#trace={stream}")
        detail = page.get_by_role("dialog")
        await expect(detail.locator("dl.facts")).to_contain_text("1 applied")
        inputs = detail.get_by_role("region", name="Inputs of the client to the running answer")
        await expect(inputs.locator("tbody tr")).to_have_count(1)
        await expect(inputs.locator("tbody tr")).to_contain_text("applied")
        await expect(detail.locator("table.waterfall")).to_contain_text("steering")
        shown = await detail.locator("table.waterfall").evaluate(WATERFALL)
        why = (await one.ask("GET", f"/v1/admin/traces/{stream}/why")).json
        check_waterfall(shown, why["wall_us"])
        assert sum(segment["us"] for segment in why["segments"] if segment["name"] == "steer_us") > 0
        assert await violations(page) == []
        if folder := os.environ.get("PAGE_SHOTS"):
            await inputs.scroll_into_view_if_needed()
            await page.screenshot(path=Path(folder) / "ops-steered.png")


def check_waterfall(shown: dict[str, Any], wall_us: int) -> None:
    """Each bar begins where the one before ends; together they are the wall time."""
    rows = shown["rows"]
    assert len(rows) > 3
    assert shown["sum"] == sum(row["us"] for row in rows) == wall_us
    at = 0
    for row in rows:
        left = at + min(row["us"], 0)
        assert row["left"] == pytest.approx(100 * max(left, 0) / wall_us, abs=0.01)
        assert row["width"] == pytest.approx(100 * abs(row["us"]) / wall_us, abs=0.01)
        at += row["us"]


async def test_what_others_named_is_text(context: BrowserContext, fleet: Fleet) -> None:
    stream = await answered(fleet.hostile, model=fleet.model, user=HOSTILE, session_id=HOSTILE)
    operator = Gate(fleet.hostile.url, fleet.hostile.pid, fleet.operator)
    await until_told(operator, stream)
    async with opened(context, f"{operator.url}/ops#key={operator.key}") as page:
        await expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
        await expect(page.locator("article.pool tbody th", has_text=HOSTILE)).to_be_visible()
        row = page.locator("#requests tbody tr", has=page.locator(f"[title*={stream}]"))
        await expect(row.get_by_text(HOSTILE).first).to_be_visible()
        await row.locator("button.open").click()
        await expect(page.get_by_role("dialog")).to_contain_text("Where the time went")
        await expect(page.get_by_role("dialog").get_by_text(HOSTILE, exact=True).first).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await page.get_by_label("Id of a request").fill(HOSTILE)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("letters, digits")
        assert await page.locator("#app img, dialog img").count() == 1, "the page's own"
        assert await page.locator("b").count() == 0
        assert await page.title() == "stream-gw operations"


async def test_by_the_keyboard_alone(context: BrowserContext, fleet: Fleet) -> None:
    one = fleet.gates[0]
    stream = await answered(one)
    await until_told(one, stream)
    async with opened(context, f"{one.url}/ops") as page:
        await expect(page.get_by_label("API key")).to_be_focused()
        await page.keyboard.type(one.key)
        await page.keyboard.press("Enter")
        await expect(page.locator("#feed")).to_have_text("Live")
        button = page.locator("#requests tbody tr", has=page.locator(f"[title*={stream}]")).locator("button.open")
        await expect(button).to_be_visible()
        focused = "document.activeElement.closest('#requests tbody tr') !== null"
        for _ in range(60):
            await page.keyboard.press("Tab")
            if await page.evaluate(focused):
                break
        else:
            pytest.fail("no request can be reached by Tab")
        await button.focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_contain_text("Where the time went")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await expect(button).to_be_focused()
        # A snapshot, and the list made anew, leave the focus where it is
        clock = await page.locator("#age").inner_text()
        await expect(page.locator("#age")).not_to_have_text(clock)
        await expect(button).to_be_focused()


async def test_who_may_not_is_told_why(context: BrowserContext, fleet: Fleet) -> None:
    async with opened(context, f"{fleet.hostile.url}/ops") as page:
        for key, says in (
            ("sk-nobody", "the credential is unknown or revoked"),
            (fleet.hostile.key, "this credential has no scope 'admin'"),
        ):
            await page.get_by_label("API key").fill(key)
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("alert")).to_contain_text(says)
            assert key not in await page.evaluate(STORED)
        await page.get_by_label("API key").fill(fleet.operator)
        await page.keyboard.press("Enter")
        await expect(page.locator("#feed")).to_have_text("Live")
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_label("API key")).to_be_focused()
        await page.reload()
        await expect(page.get_by_label("API key")).to_be_focused()


async def test_a_wrong_clock_keeps_nobody_out(context: BrowserContext, fleet: Fleet) -> None:
    await context.add_init_script("const now = Date.now; Date.now = () => now() + 9 * 3_600_000")
    async with opened(context, f"{fleet.hostile.url}/ops") as page:
        await page.get_by_label("API key").fill(fleet.operator)
        await page.keyboard.press("Enter")
        await expect(page.locator("#feed")).to_have_text("Live")


async def test_a_token_that_runs_out_asks_for_the_key_again(context: BrowserContext, fleet: Fleet) -> None:
    one = fleet.gates[0]
    minted = (await one.ask("POST", "/v1/tokens", {"scopes": ["admin"], "expires_in_s": 4})).json
    kept = json.dumps({"token": minted["token"], "expiresAt": time.time() + 60})
    await context.add_init_script(
        f"sessionStorage.getItem('sgw.ops.token') ?? sessionStorage.setItem('sgw.ops.token', {kept!r})"
    )
    async with opened(context, f"{one.url}/ops") as page:
        await expect(page.locator("#feed")).to_have_text("Live")
        await expect(page.get_by_role("alert")).to_contain_text("the capability token has expired")
        await expect(page.get_by_label("API key")).to_be_visible()


async def test_it_goes_on_at_another_gateway(context: BrowserContext, fleet: Fleet) -> None:
    first, second = (
        await asyncio.gather(
            *(
                asyncio.to_thread(
                    Process, "gateway", "--port", "0", "--gateway", f"ops{number}", "--drain-s", "20",
                    **fleet.env(STREAM_GW_DEV_KEY="sk-dev", STREAM_GW_TOKEN_SECRET="0123456789abcdef"),
                )
                for number in range(2)
            )
        )
    )  # fmt: skip
    with first, second:
        here, there = (Gate(process.facts["url"], process.pid, "sk-dev") for process in (first, second))
        async with (
            Proxy.before(here.port) as proxy,
            opened(context, f"http://127.0.0.1:{proxy.port}/ops#key=sk-dev") as page,
        ):
            await expect(page.locator("#age")).to_contain_text("ops0")
            proxy.cut_all()
            await expect(page.locator("#feed")).to_have_text("Reconnecting")
            await expect(page.locator("#feed")).to_have_text("Live")
            proxy.point_at(there.port)
            first.terminate()
            await expect(page.locator("#age")).to_contain_text("ops1")
            await expect(page.locator("#feed")).to_have_text("Live")
            proxy.refuse = True
            proxy.cut_all()
            await expect(page.locator("#age")).to_contain_text("These figures are")
            proxy.refuse = False
            await expect(page.locator("#age")).to_contain_text("ops1")


async def test_a_proxy_that_holds_events_back_is_named(context: BrowserContext, fleet: Fleet) -> None:
    one = fleet.gates[0]
    buffers = "proxy_ignore_headers X-Accel-Buffering; proxy_buffers 8 64k; proxy_buffer_size 64k;"
    server = f"server {{ listen %s; location / {{ {buffers} proxy_pass {one.url}; }} }}"
    with NginxServer(lambda address: server % address) as nginx:
        async with opened(context, "about:blank") as page:
            await page.clock.install()
            async with page.expect_request("**/v1/admin/ops"):
                await page.goto(f"{nginx.url}/ops#key={one.key}")
            await page.clock.fast_forward(26_000)
            await expect(page.locator("#attention")).to_contain_text("a proxy in front of it buffers responses")


SEEN = """(state) => {
    Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_a_tab_that_nobody_looks_at_makes_room(context: BrowserContext, fleet: Fleet) -> None:
    one = fleet.gates[0]

    async def viewers() -> int:
        async with one.open("GET", "/v1/admin/ops") as exchange:
            (event,) = await exchange.events(1)
            return int(json.loads(event.data)["gateway"]["viewers"])

    async with opened(context, "about:blank") as page:
        await page.clock.install()
        await page.goto(f"{one.url}/ops#key={one.key}")
        await expect(page.locator("#feed")).to_have_text("Live")
        await page.evaluate(SEEN, "hidden")
        await page.clock.fast_forward(61_000)
        await expect(page.locator("#feed")).to_have_text("Reconnecting")

        async def alone() -> bool:
            return await viewers() == 1

        await eventually(alone, "the page to have left", 20)
        await page.evaluate(SEEN, "visible")
        await expect(page.locator("#feed")).to_have_text("Live")


async def test_without_telemetry_and_without_a_fleet(context: BrowserContext, fleet: Fleet) -> None:
    elsewhere = fleet.facts["redis_url"].removesuffix("/0") + "/1"
    env = {"STREAM_GW_DEV_KEY": "sk-dev", "STREAM_GW_TOKEN_SECRET": "0123456789abcdef"}
    nobody = {"STREAM_GW_TELEMETRY_URL": "http://127.0.0.1:1", "STREAM_GW_TELEMETRY_TOKEN": "t"}
    away, empty = await asyncio.gather(
        asyncio.to_thread(Process, "gateway", "--port", "0", **fleet.env(**env, **nobody)),
        asyncio.to_thread(
            Process,
            "gateway",
            "--port",
            "0",
            STREAM_GW_DEV_KEY="sk-dev-alone",
            STREAM_GW_REDIS_URL=elsewhere,
            STREAM_GW_PARTITIONS="4",
        ),
    )
    with away, empty:
        async with opened(context, f"{away.facts['url']}/ops#key=sk-dev") as page:
            await expect(page.locator("#attention")).to_contain_text("No history and no traces")
            await expect(page.locator("#requests-note")).to_have_text("Telemetry does not answer.")
            await expect(tile(page, "Replicas ready")).to_have_text("3 of 3")
        async with opened(context, f"{empty.facts['url']}/ops#key=sk-dev-alone") as page:
            await expect(page.locator("#attention")).to_contain_text("No replica has joined this fleet")
            await expect(page.locator("#requests-note")).to_contain_text("STREAM_GW_TELEMETRY_URL")
            await expect(tile(page, "Replicas ready")).to_have_text("0 of 0")
            await expect(page.locator("#pools")).to_contain_text("There is no pool")
            client = RedisClient(elsewhere)
            await client.start()
            term = await RedisControl(client).lead("c", 60)
            await RedisControl(client).write_plan("c", term, "north", PoolPlan(1, 0, 1, is_yielding=True))
            await expect(page.locator("#attention")).to_contain_text("Pool north: batch work yields")
            await client.close()
            # It mints no tokens: the key itself is used, and kept by nothing
            assert "sk-dev-alone" not in await page.evaluate(STORED)
            await page.reload()
            await expect(page.get_by_label("API key")).to_be_focused()


async def test_on_a_phone_nothing_is_wider_than_it(browser: Browser, fleet: Fleet) -> None:
    one = fleet.gates[0]
    stream = await answered(one)
    await until_told(one, stream)
    context = await browser.new_context(viewport={"width": 360, "height": 700})
    context.set_default_timeout(PATIENCE_MS)
    async with opened(context, f"{one.url}/ops#key={one.key}") as page:
        await page.locator("#requests tbody tr").first.wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.locator("#requests tbody tr").first.click()
        await expect(page.get_by_role("dialog")).to_contain_text("Where the time went")
        assert await page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth")
    await context.close()
