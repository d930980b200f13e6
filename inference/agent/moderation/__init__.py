"""Moderation of answers, before they enter the log."""
