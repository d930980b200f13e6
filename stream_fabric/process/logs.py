"""Logs of every process, on stderr: one JSON object per line for machines, text for a terminal. Secrets are removed.

Modules log with the standard library and put values into ``extra``. No module logs prompts or completions.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from pythonjsonlogger.core import LogData
from pythonjsonlogger.json import JsonFormatter

Format = Literal["auto", "json", "text"]
Level = Literal["debug", "info", "warning", "error"]

_OUR_PACKAGES = ("stream_fabric", "stream_gw", "inference", "telemetry")
_LINE_CHARS_MAX = 4000
"""Longest line of a value; the rest is cut. A traceback has many lines, and keeps its end."""
# Each pattern takes linear time for any text: what it scans from one start holds no other start. Messages of clients
# get into logs, and a log is written on the event loop.
_SECRETS = (
    (re.compile(r"\b(sk-|sgw_[^\W_]+_)[\w-]+"), r"\1…"),
    (re.compile(r"\b(cap_)[\w.-]{32,}"), r"\1…"),
    (re.compile(r"(?i)\b(bearer)[ .]+[\w.~+/=-]+"), r"\1 …"),
    (re.compile(r"(://[^:/@\s]*:)(?:(?!://)[^@\s])++@"), r"\1…@"),
    (
        re.compile(r"(?i)((?:password|secret|token|api[_-]?key)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]{4,}"),
        r"\1…",
    ),
)


def without_secrets(text: str) -> str:
    """Replace API keys, bearer tokens, and passwords in URLs and settings with ``…``."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _bounded(text: str, line_chars_max: int) -> str:
    if len(text) <= line_chars_max:
        return text
    lines = text.split("\n")
    return "\n".join(line if len(line) <= line_chars_max else line[:line_chars_max] + "…" for line in lines)


def _value(value: Any) -> Any:
    """Return a field's value as it is logged. A secret is redacted before the cut, which could leave half of it."""
    if not isinstance(value, str):
        return value
    return _bounded(without_secrets(_bounded(value, 3 * _LINE_CHARS_MAX)), _LINE_CHARS_MAX)


class _JSONLines(JsonFormatter):
    """One JSON object a record: time, level, logger, message, then ``extra``."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger", "message": "event", "exc_info": "exception"},
            json_default=str,
            json_ensure_ascii=False,
        )

    def add_fields(self, log_data: LogData, record: logging.LogRecord, message_dict: LogData) -> None:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        log_data["at"] = at.replace("+00:00", "Z")
        super().add_fields(log_data, record, message_dict)
        log_data["level"] = log_data["level"].lower()

    def process_log_record(self, log_data: LogData) -> LogData:
        return {key: _value(value) for key, value in log_data.items()}


class _TextLines(_JSONLines):
    """One text line a record, with the same fields, for a terminal."""

    def jsonify_log_record(self, log_data: LogData) -> str:
        at, level, name = log_data.pop("at"), log_data.pop("level").upper(), log_data.pop("logger")
        text, error = log_data.pop("event"), log_data.pop("exception", "")
        fields = "".join(f" {key}={value}" for key, value in log_data.items() if value != "")
        return f"{at} {level} {name}: {text}{fields}" + (f"\n{error}" if error else "")


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler that ``configure`` installs."""


def configure(form: Format = "auto", level: Level = "info") -> None:
    """Configure this process's logs. ``auto``: text on a terminal, JSON otherwise.

    ``level`` applies to our packages. Third-party libraries log warnings and errors only. A process in which somebody
    else has installed log handlers is left as it is.
    """
    root = logging.getLogger()
    if any(not isinstance(handler, _Handler) for handler in root.handlers):
        return
    as_text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = _Handler(sys.stderr)
    handler.setFormatter(_TextLines() if as_text else _JSONLines())
    root.handlers[:] = [handler]
    ours = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(ours, logging.WARNING))
    for package in _OUR_PACKAGES:
        logging.getLogger(package).setLevel(ours)
