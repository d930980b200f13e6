"""The agent's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from stream_fabric.limits import LEASE_RENEW_S, LEASE_TTL_S, VLLM_START_S_MAX
from stream_fabric.settings import EmitSettings


class AgentSettings(EmitSettings):
    engine: Literal["sim", "openai", "vllm"] = Field(
        "sim", description="What serves the model: sim (the simulator), openai (a server by URL), vllm (started by us)"
    )
    sim: str = Field("", description="The simulator's settings, as itl_ms=20,ttft_ms=100,max_num_seqs=64")
    upstream: str = Field("", description="engine openai: the server's base URL, for example http://127.0.0.1:8000")
    upstream_api_key: SecretStr = Field(SecretStr(""), description="engines openai, vllm: a bearer key for the server")
    upstream_slots: int = Field(
        256,
        ge=1,
        le=100_000,
        description="engines openai, vllm: sequences the server runs at once (vLLM's max_num_seqs; vLLM is told)",
    )
    model: str = Field("", description="engine vllm: the model's name or folder")
    vllm_flags: str = Field(
        "", description="engine vllm: vLLM's own flags, as a shell reads them; on the command line they follow --"
    )
    vllm_python: str = Field(
        "",
        description="engine vllm: the Python of vLLM's environment; empty: the vllm command of ours, or the PATH's",
    )
    vllm_start_s: float = Field(
        VLLM_START_S_MAX, gt=0, le=86_400, description="engine vllm: a start that takes longer has failed"
    )
    kv_events: bool = Field(False, description="engine vllm: count what its prefix cache throws out; needs pyzmq")
    pool: str = Field("", max_length=128, description="The pool to join; empty: the first model served")
    replica: str = Field("", max_length=64, description="A name for the replica; empty: the host's and process's")
    region: str = Field("", max_length=64, description="Where the replica is, as stream-gw replicas shows it")
    hardware: str = Field("", max_length=64, description="What it runs on, as stream-gw replicas shows it")
    revision: str = Field(
        "", max_length=64, description="What it was deployed from: a pool with several at once is in a rollout"
    )
    standby: bool = Field(False, description="Join the pool warm: take requests only once activated")
    room_ratio: float = Field(
        1.25,
        ge=1,
        le=64,
        description="Streams in flight at most, as a multiple of the sequences the engine runs at once",
    )
    lease_ttl_s: float = Field(LEASE_TTL_S, ge=1, le=60, description="A lease not renewed for so long is dead")
    lease_renew_s: float = Field(
        LEASE_RENEW_S, gt=0, le=20, validate_default=True, description="How often the lease is renewed"
    )
    drain_s: float = Field(30.0, ge=0, le=3600, description="On SIGTERM, how long running streams may finish")
    trace_tokens_one_in: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="One try at a stream in so many tells of each token's time, of the first 4096; 0: none does",
    )
    kv_bytes_per_token: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="What a token takes in the KV cache, for metrics in bytes: engines tell tokens; 0: unknown",
    )
    metrics_port: int = Field(
        -1, ge=-1, le=65535, description="Port of /metrics and /healthz; 0: any free one, -1: none"
    )
    metrics_host: str = Field("127.0.0.1", description="Address to listen on for them")

    @field_validator("lease_renew_s")
    @classmethod
    def _renews_in_time(cls, value: float, info: ValidationInfo) -> float:
        ttl_s = info.data.get("lease_ttl_s")  # not there when it is wrong itself
        if ttl_s is not None and value * 2 > ttl_s:
            raise ValueError(
                f"must be at most half of lease_ttl_s ({ttl_s:g}), so that one lost renewal kills no lease"
            )
        return value
