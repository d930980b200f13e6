"""Range, filters, export, charts and sparklines of the operations page, on telemetry of an hour that is known and on a
running platform."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, expect

from stream_fabric.events import RequestTrace
from tests.client.browser import PATIENCE_MS
from tests.e2e.ops_pages import answered, opened, tile, until_told, violations
from tests.gateway.processes import Process, need_redis
from tests.gateway.wire import Gate
from tests.support.keys_file import operator_and_tenant
from tests.support.waiting import eventually
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.fleet import START_US, fleet

pytestmark = pytest.mark.platform

HOUR = "range=custom&from=2026-11-20T10:00:00.000Z&to=2026-11-20T11:00:00.000Z"
GLOBEX = f"{HOUR}&tenant=globex&model=qwen-7b"
SPIKES = f"{HOUR}&tenant=initech&model=llama-70b"
"""A tenant whose TTFT has a few minutes far above the others."""
FORMULA = "=HYPERLINK(1)"
"""Name of a tenant that a spreadsheet would run."""
KATHMANDU = "Asia/Kathmandu"


@dataclass(frozen=True)
class Desk:
    past: Gate
    """A gateway whose telemetry is the known hour."""
    live: Gate
    """A gateway whose telemetry is the platform's own."""
    blind: Gate
    """A gateway without telemetry."""
    formula: Gate
    """``live``, as a tenant whose name is a formula."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    need_redis()
    folder: Path = tmp_path_factory.mktemp("ops-filters")
    keys = folder / "keys.toml"
    operator, tenant = operator_and_tenant(keys, FORMULA)
    flags = ["up", "--port", "0", "--telemetry", "--sim", "itl_ms=3,ttft_ms=20"]
    with Asked() as asked, Process(*flags, XDG_STATE_HOME=str(folder), STREAM_GW_TELEMETRY_LINGER_S="0.1") as up:
        env = {"STREAM_GW_REDIS_URL": up.facts["redis_url"], "STREAM_GW_PARTITIONS": "4"}
        own = up.facts["telemetry"]
        known = {"STREAM_GW_TELEMETRY_URL": asked.url, "STREAM_GW_TELEMETRY_TOKEN": TOKEN}
        told = {"STREAM_GW_TELEMETRY_URL": own["url"], "STREAM_GW_TELEMETRY_TOKEN": own["token"]}
        dev = {"STREAM_GW_DEV_KEY": "sk-dev", "STREAM_GW_TOKEN_SECRET": "0123456789abcdef"}
        secret = {"STREAM_GW_KEYS_FILE": str(keys), "STREAM_GW_TOKEN_SECRET": "0123456789abcdef"}
        with (
            Process("gateway", "--port", "0", **env, **dev, **known) as past,
            Process("gateway", "--port", "0", **env, **secret, **told) as live,
            Process("gateway", "--port", "0", **env, **dev) as blind,
        ):
            yield Desk(
                Gate(past.facts["url"], past.pid, "sk-dev"),
                Gate(live.facts["url"], live.pid, operator),
                Gate(blind.facts["url"], blind.pid, "sk-dev"),
                Gate(live.facts["url"], live.pid, tenant),
            )


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    made = await browser.new_context(
        timezone_id=KATHMANDU,
        permissions=["clipboard-read", "clipboard-write"],
        viewport={"width": 1360, "height": 900},
    )
    made.set_default_timeout(PATIENCE_MS)
    yield made
    await made.close()


def address(gate: Gate, query: str = "") -> str:
    return f"{gate.url}/ops{'?' if query else ''}{query}#key={gate.key}"


def asked_of(page: Page) -> dict[str, str]:
    """The query of the page's address."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


async def column(page: Page, number: int) -> list[str]:
    """Texts of a column of the list of requests, from 1."""
    cells = page.locator(f"#requests tbody tr > :nth-child({number}) .value")
    return await cells.all_inner_texts()


# --- range and filters -----------------------------------------------------------------------------------------


