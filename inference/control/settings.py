"""The controller's settings."""

from __future__ import annotations

from stream_fabric.settings import FabricSettings


class ControllerSettings(FabricSettings):
    pass
