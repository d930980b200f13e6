"""Make the documents that gateways serve: ``python -m stream_gw.transport.reference``."""

from __future__ import annotations

from stream_gw.transport.reference.asyncapi import make_asyncapi
from stream_gw.transport.reference.document import make_document
from stream_gw.transport.reference.operations import OPERATIONS
from stream_gw.transport.reference.served import ASYNCAPI, DOCUMENT, text_of

DOCUMENT.write_text(text_of(make_document(OPERATIONS)))
ASYNCAPI.write_text(text_of(make_asyncapi(OPERATIONS)))