async def test_a_link_with_filters_shows_what_it_names(context: BrowserContext, desk: Desk) -> None:
    mine = [
        row
        for row in fleet().of(RequestTrace)
        if row.tenant == "globex" and row.model == "qwen-7b" and row.at_us < START_US + 3_600_000_000
    ]
    async with opened(context, address(desk.past, GLOBEX)) as page:
        await expect(page.get_by_label("Tenant")).to_have_value("globex")
        await expect(page.get_by_label("Model")).to_have_value("qwen-7b")
        await expect(page.locator("#requests-note")).to_contain_text(f"{len(mine)} requests, newest first")
        assert set(await column(page, 4)) == {"globex"}
        assert set(await column(page, 5)) == {"qwen-7b"}
        counted = sum(row.role in ("created", "refused") for row in mine)
        await expect(tile(page, "Requests")).to_have_text(str(counted))
        assert "key" not in page.url, "the link that is shared has no key"

        await page.get_by_label("Status").select_option("refused")
        refused = sum(row.ended == "refused" for row in mine)
        await expect(page.locator("#requests-note")).to_contain_text(f"{refused} requests")
        assert asked_of(page)["status"] == "refused"
        assert set(await column(page, 2)) == {"refused"}
        await page.go_back()
        await expect(page.get_by_label("Status")).to_have_value("")
        await expect(page.locator("#requests-note")).to_contain_text(f"{len(mine)} requests")
        await page.reload()
        await expect(page.locator("#requests-note")).to_contain_text(f"{len(mine)} requests")
        await page.get_by_role("button", name="Clear filters").click()
        await expect(page.locator("#requests-note")).to_contain_text("The first 100 requests")
        assert not {"tenant", "model"} & set(asked_of(page))
        await page.get_by_role("button", name="Show up to 1,000").click()
        await expect(page.locator("#requests tbody tr")).to_have_count(1000)


async def test_a_hostile_filter_is_a_value(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past, HOUR)) as page:
        for hostile in ("' OR 1=1 -- ", "<img src=x onerror=document.title='owned'>"):
            await page.get_by_label("Tenant").fill(hostile)
            await page.keyboard.press("Enter")
            await expect(page.locator("#requests-note")).to_contain_text("No requests, according to telemetry")
            await expect(page.locator("#requests-note")).to_contain_text(hostile.strip())
            await expect(tile(page, "Requests")).to_have_text("0")
        assert await page.title() == "stream-gw operations"


async def test_a_custom_range_is_given_in_utc_and_told_in_local_time(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past)) as page:
        await expect(page.locator("#range-note")).to_contain_text("Telemetry has requests since")
        await expect(page.locator("#age")).to_contain_text("GMT+5:45")
        await page.get_by_role("button", name="Custom").click()
        await page.get_by_label("From (UTC)").fill("2026-11-20T10:20:00")
        await page.get_by_label("To (UTC)").fill("2026-11-20T10:10:00")
        await page.get_by_role("button", name="Show range").click()
        await expect(page.locator("#custom-error")).to_contain_text("must begin before it ends")
        await page.get_by_label("To (UTC)").fill("2026-11-20T10:30:00")
        await expect(page.locator("#custom-local")).to_contain_text("16:05")
        await page.get_by_role("button", name="Show range").click()
        await expect(page.locator("#latency-range")).to_contain_text("10:20 to 10:30 UTC (")
        await expect(page.locator("#latency-range")).to_contain_text("16:05 to 16:15 GMT+5:45")
        first = page.locator("#requests tbody tr").first
        await expect(first.locator(".value").first).to_contain_text("10:29:")
        await expect(first.locator(".sub").first).to_contain_text("16:14:")
        given = asked_of(page)
        assert (given["from"], given["to"]) == ("2026-11-20T10:20:00.000Z", "2026-11-20T10:30:00.000Z")
        await page.goto(address(desk.past, "range=custom&from=2026-10-01T00:00:00Z&to=2026-10-02T00:00:00Z"))
        await expect(page.locator("#range-note")).to_contain_text("Telemetry has nothing of this range")


