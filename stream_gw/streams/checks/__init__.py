"""Checks of a request for a stream that need nothing of its prompt."""
