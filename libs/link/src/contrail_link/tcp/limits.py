"""Limits of the link over TCP, the same at both ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Sizes in bytes, times in seconds; numbers are per connection.

    ``busy_*`` limit the requests that are answered as soon as possible: above them, the server
    stops reading and the client refuses. ``waits_max`` limits those that may wait; above it, they
    are refused. ``window_bytes`` is how far a stream may run ahead of its reader.
    """

    frame_bytes_max: int = 64 << 20
    busy_max: int = 16_384
    busy_bytes_max: int = 64 << 20
    waits_max: int = 16_384
    unwritten_bytes_max: int = 256 << 20
    window_bytes: int = 8 << 20
    chunk_bytes: int = 256 << 10
    unproven_max: int = 64
    connections_max: int = 256

    connect_s: float = 5.0
    handshake_s: float = 5.0
    pulse_s: float = 1.0
    silence_s: float = 10.0
    stall_s: float = 30.0
    stream_stall_s: float = 120.0
    call_s: float = 30.0
    reconnect_wait_s: float = 1.0
    backoff_min_s: float = 0.02
    backoff_max_s: float = 1.0