async def test_a_copied_link_keeps_the_time_range(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past, "range=15m&model=phi-4")) as page:
        await expect(page.locator("#feed")).to_have_text("Live")
        await page.get_by_role("button", name="Copy link").click()
        await expect(page.get_by_role("button", name="Copied")).to_be_visible()
        link = await page.evaluate("navigator.clipboard.readText()")
        given = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
        assert (given["range"], given["model"]) == ("custom", "phi-4")
        assert asked_of(page)["range"] == "15m", "the page itself goes on"
        assert desk.past.key not in link


async def test_without_telemetry_only_live_is_offered(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.blind, "range=24h&tenant=acme")) as page:
        await expect(page.locator("#range-note")).to_contain_text("this gateway has no telemetry")
        for name in ("15 min", "1 h", "24 h", "Custom"):
            await expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
        live = page.get_by_role("button", name="Live", exact=True)
        await expect(live).to_be_enabled()
        await expect(live).to_have_attribute("aria-pressed", "true")
        await expect(page.get_by_label("Tenant")).to_be_disabled()
        await expect(page.locator("#latency")).to_contain_text("No telemetry, so no history.")
        await expect(tile(page, "Replicas ready")).to_have_text("2 of 2")
        await page.get_by_label("Model").fill("nothing")
        await expect(page.locator("#pools")).to_contain_text("No pool that is shown serves nothing")


async def test_live_requests_are_filtered_by_tenant(context: BrowserContext, desk: Desk) -> None:
    stream = await answered(desk.formula)
    await until_told(desk.live, stream)
    async with opened(context, address(desk.live)) as page:
        await page.get_by_label("Tenant").fill("nobody")
        await expect(page.locator("#requests-note")).to_contain_text("No requests")
        await page.get_by_label("Tenant").fill(FORMULA)
        await expect(page.locator("#requests-note")).to_contain_text(f"tenant {FORMULA}")
        await expect(page.locator(f"#requests .id[title='{stream}']")).to_be_visible()
        await expect(page.locator("#tenants option")).not_to_have_count(0)


# --- charts ----------------------------------------------------------------------------------------------------


async def test_outliers_do_not_flatten_the_chart_and_are_reached(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past, SPIKES)) as page:
        ttft = page.locator("article", has=page.get_by_role("heading", name="TTFT", exact=True))
        marks = ttft.locator(".mark")
        above = ttft.get_by_role("button", name=re.compile(r"^\d+ steps above the axis: show whole$"))
        count = int((await above.inner_text()).split()[0])
        assert 1 < count < 10, "few of the hour's steps"
        await expect(marks).to_have_count(count)
        await expect(ttft.locator(".y span").first).to_contain_text(" ms")
        await above.click()
        await expect(marks).to_have_count(0)
        assert asked_of(page)["axis"] == "full"
        await expect(ttft.locator(".y span").first).to_contain_text(" s")
        await ttft.get_by_role("button", name="Fit axis to most steps").click()
        await expect(marks).to_have_count(count)
        said = await marks.first.inner_text()
        found = re.search(r"p99 ([\d.]+ m?s)", said)
        assert found
        await marks.first.focus()
        await expect(ttft.locator(".readout")).to_contain_text(found[0])
        await page.keyboard.press("Enter")
        await expect(page.locator("#sort")).to_have_value("ttft")
        given = asked_of(page)
        assert given["tenant"] == "initech"
        first = page.locator("#requests tbody tr").first
        await expect(first.locator("td").nth(-2)).to_have_text(found[1])
        await page.go_back()
        await expect(marks).to_have_count(count)
        await ttft.locator("summary").click()
        await expect(ttft.locator("tbody tr")).not_to_have_count(0)


@pytest.mark.parametrize(
    ("values", "is_full", "top"),
    [
        ([10] * 19 + [10_000], "false", 20),
        ([10] * 19 + [10_000], "true", 10_000),
        ([10, 10_000], "false", 10_000),
        ([10, 12, 14, 16, 18, 20, 22, 24], "false", 50),
        ([0] * 10, "false", 1),
    ],
    ids=["an outlier", "the whole", "too few for a percentile", "no outlier", "nothing"],
)
async def test_the_axis_fits_most_steps(
    context: BrowserContext, desk: Desk, values: list[int], is_full: str, top: int
) -> None:
    async with opened(context, f"{desk.blind.url}/ops") as page:
        code = f"import('/static/ops-chart.js').then(({{ fitTop }}) => fitTop({values}, {is_full}))"
        assert await page.evaluate(code) == top


