"""Settings of the public HTTP edge: who may call, and every bound that keeps memory finite."""

from dataclasses import dataclass
from typing import Final

from contrail_common.model import PAYLOAD_BYTES_MAX

LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """How an edge process serves; sizes in bytes, times in seconds.

    ``ack_keys`` sign ack tokens: the first signs, all verify, so a key is rotated by putting the
    new one in front. ``token`` is the bootstrap bearer token; without it the server must be bound
    to loopback. ``allowed_hosts`` are names without port; ``allowed_origins`` full origins beyond
    those on allowed hosts. ``fast_lane`` off serves everything through the FastAPI routes.
    ``access_log`` writes a line for each request.

    ``unread_bytes_max`` is that of one socket, ``unread_bytes_of_all_max`` of all connections
    together. ``unproven_frame_bytes_max`` bounds a message of a socket that is to send its token.

    A body may take as long as it likes while no ``body_idle_s`` pass without a byte of it, and
    each ``body_window_s`` bring it to its end or at least ``body_window_bytes_min`` further.
    """

    ack_keys: tuple[bytes, ...]
    account: str = "default"
    node: str = "n1"
    token: str | None = None
    allowed_hosts: frozenset[str] = LOOPBACK_HOSTS
    allowed_origins: frozenset[str] = frozenset()
    fast_lane: bool = True
    access_log: bool = False
    clustered: bool = False

    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    body_bytes_max: int = 16 << 20
    body_window_bytes_min: int = 4 << 20
    json_body_bytes_max: int = 1 << 20
    bodies_in_flight_bytes_max: int = 256 << 20
    target_bytes_max: int = 16 << 10
    head_bytes_max: int = 64 << 10
    head_lines_max: int = 200
    connections_max: int = 4096
    waiting_max: int = 4096
    unanswered_publishes_max: int = 10_000
    unanswered_bytes_max: int = 32 << 20
    frame_bytes_max: int = 8 << 20
    unproven_frame_bytes_max: int = 8 << 10
    unread_bytes_max: int = 8 << 20
    unread_bytes_of_all_max: int = 256 << 20
    pipelined_max: int = 256

    head_timeout_s: float = 10.0
    body_idle_s: float = 15.0
    body_window_s: float = 300.0
    keep_alive_s: float = 75.0
    write_stall_s: float = 60.0
    linger_s: float = 2.0
    socket_ping_s: float = 15.0
    connect_s: float = 10.0
    grace_s: float = 10.0
