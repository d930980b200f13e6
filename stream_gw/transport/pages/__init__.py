"""The browser's pages and their files."""

from stream_gw.transport.pages.secured import SiteApp, no_path
from stream_gw.transport.pages.served import ServedBody
from stream_gw.transport.pages.site import Site

__all__ = ["ServedBody", "Site", "SiteApp", "no_path"]
