"""Questions about bills: usage in groups, nightly comparison of closed hours, and reconstruction of lost bills.

``rebuild`` and ``routes`` are of the telemetry process alone, and imported there: they load Arrow and an HTTP server.
"""

from telemetry.ask.usage.lost_bills import LostBills
from telemetry.ask.usage.page import UsageQuery, usage_page

__all__ = ["LostBills", "UsageQuery", "usage_page"]
