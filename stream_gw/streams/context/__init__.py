"""Requests that are made to fit a model's context before their stream is created."""
