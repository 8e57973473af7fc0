"""The state of one socket: authentication, subscriptions, and the work that is not answered yet.

The module does no I/O. Arguments are decoded frames and the time; return values say what to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import AckKind
from contrail_common.timeunits import NS_PER_MS, NS_PER_S, parse_duration
from contrail_gateway.core.credit import Credit
from contrail_gateway.core.frames import (
    Ack,
    AddCredit,
    Beat,
    Connect,
    CreditGiven,
    DurationText,
    Nak,
    Settling,
    Sub,
    Term,
)
from contrail_gateway.core.ledger import seq_in, shard_in, shard_seq
from contrail_gateway.core.subscription import Subscription
from contrail_link.contract.consume import AckItem

HEARTBEAT_DEFAULT_NS: Final = 15 * NS_PER_S
HEARTBEAT_MIN_NS: Final = 100 * NS_PER_MS
HEARTBEAT_MAX_NS: Final = 3_600 * NS_PER_S
SUBSCRIPTIONS_MAX: Final = 256
# Messages and acknowledgements without an answer, at which the socket stops reading.
OUTSTANDING_MAX: Final = 4_096
OUTSTANDING_BYTES_MAX: Final = 8 << 20
# Sequences, ranges and tokens in one frame.
SETTLED_MAX: Final = 10_000
# Silence after which a draining socket may close: the client has probably seen `drain`.
_QUIET_NS: Final = 300 * NS_PER_MS

_KINDS: Final[dict[type[Settling], AckKind]] = {
    Ack: "ack",
    Nak: "nak",
    Term: "term",
}


class UnauthenticatedError(Exception):
    """The socket has shown no valid token, and must be closed."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """The acknowledgements of one frame: of ``seqs``, which the socket holds, and of ``tokens``.

    ``unknown`` describes sequences of the frame that the socket does not hold, or is "".
    """

    kind: AckKind
    seqs: list[int]
    tokens: list[str]
    delay_ns: int
    reason: str
    unknown: str = ""

    def items(
        self, addresses: Mapping[int, tuple[int, int, int]], part: slice = slice(None)
    ) -> list[AckItem]:
        """Return the acknowledgements of ``seqs``, or of a ``part`` of them, for storage.

        ``addresses`` has shard id, consumer id and epoch of the deliveries for each shard.
        """
        return [
            AckItem(
                *addresses[shard], list(map(seq_in, some)), self.kind, self.delay_ns, self.reason
            )
            for shard, some in groupby(self.seqs[part], shard_in)
        ]


def too_many_settled() -> ApiError:
    """The refusal of a frame that acknowledges too much."""
    limit = f"a frame must not contain more than {SETTLED_MAX} seqs, ranges and tokens"
    return ApiError(errors.BATCH_TOO_LARGE, limit, applied=False)


class Session:
    """The state of one socket. ``packed``: its frames are msgpack."""

    def __init__(self, *, authenticated: bool, now_ns: int, packed: bool = False) -> None:
        self.authenticated = authenticated
        self.packed = packed
        self.heartbeat_ns = HEARTBEAT_DEFAULT_NS
        self.subscriptions: dict[str, Subscription] = {}
        self.draining = False
        # Messages and acknowledgements without an answer from storage, and their bytes.
        self._outstanding = 0
        self._outstanding_bytes = 0
        # Time of the last frame; a draining socket waits for silence.
        self._heard_ns = now_ns

    # Authentication ------------------------------------------------------------------------------
    def heard(self, frame: object, now_ns: int) -> None:
        """Note that a frame arrived. Raises UnauthenticatedError if it must be ``connect``."""
        self._heard_ns = now_ns
        if not self.authenticated and not isinstance(frame, Connect):
            raise UnauthenticatedError

    def connect(self, frame: Connect, *, good_token: bool) -> None:
        """Apply a ``connect`` frame; ``good_token``: its token is valid.

        Raises UnauthenticatedError and INVALID_FIELD.
        """
        # Refuse a wrong token even if the handshake had a good one: the client is misconfigured.
        if not (self.authenticated or good_token) or (frame.token is not None and not good_token):
            raise UnauthenticatedError
        if frame.heartbeat is not None:
            self.heartbeat_ns = _heartbeat_ns(frame.heartbeat)
        self.authenticated = True

    # Back-pressure -------------------------------------------------------------------------------
    def begin(self, count: int, size: int) -> None:
        """Count messages or acknowledgements that were passed on and are answered later."""
        self._outstanding += count
        self._outstanding_bytes += size

    def finish(self, count: int, size: int) -> None:
        """Stop counting messages or acknowledgements, because they were answered."""
        self._outstanding -= count
        self._outstanding_bytes -= size

    @property
    def full(self) -> bool:
        """True if the socket must not read until something is answered."""
        return (
            self._outstanding >= OUTSTANDING_MAX or self._outstanding_bytes >= OUTSTANDING_BYTES_MAX
        )

    # Subscriptions -------------------------------------------------------------------------------
    def subscribe(self, frame: Sub) -> Subscription:
        """Add a subscription; the caller must then find or create its consumer.

        Raises SUBSCRIPTION_EXISTS, SHUTTING_DOWN, TOO_MANY_WAITERS and INVALID_FIELD.
        """
        if self.draining:
            raise ApiError(errors.SHUTTING_DOWN, applied=False)
        if frame.sid in self.subscriptions:
            raise ApiError(errors.SUBSCRIPTION_EXISTS, f"sid {frame.sid}", applied=False)
        if len(self.subscriptions) >= SUBSCRIPTIONS_MAX:
            limit = f"a socket must not have more than {SUBSCRIPTIONS_MAX} subscriptions"
            raise ApiError(errors.TOO_MANY_WAITERS, limit, applied=False)
        if frame.consumer is not None:
            _check_durable(frame)
        if frame.cols and not frame.ordered:
            raise _invalid("cols", "is only allowed in an ordered subscription")
        if frame.cols and not self.packed:
            raise _invalid("cols", "requires the sub-protocol contrail.v1.msgpack")
        # Without credit nothing is sent; an empty CreditGiven would mean no limit.
        given = frame.credit or CreditGiven(msgs=0)
        found = Subscription(
            frame.sid,
            frame.stream,
            Credit(given.msgs, given.bytes),
            own=frame.consumer is None,
            ordered=frame.ordered,
            cols=frame.cols,
        )
        self.subscriptions[frame.sid] = found
        return found

    def find(self, sid: str) -> Subscription:
        """Return the subscription ``sid``. Raises SUBSCRIPTION_NOT_FOUND."""
        found = self.subscriptions.get(sid)
        if found is None:
            raise ApiError(errors.SUBSCRIPTION_NOT_FOUND, f"sid {sid}", applied=False)
        return found

    def credit(self, frame: AddCredit) -> Subscription:
        """Add credit, and return the subscription, which may now continue."""
        found = self.find(frame.sid)
        found.credit.add(frame.msgs, frame.bytes)
        return found

    def settle(self, frame: Settling) -> Settlement:
        """Return the acknowledgements of ``frame``.

        Raises BATCH_TOO_LARGE, INVALID_FIELD, and NOT_SENT_HERE if the socket holds none of them.
        """
        found = self.find(frame.sid)
        seqs, ranges = _shard_seqs(found, frame)
        if len(seqs) + len(ranges) + len(frame.tokens) > SETTLED_MAX:
            raise too_many_settled()
        if not (seqs or ranges or frame.tokens):
            raise _invalid("seqs", "seqs, ranges or tokens must be given")
        delay_ns = _delay_ns(frame.delay) if isinstance(frame, Nak) else 0
        seqs, unknown = found.ledger.find(seqs, ranges)
        if not (seqs or frame.tokens):
            raise ApiError(errors.NOT_SENT_HERE, unknown, applied=False)
        return Settlement(
            _KINDS.get(type(frame), "in_progress"),
            seqs,
            frame.tokens,
            delay_ns,
            (frame.reason or "") if isinstance(frame, Term) else "",
            unknown,
        )

    # Heartbeats ----------------------------------------------------------------------------------
    def beats(self, now_ns: int) -> list[Beat]:
        """Return the heartbeats that are due, and count them as sent."""
        if not self.heartbeat_ns:
            return []
        due = [
            one
            for one in self.subscriptions.values()
            if one.consumer and not one.leaving and now_ns - one.last_sent_ns >= self.heartbeat_ns
        ]
        for one in due:
            one.last_sent_ns = now_ns
        return [
            Beat(
                sid=one.sid,
                last_consumer_seq=one.last_consumer_seq,
                last_stream_seq=one.last_stream_seq,
                shards=dict(one.last_of_shards) or None,
            )
            for one in due
        ]

    def quiet(self, now_ns: int) -> bool:
        """Return True if a draining socket can close.

        All work is answered, all messages are settled, and the client has been silent for 300 ms.
        """
        return (
            not self._outstanding
            and now_ns - self._heard_ns >= _QUIET_NS
            and not any(len(one.ledger) for one in self.subscriptions.values())
        )


def _shard_seqs(sub: Subscription, frame: Settling) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the sequences and ranges of a frame as shard sequences of the ledger."""
    for name, given in (("seqs", frame.seqs), ("ranges", frame.ranges)):
        if given and isinstance(given, dict) != bool(sub.last_of_shards):
            form = (
                "an object keyed by shard"
                if sub.last_of_shards
                else "a list, because the stream has one shard"
            )
            raise _invalid(name, f"must be {form}")
    seqs = frame.seqs if isinstance(frame.seqs, dict) else {0: frame.seqs}
    ranges = frame.ranges if isinstance(frame.ranges, dict) else {0: frame.ranges}
    return (
        [shard_seq(shard, seq) for shard, of_shard in seqs.items() for seq in of_shard],
        [
            (shard_seq(shard, first), shard_seq(shard, last))
            for shard, of_shard in ranges.items()
            for first, last in of_shard
        ],
    )


