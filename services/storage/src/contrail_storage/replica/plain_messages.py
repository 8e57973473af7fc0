"""Entries of single messages that ask for nothing but to be stored, which most publishers send."""

import struct
from collections.abc import Sequence
from typing import Final

import structlog

from contrail_common.columns.blocks import MessageColumns, columns_of
from contrail_common.columns.header_columns import headers_in_columns
from contrail_common.columns.message_batch import index_subjects
from contrail_common.model import PublishMessage
from contrail_storage.core.commands import Append, Command, Entry
from contrail_storage.replica.entries import (
    Appending,
    AppendRequest,
    CommandRequest,
    EntryContext,
    Part,
)

_FIRST: Final = bytes(4)
_OFFSETS: Final = struct.Struct("<2I")
_log: Final = structlog.get_logger("contrail.proposer")


def entry_of_plain(
    requests: Sequence[AppendRequest | CommandRequest], time_ns: int, skipped_ns: int
) -> tuple[EntryContext, list[Part]] | None:
    """Return what an `EntryBuilder` makes of these requests, in fewer steps.

    None if one of them is not such a message, or is for another shard; nothing has changed then.
    All of them must fit into one block.
    """
    shard_id = requests[0].shard_id
    waiting: Appending = []
    messages: list[PublishMessage] = []
    for request in requests:
        if isinstance(request, CommandRequest) or request.shard_id != shard_id:
            return None
        message = request.content
        if not isinstance(message, PublishMessage) or not message.is_plain:
            return None
        waiting.append(request)
        messages.append(message)
    try:
        append = _append_of_one(messages[0]) if len(messages) == 1 else _append_of(messages)
    except Exception:
        _log.exception("messages_not_encoded")
        return None  # an `EntryBuilder` refuses them
    commands: list[tuple[int, Command]] = [(shard_id, append)]
    entry = Entry(time_ns, commands, skipped_ns)
    return EntryContext(entry, [waiting], len(messages)), [*commands]


def _append_of(messages: list[PublishMessage]) -> Append:
    subjects = [message.subject for message in messages]
    payloads = [message.payload for message in messages]
    headers = [message.headers for message in messages]
    return Append(*index_subjects(subjects), columns_of(payloads, headers))


def _append_of_one(message: PublishMessage) -> Append:
    payload, headers = message.payload, message.headers
    header_columns = headers_in_columns([headers]) if headers else None
    columns = MessageColumns(1, _OFFSETS.pack(0, len(payload)), payload, header_columns)
    return Append([message.subject], _FIRST, columns)
