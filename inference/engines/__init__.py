"""Engines: the model servers behind the ``stream_fabric.ports.Engine`` port."""
