"""Questions about bills: usage in groups, nightly comparison of closed hours, and reconstruction of lost bills."""

from telemetry.ask.usage.page import UsageQuery, usage_page
from telemetry.ask.usage.rebuild import LostBills, rebuild
from telemetry.ask.usage.routes import UsageRoutes

__all__ = ["LostBills", "UsageQuery", "UsageRoutes", "rebuild", "usage_page"]
