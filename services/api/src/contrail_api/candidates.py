"""Batches in msgpack: their wire forms, and what becomes of them as a whole or one by one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from contrail_common.columns.blocks import columns_of
from contrail_common.columns.header_columns import (
    HEADER_NAME_MAX,
    UniformHeaders,
    headers_in_columns,
)
from contrail_common.columns.message_batch import MessageBatch, index_subjects, join_batches
from contrail_common.errors import ApiError
from contrail_common.model import HEADER_BYTES_MAX, MSG_ID, TTL, PublishMessage
from contrail_common.subjects import subject_problem
from contrail_common.texts import Texts
from contrail_edge.http.steps import Steps
from contrail_edge.inputs.message_items import PLAIN_ID_MAX, Candidate, header_problem
from contrail_edge.inputs.publishing import parse_ttl

_TOGETHER: Final = 2_000
"""Messages that are put in columns in one step."""
_ID_NAME: Final = [MSG_ID]
_ID_NAMES: Final = Texts.of(_ID_NAME)


class PackedItem(PublishMessage, array_like=True, forbid_unknown_fields=True, gc=False):
    """One message of a msgpack batch: ``[subject, headers or nil, payload]``.

    What the headers ask for is set when they are interpreted, never taken from the wire.
    """

    msg_id: None = None
    expected: None = None
    rollup: None = None
    ttl_ns: None = None


class OneValue(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The values of a header that has one."""

    value: str


class OnlyId(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The headers of a message that has an id and nothing else."""

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
    """The messages of a request that may be published, and why others, by position, may not."""

    batch: MessageBatch
    refused: dict[int, ApiError]


def admitted(candidates: Sequence[Candidate]) -> Steps[Admitted]:
    """The messages among ``candidates``, and the refusals."""
    messages = [one for one in candidates if not isinstance(one, ApiError)]
    batches = []
    for start in range(0, len(messages) or 1, _TOGETHER):
        batches.append(MessageBatch.of(messages[start : start + _TOGETHER]))
        yield
    refused = {at: one for at, one in enumerate(candidates) if isinstance(one, ApiError)}
    return Admitted(join_batches(batches), refused)


PlainItem = BareItem | IdItem | PackedItem


def bare_batch(items: Sequence[PlainItem], payload_bytes_max: int) -> MessageBatch | None:
    """Subjects and payloads of ``items``; None when some are not valid and need a closer look.

    They are checked as a whole, not one by one.
    """
    subjects, index = index_subjects([item.subject for item in items])
    if any(subject_problem(subject) is not None for subject in subjects):
        return None
    columns = columns_of([item.payload for item in items], None)
    if columns.size() > payload_bytes_max and int(columns.sizes().max()) > payload_bytes_max:
        return None
    return MessageBatch(subjects, index, columns)


def id_batch(items: Sequence[IdItem], payload_bytes_max: int) -> MessageBatch | None:
    """As :func:`bare_batch`, with the ids of the messages."""
    ids = Texts.of([item.headers.message_id.value for item in items])
    return _with_headers(bare_batch(items, payload_bytes_max), UniformHeaders(_ID_NAMES, ids))


def uniform_batch(items: Sequence[PackedItem], payload_bytes_max: int) -> MessageBatch | None:
    """As :func:`bare_batch`, with headers when they have the same names in every message."""
    headers = headers_in_columns([item.headers for item in items])
    if not isinstance(headers, UniformHeaders):
        return None
    return _with_headers(bare_batch(items, payload_bytes_max), headers)


def _with_headers(batch: MessageBatch | None, headers: UniformHeaders) -> MessageBatch | None:
    """``batch`` with its headers, which ask for no more than ids and TTLs; None if one is odd."""
    names = headers.names.each()
    if batch is None or max(map(len, names), default=0) > HEADER_NAME_MAX:
        return None
    if not all(map(_asks_for_nothing, names)):
        return None
    if MSG_ID in names:
        batch.ids = headers.column(names.index(MSG_ID))
        lengths = batch.ids.lengths()
        if not 0 < int(lengths.min(initial=1)) <= int(lengths.max(initial=1)) <= PLAIN_ID_MAX:
            return None
    # An id alone is below the bound of headers by the bound of ids.
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
    """Each as :func:`parse_ttl` reads it; None when one cannot be read."""
    try:
        read = {text: parse_ttl(text) for text in set(texts)}
    except ApiError:
        return None
    return [read[text] for text in texts]


@functools.lru_cache(maxsize=4096)
def _asks_for_nothing(name: str) -> bool:
    """Whether a header means nothing to the service, but for those that are read in columns."""
    if name in (MSG_ID, TTL):
        return True
    return not name.lower().startswith("nats-") and header_problem({name: [""]}) is None
