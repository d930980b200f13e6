"""Findings of ``stream-gw doctor``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "missing", "absent", "skipped"]
"""``missing``: the platform needs it. ``absent``: the platform works without it. ``skipped``: not configured."""

_LABELS: dict[Status, str] = {"ok": "ok", "missing": "MISSING", "absent": "absent", "skipped": "-"}


class Finding(NamedTuple):
    what: str
    status: Status
    found: str
    """The value found; empty where ``what`` says all."""
    remedy: str


class Report:
    """Collects findings; ``on_finding`` gets each at once."""

    def __init__(self, on_finding: Callable[[Finding], None]) -> None:
        self.findings: list[Finding] = []
        self._on_finding = on_finding

    @property
    def failed(self) -> bool:
        return any(finding.status == "missing" for finding in self.findings)

    def ok(self, what: str, found: str = "") -> None:
        """Add a successful check. ``found``: the value found, for example a version."""
        self._add(Finding(what, "ok", found, ""))

    def missing(self, what: str, remedy: str, *, found: str = "", needed: bool = True) -> None:
        """Add something that was not found, with its remedy. ``needed`` False: the platform works without it."""
        self._add(Finding(what, "missing" if needed else "absent", found, remedy))

    def skipped(self, what: str, remedy: str) -> None:
        """Add a check that was not run. ``remedy`` says which setting makes it run."""
        self._add(Finding(what, "skipped", "", remedy))

    def _add(self, finding: Finding) -> None:
        if finding not in self.findings:  # several roles share settings, and each would tell of the same fault
            self.findings.append(finding)
            self._on_finding(finding)


def as_text(finding: Finding) -> str:
    head = f"  {_LABELS[finding.status]:<8} {finding.what}" + (f": {finding.found}" if finding.found else "")
    if finding.status == "skipped":
        return f"{head}: {finding.remedy}"
    return f"{head}\n           {finding.remedy}" if finding.remedy else head


def as_json(report: Report) -> str:
    findings = [finding._asdict() for finding in report.findings]
    return json.dumps({"ok": not report.failed, "findings": findings})