async def test_itl_and_rates_have_a_line(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past, HOUR)) as page:
        for name in ("ITL", "Requests"):
            part = page.locator("article", has=page.get_by_role("heading", name=name, exact=True))
            await expect(part.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"UTC \(.*GMT\+5:45\): "))


# --- export ----------------------------------------------------------------------------------------------------


async def downloaded(page: Page, button: str) -> tuple[str, str]:
    async with page.expect_download() as waiting:
        await page.get_by_role("button", name=button, exact=True).click()
    download = await waiting.value
    return download.suggested_filename, Path(await download.path()).read_text("utf-8")


async def test_an_export_has_the_rows_that_are_shown(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past, f"{GLOBEX}&status=completed")) as page:
        await expect(page.locator("#requests-note")).to_contain_text("requests, newest first")
        ids = await page.locator("#requests .id[title^=resp_]").evaluate_all("(all) => all.map(({ title }) => title)")
        name, text = await downloaded(page, "Export requests as CSV")
        assert re.fullmatch(r"stream-gw-requests-[\dT-]+Z\.csv", name)
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        assert [row["id"] for row in rows] == ids
        assert {row["tenant"] for row in rows} == {"globex"}
        assert all(float(row["total_ms"]) > 0 for row in rows)
        _, text = await downloaded(page, "Export requests as JSON")
        told = json.loads(text)
        assert [row["id"] for row in told["rows"]] == ids
        assert told["page"] == page.url
        for part, field in (("TTFT", "ttft_p99_ms"), ("ITL", "itl_p99_ms"), ("request rates", "failed")):
            _, text = await downloaded(page, f"Export {part} as JSON")
            assert all(field in row for row in json.loads(text)["rows"]), part
        _, text = await downloaded(page, "Export fleet events as CSV")
        assert "llama" in text
        await page.get_by_label("Model").fill("")
        await expect(page.locator("article.pool")).to_have_count(1)
        _, text = await downloaded(page, "Export replicas as CSV")
        assert len(list(csv.DictReader(io.StringIO(text, newline="")))) == 2


async def test_a_formula_in_a_name_is_exported_as_text(context: BrowserContext, desk: Desk) -> None:
    stream = await answered(desk.formula)
    await until_told(desk.live, stream)
    async with opened(context, address(desk.live)) as page:
        await expect(page.locator(f"#requests .id[title='{stream}']")).to_be_visible()
        _, text = await downloaded(page, "Export requests as CSV")
        assert f'"\'{FORMULA}"' in text
        assert f'"{FORMULA}"' not in text
        cells = ["=1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1", "\uff1d1", "a=1", 'say "hi"', -1, None, True]
        code = "import('/static/ops-export.js').then(({ csvCell }) => %s.map(csvCell))"
        made = await page.evaluate(code % json.dumps(cells))
        assert made[:9] == [f'"\'{cell}"' for cell in cells[:9]]
        assert made[9:] == ['"a=1"', '"say ""hi"""', "-1", "", "true"]


# --- replicas, ids and layout ----------------------------------------------------------------------------------


async def test_a_replica_has_a_sparkline_of_the_minutes_before(context: BrowserContext, desk: Desk) -> None:
    async def sampled() -> bool:
        async with desk.live.open("GET", "/v1/admin/ops") as exchange:
            (event,) = await exchange.events(1)
        pools = json.loads(event.data)["fleet"]["pools"]
        return all(len(row["recent"]) >= 2 for pool in pools for row in pool["replicas"])

    await eventually(sampled, "the gateway to keep loads while nobody looks", 60)
    async with opened(context, address(desk.live)) as page:
        spark = page.locator("article.pool tbody tr").first.get_by_role("img")
        await expect(spark).to_have_attribute(
            "aria-label", re.compile(r"^load: now \d+ %, .* in the last 1\d s|\d\d s")
        )
        points = await spark.locator("path.stroke").get_attribute("d")
        assert points is not None and len(re.findall("[ML]", points)) >= 3, "those of before, and the first snapshot's"
        for figure, name in (("kv", "KV cache"), ("queue", "engine queue")):
            await page.get_by_label("Sparkline").select_option(figure)
            await expect(spark).to_have_attribute("aria-label", re.compile(f"^{name}: now "))
            assert asked_of(page)["spark"] == figure
            points = await spark.locator("path.stroke").get_attribute("d")
            assert points is not None and len(re.findall("[ML]", points)) >= 3, f"{name} of before"


