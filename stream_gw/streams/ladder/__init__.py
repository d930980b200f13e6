"""A smaller model answers a request while the pool of its own model is saturated."""

from stream_gw.streams.ladder.ladder import Ladder, ladder_of

__all__ = ["Ladder", "ladder_of"]
