"""Chats of the AI SDK's ``useChat``, without a server of the user's own."""

from stream_gw.transport.ui.routes import UiRoutes
from stream_gw.transport.ui.socket import chat_socket

__all__ = ["UiRoutes", "chat_socket"]
