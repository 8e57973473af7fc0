"""The stream of the demonstration: judge what an earlier run left, and publish all flights."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from contrail_client import ApiProblem, Contrail, Message, StreamInfo
from contrail_flights.dataset import SUBJECTS, Flight
from contrail_flights.tally import Tally, tally_of

STREAM: Final = "FLIGHTS"
MARK: Final = "flights"
"""The key in the stream's metadata for the tally that a run is about to publish."""


NOT_FOUND: Final = 404


class ForeignStreamError(RuntimeError):
    """The stream holds messages that no run of this job has published."""


class Found(Enum):
    """The state of the stream when a run begins."""

    NOTHING = auto()
    COMPLETE = auto()
    INCOMPLETE = auto()
    FOREIGN = auto()


def stream_info(client: Contrail) -> StreamInfo | None:
    """The configuration and state of the stream; None if it does not exist."""
    try:
        return client.get_stream(STREAM)
    except ApiProblem as problem:
        if problem.status == NOT_FOUND:
            return None
        raise


def judge(info: StreamInfo | None, expected: Tally) -> Found:
    """Compare the stream with the messages that this run would publish.

    COMPLETE is an earlier run's stream with this run's tally and as many messages (Spark checks
    their content later). INCOMPLETE is one that was interrupted, or had another limit. FOREIGN
    holds messages that no run of this job has published, and is never touched.
    """
    if info is None:
        return Found.NOTHING
    noted = info.config.get("metadata", {}).get(MARK)
    # Never delete what others have published.
    if noted is None or info.state.messages > _count(noted):
        return Found.FOREIGN
    if noted == _note(expected) and info.state.messages == expected.count:
        return Found.COMPLETE
    return Found.INCOMPLETE


def _note(tally: Tally) -> str:
    return f"{tally.count} {tally.checksum:x}"


def _count(noted: str) -> int:
    count = noted.partition(" ")[0]
    return int(count) if count.isdecimal() else 0


def create(client: Contrail, expected: Tally) -> None:
    """Create the stream, with the tally of the messages to publish in its metadata."""
    client.put_stream(STREAM, {"subjects": [SUBJECTS], "metadata": {MARK: _note(expected)}})


@dataclass(frozen=True, slots=True)
class Published:
    """The messages that the service has acknowledged, and how long it took."""

    tally: Tally
    seconds: float

    @property
    def rate(self) -> float:
        """Acknowledged messages a second."""
        return self.tally.count / self.seconds if self.seconds else 0.0


def publish_all(
    client: Contrail, flights: Sequence[Flight], on_progress: Callable[[int], object]
) -> Published:
    """Publish ``flights`` in order; ``on_progress`` gets the number confirmed by each answer.

    One batch is in flight at a time: with several, a later hour could be stored before an earlier
    one. A batch that is sent again after a lost answer stores nothing twice, because each message
    has an id.
    """
    begun = time.perf_counter()
    messages = (
        Message(flight.subject, flight.payload, msg_id=flight.message_id) for flight in flights
    )
    tally = Tally()
    for result in client.publish_all(STREAM, messages, outstanding=1):
        result.raise_refused()
        stored = flights[tally.count : tally.count + len(result.results)]
        tally += tally_of((flight.subject, flight.payload) for flight in stored)
        on_progress(len(stored))
    return Published(tally, time.perf_counter() - begun)