async def test_ids_stay_on_one_line_and_are_copied_whole(context: BrowserContext, desk: Desk) -> None:
    async with opened(context, address(desk.past, GLOBEX)) as page:
        cell = page.locator("#requests .id[title^=resp_]").first
        await cell.wait_for()
        whole = await cell.get_attribute("title")
        assert whole is not None
        shown = await cell.locator("bdi").inner_text()
        start, _, end = shown.partition("…")
        assert whole.startswith(start) and whole.endswith(end) and len(shown) < len(whole)
        tall = "(all) => all.filter((one) => one.getClientRects().length !== 1 || one.offsetHeight > 30).length"
        assert await page.locator(".id").evaluate_all(tall) == 0
        await cell.get_by_role("button").click()
        assert await page.evaluate("navigator.clipboard.readText()") == whole
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await page.locator("#requests tbody tr").first.click()
        detail = page.get_by_role("dialog")
        await expect(detail).to_contain_text("Where the time went")
        await expect(detail).to_contain_text("Max ITL")
        assert await detail.locator(".id").evaluate_all(tall) == 0


async def test_tiles_fill_their_rows(browser: Browser, desk: Desk) -> None:
    context = await browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    async with opened(context, address(desk.blind)) as page:
        await page.locator("#tiles .tile").first.wait_for()
        for width in (340, 700, 900, 1200, 1400, 2000):
            await page.set_viewport_size({"width": width, "height": 800})
            tops = await page.locator("#tiles .tile").evaluate_all(
                "(all) => all.map((one) => Math.round(one.getBoundingClientRect().top))"
            )
            rows = {tops.count(top) for top in tops}
            assert len(rows) == 1, f"at {width} px: {tops}"
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    await context.close()


# Colours depend on the theme and the layout on the width: each is there once, as axe-core takes many seconds
looks = pytest.mark.parametrize(("width", "scheme"), [(1360, "dark"), (360, "light")])
STATES = ("", HOUR, f"{GLOBEX}&sort=decode")


@looks
async def test_axe_finds_nothing(browser: Browser, desk: Desk, width: int, scheme: Any) -> None:
    context = await browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, timezone_id=KATHMANDU
    )
    context.set_default_timeout(PATIENCE_MS)
    for query in STATES:
        async with opened(context, address(desk.past, query)) as page:
            await expect(page.locator("#requests-note")).to_contain_text(
                "according to telemetry" if not query else "first"
            )
            assert await violations(page) == [], query
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if query:
                await page.locator("#requests tbody tr").first.click()
                await expect(page.get_by_role("dialog")).to_contain_text("Where the time went")
                assert await violations(page) == [], "with a request open"
    async with opened(context, address(desk.blind)) as page:
        await expect(page.locator("#range-note")).to_contain_text("no telemetry")
        assert await violations(page) == [], "without telemetry"
    await context.close()


@looks
async def test_axe_finds_nothing_on_the_reference(browser: Browser, desk: Desk, width: int, scheme: Any) -> None:
    context = await browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    async with opened(context, f"{desk.past.url}/docs") as page:
        await page.locator("article.operation").first.wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        menu = page.locator("#menu")
        await expect(menu).to_have_js_property("open", width >= 860)
        if width < 860:
            await menu.locator("summary").click()
        # A part of the operations, which look alike: axe-core takes a second for ten of them
        await page.get_by_label("Filter operations").fill("completions")
        await expect(page.locator("article.operation:visible")).not_to_have_count(0)
        assert await violations(page) == []
        if width < 860:
            await menu.get_by_role("link").first.click()
            await expect(menu).to_have_js_property("open", False)
    await context.close()
