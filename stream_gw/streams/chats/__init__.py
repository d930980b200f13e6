"""Chats of clients that know only the chat's id: which stream to resume or stop."""
