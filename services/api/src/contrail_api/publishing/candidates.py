"""Batches in msgpack: their rows, and checking them as a whole or message by message."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from contrail_common.columns.blocks import MessageColumns, columns_of
from contrail_common.columns.header_columns import (
    HEADER_NAME_MAX,
    UniformHeaders,
    headers_in_columns,
)
from contrail_common.columns.message_batch import (
    MessageBatch,
    index_subjects,
    join_batches,
    join_ids,
)
from contrail_common.errors import ApiError
from contrail_common.model import HEADER_BYTES_MAX, MSG_ID, TTL, PublishMessage
from contrail_common.subjects import any_subject_problem
from contrail_common.texts import Texts
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.message_items import (
    PLAIN_ID_MAX,
    Candidate,
    header_problem,
    parse_ttl,
)

_TOGETHER: Final = 2_000
_BYTES_TOGETHER: Final = 512 << 10
"""Messages, and their bytes, that are converted to columns in one step."""
_ID_NAME: Final = [MSG_ID]
_ID_NAMES: Final = Texts.of(_ID_NAME)


class PackedItem(PublishMessage, array_like=True, forbid_unknown_fields=True, gc=False):
    """One message of a msgpack batch: ``[subject, headers or nil, payload]``.

    The fields that depend on headers are set when the headers are interpreted, never by the client.
    """

    msg_id: None = None
    expected: None = None
    rollup: None = None
    ttl_ns: None = None


class OneValue(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The values of a header that has exactly one."""

    value: str


class OnlyId(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The headers of a message that only has an id."""

    message_id: OneValue = msgspec.field(name=MSG_ID)


class BareItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message of a msgpack batch without headers."""

    subject: str
    headers: None
    payload: bytes


class IdItem(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message of a msgpack batch that has an id and no other header."""

    subject: str
    headers: OnlyId
    payload: bytes


@dataclass(slots=True, frozen=True)
class Admitted:
    """The valid messages of a request, and the errors of all others by position."""

    batch: MessageBatch
    refused: dict[int, ApiError]


def admitted(candidates: Sequence[Candidate]) -> Steps[Admitted]:
    """Separate ``candidates`` into messages and refusals."""
    messages = [one for one in candidates if not isinstance(one, ApiError)]
    batches, start = [], 0
    for end in ends_of_pieces(map(_size, messages)):
        batches.append(MessageBatch.of(messages[start:end]))
        start = end
        yield
    refused = {at: one for at, one in enumerate(candidates) if isinstance(one, ApiError)}
    return Admitted((yield from joined(batches)), refused)


def ends_of_pieces(sizes: Iterable[int]) -> Iterator[int]:
    """Divide messages of these sizes into pieces to convert in one step each; at least one."""
    start = count = total = 0
    for count, size in enumerate(sizes, 1):
        total += size
        if total > _BYTES_TOGETHER or count - start == _TOGETHER:
            yield count
            start, total = count, 0
    if count > start or not count:
        yield count


def _size(message: PublishMessage) -> int:
    """About the bytes of a message."""
    values = (message.headers or {}).values()
    return len(message.payload) + sum(len(value) for some in values for value in some)


def joined(batches: Sequence[MessageBatch]) -> Steps[MessageBatch]:
    """Join batches in two steps, since ids may be as large as everything else."""
    if len(batches) == 1:
        return batches[0]
    yield True
    ids = join_ids(batches)
    yield True
    for batch in batches:
        batch.ids = None
    batch = join_batches(batches)
    batch.ids = ids
    yield
    return batch


PlainItem = BareItem | IdItem | PackedItem


def bare_batch(items: Sequence[PlainItem], payload_bytes_max: int) -> MessageBatch | None:
    """Return the subjects and payloads of ``items`` as columns.

    They are checked as a whole. Returns None if some are invalid, and must be checked one by one.
    """
    columns = columns_of([item.payload for item in items], None)
    return checked_columns([item.subject for item in items], columns, payload_bytes_max)


def checked_columns(
    each_subject: Sequence[str], columns: MessageColumns, payload_bytes_max: int
) -> MessageBatch | None:
    """Return messages without headers; None if some are invalid, and must be checked one by one."""
    subjects, index = index_subjects(each_subject)
    if any_subject_problem(subjects):
        return None
    if columns.size() > payload_bytes_max and int(columns.sizes().max()) > payload_bytes_max:
        return None
    return MessageBatch(subjects, index, columns)


def id_batch(items: Sequence[IdItem], payload_bytes_max: int) -> MessageBatch | None:
    """Do the same as :func:`bare_batch`, for messages with ids."""
    ids = [item.headers.message_id.value for item in items]
    # Texts may be as large as the body: do not convert what has to be looked at one by one.
    if max(map(len, ids), default=0) > PLAIN_ID_MAX:
        return None
    return with_ids(bare_batch(items, payload_bytes_max), Texts.of(ids))


def with_ids(batch: MessageBatch | None, ids: Texts) -> MessageBatch | None:
    """Add an id to each message of ``batch``; None if some need a closer look."""
    return _with_headers(batch, UniformHeaders(_ID_NAMES, ids))


def uniform_batch(items: Sequence[PackedItem], payload_bytes_max: int) -> MessageBatch | None:
    """Do the same as :func:`bare_batch`, for messages that all have the same header names."""
    headers = headers_in_columns([item.headers for item in items])
    if not isinstance(headers, UniformHeaders):
        return None
    return _with_headers(bare_batch(items, payload_bytes_max), headers)


def _with_headers(batch: MessageBatch | None, headers: UniformHeaders) -> MessageBatch | None:
    """Add headers to ``batch``; None if some are invalid or ask for more than ids and TTLs."""
    names = headers.names.each()
    if batch is None or max(map(len, names), default=0) > HEADER_NAME_MAX:
        return None
    # Headers with a meaning of their own, such as expectations, are read message by message.
    if not all(map(_asks_for_nothing, names)):
        return None
    if MSG_ID in names:
        batch.ids = headers.column(names.index(MSG_ID))
        lengths = batch.ids.lengths()
        if not 0 < int(lengths.min(initial=1)) <= int(lengths.max(initial=1)) <= PLAIN_ID_MAX:
            return None
    # The limit on ids keeps a header with only an id below the limit on headers.
    if names != _ID_NAME and int(headers.sizes().max(initial=0)) > HEADER_BYTES_MAX:
        return None
    if not headers.values.are_printable():
        return None
    if TTL in names:
        ttls = _ttls(headers.column(names.index(TTL)).each())
        if ttls is None:
            return None
        batch.ttls = dict(enumerate(ttls)) or None
    batch.columns.headers = headers
    return batch


def _ttls(texts: list[str]) -> list[int] | None:
    """Parse each with :func:`parse_ttl`; None if one is invalid."""
    try:
        # Most batches have few different times to live.
        read = {text: parse_ttl(text) for text in set(texts)}
    except ApiError:
        return None
    return [read[text] for text in texts]


@functools.lru_cache(maxsize=4096)
def _asks_for_nothing(name: str) -> bool:
    """Return True if a header has no meaning to the service, or is read in columns."""
    if name in (MSG_ID, TTL):
        return True
    return not name.lower().startswith("nats-") and header_problem({name: [""]}) is None
