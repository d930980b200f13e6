"""The agent's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from inference.agent.observe.bill_guard import ServeWithoutBills
from stream_fabric.accounts.records import REGION_PATTERN
from stream_fabric.limits import FLUSH_FLOOR_S, LEASE_RENEW_S, LEASE_TTL_S, LEASE_TTL_S_MAX, VLLM_START_S_MAX
from stream_fabric.moderation.settings import ModerationSettings
from stream_fabric.pool.cells import CELLS_MAX
from stream_fabric.process.settings import EmitSettings, MetricsSettings, SettingsConflict


class AgentSettings(EmitSettings, ModerationSettings, MetricsSettings):
    engine: Literal["sim", "openai", "vllm"] = Field(
        "sim",
        description="Model server: sim (the simulator), openai (a server by URL), vllm (a vLLM that the agent starts)",
    )
    sim: str = Field("", description="Engine sim: its settings, for example itl_ms=20,ttft_ms=100,max_num_seqs=64")
    upstream: str = Field("", description="Engine openai: base URL of the server, for example http://127.0.0.1:8000")
    upstream_api_key: SecretStr = Field(
        SecretStr(""), description="Engines openai and vllm: API key of the server, sent as bearer token"
    )
    upstream_slots: int = Field(
        256,
        ge=1,
        le=100_000,
        description="Engines openai and vllm: sequences that the server runs at once; vLLM's max_num_seqs",
    )
    upstream_steps: str = Field(
        "auto",
        description="How tokens come from vLLM. auto: engine vllm loads a plug-in that writes the tokens of one step "
        "to a Unix socket in one message; engine openai uses HTTP. off: HTTP. A path: of the Unix socket at which the "
        "agent listens for the plug-in of this vLLM",
    )
    model: str = Field("", description="Engine vllm: name or folder of the model")
    vllm_flags: str = Field(
        "", description="Engine vllm: vLLM's own flags, split as in a shell; on the command line they follow --"
    )
    vllm_python: str = Field(
        "",
        description="Engine vllm: Python of vLLM's environment; empty: the vllm command beside ours or on the PATH",
    )
    vllm_start_s: float = Field(
        VLLM_START_S_MAX, gt=0, le=86_400, description="Engine vllm: time limit of a start, in seconds"
    )
    itl_objective_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="Engines vllm and sim: objective for the time between tokens, in milliseconds. While answers are "
        "running the engine computes prompts in pieces that keep each step below it; 0: pieces are not limited",
    )
    kv_events: bool = Field(False, description="Engine vllm: count evictions from its prefix cache; needs pyzmq")
    pool: str = Field("", max_length=128, description="Pool to join; empty: the name of the first model served")
    cells: int = Field(
        1,
        ge=1,
        le=CELLS_MAX,
        description="Cells of the pool; the replica joins one of them. A pool of more than about 500 replicas, or of "
        "5,000 requests a second, needs several: each has a queue and a Redis slot of its own",
    )
    replica: str = Field(
        "",
        max_length=64,
        description="Name of the replica; empty: host name and process id. Random digits are appended",
    )
    region: str = Field(
        "",
        pattern=rf"^({REGION_PATTERN})?$",
        description="Region of the replica, shown by stream-gw replicas and in telemetry; tenants may be bound to it",
    )
    hardware: str = Field(
        "", max_length=64, description="Hardware of the replica, shown by stream-gw replicas and in telemetry"
    )
    gpu_hour_micro: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="Price of one hour of the replica's GPUs together, in micro-units of the operator's currency, for "
        "the GPU cost in usage; 0: no cost is counted",
    )
    serve_without_bills: ServeWithoutBills = Field(
        "reconstruct",
        description="While bills can be neither delivered nor kept in memory or spool: reconstruct (take requests for "
        "39 days, as long as stream-gw usage rebuild can reconstruct their bills from Redis) or never (take none)",
    )
    revision: str = Field(
        "",
        max_length=64,
        description="Deployment revision. More than one revision in a pool means a rollout is in progress",
    )
    standby: bool = Field(
        False,
        description="Join the pool warm: take no requests until an operator or a controller activates the replica",
    )
    room_ratio: float = Field(
        1.25,
        ge=1,
        le=64,
        description="Maximum streams in flight, as a multiple of the sequences that the engine runs at once",
    )
    lease_ttl_s: float = Field(
        LEASE_TTL_S,
        ge=1,
        le=LEASE_TTL_S_MAX,
        description="Lifetime of the replica's lease in seconds; a replica that does not renew it is dead",
    )
    lease_renew_s: float = Field(
        LEASE_RENEW_S,
        gt=0,
        le=20,
        validate_default=True,
        description="Seconds between renewals of the lease; at most half of lease_ttl_s",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds that running streams get to finish after SIGTERM; 0: hand them over at once",
    )
    trace_tokens_one_in: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Record the time of each token, up to 4096, for 1 in N attempts; 0: for none",
    )
    flush_floor_ms: float = Field(
        FLUSH_FLOOR_S * 1000,
        ge=0,
        le=100,
        description="Minimum milliseconds between two writes of tokens to Redis; tokens wait for it only while others "
        "come faster. A higher floor costs less CPU and more delay",
    )
    moderation_window_chars: int = Field(
        200,
        ge=40,
        le=10_000,
        description="Characters of an answer that gather for one question to moderation_url; readers get them after it",
    )
    kv_bytes_per_token: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="Bytes of one token in the KV cache, for metrics in bytes; 0: unknown, those metrics are left out",
    )

    @field_validator("lease_renew_s")
    @classmethod
    def _check_renews_in_time(cls, value: float, info: ValidationInfo) -> float:
        ttl_s = info.data.get("lease_ttl_s")  # missing when it is invalid itself
        if ttl_s is not None and value * 2 > ttl_s:
            raise SettingsConflict(
                f"must be at most half of lease_ttl_s ({ttl_s:g}), so that one lost renewal kills no lease",
                "lease_ttl_s",
            )
        return value
