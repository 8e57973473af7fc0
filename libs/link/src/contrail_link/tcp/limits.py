"""Limits of the link over TCP, the same at both ends."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Sizes in bytes, times in seconds; numbers are per connection.

    ``busy_*`` limit the requests that are answered as soon as possible: above them, the server
    stops reading and the client refuses. ``waits_max`` limits those that may wait; above it, they
    are refused. ``window_bytes`` is how far a stream may run ahead of its reader. Every
    ``sweep_s``, overdue requests are ended. After ``doubt_s`` of silence, a client gives up the
    requests that another node can answer.
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
    pulse_s: float = 0.25
    sweep_s: float = 1.0
    silence_s: float = 10.0
    doubt_s: float = math.inf
    stall_s: float = 30.0
    stream_stall_s: float = 120.0
    call_s: float = 30.0
    reconnect_wait_s: float = 1.0
    backoff_min_s: float = 0.02
    backoff_max_s: float = 1.0


def limits_in_cluster(call_s: float) -> LinkLimits:
    """Return the limits of a link to one of several nodes, which answers within ``call_s``.

    A request does not wait for a connection, and not for a node that is silent for three pulses:
    another node may answer it.
    """
    return LinkLimits(call_s=call_s, reconnect_wait_s=0.0, doubt_s=0.75, backoff_max_s=0.25)
