"""Dialect ``vercel.ui``: the UI message stream v1 of Vercel's AI SDK, which ``useChat`` reads."""
