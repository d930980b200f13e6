"""A platform for tests of the whole API: simulated engines, a database of tenants, two tenants' keys and an operator's.

It is of these tests alone, because they create and cancel whatever they can.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key
from stream_gw.transport.reference.document import make_document
from stream_gw.transport.reference.operations import OPERATIONS
from tests.gateway.processes import Process, running
from tests.gateway.wire import Gate

PEPPER = "a pepper of sixteen bytes"
DOCUMENT: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(make_document(OPERATIONS)))


KNOWN = {"tenant": "known", "id": "ann/b c", "model": "org/m", "name": "known"}
"""A tenant, its user, a price and a plan that ``make_known`` adds."""


class Fleet(NamedTuple):
    """One gateway as each of its callers sees it."""

    acme: Gate
    globex: Gate
    operator: Gate
    process: Process


@contextmanager
def api_fleet(folder: Path) -> Iterator[Fleet]:
    """Start the platform. Its end fails where a gateway or an agent logged a traceback."""
    keys = {name: new_key(HostRandom()) for name in ("acme", "globex", "ops")}
    scopes = {"ops": 'scopes = ["admin"]\n'}
    file = folder / "keys.toml"
    file.write_text(
        "".join(
            f'[[tenant]]\nid = "{name}"\n[[tenant.key]]\nsha256 = "{key_digest(key)}"\n{scopes.get(name, "")}'
            for name, key in keys.items()
        )
    )
    env = {
        "STREAM_GW_KEYS_FILE": str(file),
        "STREAM_GW_KEY_PEPPER": PEPPER,
        "STREAM_GW_DATABASE_URL": f"sqlite:///{folder / 'tenants.db'}",
        "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16),
    }
    with (
        running(sim="itl_ms=0,ttft_ms=0", gateways=1) as platform,
        platform.gateway("--gateway", "api", **env) as process,
    ):
        acme, globex, operator = (Gate(process.facts["url"], process.pid, key) for key in keys.values())
        yield Fleet(acme, globex, operator, process)


async def make_known(operator: Gate) -> None:
    """Add the rows that ``narrowed`` names, where they are not there."""
    tenant, user, model, plan = KNOWN.values()
    for method, path, body in (
        ("POST", "tenants", {"id": tenant}),
        ("POST", "users", {"tenant": tenant, "id": user}),
        ("POST", "plans", {"name": plan}),
        ("PUT", f"prices/{model}", {"prompt": 1}),
    ):
        reply = await operator.ask(method, f"/v1/admin/{path}", body)
        assert reply.status in (200, 201, 409), reply


def narrowed(stream: str, doomed: tuple[str, str]) -> dict[str, Any]:
    """Return the document with fewer values, so that generated requests reach a model and streams, and end soon.

    ``doomed``: streams that may be deleted, in either profile of responses.
    """
    document = copy.deepcopy(DOCUMENT)
    schemas = document["components"]["schemas"]
    schemas["ScoreBody"]["required"] += ["queries", "documents"]  # one of several ways to write it
    for name in ("queries", "documents"):
        schemas["ScoreBody"]["properties"][name] = {"type": "string"}
    for name in ("data_1", "data_2", "text_1", "text_2", "items"):
        del schemas["ScoreBody"]["properties"][name]
    schemas["ClassifyBody"]["required"].append("input")
    del schemas["ClassifyBody"]["properties"]["messages"]
    bodies = ("ChatBody", "CompletionsBody", "EmbeddingsBody", "RerankBody", "MessagesBody", "CountTokensBody")
    for name in (*bodies, "ClassifyBody", "ScoreBody", "CompactBody", "ResponsesBody"):
        schemas[name]["properties"]["model"] = {"enum": ["sim-small"]}
    for name in ("ChatBody", "CompletionsBody"):
        schemas[name]["properties"]["max_tokens"] = {"enum": [1, 7, 20]}
        schemas[name]["properties"]["max_completion_tokens"] = {"type": "null"}
        schemas[name]["required"].append("max_tokens")
    schemas["MessagesBody"]["properties"]["max_tokens"] = {"enum": [1, 7, 20]}
    schemas["ResponsesBody"]["properties"]["max_output_tokens"] = {"enum": [1, 7, 20]}
    said = {"type": "string", "minLength": 1}
    schemas["ResponsesBody"]["properties"]["input"] = {"anyOf": [said, schemas["ResponsesBody"]["properties"]["input"]]}
    schemas["ResponsesBody"]["properties"]["max_tool_calls"] = {"type": "null"}
    schemas["ResponsesBody"]["properties"]["previous_response_id"] = {"type": "null"}
    schemas["ResponsesBody"]["properties"]["conversation"] = {"type": "null"}
    schemas["ResponsesBody"]["required"] += ["input", "max_output_tokens"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ("after", "Last-Event-ID") and "pattern" in parameter["schema"]:
                    parameter["schema"] = {"enum": ["1-0", "1-2", "1-900"]}
                if path.startswith("/v1/ui/chat/") and parameter["in"] == "path":
                    parameter["schema"] = {"enum": ["chat", "a/b", "x" * 129]}
                if path == "/v1/models/{id}":
                    parameter["schema"] = {"enum": ["sim-small", "org/none"]}
                if path.startswith(("/v1/streams/", "/v1/responses/", "/v1/open/")) and parameter["in"] == "path":
                    is_deleted = method == "delete" and path.endswith("{id}")
                    one = doomed["open" in path] if is_deleted else stream
                    others = [] if path.endswith("/input") else ["resp_" + "0" * 32, one + "\n"]
                    parameter["schema"] = {"enum": [one, *others]}
                if path.startswith(("/v1/admin/users", "/v1/admin/prices/")) and parameter["name"] in KNOWN:
                    parameter["schema"] = {"enum": [KNOWN[parameter["name"]]]}
                if path in ("/v1/admin/tenants/{id}", "/v1/admin/plans/{name}"):
                    known = KNOWN["tenant" if "tenants" in path else "name"]
                    parameter["schema"] = {"enum": [known, "nobody"]}
    schemas["UiChatBody"]["properties"] |= {"model": {"enum": ["sim-small"]}, "maxOutputTokens": {"const": 9}}
    schemas["UiChatBody"]["required"] += ["model", "maxOutputTokens"]
    schemas["UserCreate"]["properties"]["tenant"] = {"enum": [KNOWN["tenant"]]}
    del document["paths"]["/v1/admin/ops"]  # it never ends
    return document
