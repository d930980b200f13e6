"""Models in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol


class Served(Protocol):
    """Model that is served."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def since_s(self) -> int: ...


def model_json(model: str, served: Served) -> dict[str, Any]:
    """Return the description of one model. The epoch stands for an unknown date, as Anthropic's reference says."""
    since = datetime.fromtimestamp(served.since_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    known = {"max_input_tokens": served.max_model_len} if served.max_model_len else {}
    return {"type": "model", "id": model, "display_name": model, "created_at": since, **known}


def model_list(served: Sequence[tuple[str, Served]]) -> dict[str, Any]:
    """Return all models as one page."""
    data = [model_json(model, each) for model, each in served]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
