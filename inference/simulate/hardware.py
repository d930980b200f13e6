"""Speed, memory and price of one replica, from an operator's TOML profile to the simulator's settings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from inference.engines.sim.settings import SimSettings
from inference.simulate.engine import SETTINGS
from inference.simulate.traces import ENGINE_BLOCK_TOKENS

GIB = 2**30
_KV_BYTES_PER_TOKEN = 128 << 10

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a model's attention, which gives the KV bytes per token."""

    layers: _Count
    kv_heads: _Count
    head_dim: _Count
    bytes_per_value: _Positive = 2.0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Profile of one replica. Memory is given as ``kv_tokens``, or by the figures that it follows from."""

    prefill_tokens_per_s: _Positive
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    """Largest number of concurrent sequences."""
    decode_tokens_per_s: dict[str, _Positive]
    """Output tokens per second of the whole batch, by batch size."""
    name: str = ""
    gpus: _Count = 1
    gpu_hour: _Size = 0.0
    """Price of a GPU hour in dollars."""
    batch_tokens: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 2048
    """Tokens of one step, prefill and decode together."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=0)] = 0
    attention: Attention | None = None
    gpu_memory_gib: _Size = 0.0
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Share of the GPUs' memory that the engine may use."""
    weights_gib: _Size = 0.0
    """Weights of the whole replica."""
    other_gib: _Size = 0.0
    """Memory for activations, graphs and buffers."""


@dataclass(frozen=True)
class Hardware:
    """One replica, with the arithmetic behind it."""

    settings: SimSettings
    name: str
    gpus: int
    gpu_hour: float
    kv_bytes_per_token: int
    """KV bytes of one token; 0: unknown."""
    steps: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        return self.settings.num_blocks * self.settings.block_size


ASSUMED = Hardware(
    SETTINGS,
    "assumed: of the order of an 8B model in 16 bits on one H100",
    1,
    0.0,
    _KV_BYTES_PER_TOKEN,
    ("no profile was given: these are of the right order and were not measured",),
)


def load(path: Path) -> Hardware:
    """Read a profile from a TOML file. Raises OSError, and ValueError that names the file and the mistake."""
    try:
        profile = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Profile)
        return hardware(profile, path.name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def hardware(profile: Profile, name: str = "") -> Hardware:
    """Compute a replica's speed and memory from its profile. Raises ValueError for an impossible profile."""
    steps: list[str] = []
    first_s, further_s = _fit_step_time(profile.decode_tokens_per_s, profile.slots, steps)
    bytes_per_token = _bytes_per_token(profile, steps)
    kv_tokens = profile.kv_tokens or _kv_tokens(profile, bytes_per_token, steps)
    if kv_tokens < 2 * ENGINE_BLOCK_TOKENS:
        raise ValueError(f"the KV cache would hold {kv_tokens} tokens; that is no replica")
    settings = SimSettings(
        itl_ms=first_s * 1e3,
        batch_slope_us=further_s * 1e6,
        ttft_ms=0.0,
        prefill_tokens_per_s=profile.prefill_tokens_per_s,
        max_num_seqs=profile.slots,
        max_num_batched_tokens=max(profile.batch_tokens, profile.slots),
        block_size=ENGINE_BLOCK_TOKENS,
        num_blocks=kv_tokens // ENGINE_BLOCK_TOKENS,
    )
    return Hardware(settings, profile.name or name, profile.gpus, profile.gpu_hour, bytes_per_token, tuple(steps))


def _fit_step_time(rates: Mapping[str, float], slots: int, steps: list[str]) -> tuple[float, float]:
    """Return the seconds of a decode step with one sequence, and the seconds that each further one adds.

    A least-squares line of relative errors through the measured points.
    """
    points = []
    for text, rate in rates.items():
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"decode_tokens_per_s: {text!r} is no batch size; write 64 = 2500.0")
        points.append((int(text), int(text) / rate))
    if not points:
        raise ValueError("decode_tokens_per_s: no batch size; write 1 = 100.0 and so on")
    points.sort()
    weights = [1 / time_s**2 for _, time_s in points]
    total = sum(weights)
    mean_x = sum(w * (batch - 1) for w, (batch, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * time_s for w, (_, time_s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (batch - 1 - mean_x) ** 2 for w, (batch, _) in zip(weights, points, strict=True))
    slope_s = 0.0
    if spread > 0:
        slope_s = sum(
            w * (batch - 1 - mean_x) * (time_s - mean_y) for w, (batch, time_s) in zip(weights, points, strict=True)
        )
        slope_s = max(slope_s / spread, 0.0)
    first_s = mean_y - slope_s * mean_x
    if first_s <= slope_s:
        raise ValueError("decode_tokens_per_s: larger batches would make fewer tokens a second; that is no GPU")
    off = max(abs(first_s + slope_s * (batch - 1) - time_s) / time_s for batch, time_s in points)
    shown = ", ".join(f"{batch}: {time_s * 1e3:.1f}" for batch, time_s in points)
    line = (
        f"decode steps of batch {shown} ms: {first_s * 1e3:.2f} ms and {slope_s * 1e6:.0f} us for each further sequence"
    )
    if len(points) > 2:
        line += f", off by {off:.0%} at most"
    steps.append(line)
    if slots > points[-1][0]:
        steps.append(
            f"batches above {points[-1][0]}, up to {slots} slots, are taken from that line; nobody measured them"
        )
    return first_s, slope_s


def _bytes_per_token(profile: Profile, steps: list[str]) -> int:
    """KV bytes of one token, as given or from the attention's shape; 0: unknown. Adds its arithmetic to ``steps``."""
    if profile.kv_bytes_per_token or profile.attention is None:
        return profile.kv_bytes_per_token
    a = profile.attention
    steps.append(
        f"KV of a token: 2 (key and value) x {a.layers} layers x {a.kv_heads} heads x {a.head_dim} x "
        f"{a.bytes_per_value:g} bytes = {a.bytes_per_token:,} bytes"
    )
    return a.bytes_per_token


def _kv_tokens(profile: Profile, bytes_per_token: int, steps: list[str]) -> int:
    """KV tokens that fit beside the weights. Adds its arithmetic to ``steps``. Raises ValueError if unknown."""
    if not bytes_per_token or not profile.gpu_memory_gib:
        raise ValueError(
            "how much KV there is room for is unknown: give kv_tokens, or gpu_memory_gib and weights_gib with "
            "kv_bytes_per_token or [attention]"
        )
    left_gib = profile.gpus * profile.gpu_memory_gib * profile.memory_share - profile.weights_gib - profile.other_gib
    other = f" - {profile.other_gib:g} GiB other" if profile.other_gib else ""
    arithmetic = (
        f"{profile.gpus} x {profile.gpu_memory_gib:g} GiB x {profile.memory_share:g} - {profile.weights_gib:g} GiB "
        f"weights{other} = {left_gib:,.1f} GiB"
    )
    if left_gib <= 0:
        raise ValueError(f"the model does not fit: {arithmetic} for KV")
    tokens = int(left_gib * GIB / bytes_per_token)
    steps.append(f"room for KV: {arithmetic} / {bytes_per_token:,} bytes = {tokens:,} tokens")
    return tokens