def _check_durable(frame: Sub) -> None:
    for name in (
        "filter_subjects", "deliver_policy", "opt_start_seq", "opt_start_time", "replay_policy",
        "opt_start_cursor", "num_replicas", "mem_storage",
    ):  # fmt: skip
        if getattr(frame, name) is not None:
            raise _invalid(name, "is only allowed in a subscription that names no consumer")
    if frame.ordered:
        raise _invalid("ordered", "is only allowed in a subscription that names no consumer")


def _heartbeat_ns(text: DurationText) -> int:
    """Return the interval of heartbeats; 0 means none."""
    interval_ns = _duration("heartbeat", text)
    if interval_ns and not HEARTBEAT_MIN_NS <= interval_ns <= HEARTBEAT_MAX_NS:
        raise _invalid("heartbeat", "must be 0 or between 100ms and 1h")
    return interval_ns


def _delay_ns(text: DurationText | None) -> int:
    return 0 if text is None else _duration("delay", text)


def _duration(name: str, text: DurationText) -> int:
    try:
        duration_ns = parse_duration(text)
    except ValueError as error:
        raise _invalid(name, str(error)) from None
    if duration_ns < 0:
        raise _invalid(name, "must not be negative")
    return duration_ns


def _invalid(name: str, message: str) -> ApiError:
    fields = [FieldProblem(f"/{name}", message)]
    return ApiError(errors.INVALID_FIELD, f"{name}: {message}", fields, applied=False)
