"""Questions about bills: usage in groups, and the closed hours of a month."""

from telemetry.ask.usage.page import UsageQuery, usage_page

__all__ = ["UsageQuery", "usage_page"]
