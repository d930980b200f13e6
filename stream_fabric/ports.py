"""The doors between planes. Each has one contract suite in ``tests/`` that every implementation passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from stream_fabric.events import Event
from stream_fabric.frames import ErrorInfo, Frame, TerminalStatus, Usage
from stream_fabric.ids import StreamId

# --- the engine beside an agent ----------------------------------------------------------------------------


class EngineRequest(msgspec.Struct, frozen=True):
    """What an engine is asked to do."""

    stream: StreamId
    kind: Literal["chat", "completions", "embeddings", "rerank"]
    """Of embeddings and rerank the answer is one block of kind ``item`` whose deltas are the server's JSON body."""
    model: str
    body: msgspec.Raw
    """The request in OpenAI's words, as the client sent it (``stream`` and our own fields taken out)."""
    deadline_unix_ms: int = 0
    """0: none."""
    traceparent: str = ""
    """W3C trace context that the engine's own spans belong to."""


class FrameSink(Protocol):
    """Where an engine puts one request's output. Calls never block and never raise.

    Frames arrive in the order of the calls. After ``end``, or after ``abort`` was called, calls are ignored.
    """

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        """A text delta; the hot call."""

    def frame(self, frame: Frame) -> None:
        """Any frame but ``End``."""

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        """Correct the running usage. Output tokens are counted from the deltas."""

    def computed(self, queue_s: float, prefill_s: float) -> None:
        """The engine's own figures, where it tells them, before ``end``: how long the request waited for its turn, and
        how long from then to its first token."""

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        """The one terminal. ``usage``: the engine's own figures, when it reports them."""


SleepLevel = Literal[1, 2]
"""1: the weights are kept in the host's memory; 2: nothing is kept, and they are read again. Either loses the cache."""


class EngineLoad(msgspec.Struct, frozen=True):
    """One reading of an engine's load, for the lease. What an engine does not tell is 0."""

    running: int
    waiting: int
    slots: int
    """How many sequences it runs at once (``max_num_seqs``)."""
    ready: bool = True
    """Whether it takes requests: False while it boots, warms up, sleeps or is being restarted."""
    kv_used_ratio: float = 0.0
    kv_capacity_tokens: int = 0
    kv_evicted_tokens: int = 0
    """Tokens whose cached KV has been thrown out, ever; it only grows."""
    kv_clears: int = 0
    """How often the whole prefix cache has been thrown away, ever."""
    prefix_queries_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, ever."""
    prefix_hits_tokens: int = 0
    """Of them, those found."""
    metrics_missing: int = 0
    """Of the metrics by which a server should tell all this, those that it does not show."""
    asleep: int = 0
    """The level that it sleeps at, until it is awake again; 0: it is."""


class Loaded(msgspec.Struct, frozen=True):
    """What an engine has loaded, as far as it tells."""

    adapters: tuple[str, ...] = ()
    """Of the models it serves, those that are LoRA adapters of another."""
    artifact: str = ""
    """Hash of what its base model was loaded from."""


class Engine(Protocol):
    """One model server. Failures of a request end that request through its sink, never raise."""

    async def start(self) -> Sequence[str]:
        """Connect or boot; return the names of the models served. Raises EngineFailed with what to do."""

    async def serving(self) -> None:
        """Wait while the engine can serve; only ``close`` makes it return. Raises what ended it: its requests' sinks
        may then have heard no end, and the caller ends them."""

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        """Begin. Output follows through the sink, which gets exactly one ``end`` unless aborted."""

    def abort(self, stream: StreamId) -> None:
        """Stop and free the engine's resources for the stream. Unknown or ended streams are ignored."""

    def load(self) -> EngineLoad: ...

    def loaded(self) -> Loaded:
        """Once it has started."""

    async def sleep(self, level: SleepLevel) -> bool:
        """Give the device's memory back. False: something runs, or it is being restarted, and it stays as it is; it
        sleeps already: True. Its cached prompts are gone, and until ``wake`` has returned each request fails at once
        with ``EngineLost``.

        Raises Unsupported when it cannot, EngineFailed when it did not: ``wake`` then makes it what it was."""

    async def wake(self) -> None:
        """Serve again as before the sleep; of one that is awake, harmless. A token has come out when it returns.

        Raises EngineLost when it did not wake and is being started again (``load().ready`` tells when it serves),
        EngineFailed when nobody starts it again. It takes no request from then on."""

    async def close(self) -> None:
        """Abort everything and release."""


# --- telemetry ---------------------------------------------------------------------------------------------


class EventSink(Protocol):
    """Where a process leaves what it has to tell."""

    def emit(self, event: Event) -> None:
        """Take the event. Never blocks and never raises; what cannot be kept is counted."""


class NoEvents:
    """An ``EventSink`` for a process that tells nobody."""

    def emit(self, event: Event) -> None: ...
