"""The composition roots: the only place that knows all rooms and wires them together."""

from contrail_serve.main import main

__all__ = ["main"]
