"""Parameters, headers and examples that several reads share."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec

from contrail_common.errors import ApiError
from contrail_common.timeunits import INT64_MAX, NS_PER_MS
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header
from contrail_edge.inputs.messages import payload_form
from contrail_edge.routing import BodyDoc, HeaderDoc
from contrail_link.contract import StorageLink
from contrail_link.routed.outcomes import Kind, kind_of

_R = TypeVar("_R")
STREAM_PATH: Final = "/v1/streams/{stream}"
MESSAGES_PATH: Final = f"{STREAM_PATH}/messages"
_SEQ_DIGITS_MAX: Final = 19
READING: Final = "reading"
BINARY: Final = BodyDoc(shape={"type": "string", "format": "binary"})
MESSAGE: Final[dict[str, Any]] = {
    "stream": "ORDERS",
    "seq": 42,
    "subject": "orders.eu.created",
    "time": "2026-01-31T08:00:00.500000000Z",
    "headers": {"Nats-Msg-Id": ["order-1017-created"]},
    "data": '{"id":1017}',
}
POSITION: Final = (
    HeaderDoc(
        name="Nats-Last-Sequence",
        description="With `consistency=any`: the replica's last sequence when it started to read.",
        example="42",
    ),
    HeaderDoc(
        name="Contrail-Applied-Index",
        description="With `consistency=any`: the log index up to which the replica had applied "
        "changes.",
        example="1042",
    ),
    HeaderDoc(
        name="Contrail-Staleness",
        description="With `consistency=any`: the replica has everything that was acknowledged up "
        "to so many milliseconds ago. It is at most 10,000.",
        example="75",
    ),
    HeaderDoc(
        name="Contrail-Replica",
        description="With `consistency=any`: the node whose replica answered.",
        example="n2",
    ),
)

Payload = Annotated[
    str,
    msgspec.Meta(
        description="`base64`: return every payload as `data_base64`.",
        extra_json_schema={"enum": ["auto", "base64"]},
    ),
]
Consistency = Annotated[
    str,
    msgspec.Meta(
        description="Which replica answers: `leader` (default) or `any`. The leader shows "
        "everything that was acknowledged before the request. With `any` it may be a replica that "
        "is up to 10 s behind, even if no node leads the stream; the headers "
        "`Nats-Last-Sequence`, `Contrail-Applied-Index` and `Contrail-Staleness` tell how up to "
        "date it is.",
        extra_json_schema={"enum": ["leader", "any"]},
    ),
]
Replica = Annotated[
    str,
    msgspec.Meta(
        description="With `consistency=any`: the node whose replica answers, instead of any. If it "
        "cannot, the answer is 503."
    ),
]
Shard = Annotated[
    int, msgspec.Meta(ge=0, le=INT64_MAX, description="Shard to use, if the stream has several.")
]


class ShardQuery(msgspec.Struct):
    """The parameter of a change of one shard."""

    shard: Shard | msgspec.UnsetType = msgspec.UNSET


class ReadQuery(msgspec.Struct):
    """Parameters that all reads have."""

    payload: Payload = ""
    consistency: Consistency = "leader"
    shard: Shard | msgspec.UnsetType = msgspec.UNSET


def one_shard(shard: int | msgspec.UnsetType) -> int | None:
    """Return the shard that a request names, or None for all shards together."""
    return None if shard is msgspec.UNSET else shard


def path_seq(request: Request) -> int:
    """Return the sequence in the path."""
    text = request.path_values["seq"]
    # `int` accepts more, such as signs, white space and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= _SEQ_DIGITS_MAX):
        raise invalid_field("seq", "must be a sequence number")
    seq = int(text)
    if seq > INT64_MAX:
        raise invalid_field("seq", "must fit in 64 bits")
    return seq


def check_read(query: ReadQuery) -> bool:
    """Check the common parameters of reads; return True if payloads are shown as base64."""
    check_consistency(query.consistency)
    try:
        return payload_form(query.payload)
    except ValueError as error:
        raise invalid_field("payload", str(error)) from None


def check_consistency(consistency: str, replica: str = "") -> None:
    """Refuse any value but ``leader`` and ``any``, and a replica that is named for ``leader``."""
    if consistency not in ("leader", "any"):
        raise invalid_field("consistency", "must be leader or any")
    if replica and consistency != "any":
        raise invalid_field("replica", "needs consistency=any")


async def read_as(
    consistency: str,
    link: StorageLink,
    stream: str,
    shard: int | None,
    read: Callable[[str], Awaitable[_R]],
    replica: str = "",
) -> tuple[_R, list[Header]]:
    """Return what ``read`` returns, and headers with the position if ``consistency`` is ``any``.

    ``read`` gets the name of the replica to read from, or "" for the leader. With ``any`` it is
    ``replica``, if that is not "".
    """
    if consistency != "any":
        return await read(""), []
    # The position is that of the node that reads then, and before the read, which is not older. If
    # that node fails in between, another one may have a copy too.
    for again in (not replica, False):
        if replica:
            position = await link.replica_position(stream, shard, replica)
        else:
            position = await link.find_replica(stream, shard)
        try:
            found = await read(position.node)
        except ApiError as error:
            if not again or kind_of(error) is Kind.FINAL:
                raise
        else:
            return found, [
                (b"nats-last-sequence", b"%d" % position.last_seq),
                (b"contrail-applied-index", b"%d" % position.applied_index),
                (b"contrail-staleness", b"%d" % -(-position.staleness_ns // NS_PER_MS)),
                (b"contrail-replica", position.node.encode()),
            ]
    raise AssertionError("the second attempt returns or raises")
