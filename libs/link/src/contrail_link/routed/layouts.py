"""Which shard of a stream a message is for, where several nodes lead the shards of one stream."""

from typing import Final, NamedTuple

import numpy as np

from contrail_common.arrays import distinct
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import StreamInfo
from contrail_common.partition import shard_of, shards_of
from contrail_common.texts import I64Array, as_u32
from contrail_link.contract.publish import PublishContent

_SEPARATOR: Final = "/"
"""Between the name of a stream, which never has it, and the number of a shard."""


class Layout(NamedTuple):
    """The number of shards that are led by themselves, and what chooses one for a subject.

    One shard stands for a stream whose shards are all led by the same node.
    """

    shards: int
    shard_by: tuple[int, ...] = ()

    def key(self, stream: str, subject: str) -> str:
        """Return the key of what leads the messages with a subject: see :func:`key_of`."""
        if self.shards == 1:
            return stream
        return key_of(stream, shard_of(subject, self.shards, self.shard_by))


PLAIN: Final = Layout(1)
"""Of a stream whose results name no shard: it has one."""


class Part(NamedTuple):
    """The messages of a request for one shard, and their positions in it."""

    shard: int
    positions: I64Array
    content: PublishContent


def key_of(stream: str, shard: int) -> str:
    """Return the key of a shard, under which its leader is remembered; a stream's is its name."""
    return f"{stream}{_SEPARATOR}{shard}"


def unnamed(subject: str) -> str:
    """Return the key of messages whose stream is not known. No stream has such a name."""
    return _SEPARATOR + subject.partition(".")[0]


def of_key(key: str) -> tuple[str, int | None]:
    """Return the stream of a key, or "" if it is not known, and the shard if it is that of one."""
    stream, _, shard = key.partition(_SEPARATOR)
    return stream, int(shard) if stream and shard else None


def layout_of(info: StreamInfo) -> Layout:
    """Return the layout of a stream."""
    if any(one.leader is not None for one in info.shards):
        return Layout(info.config.shards, info.config.shard_by)
    return Layout(1)


def first_subject(content: PublishContent) -> str:
    """Return the subject of the first message; "" if there is none."""
    if isinstance(content, MessageBatch):
        return content.subjects[int(as_u32(content.subject_index)[0])] if content.count else ""
    return content[0].subject if content else ""


def parts_of(layout: Layout, content: PublishContent) -> list[Part]:
    """Return the messages by shard, in order; one part if they are all for the same one."""
    if isinstance(content, MessageBatch):
        if not content.count:
            return []
        by_subject = shards_of(content.subjects, layout.shards, layout.shard_by)
        shards = by_subject.astype(np.int64)[as_u32(content.subject_index)]
        if content.atomic:  # storage refuses one that is not for a single shard
            shards[:] = shards[0]
    else:
        subjects = [one.subject for one in content]
        shards = shards_of(subjects, layout.shards, layout.shard_by).astype(np.int64)
    parts: list[Part] = []
    for shard in distinct(shards).tolist():
        positions = np.flatnonzero(shards == shard)
        own = content
        if len(positions) < len(shards):
            own = (
                content.select(positions)
                if isinstance(content, MessageBatch)
                else [content[at] for at in positions.tolist()]
            )
        parts.append(Part(shard, positions, own))
    return parts
