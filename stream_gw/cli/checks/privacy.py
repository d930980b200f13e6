"""Checks of redaction and moderation."""

from __future__ import annotations

from stream_fabric.errors import ModerationUnavailable
from stream_fabric.moderation.moderator import open_moderator
from stream_fabric.moderation.settings import ModerationSettings
from stream_fabric.process.host import HostClock
from stream_gw.cli.checks.report import Report
from stream_gw.privacy.redaction import can_redact


async def check_privacy(report: Report, settings: ModerationSettings) -> None:
    """Check that stored content can be redacted, and that moderation answers."""
    if can_redact():
        report.ok("redaction of stored content")
    else:
        remedy = "pip install 'stream-gw[privacy]'; without it plans with redact store no content"
        report.missing("redaction of stored content", remedy, needed=False)
    closed = settings.model_copy(update={"moderation_fail": "closed"})  # a failure shall be seen
    try:
        async with open_moderator(closed, lambda outcome, seconds: None, HostClock()) as moderator:
            if moderator is None:
                remedy = "set STREAM_GW_MODERATION_URL or STREAM_GW_MODERATION_RULES_FILE for plans with moderation"
                report.skipped("moderation", remedy)
                return
            await moderator.check(["hello"])
    except (ValueError, OSError) as error:
        report.missing("a usable file of moderation rules", str(error))
    except ModerationUnavailable as error:
        cause = error.__cause__ or error
        report.missing(f"moderation at {settings.moderation_url}", f"{cause}; correct its URL or its key")
    else:
        what = settings.moderation_url or f"rules of {settings.moderation_rules_file}"
        report.ok("moderation", what)
