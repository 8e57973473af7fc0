"""Settings of the public HTTP edge: permitted callers, and the limits on memory and time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from contrail_common.model import PAYLOAD_BYTES_MAX

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """How an edge process serves; sizes in bytes, times in seconds.

    The first of ``ack_keys`` signs ack tokens, and all verify them. They may be changed in place;
    to rotate keys, put the new one first. ``token`` is the bootstrap bearer token; without it the
    server must be bound to loopback. ``allowed_hosts`` are names without a port.
    ``allowed_origins`` are full origins, in addition to those on allowed hosts. If ``fast_lane`` is
    off, FastAPI serves all routes. ``access_log`` writes a line for each request.

    ``unread_bytes_max`` applies to one socket, ``unread_bytes_of_all_max`` to all connections
    together. ``unproven_frame_bytes_max`` applies to messages of a socket before it has sent its
    token.

    A body may take any time if a byte of it arrives at least every ``body_idle_s``, and if at least
    ``body_window_bytes_min`` bytes, or its end, arrive in each ``body_window_s``.
    """

    ack_keys: Sequence[bytes]
    account: str = "default"
    node: str = "n1"
    token: str | None = None
    allowed_hosts: frozenset[str] = LOOPBACK_HOSTS
    allowed_origins: frozenset[str] = frozenset()
    fast_lane: bool = True
    access_log: bool = False

    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    body_bytes_max: int = 16 << 20
    body_window_bytes_min: int = 4 << 20
    # Bodies of management requests.
    json_body_bytes_max: int = 1 << 20
    # Over all connections, with the unfinished messages of sockets.
    bodies_in_flight_bytes_max: int = 256 << 20
    target_bytes_max: int = 16 << 10
    head_bytes_max: int = 64 << 10
    head_lines_max: int = 200
    connections_max: int = 8192
    # Long polls.
    waiting_max: int = 4096
    # Publishes with `ack=none` that storage has not finished.
    unanswered_publishes_max: int = 10_000
    unanswered_bytes_max: int = 32 << 20
    frame_bytes_max: int = 8 << 20
    unproven_frame_bytes_max: int = 8 << 10
    unread_bytes_max: int = 8 << 20
    unread_bytes_of_all_max: int = 256 << 20
    # Requests on a connection that wait for the answers to earlier ones.
    pipelined_max: int = 256

    head_timeout_s: float = 10.0
    body_idle_s: float = 15.0
    body_window_s: float = 300.0
    # Between two requests.
    keep_alive_s: float = 75.0
    # A client that reads nothing of its answer for this long is disconnected.
    write_stall_s: float = 60.0
    # A refused body is read and dropped for this long, so that the client sees the answer.
    linger_s: float = 2.0
    # A silent socket is pinged after this time, and must answer within the same time.
    socket_ping_s: float = 15.0
    # For the first frame of a socket, if its handshake had no token.
    connect_s: float = 10.0
    # To finish requests when the process stops; sockets get half of it.
    grace_s: float = 10.0
