"""What processes log, on stderr: a JSON object a line for machines, text for a terminal. Secrets are taken out of both.

Modules log by the standard library, with facts in ``extra``; prompts and completions are never given to a log.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict

Format = Literal["auto", "json", "text"]

_SECRETS = (
    (re.compile(r"\b(sk-)[\w-]+"), r"\1…"),
    (re.compile(r"(?i)\b(bearer)[ .]+[\w.~+/=-]+"), r"\1 …"),
    (re.compile(r"(://[^:/@\s]*:)[^@\s]+@"), r"\1…@"),
    (
        re.compile(r"(?i)\b((?:[\w-]*(?:password|secret|token|api[_-]?key))[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{4,}"),
        r"\1…",
    ),
)


def without_secrets(text: str) -> str:
    """Keys, bearer tokens, and passwords in URLs and settings, where a text has them."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _clean(logger: Any, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = without_secrets(value)
    return event


def _as_text(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    at, level, name = event.pop("at"), event.pop("level").upper(), event.pop("logger")
    error = event.pop("exception", "")
    text = event.pop("event")
    facts = "".join(f" {key}={value}" for key, value in event.items() if value != "")
    return f"{at} {level} {name}: {text}{facts}" + (f"\n{error}" if error else "")


class _Handler(logging.StreamHandler[TextIO]):
    pass


def configure(form: Format = "auto") -> None:
    """Of this process. ``auto``: text on a terminal, else JSON."""
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    last = _as_text if as_text else structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    root = logging.getLogger()
    if any(not isinstance(handler, _Handler) for handler in root.handlers):
        return  # whoever runs us in a process of theirs has said where logs go
    handler = _Handler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _clean,
                last,
            ],
        )
    )
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
