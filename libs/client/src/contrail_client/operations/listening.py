"""Reads the events of a server, also across broken connections."""

from collections.abc import Sequence
from typing import Final

import msgspec

from contrail_client.calls import Request, path_of, query_items, texts
from contrail_client.errors import ContrailError, UnexpectedAnswer, Unreachable
from contrail_client.models import Event, EventType
from contrail_client.reconnecting import Reconnecting

_SILENCE_S: Final = 15.0
"""The server sends an event or a heartbeat at least this often."""
# A longer line is not an event of a server, and would fill the memory.
_LINE_BYTES_MAX: Final = 1 << 20
_GONE: Final = b"gone"
_decoder: Final = msgspec.json.Decoder(Event)


class EventReader:
    """Reads server-sent events: bytes in, events out, without IO.

    Send `request()` and `feed` the chunks of its answer; call `ended` at its end. When the
    connection breaks, call `interrupted`, wait, and send `request()` again: it continues after the
    last event.
    """

    def __init__(
        self,
        stream: str | None,
        consumer: str | None,
        types: Sequence[EventType],
        reconnecting: Reconnecting,
    ) -> None:
        listed = ",".join(texts(types)) or None
        self._query = query_items({"stream": stream, "consumer": consumer, "types": listed})
        self._reconnecting = reconnecting
        # The id of the last event, from which the next request continues.
        self._last_id = ""
        self._begin()

    def _begin(self) -> None:
        # True once a byte of the answer has arrived.
        self._open = False
        # The line that is not complete yet.
        self._tail = b""
        # Fields of the event that is not complete yet.
        self._fields: dict[bytes, bytes] = {}

    def request(self) -> Request:
        """The request for all events after the last one that was read."""
        self._begin()
        headers: tuple[tuple[str, str], ...] = (("Accept", "text/event-stream"),)
        if self._last_id:
            headers = (*headers, ("Last-Event-ID", self._last_id))
        return Request("GET", path_of("events"), self._query, headers, wait_s=_SILENCE_S)

    def feed(self, chunk: bytes, now_s: float) -> list[Event]:
        """The events that `chunk` completes; raises UnexpectedAnswer if it has no valid events."""
        if not self._open:
            self._open = True
            self._reconnecting.opened(now_s)
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        if len(self._tail) > _LINE_BYTES_MAX:
            raise UnexpectedAnswer("a line of the event stream is too long")
        found = []
        for line in lines:
            if line:
                name, _, value = line.partition(b": ")
                self._fields[name] = value
                continue
            fields, self._fields = self._fields, {}
            # As in the HTML standard, an event without an id leaves the position as it is.
            self._last_id = fields.get(b"id", self._last_id.encode()).decode()
            if b"data" in fields and fields.get(b"event") != _GONE:
                found.append(_event(fields[b"data"]))
        return found

    def ended(self) -> None:
        """Raise `Unreachable`: the body has ended, although events never end."""
        raise Unreachable("the server ended the event stream")

    def interrupted(self, error: ContrailError, now_s: float, chance: float) -> float:
        """Seconds to wait before the next request; raises `error` if it will not pass."""
        pause_s = self._reconnecting.lost(error, now_s, chance)
        if pause_s is None:
            raise error
        return pause_s


def _event(data: bytes) -> Event:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise UnexpectedAnswer(f"an event cannot be read: {error}") from error
