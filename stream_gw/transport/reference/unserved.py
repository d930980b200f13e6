"""Endpoints of OpenAI's and Anthropic's services that this platform does not have, and what a caller can use instead.

A request to one is answered like any path that does not exist: 404, before authentication and without reading the body.
"""

from __future__ import annotations

from stream_fabric.errors import NotServed

_CHAT = "keep the conversation in your application and send it to /v1/chat/completions with a session_id"
UNSERVED: dict[str, str] = {
    "/v1/assistants": _CHAT,
    "/v1/audio": "run a speech server beside this platform, and send the text to /v1/chat/completions",
    "/v1/batches": "send the requests one by one with service_tier flex or batch",
    "/v1/complete": "use /v1/messages",
    "/v1/containers": "run tools in your application, and send their results to /v1/chat/completions",
    "/v1/evals": "score answers with /v1/score or /v1/classify",
    "/v1/files": "send text and images within the messages of /v1/chat/completions",
    "/v1/fine_tuning": "train elsewhere and serve the result; LoRA adapters are models of GET /v1/models",
    "/v1/images": "this platform makes text only; vision models take images in /v1/chat/completions",
    "/v1/messages/batches": "send the messages one by one to /v1/messages",
    "/v1/moderations": "use /v1/classify with a moderation model",
    "/v1/realtime": "use the WebSocket /v1/stream, which carries text",
    "/v1/threads": _CHAT,
    "/v1/uploads": "send text and images within the messages of /v1/chat/completions",
    "/v1/vector_stores": "keep the vectors in your own store; /v1/embeddings and /v1/rerank make and rank them",
    "/v1/videos": "this platform makes text only",
}
"""Paths by their beginning, with advice. ``docs/protocol.md`` has the same table."""


def unserved(path: str) -> NotServed | None:
    """Return the error of a path of an endpoint that is not served; None: the path is none of these.

    It looks at three parts of the path, so its time depends on no table's size.
    """
    parts = path.split("/", 4)
    for depth in (4, 3):
        start = "/".join(parts[:depth])
        advice = UNSERVED.get(start)
        if advice is not None:
            return NotServed(f"{start} is not served here; {advice}")
    return None
