"""Metrics of all WebSockets of a process."""

from collections import Counter
from collections.abc import Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_OWN_CODES: Final = frozenset((4000, 4008, 4029, 4050, 4500, 4501, 4503, 4509, 4513))
_STANDARD_CODES: Final = range(1000, 1016)


class Unread(Protocol):
    """The part of a socket that the metrics read."""

    @property
    def unread_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        ...


class SocketCounts(Collector):
    """Counters of all sockets of a process; one thread counts, so they need no locks."""

    def __init__(self) -> None:
        self.frames_in = 0
        self.frames_out = 0
        self._open: set[Unread] = set()
        self._closed: Counter[str] = Counter()

    def opened(self, socket: Unread) -> None:
        """Count an accepted handshake."""
        self._open.add(socket)

    def closed(self, socket: Unread, code: int) -> None:
        """Count a socket that ended with ``code``, ours or the peer's; 1006 means without one."""
        self._open.discard(socket)
        known = code in _OWN_CODES or code in _STANDARD_CODES
        self._closed[str(code) if known else "other"] += 1

    def collect(self) -> Iterator[Metric]:
        """The metrics, as the registry asks for them."""
        yield GaugeMetricFamily("contrail_sockets_open", "Open sockets.", len(self._open))
        yield GaugeMetricFamily(
            "contrail_socket_unread_bytes",
            "Bytes sent to sockets that clients have not read yet.",
            sum(socket.unread_bytes for socket in self._open),
        )
        for direction, count in (("in", self.frames_in), ("out", self.frames_out)):
            yield CounterMetricFamily(
                f"contrail_socket_frames_{direction}",
                f"WebSocket messages {direction}, each in one frame.",
                count,
            )
        closes = CounterMetricFamily(
            "contrail_socket_closes", "Sockets closed, by close code.", labels=["code"]
        )
        for code, count in self._closed.items():
            closes.add_metric([code], count)
        yield closes
