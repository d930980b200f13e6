"""Names and helpers that the tests of producer and reader share."""

from __future__ import annotations

from dataclasses import replace

from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId
from stream_fabric.stream.log import StreamState

STREAM = StreamId("resp_" + "0" * 32)
TENANT, REPLICA = TenantId("t"), ReplicaId("r")
LOST = ErrorInfo("replica_lost", "gone")


def copied(state: StreamState) -> StreamState:
    return replace(
        state,
        watchers=list(state.watchers),
        bases=list(state.bases),
        entries=list(state.entries),
        inputs=dict(state.inputs),
    )
