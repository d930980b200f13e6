"""The error of an answer that refuses a request."""

from __future__ import annotations

import logging

from inference.engines.upstream.answer import Answer
from inference.engines.upstream.answers import ERROR_BYTES_MAX, engine_error, upstream_error
from stream_fabric.stream.frames import ErrorInfo

log = logging.getLogger(__name__)


async def refusal_of(answer: Answer) -> ErrorInfo | None:
    """Return the error of an answer that refuses the request; None when the request is served."""
    if answer.status in (401, 403, 407):  # our key, not the client's
        log.error("model server refuses the agent's API key, set --upstream-api-key: status=%d", answer.status)
        return engine_error("the model server refuses the platform's own API key; the operator must correct it")
    # A redirect is not followed: the request would become a GET, or go to a host that the operator did not set
    if 300 <= answer.status < 400 and (location := answer.headers.get("location")) is not None:
        log.error("model server redirects, set --upstream to its own URL: location=%s", location)
        return engine_error("the model server redirects; the operator must correct its URL")
    if answer.status != 200:
        return upstream_error(await answer.read_start(ERROR_BYTES_MAX), answer.status)
    return None
