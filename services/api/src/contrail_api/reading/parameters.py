"""Parameters, headers and examples that several reads share."""

from typing import Annotated, Any, Final

import msgspec

from contrail_common.timeunits import INT64_MAX
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Header
from contrail_edge.inputs.messages import payload_form
from contrail_edge.routing import BodyDoc, HeaderDoc
from contrail_link.contract import StorageLink

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
        description="Which replica answers: `leader` (default) or `any`. With `any`, the headers "
        "`Nats-Last-Sequence` and `Contrail-Applied-Index` tell how up to date the "
        "replica is.",
        extra_json_schema={"enum": ["leader", "any"]},
    ),
]
Shard = Annotated[
    int, msgspec.Meta(ge=0, le=INT64_MAX, description="Shard to use, if the stream has several.")
]


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


def check_consistency(consistency: str) -> None:
    """Refuse any value but ``leader`` and ``any``."""
    if consistency not in ("leader", "any"):
        raise invalid_field("consistency", "must be leader or any")


async def position_headers(
    link: StorageLink, stream: str, consistency: str, shard: int | None = None
) -> list[Header]:
    """Return headers with the replica's position if ``consistency`` is ``any``.

    Must be called before the read, so that the read is not older.
    """
    if consistency != "any":
        return []
    position = await link.read_position(stream, shard)
    return [
        (b"nats-last-sequence", b"%d" % position.last_seq),
        (b"contrail-applied-index", b"%d" % position.applied_index),
    ]
