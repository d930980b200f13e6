"""Dialects of the Responses API: ``openai.responses`` and, of the Open Responses specification, ``open.responses``."""
