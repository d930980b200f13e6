"""The simulator's settings, written as ``itl_ms=20,ttft_ms=100,max_num_seqs=64``."""

from __future__ import annotations

import msgspec


class SimSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fictional replica. The defaults are similar to an 8B model on one large GPU. Times in milliseconds."""

    model: str = "sim-small"
    itl_ms: float = 20.0
    """Duration of a decode step with one sequence; 0: no delay."""
    batch_slope_us: float = 0.0
    """Time that each further sequence adds to a step."""
    ttft_ms: float = 100.0
    """Minimum time from the start of a request's prefill to its first token."""
    prefill_tokens_per_s: float = 20_000.0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    """Maximum tokens of one step, decode and chunked prefill together."""
    itl_objective_ms: float = 0.0
    """Prompts are computed in pieces that let a step with running answers take no longer; 0: pieces are not limited."""
    block_size: int = 16
    num_blocks: int = 32_768
    context: int = 0
    """Maximum context in tokens: longer requests are refused, output ends there; 0: unknown, the KV cache limits."""
    prefix_cache: bool = True
    seed: int = 0
    length_min: int = 50
    length_max: int = 400
    """Range of output tokens when the request sets no limit; derived from the prompt."""
    fail_rate: float = 0.0
    """Share of requests that fail half-way."""
    stall_after_tokens: int = 0
    """Every request stops without an end after this number of tokens; 0: never."""
    crash_after_tokens: int = 0
    """The process exits after this total number of tokens; 0: never."""

    sleep_levels: int = 2
    """Deepest supported sleep level; 0: no sleep."""
    sleep_ms: float = 500.0
    """Duration of falling asleep."""
    wake_ms: float = 500.0
    reload_ms: float = 5000.0
    """Extra duration of a wake from level 2, which reads the weights again."""

    @classmethod
    def parse(cls, text: str) -> SimSettings:
        """Read settings from text. Raises ValueError that names the wrong setting and the allowed values."""
        given: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in cls.__struct_fields__:
                raise ValueError(f"--sim: no setting {name!r}; there are {', '.join(cls.__struct_fields__)}")
            if not equals:
                raise ValueError(f"--sim: {name} has no value; write {name}=<value>")
            given[name] = value.strip()
        try:
            settings = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"--sim: {error}") from error
        for name, (low, high) in _RANGES.items():
            value = getattr(settings, name)
            if not low <= value <= high:
                raise ValueError(f"--sim: {name} must be {low:g} to {high:g}, got {value:g}")
        if settings.length_min > settings.length_max:
            raise ValueError("--sim: length_min must not be above length_max")
        return settings


_RANGES: dict[str, tuple[float, float]] = {
    "itl_ms": (0, 60_000),
    "batch_slope_us": (0, 1e6),
    "ttft_ms": (0, 600_000),
    "prefill_tokens_per_s": (1, 1e9),
    "max_num_seqs": (1, 100_000),
    "max_num_batched_tokens": (16, 1 << 20),
    "itl_objective_ms": (0, 60_000),
    "block_size": (1, 1024),
    "num_blocks": (2, 1 << 24),
    "context": (0, 1 << 31),
    "length_min": (1, 1 << 20),
    "length_max": (1, 1 << 20),
    "fail_rate": (0, 1),
    "stall_after_tokens": (0, 1 << 31),
    "crash_after_tokens": (0, 1 << 31),
    "sleep_levels": (0, 2),
    "sleep_ms": (0, 600_000),
    "wake_ms": (0, 600_000),
    "reload_ms": (0, 600_000),
}
