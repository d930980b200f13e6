"""Structured replies: their check against the request's JSON schema before the log, and their repair."""
