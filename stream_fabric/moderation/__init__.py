"""Moderation of prompts and answers: local rules, an OpenAI-compatible endpoint, or both."""
